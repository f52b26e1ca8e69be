"""Looks at the page cache around every load of an arm, and tells the budget what was loaded.

Runs in the thread that loads: residency before (cachestat and mincore), bytes that the device moved, from the thread's
own counter. The probe lies outside the load's timed interval but delays the load, so only one load in n is probed while
steps are timed. Which ones is drawn, the same draws in every arm: every n-th would be the same place of each layer
where n is a multiple of K.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge0.checkpoint.layout import ByteRange
from edge0.telemetry.loads import WHOLE, LoadRecord
from edge0.telemetry.pagecache import DARWIN, FilePages, Range, page_spans, thread_device_bytes
from experiments.budgets.budget import Budget


class CacheObserver:
    """A `LoadObserver`. `after_load` runs before a record is given to the budget (mappings must let go of pages);
    `leaves_pages`: whether loads leave anything in the page cache that a budget must know of (direct reads do not).
    `probe_every`: n, of which one load is probed in expectation; 1: all of them, 0: none. `seed` decides which."""

    def __init__(self, files: Mapping[Path, FilePages], budget: Budget | None, probe_every: int = 1, seed: int = 0):
        self._files, self._budget, self.probe_every = files, budget, probe_every
        self._draws = random.Random(seed)
        self.after_load: Callable[[], None] | None = None
        self.leaves_pages = True
        self.reading_threads = 1

    @property
    def counts_device_bytes(self) -> bool:
        """Whether a load's device bytes are its own: macOS counts for the whole process, all its loads alike."""
        return not DARWIN or self.reading_threads == 1

    def before(self, ranges: tuple[ByteRange, ...], record: LoadRecord) -> None:
        if self._is_probed():
            record.cold_bytes = record.inflight_bytes = 0
            for path, parts in by_file(ranges).items():
                residency = self._files[path].residency(parts)
                record.cold_bytes += residency.cold_bytes
                record.inflight_bytes += residency.inflight_bytes
            record.cold_page_bytes = 0
            for path, parts in by_file(page_ranges(ranges, self._files)).items():
                record.cold_page_bytes += self._files[path].residency(parts).cold_bytes
        if self.counts_device_bytes:
            record.device_bytes = -thread_device_bytes()

    def after(self, record: LoadRecord) -> None:
        if self.counts_device_bytes:
            record.device_bytes += thread_device_bytes()
        if self.after_load is not None:
            self.after_load()
        if self._budget is not None and self.leaves_pages:
            self._budget.note(record.layer, None if record.expert == WHOLE else record.expert)

    def _is_probed(self) -> bool:
        """Warm-up, of which every load is probed, takes no draw: so the draws of timed steps are alike in all arms."""
        if self.probe_every < 2:
            return self.probe_every == 1
        return self._draws.random() * self.probe_every < 1


def page_ranges(ranges: Sequence[ByteRange], files: Mapping[Path, FilePages]) -> tuple[ByteRange, ...]:
    """Some ranges, file by file, rounded outward to pages, each page once; the device reads no less than that."""
    spans = []
    for path, parts in by_file(tuple(ranges)).items():
        end = files[path].file_bytes
        spans += [ByteRange(path, start, min(stop, end) - start) for start, stop in page_spans(parts)]
    return tuple(spans)


def by_file(ranges: tuple[ByteRange, ...]) -> dict[Path, list[Range]]:
    """(offset, bytes) of each range, by file."""
    parts: dict[Path, list[Range]] = {}
    for piece in ranges:
        parts.setdefault(piece.path, []).append((piece.offset, piece.nbytes))
    return parts
