"""What every page-cache budget of a run can do, and the choice of records that each of them starts with.

A budget is what a smaller machine would leave of the page cache for the experts of a checkpoint. Three ways keep
one: `eviction` (no rights needed), `cgroup_budget` and, on macOS, `balloon_budget`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge0.checkpoint.layout import ExpertLayout
from edge0.telemetry.pagecache import PAGE_BYTES, FilePages, Range

Record = tuple[int, int]  # (layer, expert)
RangesOf = Callable[[int, int], Sequence[tuple[Path, int, int]]]  # (layer, expert) -> (path, offset, nbytes)

SLACK_MIN_BYTES, SLACK_SHARE = 16 << 20, 0.10


class Budget(Protocol):
    """Keeps the page cache of the expert files down to `budget_bytes`."""

    budget_bytes: int

    def note(self, layer: int, expert: int | None) -> None:
        """Say that an expert was just loaded, or with None a part of each of the layer's. Any thread; a few
        microseconds; failures surface in `drain`."""

    def prefill(self, seed: int) -> list[Record]:
        """Evict the files, then cache a seeded random choice of records up to the budget; returns it, oldest first."""

    def cached_bytes(self) -> int:
        """Bytes of the files in the page cache, by probe, everything in the files included."""

    def kept_page_bytes(self) -> int:
        """Bytes of the pages of the records that the budget is known to hold: at most the budget."""

    def drain(self) -> None:
        """Return when everything noted before this call is enforced. Raises what went wrong meanwhile."""

    def close(self) -> None:
        """Stop keeping the budget. Later calls but `cached_bytes` are errors or no-ops."""


class Records:
    """The records of a budget by index: their ranges in each file and the pages they touch."""

    def __init__(self, ranges_of: RangesOf, records: Sequence[Record]):
        self.names = list(records)
        self.index = {record: index for index, record in enumerate(records)}
        self.ranges: list[dict[Path, list[Range]]] = []
        self.pages: list[_Pages] = []
        for record in records:
            by_file: dict[Path, list[Range]] = {}
            for path, offset, nbytes in ranges_of(*record):
                by_file.setdefault(path, []).append((offset, nbytes))
            self.ranges.append(by_file)
            self.pages.append(_Pages.of(by_file))

    def prefill(self, files: Mapping[Path, FilePages], budget_bytes: int, seed: int) -> tuple[list[int], Ledger]:
        """Read a seeded random choice of records into the page cache, as many as the budget has pages for.

        Returns their indices, oldest first, and the ledger of their pages.
        """
        chosen, ledger = [], Ledger(self)
        for index in random.Random(seed).sample(range(len(self.names)), len(self.names)):
            ledger.add(index)
            if ledger.page_bytes > budget_bytes:
                ledger.remove(index)
                break
            for path, ranges in self.ranges[index].items():
                files[path].warm(ranges)
            chosen.append(index)
        return chosen, ledger


@dataclass(frozen=True)
class _Pages:
    """The pages of one record. `whole`: ranges of pages that are its alone; `partial`: (file, offset) of the pages at
    the edges of its ranges, which neighbours may touch too."""

    whole: tuple[tuple[Path, int, int], ...]
    partial: frozenset[tuple[Path, int]]
    whole_bytes: int

    @classmethod
    def of(cls, by_file: Mapping[Path, Sequence[Range]]) -> _Pages:
        whole, partial = [], set()
        for path, ranges in by_file.items():
            for offset, nbytes in (each for each in ranges if each[1]):
                first, last = -(-offset // PAGE_BYTES) * PAGE_BYTES, (offset + nbytes) // PAGE_BYTES * PAGE_BYTES
                if first < last:
                    whole.append((path, first, last - first))
                if offset < first:
                    partial.add((path, first - PAGE_BYTES))
                if last < offset + nbytes:
                    partial.add((path, last))
        return cls(tuple(whole), frozenset(partial), sum(nbytes for _, _, nbytes in whole))


class Ledger:
    """The pages of a changing set of records, in bytes; a page that several of them touch counts once.

    The page cache holds pages, and a budget is what it may hold. Where records are small, their edges weigh: a record
    of 432 KiB in nine ranges touches 468 KiB of pages of 4 KiB.
    """

    def __init__(self, records: Records):
        self._records = records
        self._holders: Counter[tuple[Path, int]] = Counter()
        self.page_bytes = 0

    def add(self, index: int) -> None:
        """Take in a record that is not in the set."""
        pages = self._records.pages[index]
        self.page_bytes += pages.whole_bytes
        for page in pages.partial:
            self.page_bytes += 0 if self._holders[page] else PAGE_BYTES
            self._holders[page] += 1

    def remove(self, index: int) -> dict[Path, list[Range]]:
        """Give up a record of the set; returns ranges in the pages that no other record of the set touches, to be
        rounded outward to pages."""
        pages = self._records.pages[index]
        self.page_bytes -= pages.whole_bytes
        free: dict[Path, list[Range]] = {}
        for path, offset, nbytes in pages.whole:
            free.setdefault(path, []).append((offset, nbytes))
        for page in pages.partial:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self.page_bytes -= PAGE_BYTES
                free.setdefault(page[0], []).append((page[1], 1))  # a byte of it: the file may end inside
        return free


def ranges_of(layout: ExpertLayout) -> RangesOf:
    """What is read for each record of a checkpoint."""
    return lambda layer, expert: [(piece.path, piece.offset, piece.nbytes) for piece in layout.ranges(layer, expert)]


def slack_bytes(budget_bytes: int) -> int:
    """How far the cached bytes may lie above a budget: pages at the edges of records, and loads under way."""
    return max(SLACK_MIN_BYTES, int(SLACK_SHARE * budget_bytes))
