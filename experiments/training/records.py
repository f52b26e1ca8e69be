"""What a training leaves beside its tensors: its losses as a table, and a card that says how it came about.

Knows nothing of training.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from mlx.utils import tree_flatten

from edge0.errors import writing
from edge0.training.corpus import Corpus
from edge0.training.files import sha256
from edge0.training.loop import Run
from edge0.training.phases import Task

CARD, LOSSES = "card.json", "losses.parquet"
BUILT_ON = ("heads", "lora", "teacher")


def record(task: Task, run: Run, blas: str, about: Mapping[str, Any]) -> None:
    """Write both for a phase: what it depends on, by digests of tensors where there is no file, and what it came to.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    card = {
        **about,
        "base": str(task.student.directory),
        "base_fingerprint": run.identity["base"],
        "built_on": {name: run.identity[name] for name in BUILT_ON if run.identity.get(name) is not None},
        "k": task.student.executor.router.k,
        "owners": task.student.executor.owners,
        "seed": task.seed,
        "schedule": dataclasses.asdict(task.schedule),
        "corpus": described(task.corpus),
    }
    leave(run, blas, card)


def leave(run: Run, blas: str, about: Mapping[str, Any]) -> None:
    """Write a run's table, a row per step, and a card that says what is told `about` it and what the run itself knows.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    card = {
        **about,
        "trained_numbers": sum(value.size for _, value in tree_flatten(run.trained)),
        "steps": run.step,
        "last_loss": run.rows[-1]["loss"],
        "blas": blas,
    }
    with writing(run.folder):
        pd.DataFrame(run.rows).to_parquet(run.folder / LOSSES)
    write_card(run.folder / CARD, card)


def write_card(path: Path, card: Mapping[str, Any]) -> None:
    """
    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    text = json.dumps({**card, "mlx": version("mlx")}, indent=1)
    with writing(path):
        path.write_text(f"{text}\n", encoding="utf-8")


def described(corpus: Corpus) -> dict[str, Any]:
    return {
        "file": corpus.path.name,
        "sha256": corpus.digest,
        "samples": len(corpus.samples),
        "skipped_lines": corpus.skipped,
    }


def named(path: Path) -> dict[str, str]:
    """A file that something was built on."""
    return {"file": path.name, "sha256": sha256(path)}
