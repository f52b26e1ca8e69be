"""The readers: they move the bytes of experts from a source into slot memory, on threads or on the engine's own.

A load is some byte ranges and the targets that they fill, in order; a range may fill several targets with one read. A
job is one load, or some of one layer that a thread reads together: ranges that lie end to end are then one read.

They never touch MLX (a lazy array belongs to the thread that built it); all they see are memoryviews. On CPU the
scales and biases are widened from bf16 to fp32 on the way, since MLX would otherwise convert the whole bank per step.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge0.checkpoint.layout import ByteRange
from edge0.streaming.prefill import even_cuts
from edge0.streaming.source import Source
from edge0.telemetry.loads import LOADS, PREFETCH, WHOLE, LoadRecord, Recorder


@dataclass(frozen=True)
class Target:
    """Memory of one piece of a slot, or of many slots. `widen`: the file has bf16, the memory takes fp32."""

    memory: memoryview
    widen: bool

    @property
    def file_bytes(self) -> int:
        return len(self.memory) // 2 if self.widen else len(self.memory)


@dataclass(frozen=True)
class Load:
    """One expert that was asked for."""

    future: Future
    record: LoadRecord
    ranges: tuple[ByteRange, ...]
    targets: Sequence[Target]


class ExpertReader(Protocol):
    """Who brings experts into slots."""

    def submit(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> Future:
        """Ask for one expert. The future ends with None, or with the error that the read met."""

    def flush(self) -> None:
        """All of one layer was asked for that is to be read together; until then a read may not begin."""

    def close(self) -> None:
        """Finish what was asked for; nothing may be submitted afterwards."""


class Reader:
    """Reads experts on `threads` threads. Order: prefetches last, then first come, first served.

    `together`: what is asked for between two flushes is cut into one job per thread, each of neighbours in the file;
    its ranges are announced at once, and those that lie end to end are one read.
    """

    def __init__(self, source: Source, recorder: Recorder, threads: int, advise: bool, together: bool = False):
        self._source, self._recorder, self._advise, self._together = source, recorder, advise, together
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._number = itertools.count()
        self._staged: list[Load] = []
        self._threads = [
            threading.Thread(target=self._work, name=f"edge0-reader-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> Future:
        """Queue one expert."""
        load = Load(Future(), record, ranges, targets)
        if self._together:
            self._staged.append(load)
        else:
            self._put([load])
        return load.future

    def flush(self) -> None:
        """Queue what is to be read together."""
        staged, self._staged = self._staged, []
        for cut in even_cuts(len(staged), -(-len(staged) // len(self._threads))) if staged else ():
            job = staged[cut]
            if len(job) > 1:
                self._recorder.together([load.record for load in job], len(merged(job)))
            self._put(job)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for _ in self._threads:
            self._queue.put((2, next(self._number), None))
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _put(self, job: list[Load]) -> None:
        urgency = 1 if job[0].record.purpose == PREFETCH else 0
        self._queue.put((urgency, next(self._number), job))

    def _work(self) -> None:
        work = Work(self._source, self._recorder, self._advise)
        while (job := self._queue.get()[2]) is not None:
            work.run(job)


class EngineReader:
    """The paper's synchronous fill: `submit` itself reads, on the caller's thread, and the future it gives has ended.

    What the engine asks for between two groups is read there; its time is the engine's waiting for loads.
    """

    def __init__(self, source: Source, recorder: Recorder, advise: bool):
        self._work, self._recorder = Work(source, recorder, advise), recorder

    def submit(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> Future:
        """Read one expert now."""
        load = Load(Future(), record, ranges, targets)
        with self._recorder.waiting(LOADS, record.layer):
            self._work.run([load], Exception)  # Ctrl-C ends the engine's work, not one read
        return load.future

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is under way."""


class Work:
    """One thread's way of reading, with the scratch memory that widening needs."""

    def __init__(self, source: Source, recorder: Recorder, advise: bool):
        self._source, self._recorder, self._advise = source, recorder, advise
        self._scratch = bytearray()

    def run(self, loads: Sequence[Load], caught: type[BaseException] = BaseException) -> None:
        """Read a job's experts, then end their futures; an error is that of all. What is not `caught` passes, and the
        futures do not end."""
        try:
            self._read(loads)
        except caught as error:  # handed to who waits for the future, and ends the request
            for load in loads:
                load.future.set_exception(error)
        else:
            for load in loads:
                load.future.set_result(None)

    def _read(self, loads: Sequence[Load]) -> None:
        needed = sum(target.file_bytes for load in loads for target in load.targets if target.widen)
        if len(self._scratch) < needed:
            self._scratch = bytearray(needed)
        records = [load.record for load in loads]
        for load in loads:
            self._recorder.begin(load.record, load.ranges)
        if self._advise and records[0].expert != WHOLE:  # long reads are read ahead by the kernel
            self._source.advise([piece for load in loads for piece in load.ranges])
            records[0].advise_ns = time.monotonic_ns() - records[-1].start_ns
        for piece, targets in merged(loads) if len(loads) > 1 else parts(loads[0].ranges, loads[0].targets):
            fill(self._source, piece, targets, memoryview(self._scratch))
        self._recorder.finish(*records)


def parts(ranges: Sequence[ByteRange], targets: Sequence[Target]) -> list[tuple[ByteRange, list[Target]]]:
    """Each range of a load with the targets that it fills."""
    found: list[tuple[ByteRange, list[Target]]] = []
    rest = iter(targets)
    for piece in ranges:
        own, left = [], piece.nbytes
        while left > 0:
            target = next(rest, None)
            if target is None or target.file_bytes > left:
                raise ValueError("targets do not fill the range")
            own.append(target)
            left -= target.file_bytes
        found.append((piece, own))
    if next(rest, None) is not None:
        raise ValueError("there are more targets than bytes")
    return found


def merged(loads: Sequence[Load]) -> list[tuple[ByteRange, list[Target]]]:
    """The parts of some loads in the order of the file; those that lie end to end there are one range."""
    found: list[tuple[ByteRange, list[Target]]] = []
    every = [part for load in loads for part in parts(load.ranges, load.targets)]
    for piece, targets in sorted(every, key=lambda part: (part[0].path, part[0].offset)):
        last = found[-1][0] if found else None
        if last is not None and (last.path, last.offset + last.nbytes) == (piece.path, piece.offset):
            found[-1] = ByteRange(last.path, last.offset, last.nbytes + piece.nbytes), found[-1][1] + targets
        else:
            found.append((piece, targets))
    return found


def fill(source: Source, piece: ByteRange, targets: Sequence[Target], scratch: memoryview) -> None:
    """Bring one range into the targets that it holds; what is to be widened goes through `scratch`."""
    memories: list[memoryview] = []
    widening: list[tuple[Target, memoryview]] = []
    used = 0
    for target in targets:
        memory = target.memory
        if target.widen:
            memory = scratch[used : used + target.file_bytes]
            widening.append((target, memory))
            used += target.file_bytes
        memories.append(memory)
    source.read(piece, memories)
    for target, memory in widening:
        patterns = np.frombuffer(memory, np.uint16)
        np.left_shift(patterns, 16, out=np.frombuffer(target.memory, np.uint32), dtype=np.uint32)


def joined(futures: Sequence[Future]) -> Future:
    """One future for several: it ends when all have, with None or with an error that one of them met."""
    whole: Future = Future()
    left, lock = len(futures), threading.Lock()

    def ended(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if not last:
            return
        error = next((future.exception() for future in futures if future.exception() is not None), None)
        if error is None:
            whole.set_result(None)
        else:
            whole.set_exception(error)

    for future in futures:
        future.add_done_callback(ended)
    return whole
