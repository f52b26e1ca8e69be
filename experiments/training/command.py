"""`edge0 train`: make a tiny teacher, let a model write a corpus, train heads and recovery LoRA for a checkpoint.

    edge0 train base tiny-35b teacher.safetensors             a teacher from scratch, kept in bf16
    edge0 train quantise teacher.safetensors models/mine      its int4 checkpoint
    edge0 train generate models/mine asked.jsonl corpus.jsonl
    edge0 train heads models/mine corpus.jsonl --held held.jsonl --k 4      phase 1
    edge0 train lora models/mine corpus.jsonl --held held.jsonl --k 4       phase 2
    edge0 train on-policy models/mine corpus.jsonl --held held.jsonl --k 4 --teacher teacher.safetensors

A run that was interrupted goes on by the same command, to the same bits. Each phase saves its adapter where the engine
looks for it, says how good it is on what was held out, and leaves losses (Parquet) and a card beside its state. What
phase 2 made last is kept under OUT/training too: phase 3 begins with that, never with a result of its own. `snakemake
ladder` does all of it and scores it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import ModelConfig, read_config
from edge0.tiers import find_tier
from edge0.training.schedule import SCHEDULES
from experiments.training.arguments import PHASES, add_arguments
from experiments.training.watching import showing, watching

if TYPE_CHECKING:
    from edge0.training.corpus import Corpus
    from edge0.training.phases import Task

__all__ = ["HELP", "add_arguments", "run"]
HELP = "train a tiny teacher, prerouter heads and recovery LoRA"
SOURCE = "edge0 train"  # and the phase: what an adapter says of where it comes from
HEADS, LORA = "prerouter", "lora"
SUFFIX = ".safetensors"


def run(options: argparse.Namespace) -> None:
    from edge0 import blas

    options.blas = blas.NONE if options.no_blas else blas.load()
    {"base": _base, "quantise": _quantise, "generate": _generate}.get(options.action, _phase)(options)


def _base(options: argparse.Namespace) -> None:
    from edge0.training import teacher
    from edge0.training.files import check_writable
    from experiments.training.records import leave, named

    tier, output = find_tier(options.tier), options.output
    if tier.name not in SCHEDULES:
        expected = ", ".join(SCHEDULES)
        raise Edge0Error(ErrorKind.TIER_UNKNOWN, "not a tier to train", expected=expected, found=tier.name)
    if output.suffix != SUFFIX:  # MLX writes no other name
        detail, expected = "the file of a teacher", f"a name that ends in {SUFFIX}"
        raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=expected, found=output.name)
    if output.exists():
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE, "is there already", path=output, hint="remove it or name another file"
        )
    check_writable(output)
    schedule = SCHEDULES[tier.name]
    if options.steps is not None:
        schedule = dataclasses.replace(schedule, steps=options.steps)
    folder = output.with_name(f".{output.name}.training")
    with watching(f"{tier.name}, {options.blas}", schedule.steps) as watch:
        student, made = teacher.train(tier, folder, options.seed, schedule, watch)
    teacher.keep(student, output, tier, options.seed, folder)
    about = {
        "phase": "base",
        "tier": tier.name,
        "seed": options.seed,
        "schedule": dataclasses.asdict(schedule),
        "problems": {
            "drawn": schedule.steps * schedule.accumulate * schedule.batch,
            "sha256": teacher.data_digest(schedule, options.seed),
        },
        "kept": named(output),
    }
    leave(made, options.blas, about)
    _tell(output, folder)


def _quantise(options: argparse.Namespace) -> None:
    from edge0.training import teacher

    print(teacher.write(options.weights, options.output))


def _generate(options: argparse.Namespace) -> None:
    from edge0.checkpoint.fingerprint import fingerprint
    from edge0.checkpoint.header import CheckpointIndex
    from edge0.serving.vocabulary import Vocabulary
    from edge0.training import teacher
    from edge0.training.corpus import read_prompts, write_corpus
    from edge0.training.files import check_writable
    from edge0.training.sampling import own_lines
    from edge0.training.student import Student
    from experiments.training.records import described, named, write_card

    model, output, k = options.model, options.output, options.k
    if output.resolve() == options.corpus.resolve() or output.exists() and output.samefile(options.corpus):
        detail, hint = "is the corpus that is to be read", "name another file"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=output, hint=hint)
    teacher.check_tokenizer(model)
    config, vocabulary = read_config(model), Vocabulary(model)
    asked = read_prompts(options.corpus, vocabulary, config.positions, options.skip_broken)
    _tell_skipped(asked)
    check_writable(output)
    student = Student(model, k) if options.teacher is None else teacher.original(config, options.teacher, k, model)
    with showing(f"generate, {options.blas}", len(asked.samples)) as watch:
        lines = own_lines(student, vocabulary, asked.samples, options.longest, watch)
    write_corpus(output, lines)
    unended = len(asked.samples) - len(lines)
    card = {
        "phase": "generate",
        "base": str(model),
        "base_fingerprint": fingerprint(CheckpointIndex.open(model), config),
        "teacher": None if options.teacher is None else named(options.teacher),
        "k": k,
        "longest": options.longest,
        "seed": None,  # the likeliest token each time
        "asked": {**described(asked), "texts": asked.texts},
        "answers": len(lines),
        "unended": unended,
        "corpus": named(output),
        "blas": options.blas,
    }
    write_card(output.with_name(f"{output.name}.card.json"), card)
    said = f"{output}: {len(lines)} answers; {unended} had no end in {options.longest} tokens"
    print(said + f"; {asked.texts} texts ask nothing" * (asked.texts > 0))


def _phase(options: argparse.Namespace) -> None:
    from edge0.serving.vocabulary import Vocabulary
    from edge0.training import phases, teacher
    from edge0.training.adapters import adapter_place, load_adapter, save_adapter
    from edge0.training.corpus import read_corpus
    from edge0.training.student import Student
    from experiments.training.records import described, named, record

    model, out, k = options.model, options.out or options.model, options.k
    teacher.check_tokenizer(model)
    config, vocabulary = read_config(model), Vocabulary(model)
    corpus, held = (
        read_corpus(path, vocabulary, options.longest, options.skip_broken) for path in (options.corpus, options.held)
    )
    for one in (corpus, held):
        _tell_skipped(one)
    corpus.check_apart(held)
    heads, lora, files = None, None, {}
    if options.action == "heads":
        owners = _owners(config, options.first)
    else:
        heads, owners = _made_before(lambda: load_adapter(out, HEADS, k, model), "heads", k)
        files["heads"] = named(_file(out, config, HEADS, k))
    if options.action == "on-policy":
        begun = _made_before(lambda: _begun(options, out, config), "lora", k)
        lora, _ = load_adapter(begun, LORA, k, model)
        original = teacher.original(config, options.teacher, teacher.TEACHER_K, model)
        files |= {"lora": named(_file(begun, config, LORA, k)), "teacher": named(options.teacher)}
    kind = HEADS if options.action == "heads" else LORA
    adapter_place(out, kind, k, model)
    _, schedule = PHASES[options.action]
    changeable = ("steps", "batch", "accumulate", "learning_rate")
    schedule = dataclasses.replace(
        schedule, **{name: value for name in changeable if (value := getattr(options, name)) is not None}
    )
    if (most := len(corpus.samples)) < schedule.batch:
        if options.batch is not None:
            detail, expected = "option --batch", f"no more than the corpus holds, {most}"
            raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=expected, found=options.batch)
        schedule = dataclasses.replace(schedule, batch=most)
    student = Student(model, k, owners)
    folder = options.folder or out / "training" / f"k{k}-{options.action}"
    with watching(f"{options.action}, {options.blas}", schedule.steps) as watch:
        task = phases.Task(student, corpus, held.samples, folder, options.seed, schedule, watch)
        task = dataclasses.replace(task, checkpointing=getattr(options, "checkpointing", False))
        if options.action == "heads":
            tensors, made = phases.train_heads(task, options.inner)
        elif options.action == "lora":
            tensors, made = phases.train_lora(task, heads)
        else:
            tensors, made = phases.train_on_policy(task, original, heads, lora, options.longest)
    for place in (out, _second(out, k)) if options.action == "lora" else (out,):
        save_adapter(place, kind, k, tensors, owners, f"{SOURCE} {options.action}", model)
    path = _file(out, config, kind, k)
    found = _held_quality(task, heads, phases.as_stored(tensors))
    about = {"phase": options.action, "adapter": named(path), "files": files, "held": described(held)}
    record(task, made, options.blas, about | {"held_quality": dataclasses.asdict(found)})
    print(f"{options.action}: {found}")
    _tell(path, folder)


def _held_quality(task: Task, heads: Any, trained: Any) -> Any:
    """How good the student is after a phase, with what it trained as a file gives it back."""
    from edge0.training.scoring import quality

    if heads is None:
        return quality(task.student, task.held, trained, None, task.pad, answering=False)
    return quality(task.student, task.held, heads, trained, task.pad)


def _second(out: Path, k: int) -> Path:
    """Where the LoRA that phase 2 made last is kept, beside the one that is served."""
    return out / "training" / f"k{k}-phase2"


def _begun(options: argparse.Namespace, out: Path, config: ModelConfig) -> Path:
    """The directory of the LoRA that phase 3 begins with: phase 2's, also where phase 3's own is already served."""
    from edge0.checkpoint.adapters import adapter_path, open_adapter
    from edge0.training.files import check_writable, partial_of

    if options.lora is not None:
        return options.lora
    kept = _second(out, options.k)
    copy = adapter_path(kept, config.family, LORA, options.k)
    if not copy.is_file():
        header = open_adapter(out, config.family, LORA, options.k).header
        source = json.loads(header.metadata["__metadata__"]).get("source")
        if source == f"{SOURCE} on-policy":
            raise Edge0Error(
                ErrorKind.ADAPTER_MISMATCH,
                "is phase 3's own result",
                path=header.path,
                expected=f"{SOURCE} lora",
                found=source,
                hint="train phase 2 first, or name the directory of its LoRA (--lora)",
            )
        check_writable(copy)
        with writing(copy):
            shutil.copyfile(header.path, partial_of(copy))
            partial_of(copy).replace(copy)
    return kept


def _file(directory: Path, config: ModelConfig, kind: str, k: int) -> Path:
    from edge0.checkpoint.adapters import open_adapter

    return open_adapter(directory, config.family, kind, k).header.path


def _owners(config: ModelConfig, first: int | None) -> tuple[int, ...]:
    """The layers that get a head: from `first` on, each but the last one."""
    if first is None:
        first = find_tier(f"shape-{config.family.tag}").first_owner(config.layers)
    if not config.dense_layers <= first < config.layers - 1:
        expected = f"{config.dense_layers} to {config.layers - 2}"
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option --first", expected=expected, found=first)
    return tuple(range(first, config.layers - 1))


def _made_before(load: Callable[[], Any], action: str, k: int) -> Any:
    """What an earlier phase left; where it did not, the error says which to run."""
    try:
        return load()
    except Edge0Error as error:
        if error.kind is not ErrorKind.ADAPTER_MISSING:
            raise
        hint = f"run `edge0 train {action}` for K={k} first, or name its directory"
        raise Edge0Error(
            error.kind, error.detail, path=error.path, expected=error.expected, found=error.found, hint=hint
        ) from error


def _tell_skipped(corpus: Corpus) -> None:
    if corpus.skipped:
        print(f"{corpus.path}: {corpus.skipped} broken lines left out", file=sys.stderr)


def _tell(path: Path, folder: Path) -> None:
    print(path)
    print(f"losses and card: {folder}")
