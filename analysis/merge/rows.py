"""What the merge study is made of: a merge.json for each checkpoint, and the rows of targets and positions beside it.

Knows nothing of how weights are quantised, nor of what is said of a correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.paper.findings import SYNTHESISED
from analysis.rows import named, read_json, read_rows
from analysis.statistics import LEAST_FOR_INTERVAL, Difference, paired_difference
from analysis.units import require

KINDS = ("attention", "linear attention", "shared expert", "dense")
ATTENTION, DENSE = KINDS[:2], KINDS[2:]  # the paper's two words for what our targets are
LOGITS = "logits"
RANDOM = "edge0 synth"  # how the source of a LoRA begins that was drawn by lot
WEIGHT_COLUMNS = (
    "adapters target layer kind projection bits weights survival survival_same_grid delta_rms step_median "
    "delta_over_step requantised_rms codes_changed"
).split()
LOGIT_COLUMNS = "adapters prompt task position change error survival".split()
ABOUT = "tier k adapters prompts logits_refused prerouter session".split()


@dataclass(frozen=True)
class Study:
    """One checkpoint: `weights` has a row per target and adapter set, `logits` one per position and set."""

    about: Mapping[str, Any]
    weights: pd.DataFrame
    logits: pd.DataFrame

    @classmethod
    def load(cls, file: Path) -> Study:
        """Raises ValueError, one line: a file that is none, a column or a fact that is missing, an unknown kind."""
        path = named(file, "merge.json")
        about = read_json(path)
        if not isinstance(about, dict):
            raise ValueError(f"{path}: expected a JSON object, found {type(about).__name__}")
        require(path, about, ABOUT, "keys")
        weights = read_rows(path.with_suffix(".parquet"), WEIGHT_COLUMNS)
        strange = sorted(set(weights["kind"]) - set(KINDS))
        if strange or weights.empty:
            found = f"kind {strange[0]!r}" if strange else "no row"
            raise ValueError(f"{path.with_suffix('.parquet')}: expected targets of {', '.join(KINDS)}, found {found}")
        return cls(about, weights, read_rows(path.with_name("logits.parquet"), LOGIT_COLUMNS))

    @property
    def tier(self) -> str:
        return str(self.about["tier"])

    @property
    def sets(self) -> int:
        return len(self.about["adapters"])

    def of(self, *kinds: str) -> pd.DataFrame:
        """Rows of targets of these kinds; of the logits for `LOGITS`. Without those that no correction touches."""
        rows = self.logits if kinds == (LOGITS,) else self.weights[self.weights["kind"].isin(kinds)]
        return rows[rows["survival"].notna()]

    def units(self, rows: pd.DataFrame, column: str) -> pd.Series:
        """The median of a column within each unit that varies on its own."""
        inner = "prompt" if "prompt" in rows.columns else "layer"
        return rows.groupby(["adapters"] if self.sets >= LEAST_FOR_INTERVAL else ["adapters", inner])[column].median()

    def unit_name(self, kind: str) -> str:
        if self.sets >= LEAST_FOR_INTERVAL:
            return "adapter sets"
        return "prompts" if kind == LOGITS else "layers"

    def survival(self, *kinds: str) -> Difference:
        """Mean over units, with its interval; NaN for no row."""
        values = self.units(self.of(*kinds), "survival")
        return paired_difference(values, np.zeros(len(values)))

    @property
    def released(self) -> bool:
        return self.tier not in SYNTHESISED

    @property
    def random(self) -> bool:
        """Whether a LoRA is of random numbers, of which no claim speaks."""
        return any(str(source).startswith(RANDOM) for source in self.about["adapters"].values())

    @property
    def origin(self) -> str:
        """What the correction is, in words."""
        source = " and ".join(dict.fromkeys(map(str, self.about["adapters"].values())))
        return f"{'' if self.released else 'not the released adapter: '}{self.tier}, its LoRA made by {source}"
