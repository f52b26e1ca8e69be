"""Rows of single expert reads: those of `experiments.load_cost`, those of a session, or any table of cold share and ms.

Knows nothing of lines or claims. Everything is brought into the same columns: `cold` (share of the asked bytes that the
page cache lacked, 0..1), `ms` (of one load) and `asked_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.rows import MIB, Session, named, read_json

LOAD_COST_COLUMNS = (
    "way layout target_cold role repetition order layer expert asked_bytes cold_bytes inflight_bytes cold_page_bytes "
    "cold_pieces device_bytes advise_ns read_ns build_ns ns"
).split()
REFERENCE_PARTS = 4  # the reference loads are cut into so many parts of the run
REFERENCE_LIMIT = 1.3  # by how much their medians may differ until the device counts as changed


@dataclass(frozen=True)
class LoadCost:
    """One run of load_cost: `rows` in the order of time, `reference` the fixed load among them, `about` its JSON."""

    rows: pd.DataFrame
    reference: pd.DataFrame
    about: dict[str, Any]

    @property
    def session(self) -> str:
        return str(self.about.get("session", ""))

    @property
    def place(self) -> str:
        """The checkpoint and the machine, in words."""
        return f"{self.about.get('tier') or 'an unnamed checkpoint'} on {self.about.get('machine') or 'this machine'}"

    @property
    def mib_per_load(self) -> float:
        return float(self.rows["asked_bytes"].median()) / MIB

    def cell(self, way: str, layout: str) -> pd.DataFrame:
        """The loads of one way from one layout."""
        return self.rows[(self.rows["way"] == way) & (self.rows["layout"] == layout)].reset_index(drop=True)

    def drift(self) -> tuple[float, str]:
        """How far the device moved: slowest over fastest part of the run by its reference loads, and that in words."""
        if len(self.reference) < 2 * REFERENCE_PARTS:
            return float("nan"), "too few reference loads to tell"
        parts = np.array_split(self.reference["ms"].to_numpy(), REFERENCE_PARTS)
        medians = [float(np.median(part)) for part in parts]
        ratio = max(medians) / min(medians)
        verdict = "the device changed: read milliseconds with care" if ratio > REFERENCE_LIMIT else "no drift"
        words = ", ".join(f"{value:.2f}" for value in medians)
        return ratio, (
            f"one fixed direct load took {words} ms (medians of {REFERENCE_PARTS} parts of the run, "
            f"n={len(self.reference)}): {ratio:.2f}x, {verdict} (limit {REFERENCE_LIMIT}x)"
        )


def read_load_cost(path: Path) -> LoadCost:
    """Read what load_cost wrote: its folder, one of its two files, or the latest.json that names it.

    Raises ValueError, one line naming the file: unreadable, missing column, no loads.
    """
    folder = path if path.is_dir() else named(path, "loads.json").parent
    rows = read_table(folder / "loads.parquet")
    require(folder / "loads.parquet", rows, LOAD_COST_COLUMNS)
    rows = with_shares(rows.sort_values("order", ignore_index=True))
    loads = rows[rows["role"] == "load"].reset_index(drop=True)
    if loads.empty:
        raise ValueError(f"{folder / 'loads.parquet'}: no rows of role 'load'")
    about = read_json(folder / "loads.json")
    return LoadCost(loads, rows[rows["role"] == "reference"].reset_index(drop=True), about)


def session_loads(session: Session) -> pd.DataFrame:
    """The expert reads of a session's timed steps before which the page cache was looked at, with arm, k and round.

    Rows of role "arm" only; reads of whole layers and of prompts are none.
    """
    runs = session.runs.loc[session.runs["role"] == "arm", ["run_id", "arm", "k", "round"]]
    loads = session.loads.merge(runs, on="run_id")
    loads = loads[(loads["step"] >= 0) & (loads["expert"] >= 0) & (loads["cold_bytes"] >= 0)].reset_index(drop=True)
    return with_shares(loads.assign(ns=loads["end_ns"] - loads["start_ns"]))


def with_shares(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `cold` and `ms`, from cold_bytes, asked_bytes and ns."""
    return rows.assign(cold=rows["cold_bytes"] / rows["asked_bytes"], ms=rows["ns"] / 1e6)


def read_table(path: Path) -> pd.DataFrame:
    """A .parquet or .csv file. Raises ValueError, one line naming the file."""
    readers = {".parquet": pd.read_parquet, ".csv": pd.read_csv}
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a .parquet or .csv file")
    try:
        return readers[path.suffix](path)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a readable table ({reason})") from error


def require(path: Path, rows: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raises ValueError, one line that names what is missing and what is there."""
    missing = [column for column in columns if column not in rows.columns]
    if missing:
        raise ValueError(f"{path}: missing columns: {', '.join(missing)}; it has {', '.join(map(str, rows.columns))}")
