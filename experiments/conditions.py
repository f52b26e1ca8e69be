"""Page-cache conditions of a run: cold, warm, or a byte budget, each brought about and then verified by probe.

A budget is what a smaller machine would leave for the checkpoint. It is kept by eviction, by a memory cgroup that the
process was started in (`experiments.budgets.cgroups`), or by a balloon; which of them works on a machine,
`experiments.budgets.methods` tries out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.pagecache import FilePages
from experiments.budgets.balloon_budget import BalloonBudget
from experiments.budgets.budget import Budget, ranges_of
from experiments.budgets.cgroup_budget import CgroupBudget
from experiments.budgets.eviction import CacheBudget

BUDGET_BY = {"eviction": CacheBudget, "cgroup": CgroupBudget, "balloon": BalloonBudget}
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}  # largest first
_READERS = "another process may map or read the checkpoint: end it, and measure again"
_SMALL = "memory is too small to hold the checkpoint, or another process takes it: free some, or measure a budget"
_FORMS = "warm, cold, limit, budget:FRACTION (between 0 and 1) or budget:SIZE (such as 64MiB)"


@dataclass(frozen=True)
class Condition:
    """`warm`, `cold`, `limit`, or `budget` with a fraction of the expert bytes (0 < fraction < 1) or a size in bytes.

    `limit`: nothing is cached at the start, then what an enforced limit on the whole process leaves.

    Raises Edge0Error CONDITION_UNKNOWN for another name, OPTION_INVALID for a value that does not fit the name.
    """

    name: str
    fraction: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.fraction, self.nbytes) if value is not None]
        if self.name not in ("warm", "cold", "limit", "budget"):
            raise _refused("no such condition", self.name, ErrorKind.CONDITION_UNKNOWN)
        if len(given) != (self.name == "budget"):
            raise _refused("takes one value" if self.name == "budget" else "takes no value", self.name)
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise _refused("a budget's fraction lies between 0 and 1, both excluded", f"{self.fraction:g}")
        if self.nbytes is not None and self.nbytes < 1:
            raise _refused("a budget has at least 1 byte", self.nbytes)

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Condition from `warm`, `cold`, `budget:0.5`, `budget:64MiB`. Raises as the class does."""
        name, colon, value = text.strip().partition(":")
        if not colon or name != "budget":
            if colon and name in ("warm", "cold", "limit"):
                raise _refused(f"{name} takes no value", text)
            return cls(name)
        size = re.fullmatch(r"([0-9]+)(B|KiB|MiB|GiB)", value)
        if size:
            return cls(name, nbytes=int(size.group(1)) * _UNITS[size.group(2)])
        try:
            return cls(name, fraction=float(value))
        except ValueError:
            raise _refused("not a budget", text) from None

    def budget_bytes(self, expert_bytes: int) -> int | None:
        """Bytes that the page cache may hold of the expert records: None where nobody of ours keeps one, 0 for cold."""
        if self.name in ("warm", "limit"):
            return None
        if self.name == "cold":
            return 0
        return self.nbytes if self.fraction is None else int(self.fraction * expert_bytes)

    def __str__(self) -> str:
        """Canonical text, which `parse` turns back into an equal condition."""
        if self.nbytes is not None:
            unit, size = next((unit, size) for unit, size in _UNITS.items() if self.nbytes % size == 0)
            return f"budget:{self.nbytes // size}{unit}"
        return self.name if self.fraction is None else f"budget:{self.fraction!r}"


def _refused(detail: str, found: object, kind: ErrorKind = ErrorKind.OPTION_INVALID) -> Edge0Error:
    """Named by the key that a condition is given under, in a configuration and on a command line."""
    return Edge0Error(kind, detail, tensor="condition", expected=_FORMS, found=found if found != "" else "nothing")


def open_budget(by: str, files: Mapping[Path, FilePages], budget_bytes: int, layout: ExpertLayout) -> Budget:
    """The budget of a run over a checkpoint's experts. `by`: "eviction", "cgroup" in a process that was started behind
    the prefix of `experiments.budgets.cgroups.limited_command`, or "balloon" on macOS.

    Raises:
        Edge0Error: OPTION_INVALID for another way or a size that it cannot keep; PROBE_UNAVAILABLE where it has no
            cgroup, or a balloon is not used.
    """
    if by not in BUDGET_BY:
        expected = ", ".join(BUDGET_BY)
        raise Edge0Error(ErrorKind.OPTION_INVALID, "no such way", tensor="budget_by", expected=expected, found=by)
    return BUDGET_BY[by](files, budget_bytes, ranges_of(layout), layout.records())


def prepare(condition: Condition, files: Mapping[Path, FilePages], budget: Budget | None = None, seed: int = 0) -> int:
    """Bring the files into the condition and verify it; returns their cached bytes.

    `budget`: needed for a budget, and for cold if loads will be noted. `seed` picks what a budget starts with.
    Raises Edge0Error PROBE_UNAVAILABLE when the probe does not find what was asked for, ValueError without a `budget`.
    """
    if condition.name == "warm":
        return prepare_warm(files)
    if condition.name == "budget":
        if budget is None:
            raise ValueError("a budget condition needs a Budget")
        return prepare_budget(budget, seed)
    if budget is not None:
        budget.prefill(seed)  # forgets the records that it tracked
    return prepare_cold(files)


def prepare_cold(files: Mapping[Path, FilePages]) -> int:
    """Evict the files; at most 1% of their bytes may stay cached (pages that another process has mapped do)."""
    for pages in files.values():
        pages.evict()
    cached, limit = _cached(files), sum(pages.file_bytes for pages in files.values()) // 100
    _verify(cached <= limit, "cold", f"at most {limit} bytes cached", cached, _READERS)
    return cached


def prepare_warm(files: Mapping[Path, FilePages]) -> int:
    """Read the files; at least 99% of their bytes must be cached then (they are not if memory is too small)."""
    for pages in files.values():
        pages.warm()
    cached, floor = _cached(files), -(-sum(pages.file_bytes for pages in files.values()) * 99 // 100)
    _verify(cached >= floor, "warm", f"at least {floor} bytes cached", cached, _SMALL)
    return cached


def prepare_budget(budget: Budget, seed: int) -> int:
    """Fill the budget with a seeded choice of records; their pages must be cached then, within 5% of the budget."""
    budget.prefill(seed)
    cached, kept, tolerance = budget.cached_bytes(), budget.kept_page_bytes(), budget.budget_bytes // 20
    low, high = kept - tolerance, kept + tolerance
    _verify(low <= cached <= high, "budget", f"{low} to {high} bytes cached", cached, _READERS)
    return cached


def _cached(files: Mapping[Path, FilePages]) -> int:
    return sum(pages.cached_bytes() for pages in files.values())


def _verify(holds: bool, name: str, expected: str, cached_bytes: int, hint: str) -> None:
    if not holds:
        sides = {"expected": expected, "found": cached_bytes, "hint": hint}
        raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, f"{name} was not reached", tensor="condition", **sides)
