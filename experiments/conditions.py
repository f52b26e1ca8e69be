"""Page-cache conditions of a run: cold, warm, or a byte budget, each brought about and then verified by probe.

A budget is what a smaller machine would leave for the checkpoint. Without root it is kept by eviction: the record (one
expert of one layer) that was loaded longest ago loses its pages first. Loads that fault pages in also cache neighbours
that no record accounts for; those are swept out when the probe shows too much.

Does not know the kernel's own reclaim: another process, memory pressure or a reclaim scheme may take pages earlier, so
a budget is an upper bound and every run probes again at its end. A sweep may drop pages of a load that is still
running; the load stays right and reads them twice.
"""

from __future__ import annotations

import queue
import random
import re
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
from edge0.telemetry.pagecache import PAGE_BYTES, FilePages, Range, page_spans

Record = tuple[int, int]  # (layer, expert)

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}  # largest first
_CHECK_EVERY_NOTES = 8
_CHECK_SHARE = 0.05  # of one core at most, for probing whole files
_SWEEP_STEP_BYTES = 32 << 20  # about 10 ms of eviction, after which new notes are taken into account
_SLACK_MIN_BYTES, _SLACK_SHARE = 16 << 20, 0.10
_HINT = "one of warm, cold, budget:FRACTION (0 to 1) or budget:SIZE (such as 64MiB)"


@dataclass(frozen=True)
class Condition:
    """`warm`, `cold`, or `budget` with either a fraction of the expert bytes (0 < fraction < 1) or a size in bytes.

    Raises Edge0Error CONDITION_UNKNOWN for another name, OPTION_INVALID for a value that does not fit the name.
    """

    name: str
    fraction: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ("warm", "cold", "budget"):
            raise Edge0Error(ErrorKind.CONDITION_UNKNOWN, "no such condition", expected=_HINT, found=self.name)
        given = [value for value in (self.fraction, self.nbytes) if value is not None]
        if len(given) != (self.name == "budget"):
            detail = f"{self.name} takes {'one value' if self.name == 'budget' else 'no value'}"
            raise Edge0Error(ErrorKind.OPTION_INVALID, detail, hint=_HINT)
        if self.fraction is not None and not 0 < self.fraction < 1:
            detail = "a budget fraction lies between 0 and 1, both excluded"
            raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=_HINT, found=self.fraction)
        if self.nbytes is not None and self.nbytes < 1:
            raise Edge0Error(ErrorKind.OPTION_INVALID, "a budget has at least 1 byte", found=self.nbytes, hint=_HINT)

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Condition from `warm`, `cold`, `budget:0.5`, `budget:64MiB`. Raises as the class does."""
        name, colon, value = text.strip().partition(":")
        if not colon or name != "budget":
            if colon and name in ("warm", "cold"):
                raise Edge0Error(ErrorKind.OPTION_INVALID, f"{name} takes no value", expected=name, found=text)
            return cls(name)
        size = re.fullmatch(r"([0-9]+)(B|KiB|MiB|GiB)", value)
        if size:
            return cls(name, nbytes=int(size.group(1)) * _UNITS[size.group(2)])
        try:
            return cls(name, fraction=float(value))
        except ValueError:
            raise Edge0Error(ErrorKind.OPTION_INVALID, "not a budget", expected=_HINT, found=text) from None

    def budget_bytes(self, expert_bytes: int) -> int | None:
        """Bytes that the page cache may hold of the expert records: None for warm (no limit), 0 for cold."""
        if self.name == "warm":
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

    One daemon thread owns the order of records and makes every evict call, so `note` only enqueues. Bytes outside all
    records (headers, resident weights) are not part of the budget; a sweep drops them with the rest. With budget 0 each
    record is evicted right after its load. Eviction takes whole pages, so a kept neighbour may lose a page at its edge.

    Args:
        files: probe of each file, keyed by the paths that `ranges_of` returns; not closed here.
        budget_bytes: bytes of records to leave cached.
        ranges_of: (layer, expert) -> its (path, offset, nbytes) ranges.
        records: every record that may be noted.
    """

    def __init__(
        self,
        files: Mapping[Path, FilePages],
        budget_bytes: int,
        ranges_of: Callable[[int, int], Sequence[tuple[Path, int, int]]],
        records: Sequence[Record],
    ):
        if budget_bytes < 0:
            raise Edge0Error(ErrorKind.OPTION_INVALID, "a budget is not negative", expected=">= 0", found=budget_bytes)
        self.budget_bytes = budget_bytes
        self.slack_bytes = max(_SLACK_MIN_BYTES, int(_SLACK_SHARE * budget_bytes))
        self.sweeps = 0  # times that unaccounted pages had to be swept out
        self._files = dict(files)
        self._index = {record: index for index, record in enumerate(records)}
        self._ranges: list[dict[Path, list[Range]]] = []
        spans: dict[Path, list[tuple[int, int, int]]] = {path: [] for path in self._files}
        for index, record in enumerate(records):
            by_file: dict[Path, list[Range]] = {}
            for path, offset, nbytes in ranges_of(*record):
                by_file.setdefault(path, []).append((offset, nbytes))
                spans[path].append((offset, nbytes, index))
            self._ranges.append(by_file)
        self._sizes = [sum(n for ranges in by_file.values() for _, n in ranges) for by_file in self._ranges]
        self._spans = {path: _Spans(rows) for path, rows in spans.items()}
        # Evictor thread only, down to _failure. Records cached, oldest first:
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._tracked_bytes = 0
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
        for record in [(layer, expert)] if expert is not None else [r for r in self._index if r[0] == layer]:
            self._queue.put(record)

    def prefill(self, seed: int) -> int:
        """Evict the files, then cache a seeded random choice of records up to the budget; returns their bytes."""
        return self._command(lambda: self._prefill(seed))

    def cached_bytes(self) -> int:
        """Bytes of the files in the page cache, by probe, everything in the files included."""
        return sum(pages.cached_bytes() for pages in self._files.values())

    def kept_page_bytes(self) -> int:
        """Bytes of the pages that the records within the budget touch: at least their own bytes."""
        return self._command(self._kept_page_bytes)

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
        index = self._index[item]
        if index not in self._lru:
            self._lru[index] = None
            self._tracked_bytes += self._sizes[index]
        self._lru.move_to_end(index)
        self._unchecked_notes += 1

    def _take_waiting(self) -> None:
        while not self._queue.empty():  # this thread is the only consumer
            self._take(self._queue.get())

    def _enforce(self) -> None:
        self._take_waiting()
        while self._tracked_bytes > self.budget_bytes:
            oldest, _ = self._lru.popitem(last=False)
            self._tracked_bytes -= self._sizes[oldest]
            for path, ranges in self._ranges[oldest].items():
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
        self.sweeps += 1
        for path, pages in self._files.items():
            for start in range(0, pages.file_bytes, _SWEEP_STEP_BYTES):
                self._enforce()
                kept = np.zeros(len(self._sizes), bool)
                kept[list(self._lru)] = True
                end = min(start + _SWEEP_STEP_BYTES, pages.file_bytes)
                pages.evict(self._spans[path].gaps(kept, start, end))

    def _kept_page_bytes(self) -> int:
        kept = [(path, part) for index in self._lru for path, parts in self._ranges[index].items() for part in parts]
        spans = (span for path in self._files for span in page_spans(part for at, part in kept if at == path))
        return sum(end - start for start, end in spans)

    def _prefill(self, seed: int) -> int:
        for pages in self._files.values():
            pages.evict()
        self._lru.clear()
        self._tracked_bytes = 0
        for index in random.Random(seed).sample(range(len(self._sizes)), len(self._sizes)):
            if self._tracked_bytes + self._sizes[index] > self.budget_bytes:
                break
            for path, ranges in self._ranges[index].items():
                self._files[path].warm(ranges)
            self._lru[index] = None
            self._tracked_bytes += self._sizes[index]
        return self._tracked_bytes


def prepare(
    condition: Condition, files: Mapping[Path, FilePages], budget: CacheBudget | None = None, seed: int = 0
) -> int:
    """Bring the files into the condition and verify it; returns their cached bytes.

    `budget`: needed for a budget, and for cold if loads will be noted. `seed` picks what a budget starts with.
    Raises Edge0Error PROBE_UNAVAILABLE when the probe does not find what was asked for, ValueError without a `budget`.
    """
    if condition.name == "warm":
        return prepare_warm(files)
    if condition.name == "budget":
        if budget is None:
            raise ValueError("a budget condition needs a CacheBudget")
        return prepare_budget(budget, seed)
    if budget is not None:
        budget.prefill(seed)  # forgets the records that it tracked
    return prepare_cold(files)


def prepare_cold(files: Mapping[Path, FilePages]) -> int:
    """Evict the files; at most 1% of their bytes may stay cached (pages that another process has mapped do)."""
    for pages in files.values():
        pages.evict()
    cached, limit = _cached(files), sum(pages.file_bytes for pages in files.values()) // 100
    _verify(cached <= limit, "cold", f"at most {limit} bytes cached", cached)
    return cached


def prepare_warm(files: Mapping[Path, FilePages]) -> int:
    """Read the files; at least 99% of their bytes must be cached then (they are not if memory is too small)."""
    for pages in files.values():
        pages.warm()
    cached, floor = _cached(files), -(-sum(pages.file_bytes for pages in files.values()) * 99 // 100)
    _verify(cached >= floor, "warm", f"at least {floor} bytes cached", cached)
    return cached


def prepare_budget(budget: CacheBudget, seed: int) -> int:
    """Fill the budget with a seeded choice of records; their pages must be cached then, within 5% of the budget."""
    chosen_bytes = budget.prefill(seed)
    cached, tolerance = budget.cached_bytes(), budget.budget_bytes // 20
    low, high = chosen_bytes - tolerance, budget.kept_page_bytes() + tolerance
    _verify(low <= cached <= high, "budget", f"{low} to {high} bytes cached", cached)
    return cached


def _cached(files: Mapping[Path, FilePages]) -> int:
    return sum(pages.cached_bytes() for pages in files.values())


def _verify(holds: bool, name: str, expected: str, cached_bytes: int) -> None:
    if not holds:
        detail, hint = f"the {name} condition was not reached", "another process may map or read the checkpoint"
        raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, detail, expected=expected, found=cached_bytes, hint=hint)
