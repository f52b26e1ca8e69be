"""A worker that all tests share, services around it, and a gate that makes the engine wait between two tokens."""

import threading
from contextlib import contextmanager

import pytest
from patience import PATIENCE_SECONDS, Gate, until
from starlette.testclient import TestClient

from edge0 import EngineOptions
from edge0.serving.app import Service, ServiceOptions
from edge0.serving.server import Server, allowed_hosts, listen
from edge0.serving.vocabulary import Vocabulary
from edge0.serving.worker import Worker

MODEL = "unit"


@pytest.fixture(scope="session")
def vocabulary(checkpoints):
    return Vocabulary(checkpoints["unit-35b"])


@pytest.fixture(scope="session")
def start_worker(checkpoints, vocabulary):
    """A function that starts a worker on unit-35b; all are closed at the end."""
    started = []

    def start(queue=2, **options):
        worker = Worker(
            checkpoints["unit-35b"], EngineOptions(**({"k": 2, "bank_bytes": 1 << 30} | options)), vocabulary, queue
        )
        started.append(worker)
        worker.start()
        return worker

    yield start
    for worker in started:
        worker.close()


@pytest.fixture(scope="session")
def shared_worker(start_worker):
    return start_worker()


@pytest.fixture
def worker(shared_worker):
    """The shared worker, idle before and after the test."""
    until(lambda: not shared_worker.running)
    yield shared_worker
    until(lambda: not shared_worker.running and not shared_worker.waiting)
    assert shared_worker.alive and sum(shared_worker.engine.store._pins) == 0


@pytest.fixture
def make_client(worker, vocabulary):
    """A function from service options to a client of a service around the shared worker."""

    def make(**options):
        options = {"model": MODEL, "hosts": allowed_hosts("127.0.0.1")} | options
        service = Service(worker, vocabulary, ServiceOptions(**options))
        return TestClient(service.app(), base_url="http://127.0.0.1", raise_server_exceptions=False)

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def serve(start_worker, vocabulary):
    """A context manager: a service with a worker of its own, on a real socket. Yields its base URL and the worker."""

    @contextmanager
    def run(queue=2, **options):
        worker = start_worker(queue)
        server = Server(Service(worker, vocabulary, ServiceOptions(MODEL, **options)))
        listener = listen("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", worker
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive() and not worker.alive

    return run


@pytest.fixture
def gate(monkeypatch):
    """A function that puts a `Gate` into a worker's engine, behind some free steps."""
    gates = []

    def put(worker, free=0):
        gates.append(Gate(worker.engine.step, free))
        monkeypatch.setattr(worker.engine, "step", gates[-1])
        return gates[-1]

    yield put
    for gate in gates:
        gate.open()
