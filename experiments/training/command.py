"""`edge0 train`: make a tiny teacher, let a model write a corpus, train heads and recovery LoRA for a checkpoint.

    edge0 train base tiny-35b teacher.safetensors             a teacher from scratch, kept in bf16
    edge0 train quantise teacher.safetensors models/mine      its int4 checkpoint
    edge0 train generate models/mine asked.jsonl corpus.jsonl
    edge0 train heads models/mine corpus.jsonl --held held.jsonl --k 4      phase 1
    edge0 train lora models/mine corpus.jsonl --held held.jsonl --k 4       phase 2
    edge0 train on-policy models/mine corpus.jsonl --held held.jsonl --k 4 --teacher teacher.safetensors

A run that was interrupted goes on by the same command, to the same bits. Each phase saves its adapter where the engine
looks for it, and leaves losses (Parquet) and a card beside its state. `snakemake ladder` does all of it and scores it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from edge0.tiers import ModelConfig, find_tier, read_config

HELP = "train a tiny teacher, prerouter heads and recovery LoRA"
INNER = 512  # hidden width of a head, as released
PHASES = {
    "heads": "phase 1: heads imitate the next layer's router",
    "lora": "phase 2: recovery LoRA on the student's path, heads frozen",
    "on-policy": "phase 3: reverse KL on the student's own text",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--no-blas", action="store_true", help="MLX's own BLAS, where a faster one is installed")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    base = actions.add_parser("base", help="a teacher from scratch, on seeded problems")
    base.add_argument("tier", help="tiny-35b or tiny-8b")
    base.add_argument("output", metavar="FILE", type=Path, help="new file for what was trained, in bf16")
    base.add_argument("--seed", type=_natural, default=0)
    base.add_argument("--steps", type=_positive, help="default: what the tier needs")

    quantise = actions.add_parser("quantise", help="the int4 checkpoint of a kept teacher")
    quantise.add_argument("weights", metavar="FILE", type=Path, help="what `train base` wrote")
    quantise.add_argument("output", metavar="OUT", type=Path, help="new directory")

    generate = actions.add_parser("generate", help="a model's own answers to the prompts of a corpus, as a new corpus")
    generate.add_argument("model", metavar="MODEL", type=Path)
    generate.add_argument("corpus", metavar="CORPUS", type=Path, help="JSONL of chat messages")
    generate.add_argument("output", metavar="OUT", type=Path, help="JSONL file to write")
    generate.add_argument("--k", type=_positive, default=8, help="experts per token (default 8)")
    generate.add_argument("--longest", type=_positive, default=64, help="tokens of an answer (default 64)")
    generate.add_argument("--skip-broken", action="store_true", help="leave broken lines of the corpus out")

    for name, about in PHASES.items():
        phase = actions.add_parser(name, help=about)
        phase.add_argument("model", metavar="MODEL", type=Path, help="an int4 checkpoint")
        phase.add_argument("corpus", metavar="CORPUS", type=Path, help="JSONL of chat messages or text")
        phase.add_argument(
            "--held", type=Path, required=True, metavar="CORPUS", help="samples that are never trained on"
        )
        phase.add_argument("--k", type=_positive, required=True, help="experts per token that is trained for")
        phase.add_argument("--out", type=Path, metavar="DIR", help="where the adapter set lies (default: MODEL)")
        phase.add_argument("--folder", type=Path, metavar="DIR", help="of the run (default: OUT/training/kK-ACTION)")
        phase.add_argument("--seed", type=_natural, default=0)
        phase.add_argument("--steps", type=_positive)
        phase.add_argument("--batch", type=_positive, help="sequences of a micro-batch")
        phase.add_argument("--accumulate", type=_positive, help="micro-batches of a step")
        phase.add_argument("--learning-rate", type=_rate)
        phase.add_argument("--longest", type=_positive, default=512, help="tokens of a sequence (default 512)")
        phase.add_argument("--skip-broken", action="store_true", help="leave broken lines of the corpora out")
        if name == "heads":
            phase.add_argument("--inner", type=_positive, default=INNER, help=f"hidden width of a head ({INNER})")
            phase.add_argument(
                "--first", type=int, help="first layer with a head (default: in proportion to the released models)"
            )
        else:
            phase.add_argument("--checkpointing", action="store_true", help="recompute layers: less memory, more time")
        if name == "on-policy":
            phase.add_argument("--teacher", type=Path, required=True, metavar="FILE", help="what `train base` wrote")


def run(options: argparse.Namespace) -> None:
    from edge0 import blas

    options.blas = blas.NONE if options.no_blas else blas.load()
    {"base": _base, "quantise": _quantise, "generate": _generate}.get(options.action, _phase)(options)


def _base(options: argparse.Namespace) -> None:
    from edge0.training import teacher

    tier = find_tier(options.tier)
    if tier.name not in teacher.SCHEDULES:
        expected = ", ".join(teacher.SCHEDULES)
        raise Edge0Error(ErrorKind.TIER_UNKNOWN, "not a tier to train", expected=expected, found=tier.name)
    if options.output.exists():
        hint = "remove it or name another file"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, "is there already", path=options.output, hint=hint)
    schedule = teacher.SCHEDULES[tier.name]
    if options.steps is not None:
        schedule = dataclasses.replace(schedule, steps=options.steps)
    folder = options.output.with_name(f".{options.output.name}.training")
    with _progress(f"{tier.name}, {options.blas}", schedule.steps) as watch:
        student = teacher.train(tier, folder, options.seed, schedule, watch)
    teacher.keep(student, options.output, tier, options.seed, folder)
    print(options.output)


def _quantise(options: argparse.Namespace) -> None:
    from edge0.training import teacher

    print(teacher.write(options.weights, options.output))


def _generate(options: argparse.Namespace) -> None:
    from edge0.serving.vocabulary import Vocabulary
    from edge0.training.corpus import read_corpus, write_corpus
    from edge0.training.sampling import own_lines
    from edge0.training.student import Student
    from experiments.publish import writing

    vocabulary, student = Vocabulary(options.model), Student(options.model, options.k)
    corpus = read_corpus(options.corpus, vocabulary, student.config.positions, options.skip_broken)
    asked = [sample for sample in corpus.samples if sample.messages]
    lines = own_lines(student, vocabulary, asked, options.longest)
    with writing(options.output):
        write_corpus(options.output, lines)
    print(f"{options.output}: {len(lines)} answers; {len(asked) - len(lines)} had no end in {options.longest} tokens")


def _phase(options: argparse.Namespace) -> None:
    from edge0.serving.vocabulary import Vocabulary
    from edge0.training import phases, teacher
    from edge0.training.adapters import load_adapter, save_adapter
    from edge0.training.corpus import read_corpus
    from edge0.training.student import Student
    from experiments.training.records import described, record

    model, out, k = options.model, options.out or options.model, options.k
    vocabulary = Vocabulary(model)
    corpus, held = (
        read_corpus(path, vocabulary, options.longest, options.skip_broken) for path in (options.corpus, options.held)
    )
    corpus.check_apart(held)
    heads, lora = None, None
    if options.action == "heads":
        owners = _owners(read_config(model), options.first)
    else:
        heads, owners = load_adapter(out, "prerouter", k, model)
    if options.action == "on-policy":
        lora, _ = load_adapter(out, "lora", k, model)
    schedule = {"heads": phases.PHASE1, "lora": phases.PHASE2, "on-policy": phases.PHASE3}[options.action]
    named = ("steps", "batch", "accumulate", "learning_rate")
    schedule = dataclasses.replace(
        schedule, **{name: value for name in named if (value := getattr(options, name)) is not None}
    )
    student = Student(model, k, owners)
    folder = options.folder or out / "training" / f"k{k}-{options.action}"
    with _progress(f"{options.action}, {options.blas}", schedule.steps) as watch:
        task = phases.Task(student, corpus, held.samples, folder, options.seed, schedule, watch)
        task = dataclasses.replace(task, checkpointing=getattr(options, "checkpointing", False))
        if options.action == "heads":
            tensors, run = phases.train_heads(task, options.inner)
        elif options.action == "lora":
            tensors, run = phases.train_lora(task, heads)
        else:
            original = teacher.original(student.config, options.teacher, teacher.TEACHER_K, model)
            tensors, run = phases.train_on_policy(task, original, heads, lora, options.longest)
    kind = "prerouter" if options.action == "heads" else "lora"
    path = save_adapter(out, kind, k, tensors, owners, f"edge0 train {options.action}", model)
    record(task, run, options.blas, {"phase": options.action, "adapter": path.name, "held": described(held)})
    print(path)


def _owners(config: ModelConfig, first: int | None) -> tuple[int, ...]:
    """The layers that get a head: from `first` on, each but the last one."""
    if first is None:
        first = find_tier(f"shape-{config.family.tag}").first_owner(config.layers)
    if not config.dense_layers <= first < config.layers - 1:
        expected = f"{config.dense_layers} to {config.layers - 2}"
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option --first", expected=expected, found=first)
    return tuple(range(first, config.layers - 1))


@contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on stderr with the time left; silent where stderr is no terminal. Yields a function of (step, loss)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ["{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    console = Console(stderr=True)
    shown = TextColumn("loss {task.fields[loss]}")
    with Progress(*columns, shown, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=steps, loss="-")
        yield lambda done, loss: progress.update(bar, completed=done, loss=f"{loss:.4f}")


def _rate(text: str) -> float:
    if not 0 < (value := float(text)) < 10:
        raise ValueError
    return value


def _natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError
    return value


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


# What argparse says was expected.
_positive.__name__, _natural.__name__, _rate.__name__ = "number from 1 on", "number from 0 on", "rate above 0"
