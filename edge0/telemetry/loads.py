"""What is written down while the engine runs: totals always, and for a measurement a row per read and per wait.

Totals are kept by the engine thread and do not grow. Rows are appended by several threads, are read after the run, and
grow with it: only who asks for them gets them. Nothing here decides anything. Times are monotonic nanoseconds. The
state of the page cache is not known here: an observer may add it to each load.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge0.checkpoint.layout import ByteRange

DEMAND, PREFETCH, PREFILL = "demand", "prefetch", "prefill"
# What takes the engine thread's time, besides building graphs: it waits for reads, or itself reads, copies and stacks;
# waits for a router's choice; hands a graph to MLX; waits for what it handed over; brings a token to the host.
LOADS, ROUTE, LAUNCH, EVALUATE, SAMPLE = REASONS = ("loads", "route", "launch", "evaluate", "sample")
WHOLE = -1  # as a record's expert: one of the nine stacked tensors of a whole layer


@dataclass(slots=True)
class LoadRecord:
    """One expert read, or one stacked tensor of a layer (expert WHOLE). Cold and in-flight bytes are -1 where no
    observer looked."""

    step: int  # the step that asked for it; -1 before the first decode step
    layer: int
    expert: int
    purpose: str
    asked_bytes: int
    calls: int  # reads asked of the operating system; of experts that are read together, all are the first one's
    submit_ns: int
    start_ns: int = 0  # after the observer's probe
    end_ns: int = 0
    advise_ns: int = 0
    thread: int = 0
    cold_bytes: int = -1
    cold_page_bytes: int = -1  # of the cold pages that it touches: what a device reads at the least
    inflight_bytes: int = -1
    device_bytes: int = -1


class LoadObserver(Protocol):
    """Looks at the page cache around each load, from the thread that loads."""

    def before(self, ranges: tuple[ByteRange, ...], record: LoadRecord) -> None: ...

    def after(self, record: LoadRecord) -> None: ...


@dataclass
class Totals:
    """Sums since the engine was opened. A hit is an expert that was asked for and needed no read of its own."""

    loads: int = 0
    hits: int = 0
    asked_bytes: int = 0
    calls: int = 0
    loads_wait_ns: int = 0  # of the engine thread, for reads


class Waiting:
    """A context that is entered several times a layer: a generator's would cost more than most of what it times."""

    __slots__ = ("_recorder", "_reason", "_layer", "_start_ns")

    def __init__(self, recorder: Recorder, reason: str, layer: int):
        self._recorder, self._reason, self._layer = recorder, reason, layer

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *exception: object) -> None:
        self._recorder.waited(self._reason, self._layer, time.monotonic_ns() - self._start_ns)


@dataclass
class Recorder:
    """Collects what one engine does. `step` is set by the engine thread. `rows`: keep `loads`, `waits`, `observing`."""

    observer: LoadObserver | None = None
    rows: bool = False
    step: int = -1
    totals: Totals = field(default_factory=Totals)
    loads: list[LoadRecord] = field(default_factory=list)
    waits: list[tuple[int, str, int, int]] = field(default_factory=list)  # step, one of REASONS, layer, ns
    drops: Counter[int] = field(default_factory=Counter)  # step -> routed experts not in memory; each ended its step
    observing: list[tuple[int, int, int]] = field(default_factory=list)  # step, layer, ns on the engine thread
    _engine_thread: int = field(default_factory=threading.get_native_id)

    @property
    def dropped(self) -> int:
        """Routed experts that did not take part; must be 0."""
        return self.drops.total()

    def waiting(self, reason: str, layer: int) -> Waiting:
        """Write down how long the engine thread stands still in a `with` block, and for what."""
        return Waiting(self, reason, layer)

    def waited(self, reason: str, layer: int, ns: int) -> None:
        """Write down time that the engine thread stood still, measured by whoever knows."""
        if reason == LOADS:
            self.totals.loads_wait_ns += ns
        if self.rows:
            self.waits.append((self.step, reason, layer, ns))

    def load(self, layer: int, expert: int, purpose: str, ranges: Sequence[ByteRange]) -> LoadRecord:
        """A record of a read that the engine thread is about to ask for."""
        nbytes = sum(piece.nbytes for piece in ranges)
        self.totals.asked_bytes += nbytes
        self.totals.calls += len(ranges)
        return LoadRecord(self.step, layer, expert, purpose, nbytes, len(ranges), time.monotonic_ns())

    def together(self, records: Sequence[LoadRecord], calls: int) -> None:
        """Some experts are read by `calls` reads, in place of those that each alone would take."""
        self.totals.calls += calls - sum(record.calls for record in records)
        for number, record in enumerate(records):
            record.calls = 0 if number else calls

    def begin(self, record: LoadRecord, ranges: tuple[ByteRange, ...]) -> None:
        """Called by the loading thread right before the first byte is asked for."""
        record.thread = threading.get_native_id()
        if self.observer is not None:
            begun = time.monotonic_ns()
            self.observer.before(ranges, record)
            self._observed(record, begun)
        record.start_ns = time.monotonic_ns()

    def finish(self, *records: LoadRecord) -> None:
        """Called by the loading thread when the last byte is there, of one expert or of some that were read together:
        these began and ended together, and share what the device delivered."""
        end, start = time.monotonic_ns(), records[-1].start_ns
        for record in records:
            record.start_ns, record.end_ns = start, end
            if self.observer is not None:
                self.observer.after(record)
        if self.observer is not None:
            self._observed(records[-1], end)
        if len(records) > 1 and records[0].device_bytes >= 0:
            share, rest = divmod(records[0].device_bytes, len(records))
            for number, record in enumerate(records):
                record.device_bytes = share + (rest if number == 0 else 0)
        if self.rows:
            self.loads.extend(records)

    def _observed(self, record: LoadRecord, begun_ns: int) -> None:
        """Where the engine thread itself loads, looking costs it time that is not the engine's."""
        if self.rows and record.thread == self._engine_thread:
            self.observing.append((self.step, record.layer, time.monotonic_ns() - begun_ns))
