"""The reader threads: they move the bytes of experts from a source into slot memory, demand before prefetch.

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

import numpy as np

from edge0.checkpoint.layout import ByteRange
from edge0.streaming.source import Source
from edge0.telemetry.loads import PREFETCH, LoadRecord, Recorder


@dataclass(frozen=True)
class Target:
    """Memory of one piece of a slot. `widen`: the file has bf16, the memory takes fp32."""

    memory: memoryview
    widen: bool


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
        """Queue one expert. The future ends with None, or with the error that the read met."""
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
        scratch = bytearray()
        while (job := self._queue.get()[2]) is not None:
            future, record, ranges, targets = job
            try:
                largest = max((r.nbytes for r, t in zip(ranges, targets, strict=True) if t.widen), default=0)
                if len(scratch) < largest:
                    scratch = bytearray(largest)
                self._recorder.begin(record, ranges)
                if self._advise:
                    self._source.advise(ranges)
                    record.advise_ns = time.monotonic_ns() - record.start_ns
                for piece, target in zip(ranges, targets, strict=True):
                    fill(self._source, piece, target, memoryview(scratch))
                self._recorder.finish(record)
            except BaseException as error:  # handed to the engine thread, which ends the request
                future.set_exception(error)
            else:
                future.set_result(None)


def fill(source: Source, piece: ByteRange, target: Target, scratch: memoryview) -> None:
    """Bring one piece into slot memory."""
    if not target.widen:
        source.read(piece, target.memory)
        return
    source.read(piece, scratch[: piece.nbytes])
    patterns = np.frombuffer(scratch, np.uint16, piece.nbytes // 2)
    np.left_shift(patterns, 16, out=np.frombuffer(target.memory, np.uint32), dtype=np.uint32)
