"""What `edge0 train` is asked: its actions and options with their defaults. Nothing here waits for MLX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from edge0.training.schedule import PHASE1, PHASE2, PHASE3, SCHEDULES

INNER = 512  # hidden width of a head, as released
SEEDS = 2**24  # phase 3 makes one number of seed, step and micro-batch
PHASES = {
    "heads": ("phase 1: heads imitate the next layer's router", PHASE1),
    "lora": ("phase 2: recovery LoRA on the student's path, heads frozen", PHASE2),
    "on-policy": ("phase 3: reverse KL on the student's own text", PHASE3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--no-blas", action="store_true", help="MLX's own BLAS, where a faster one is installed")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    base = actions.add_parser("base", help="a teacher from scratch, on seeded problems")
    base.add_argument("tier", help=" or ".join(SCHEDULES))
    base.add_argument("output", metavar="FILE", type=Path, help="new .safetensors file for what was trained, in bf16")
    base.add_argument("--seed", type=seed, default=0, help="default 0")
    steps = ", ".join(f"{schedule.steps} for {tier}" for tier, schedule in SCHEDULES.items())
    base.add_argument("--steps", type=positive, help=f"default {steps}")

    quantise = actions.add_parser("quantise", help="the int4 checkpoint of a kept teacher")
    quantise.add_argument("weights", metavar="FILE", type=Path, help="what `train base` wrote")
    quantise.add_argument("output", metavar="OUT", type=Path, help="new directory")

    generate = actions.add_parser("generate", help="a model's own answers to the prompts of a corpus, as a new corpus")
    generate.add_argument("model", metavar="MODEL", type=Path)
    generate.add_argument(
        "corpus", metavar="CORPUS", type=Path, help="JSONL of chat messages; an answer at their end is thrown away"
    )
    generate.add_argument("output", metavar="OUT", type=Path, help="JSONL file to write, OUT.card.json beside it")
    generate.add_argument("--k", type=positive, default=8, help="experts per token (default 8)")
    generate.add_argument("--longest", type=positive, default=64, help="tokens of an answer (default 64)")
    generate.add_argument("--skip-broken", action="store_true", help="leave broken lines of the corpus out")
    generate.add_argument(
        "--teacher", type=Path, metavar="FILE", help="what `train base` wrote: it answers, not MODEL's int4 weights"
    )

    for name, (about, schedule) in PHASES.items():
        phase = actions.add_parser(name, help=about, description=about)
        phase.add_argument("model", metavar="MODEL", type=Path, help="an int4 checkpoint")
        phase.add_argument("corpus", metavar="CORPUS", type=Path, help="JSONL of chat messages or text")
        phase.add_argument(
            "--held", type=Path, required=True, metavar="CORPUS", help="samples that are never trained on"
        )
        phase.add_argument("--k", type=positive, required=True, help="experts per token that is trained for")
        phase.add_argument("--out", type=Path, metavar="DIR", help="where the adapter set lies (default: MODEL)")
        phase.add_argument("--folder", type=Path, metavar="DIR", help="of the run (default: OUT/training/kK-ACTION)")
        phase.add_argument("--seed", type=seed, default=0, help="default 0")
        phase.add_argument("--steps", type=positive, help=f"default {schedule.steps}")
        phase.add_argument("--batch", type=positive, help=f"sequences of a micro-batch (default {schedule.batch})")
        phase.add_argument(
            "--accumulate", type=positive, help=f"micro-batches of a step (default {schedule.accumulate})"
        )
        phase.add_argument("--learning-rate", type=rate, help=f"default {schedule.learning_rate:g}")
        phase.add_argument("--longest", type=positive, default=512, help="tokens of a sequence (default 512)")
        phase.add_argument("--skip-broken", action="store_true", help="leave broken lines of the corpora out")
        if name == "heads":
            phase.add_argument(
                "--inner", type=positive, default=INNER, help=f"hidden width of a head (default {INNER})"
            )
            phase.add_argument(
                "--first", type=natural, help="first layer with a head (default: in proportion to the released models)"
            )
        else:
            phase.add_argument("--checkpointing", action="store_true", help="recompute layers: less memory, more time")
        if name == "on-policy":
            phase.add_argument("--teacher", type=Path, required=True, metavar="FILE", help="what `train base` wrote")
            phase.add_argument(
                "--lora", type=Path, metavar="DIR", help="with the LoRA to begin with (default: phase 2's last for OUT)"
            )


def _whole(least: int, below: int | None = None) -> Callable[[str], int]:
    expected = f"a number from {least} {'on' if below is None else f'to {below - 1}'}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or below is not None and value >= below:
            raise _unexpected(expected, text)
        return value

    return parse


natural, positive, seed = _whole(0), _whole(1), _whole(0, SEEDS)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 10:
        raise _unexpected("a rate above 0 and below 10", text)
    return value


def _unexpected(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, found {text[:80]!r}")
