"""A page-cache budget by eviction, without any rights: the record that was loaded longest ago loses its pages first.

Loads that fault pages in also cache neighbours that no record accounts for; those are swept out when the probe shows
too much.

Does not know the kernel's own reclaim: another process, memory pressure or a reclaim scheme may take pages earlier, so
a budget is an upper bound and every run probes again at its end. A sweep may drop pages of a load that is still
running; the load stays right and reads them twice.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.pagecache import PAGE_BYTES, FilePages, Range
from experiments.budgets.budget import Ledger, RangesOf, Record, Records, slack_bytes

_CHECK_EVERY_NOTES = 8
_CHECK_SHARE = 0.05  # of one core at most, for probing whole files
_SWEEP_STEP_BYTES = 32 << 20  # about 10 ms of eviction, after which new notes are taken into account


@dataclass(frozen=True)
class _Command:
    """Work for the evictor thread besides notes; its result or exception comes back through the future."""

    run: Callable[[], Any]
    future: Future[Any]


class _Spans:
    """Where the records of one file lie: sorted page-aligned starts and ends int64 [n], and each one's record index."""

    def __init__(self, spans: Sequence[tuple[int, int, int]]):
        table = np.array(sorted(spans), np.int64).reshape(-1, 3)
        self._starts = table[:, 0] // PAGE_BYTES * PAGE_BYTES
        self._ends = -(-(table[:, 0] + table[:, 1]) // PAGE_BYTES) * PAGE_BYTES
        self._owners = table[:, 2]

    def gaps(self, kept: np.ndarray, start: int, end: int) -> list[Range]:
        """Ranges between start and end that no kept record touches; kept: bool [records], start: page-aligned."""
        chosen = kept[self._owners] & (self._ends > start) & (self._starts < end)
        starts = np.append(self._starts[chosen], end)
        ends = np.append(start, np.maximum.accumulate(self._ends[chosen]))
        open_ = starts > ends
        return list(zip(ends[open_].tolist(), (starts - ends)[open_].tolist(), strict=True))


class CacheBudget:
    """Keeps the page cache of the expert files down to a byte budget, least recently loaded record first, without root.

    One daemon thread owns the order of records and makes every evict call, so `note` only enqueues. What counts is
    pages, and one that two records share counts once and stays as long as either. Bytes outside all records (headers,
    resident weights) are not part of the budget; a sweep drops them with the rest. With budget 0 each record is evicted
    right after its load.

    Args:
        files: probe of each file, keyed by the paths that `ranges_of` returns; not closed here.
        budget_bytes: bytes of pages of records to leave cached.
        ranges_of: (layer, expert) -> its (path, offset, nbytes) ranges.
        records: every record that may be noted.
    """

    def __init__(
        self,
        files: Mapping[Path, FilePages],
        budget_bytes: int,
        ranges_of: RangesOf,
        records: Sequence[Record],
    ):
        if budget_bytes < 0:
            raise Edge0Error(ErrorKind.OPTION_INVALID, "a budget is not negative", expected=">= 0", found=budget_bytes)
        self.budget_bytes = budget_bytes
        self.slack_bytes = slack_bytes(budget_bytes)
        self._files = dict(files)
        self._records = Records(ranges_of, records)
        spans: dict[Path, list[tuple[int, int, int]]] = {path: [] for path in self._files}
        for index, by_file in enumerate(self._records.ranges):
            for path, ranges in by_file.items():
                spans[path] += [(offset, nbytes, index) for offset, nbytes in ranges]
        self._spans = {path: _Spans(rows) for path, rows in spans.items()}
        # Evictor thread only, down to _failure. Records cached, oldest first:
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._ledger = Ledger(self._records)
        self._commands: deque[_Command | None] = deque()
        self._unchecked_notes = 0
        self._next_check_ns = 0
        self._failure: Exception | None = None
        self._queue: queue.SimpleQueue[Record | _Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="edge0-cache-budget", daemon=True)
        self._thread.start()

    def __enter__(self) -> CacheBudget:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def note(self, layer: int, expert: int | None) -> None:
        """Say that an expert was just loaded, or with None a part of each of the layer's. Any thread; a few
        microseconds; failures surface in `drain`."""
        for record in [(layer, expert)] if expert is not None else [r for r in self._records.index if r[0] == layer]:
            self._queue.put(record)

    def prefill(self, seed: int) -> list[Record]:
        """Evict the files, then cache a seeded random choice of records up to the budget; returns it, oldest first."""
        return self._command(lambda: self._prefill(seed))

    def cached_bytes(self) -> int:
        """Bytes of the files in the page cache, by probe, everything in the files included."""
        return sum(pages.cached_bytes() for pages in self._files.values())

    def kept_page_bytes(self) -> int:
        """Bytes of the pages that the records within the budget touch."""
        return self._command(lambda: self._ledger.page_bytes)

    def drain(self) -> None:
        """Return when everything noted before this call is enforced. Raises what the evictor thread failed with."""
        self._command(self._settle)

    def close(self) -> None:
        """Stop the evictor thread after what was noted so far. Later calls but `cached_bytes` are errors or no-ops."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _command(self, run: Callable[[], Any]) -> Any:
        if not self._thread.is_alive():
            raise RuntimeError("the cache budget is closed")
        command = _Command(run, Future())
        self._queue.put(command)
        return command.future.result()

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            try:
                self._take(item)
                self._enforce()
                if self._unchecked_notes >= _CHECK_EVERY_NOTES and time.monotonic_ns() >= self._next_check_ns:
                    self._sweep_if_over()
            except Exception as error:  # the thread lives on: callers wait for its answers
                self._failure = self._failure or error
            while self._commands:
                command = self._commands.popleft()
                if command is None:
                    return
                try:
                    command.future.set_result(command.run())
                except Exception as error:
                    command.future.set_exception(error)

    def _take(self, item: Record | _Command | None) -> None:
        """Make a noted record the most recent one; put a command behind the notes that came before it."""
        if item is None or isinstance(item, _Command):
            self._commands.append(item)
            return
        index = self._records.index[item]
        if index not in self._lru:
            self._lru[index] = None
            self._ledger.add(index)
        self._lru.move_to_end(index)
        self._unchecked_notes += 1

    def _take_waiting(self) -> None:
        while not self._queue.empty():  # this thread is the only consumer
            self._take(self._queue.get())

    def _enforce(self) -> None:
        self._take_waiting()
        while self._ledger.page_bytes > self.budget_bytes:
            oldest, _ = self._lru.popitem(last=False)
            for path, ranges in self._ledger.remove(oldest).items():
                self._files[path].evict(ranges)
            self._take_waiting()

    def _settle(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._sweep_if_over()

    def _sweep_if_over(self) -> None:
        """Evict what no record accounts for, if it is too much; in steps, since records are loaded meanwhile."""
        before_ns = time.monotonic_ns()
        over = self.cached_bytes() > self.budget_bytes + self.slack_bytes
        now_ns = time.monotonic_ns()
        self._next_check_ns = now_ns + int((now_ns - before_ns) / _CHECK_SHARE)
        self._unchecked_notes = 0
        if not over:
            return
        for path, pages in self._files.items():
            for start in range(0, pages.file_bytes, _SWEEP_STEP_BYTES):
                self._enforce()
                kept = np.zeros(len(self._records.names), bool)
                kept[list(self._lru)] = True
                end = min(start + _SWEEP_STEP_BYTES, pages.file_bytes)
                pages.evict(self._spans[path].gaps(kept, start, end))

    def _prefill(self, seed: int) -> list[Record]:
        for pages in self._files.values():
            pages.evict()
        chosen, self._ledger = self._records.prefill(self._files, self.budget_bytes, seed)
        self._lru = OrderedDict.fromkeys(chosen)
        return [self._records.names[index] for index in chosen]
