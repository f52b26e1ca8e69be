"""The thread that owns the engine: it opens it, serves one job after the other, and closes it.

Jobs wait in a bounded queue, first come first served. Whatever goes wrong in a job ends that job. Knows nothing of
HTTP or asyncio: events are handed to the job's `deliver`, on the engine thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge0.engine import Engine
from edge0.options import EngineOptions
from edge0.serving.completion import Cancelled, Finished, Order, complete
from edge0.serving.vocabulary import Vocabulary

log = logging.getLogger(__name__)

Event = str | Finished | Exception  # a piece of text; the end; or what ended the job instead


class QueueFull(Exception):
    """As many jobs wait as may."""


class Stopped(Exception):
    """The worker takes no jobs any more, or ended this one."""


@dataclass(eq=False)
class Job:
    """One answer to be written. `deliver` gets its events; the last is `Finished` or an exception."""

    order: Order
    deliver: Callable[[Event], None]
    cancelled: bool = False


class Worker:
    """Serves one checkpoint from a thread of its own.

    Args:
        queue: jobs that may be prepared or wait beside the one that is served.
    """

    def __init__(self, directory: Path, options: EngineOptions, vocabulary: Vocabulary, queue: int):
        self._directory, self._options, self._vocabulary, self._queue = directory, options, vocabulary, queue
        self.engine: Engine | None = None  # other threads may read its numbers, and nothing else
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="edge0-engine", daemon=True)

    def start(self) -> None:
        """Open the engine and wait until it is open.

        Raises:
            Edge0Error: whatever opening an engine raises.
        """
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    def check_room(self, preparing: int = 0) -> None:
        """Whether one more job may come, beside those that are being prepared.

        Raises:
            QueueFull, Stopped
        """
        if not self.alive:
            raise Stopped
        if preparing + self.waiting + self.running > self._queue:
            raise QueueFull

    def submit(self, job: Job) -> None:
        """
        Raises:
            QueueFull, Stopped
        """
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job: it leaves the queue, or ends after its current token or chunk."""
        with self._changed:
            job.cancelled = True
            with suppress(ValueError):
                self._waiting.remove(job)

    def stop(self) -> None:
        """Take no more jobs, and end those that wait or run."""
        with self._changed:
            self._closing = True
            ended = [*self._waiting]
            self._waiting.clear()
            if self._running is not None:
                self._running.cancelled = True
            self._changed.notify()
        for job in ended:
            self._deliver(job, Stopped())

    def close(self) -> None:
        """Stop, and wait until the engine is closed."""
        self.stop()
        self._thread.join()

    # --- the engine thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with Engine(self._directory, self._options) as self.engine:
                self._opened.set()
                while self._next():
                    self._serve(self._running)
        except BaseException as error:
            self._failure = error
            if self._opened.is_set():
                log.critical("the engine thread ended", exc_info=True)
        finally:
            job = self._running
            self.stop()
            if job is not None:
                self._deliver(job, Stopped())
            self._opened.set()

    def _next(self) -> bool:
        """Wait for a job to run; False when there will be none."""
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if self._waiting:
                self._running = self._waiting.popleft()
            return self._running is not None

    def _serve(self, job: Job) -> None:
        try:
            for event in complete(self.engine, self._vocabulary, job.order, lambda: job.cancelled):
                self._deliver(job, event)
        except Cancelled:
            self._deliver(job, Stopped())
        except Exception as error:
            self._deliver(job, error)

    def _deliver(self, job: Job, event: Event) -> None:
        try:
            job.deliver(event)
        except Exception:  # who waited is gone, and its event loop with it
            job.cancelled = True
