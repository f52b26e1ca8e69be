"""One stream of expert loads under one way of keeping a page-cache budget, in a process of its own.

    python -m experiments.budgets.run SPEC.json OUT

Fills the budget, loads until what is cached and what is cold hold still, then goes on for the measured loads. Each is
probed before, advised and read as the engine's readers do, and counted after, with nothing beside it. Writes
OUT.parquet, a row for each load and for each record that the budget began with, and OUT.json. Judges nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ByteRange, ExpertLayout
from edge0.families import read_config
from edge0.streaming.source import PreadSource
from edge0.telemetry.pagecache import FilePages, Residency, thread_device_bytes
from experiments.budgets.budget import Budget, Record
from experiments.budgets.cgroup_budget import CgroupBudget
from experiments.budgets.eviction import CacheBudget
from experiments.conditions import open_budget
from experiments.observer import by_file, page_ranges
from experiments.publish import open_pages, run_command

START, WARM_UP, MEASURED = "start", "warm-up", "measured"  # phases of the rows
STEADY_COLD, STEADY_CACHED = 0.01, 0.01  # between two windows: cold share, and cached bytes as a share of the budget
MAX_WINDOWS = 40
LOOKS = 10  # at what is cached, during the measured loads: a look at whole files costs the kernel milliseconds
COLUMNS = (
    "phase record layer expert asked_bytes cold_bytes inflight_bytes asked_page_bytes cold_page_bytes device_bytes"
).split()


@dataclass(frozen=True)
class BudgetSpec:
    """What one process is told. `exponent`: 0 for a uniform stream, else Zipf's. `by`: "eviction", "cgroup" or
    "balloon". `window`: loads between two looks for a steady state."""

    model: str
    by: str
    exponent: float
    budget_bytes: int
    loads: int
    window: int
    seed: int


def stream(records: int, exponent: float, count: int, seed: int, part: int) -> np.ndarray:
    """Seeded record numbers, int64 [count]: the r-th most popular record comes with a chance of r ** -exponent; which
    record that is, is drawn too. `part`: another draw from the same popularity."""
    chance = np.arange(1, records + 1, dtype=float) ** -exponent
    popular = np.random.default_rng(seed).permutation(records)
    return popular[np.random.default_rng([seed, part]).choice(records, count, p=chance / chance.sum())]


def measure(spec: BudgetSpec) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(rows, what is to be known of them). Raises Edge0Error: whatever the checkpoint or the budget is refused for."""
    layout = ExpertLayout.of(CheckpointIndex.open(spec.model), read_config(spec.model))
    names = layout.records()
    with ExitStack() as stack:
        files = stack.enter_context(open_pages(layout.paths))
        source = PreadSource(layout.paths)
        stack.callback(source.close)
        budget = open_budget(spec.by, files, spec.budget_bytes, layout)
        stack.callback(budget.close)
        start = budget.prefill(spec.seed)
        first_cached = _cached(files)
        rows = [dict.fromkeys(COLUMNS, 0) | _named(START, record, names.index(record)) for record in start]
        loader = _Loader(files, source, layout, budget)

        def load(phase: str, numbers: np.ndarray) -> list[dict[str, Any]]:
            loaded = [_named(phase, names[at], at) | loader.load(*names[at]) for at in numbers.tolist()]
            rows.extend(loaded)
            return loaded

        steady, windows = False, []
        while not steady and len(windows) < MAX_WINDOWS:
            warm_up = stream(len(names), spec.exponent, spec.window, spec.seed, 1 + len(windows))
            windows.append(_Window.of(load(WARM_UP, warm_up), _cached(files)))
            steady = len(windows) > 1 and windows[-1].like(windows[-2], spec.budget_bytes)
        cached = []
        for part in np.array_split(stream(len(names), spec.exponent, spec.loads, spec.seed, 0), LOOKS):
            load(MEASURED, part)  # the same loads whatever the warm-up took
            cached.append(_cached(files))
        budget.drain()
        about = {
            "steady": steady,
            "warm_up_loads": len(windows) * spec.window,
            "cached_first_bytes": first_cached,
            "cached_mean_bytes": int(np.mean(cached)),
            "cached_low_bytes": min(cached),
            "cached_high_bytes": max(cached),
            "charged_bytes": budget.charged_bytes() if isinstance(budget, CgroupBudget) else None,
            "record_bytes": layout.expert_bytes,
            "records": len(names),
        }
    return pd.DataFrame(rows, columns=COLUMNS), about


@dataclass(frozen=True)
class _Window:
    cold_share: float
    cached_bytes: int

    @classmethod
    def of(cls, rows: list[dict[str, Any]], cached_bytes: int) -> _Window:
        cold, asked = (sum(row[column] for row in rows) for column in ("cold_bytes", "asked_bytes"))
        return cls(cold / asked, cached_bytes)

    def like(self, other: _Window, budget_bytes: int) -> bool:
        flat = abs(self.cached_bytes - other.cached_bytes) <= STEADY_CACHED * budget_bytes
        return flat and abs(self.cold_share - other.cold_share) <= STEADY_COLD


class _Loader:
    """Loads one expert into memory that was touched before, and looks at the page cache around it."""

    def __init__(self, files: Mapping[Path, FilePages], source: PreadSource, layout: ExpertLayout, budget: Budget):
        self._files, self._source, self._layout, self._budget = files, source, layout, budget
        self._memory = memoryview(bytearray(b"\1" * layout.expert_bytes))

    def load(self, layer: int, expert: int) -> dict[str, int]:
        ranges = self._layout.ranges(layer, expert)
        asked = self._residency(ranges)
        whole = self._residency(page_ranges(ranges, self._files))
        before = thread_device_bytes()
        self._source.advise(ranges)
        at = 0
        for piece in ranges:
            self._source.read(piece, [self._memory[at : at + piece.nbytes]])
            at += piece.nbytes
        delivered = thread_device_bytes() - before
        self._budget.note(layer, expert)
        if isinstance(self._budget, CacheBudget):
            self._budget.drain()  # what it evicts beside the next load would have been probed as cached
        return {
            "asked_bytes": asked.asked_bytes,
            "cold_bytes": asked.cold_bytes,
            "inflight_bytes": asked.inflight_bytes,
            "asked_page_bytes": whole.asked_bytes,
            "cold_page_bytes": whole.cold_bytes,
            "device_bytes": delivered,
        }

    def _residency(self, ranges: tuple[ByteRange, ...]) -> Residency:
        found = [self._files[path].residency(parts) for path, parts in by_file(ranges).items()]
        return Residency(*(sum(getattr(each, name) for each in found) for name in Residency.__dataclass_fields__))


def _named(phase: str, record: Record, number: int) -> dict[str, Any]:
    return {"phase": phase, "record": number, "layer": record[0], "expert": record[1]}


def _cached(files: Mapping[Path, FilePages]) -> int:
    return sum(pages.cached_bytes() for pages in files.values())


def main() -> int:
    spec_path, out = (Path(argument) for argument in sys.argv[1:])

    def command() -> None:
        rows, about = measure(BudgetSpec(**json.loads(spec_path.read_text())))
        rows.to_parquet(out.with_suffix(".parquet"))
        out.with_suffix(".json").write_text(json.dumps(about) + "\n")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
