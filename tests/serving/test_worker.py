"""The engine thread: jobs come out in the order they went in, and none of them takes another one with it."""

import pytest
from patience import until
from reference import PROMPT

from edge0 import EngineOptions, Sampling
from edge0.errors import Edge0Error, ErrorKind
from edge0.serving.completion import Finished, Order
from edge0.serving.worker import Job, QueueFull, Stopped, Worker

ORDER = Order(tuple(PROMPT), 6, Sampling())


class Listener:
    """Collects the events of one job."""

    def __init__(self, order=ORDER, ended=None):
        self.events, self._ended = [], ended if ended is not None else []
        self.job = Job(order, self._hear)

    def _hear(self, event):
        if not isinstance(event, str):
            self._ended.append(self)
        self.events.append(event)

    @property
    def last(self):
        until(lambda: self.events and not isinstance(self.events[-1], str))
        return self.events[-1]


def run(worker, order=ORDER):
    listener = Listener(order)
    worker.submit(listener.job)
    assert isinstance(listener.last, Finished)
    return "".join(listener.events[:-1])


def test_first_come_first_served_and_no_more_than_fit(worker, gate):
    alone, held = run(worker), gate(worker)
    ended = []
    listeners = [Listener(ended=ended) for _ in range(3)]
    for listener in listeners:
        worker.submit(listener.job)
    held.arrived.wait()
    assert (worker.running, worker.waiting) == (1, 2)
    with pytest.raises(QueueFull):
        worker.submit(Listener().job)
    held.open()
    for listener in listeners:
        assert isinstance(listener.last, Finished) and "".join(listener.events[:-1]) == alone
    assert ended == listeners


def test_a_cancelled_job_leaves_the_queue_at_once(worker, gate):
    held = gate(worker)
    running, waiting = Listener(), [Listener() for _ in range(2)]
    for listener in (running, *waiting):
        worker.submit(listener.job)
    held.arrived.wait()
    worker.cancel(waiting[0].job)
    assert worker.waiting == 1
    late = Listener()
    worker.submit(late.job)
    worker.cancel(running.job)
    held.open()
    assert isinstance(running.last, Stopped)
    assert isinstance(waiting[1].last, Finished) and isinstance(late.last, Finished)
    assert not waiting[0].events


def test_what_goes_wrong_in_a_job_ends_that_job(worker, monkeypatch, caplog):
    before = run(worker)
    for error in (ValueError("a bug"), Edge0Error(ErrorKind.READ_FAILED, "bad sector"), MemoryError()):

        def fail(request, token, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(worker.engine, "step", fail)
            listener = Listener()
            worker.submit(listener.job)
            assert listener.last is error
        assert run(worker) == before


def test_a_listener_that_fails_ends_its_job(worker):
    heard = []

    def hear(event):
        heard.append(event)
        raise RuntimeError("the event loop is closed")

    worker.submit(Job(Order(tuple(PROMPT), 2000, Sampling()), hear))
    until(lambda: isinstance(heard[-1] if heard else None, Stopped))
    assert run(worker)


def test_what_an_engine_cannot_be_opened_for_is_raised(checkpoints, vocabulary, refused):
    worker = Worker(checkpoints["unit-35b"], EngineOptions(k=2, bank_bytes=1), vocabulary, 2)
    refused(ErrorKind.BANK_TOO_SMALL, worker.start)
    assert not worker.alive
    with pytest.raises(Stopped):
        worker.submit(Listener().job)


def test_if_the_thread_dies_everybody_is_told(start_worker, gate, monkeypatch):
    worker = start_worker()
    held = gate(worker)
    monkeypatch.setattr(held, "_step", lambda request, token: (_ for _ in ()).throw(SystemExit))
    listeners = [Listener() for _ in range(3)]
    for listener in listeners:
        worker.submit(listener.job)
    held.open()
    assert all(isinstance(listener.last, Stopped) for listener in listeners)
    until(lambda: not worker.alive)
    with pytest.raises(Stopped):
        worker.submit(Listener().job)


def test_close_ends_what_runs_and_what_waits(start_worker, gate):
    worker = start_worker()
    held = gate(worker)
    listeners = [Listener() for _ in range(2)]
    for listener in listeners:
        worker.submit(listener.job)
    held.arrived.wait()
    worker.stop()
    assert isinstance(listeners[1].last, Stopped)
    held.open()
    worker.close()
    assert isinstance(listeners[0].last, Stopped) and worker.running == worker.waiting == 0
