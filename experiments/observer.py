"""Looks at the page cache around every load of an arm, and tells the budget what was loaded.

Runs in the thread that loads: residency before (cachestat and mincore), bytes that the device moved, from the thread's
own counter. The probe lies outside the load's timed interval but delays the load, so only every n-th load is probed
while steps are timed: the same n in all arms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from edge0.checkpoint.layout import ByteRange
from edge0.telemetry.loads import WHOLE, LoadRecord
from edge0.telemetry.pagecache import FilePages, Range, thread_device_bytes
from experiments.conditions import CacheBudget


class CacheObserver:
    """A `LoadObserver`. `after_load` runs before a record is given to the budget (mappings must let go of pages)."""

    def __init__(self, files: Mapping[Path, FilePages], budget: CacheBudget | None, probe_every: int = 1):
        self._files, self._budget, self.probe_every = files, budget, probe_every
        self._numbers = itertools.count()
        self.after_load: Callable[[], None] | None = None

    def before(self, ranges: tuple[ByteRange, ...], record: LoadRecord) -> None:
        if self.probe_every and next(self._numbers) % self.probe_every == 0:
            record.cold_bytes = record.inflight_bytes = 0
            for path, parts in by_file(ranges).items():
                residency = self._files[path].residency(parts)
                record.cold_bytes += residency.cold_bytes
                record.inflight_bytes += residency.inflight_bytes
        record.device_bytes = -thread_device_bytes()

    def after(self, record: LoadRecord) -> None:
        record.device_bytes += thread_device_bytes()
        if self.after_load is not None:
            self.after_load()
        if self._budget is not None:
            self._budget.note(record.layer, None if record.expert == WHOLE else record.expert)


def by_file(ranges: tuple[ByteRange, ...]) -> dict[Path, list[Range]]:
    """(offset, bytes) of each range, by file."""
    parts: dict[Path, list[Range]] = {}
    for piece in ranges:
        parts.setdefault(piece.path, []).append((piece.offset, piece.nbytes))
    return parts
