"""The readers: they move the bytes of experts from a source into slot memory, on threads or on the engine's own.

A job is some byte ranges and the targets that they fill, in order; a range may fill several targets with one read.

They never touch MLX (a lazy array belongs to the thread that built it); all they see are memoryviews. On CPU the
scales and biases are widened from bf16 to fp32 on the way, since MLX would otherwise convert the whole bank per step.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge0.checkpoint.layout import ByteRange
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


class ExpertReader(Protocol):
    """Who brings experts into slots."""

    def submit(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> Future:
        """Ask for one expert. The future ends with None, or with the error that the read met."""

    def close(self) -> None:
        """Finish what was asked for; nothing may be submitted afterwards."""


class Reader:
    """Reads experts on `threads` threads. Order: demand first, then first come, first served."""

    def __init__(self, source: Source, recorder: Recorder, threads: int, advise: bool):
        self._source, self._recorder, self._advise = source, recorder, advise
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._number = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"edge0-reader-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> Future:
        """Queue one expert."""
        future: Future = Future()
        urgency = 1 if record.purpose == PREFETCH else 0
        self._queue.put((urgency, next(self._number), (future, record, ranges, targets)))
        return future

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for _ in self._threads:
            self._queue.put((2, next(self._number), None))
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        work = Work(self._source, self._recorder, self._advise)
        while (job := self._queue.get()[2]) is not None:
            work.run(*job)


class EngineReader:
    """The paper's synchronous fill: `submit` itself reads, on the caller's thread, and the future it gives has ended.

    What the engine asks for between two groups is read there; its time is the engine's waiting for loads.
    """

    def __init__(self, source: Source, recorder: Recorder, advise: bool):
        self._work, self._recorder = Work(source, recorder, advise), recorder

    def submit(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> Future:
        """Read one expert now."""
        future: Future = Future()
        with self._recorder.waiting(LOADS, record.layer):
            self._work.run(future, record, ranges, targets, Exception)  # Ctrl-C ends the engine's work, not one read
        return future

    def close(self) -> None:
        """Nothing is under way."""


class Work:
    """One thread's way of reading, with the scratch memory that widening needs."""

    def __init__(self, source: Source, recorder: Recorder, advise: bool):
        self._source, self._recorder, self._advise = source, recorder, advise
        self._scratch = bytearray()

    def run(
        self,
        future: Future,
        record: LoadRecord,
        ranges: tuple[ByteRange, ...],
        targets: Sequence[Target],
        caught: type[BaseException] = BaseException,
    ) -> None:
        """Read one expert, then end its future. What is not `caught` passes, and the future does not end."""
        try:
            self._read(record, ranges, targets)
        except caught as error:  # handed to who waits for the future, and ends the request
            future.set_exception(error)
        else:
            future.set_result(None)

    def _read(self, record: LoadRecord, ranges: tuple[ByteRange, ...], targets: Sequence[Target]) -> None:
        needed = sum(target.file_bytes for target in targets if target.widen)
        if len(self._scratch) < needed:
            self._scratch = bytearray(needed)
        self._recorder.begin(record, ranges)
        if self._advise and record.expert != WHOLE:  # long reads are read ahead by the kernel
            self._source.advise(ranges)
            record.advise_ns = time.monotonic_ns() - record.start_ns
        rest = iter(targets)
        for piece in ranges:
            fill(self._source, piece, rest, memoryview(self._scratch))
        if next(rest, None) is not None:
            raise ValueError("there are more targets than bytes")
        self._recorder.finish(record)


def fill(source: Source, piece: ByteRange, targets: Iterator[Target], scratch: memoryview) -> None:
    """Bring one range into as many of the targets as it holds; what is to be widened goes through `scratch`."""
    memories: list[memoryview] = []
    widening: list[tuple[Target, memoryview]] = []
    left, used = piece.nbytes, 0
    while left > 0:
        target = next(targets, None)
        if target is None or target.file_bytes > left:
            raise ValueError("targets do not fill the range")
        memory = target.memory
        if target.widen:
            memory = scratch[used : used + target.file_bytes]
            widening.append((target, memory))
            used += target.file_bytes
        memories.append(memory)
        left -= target.file_bytes
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
