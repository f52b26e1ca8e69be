"""What a training run leaves beside its tensors: its losses as a table, and a card that says how it came about.

Knows nothing of training.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import pandas as pd
from mlx.utils import tree_flatten

from edge0.training.corpus import Corpus
from edge0.training.loop import Run
from edge0.training.phases import Task
from experiments.publish import writing

CARD, LOSSES = "card.json", "losses.parquet"


def record(task: Task, run: Run, blas: str, about: Mapping[str, Any]) -> None:
    """Write both into the run's folder. The table has a row per step; the card what the run depends on and came to.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    card = {
        **about,
        "base": str(task.student.directory),
        "k": task.student.executor.router.k,
        "owners": task.student.executor.owners,
        "seed": task.seed,
        "schedule": dataclasses.asdict(task.schedule),
        "corpus": described(task.corpus),
        "trained_numbers": sum(value.size for _, value in tree_flatten(run.trained)),
        "steps": run.step,
        "last_loss": run.rows[-1]["loss"],
        "blas": blas,
        "mlx": version("mlx"),
    }
    with writing(run.folder):
        pd.DataFrame(run.rows).to_parquet(run.folder / LOSSES)
        (run.folder / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def described(corpus: Corpus) -> dict[str, Any]:
    return {
        "file": corpus.path.name,
        "sha256": corpus.digest,
        "samples": len(corpus.samples),
        "skipped_lines": corpus.skipped,
    }
