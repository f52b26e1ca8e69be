"""What a server does with clients that wait, do not read, or leave: time, places in the queue, and one outcome each."""

import asyncio
import json
import threading

import pytest
from patience import PATIENCE_SECONDS
from reference import PROMPT

from edge0.serving import app, streamed
from edge0.serving.app import Service, ServiceOptions

BODY = {"prompt": PROMPT, "max_tokens": 3000, "temperature": 0}


class Client:
    """One request without a socket. The client reads some messages, then `send` waits as for a full socket."""

    def __init__(self, service, body=BODY, reads=1 << 30):
        self._app, self._body, self._reads = service.app(), json.dumps(body).encode(), reads
        self.messages, self.stuck, self.gone = [], asyncio.Event(), asyncio.Event()

    async def call(self):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await self._app(scope, self._receive, self._send)

    async def _receive(self):
        if self._body is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def _send(self, message):
        if len(self.messages) == self._reads:
            self.stuck.set()
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def status(self):
        return self.messages[0]["status"]


@pytest.fixture
def make_service(worker, vocabulary):
    return lambda **options: Service(worker, vocabulary, ServiceOptions("unit", **options))


@pytest.fixture
def tokenizer(monkeypatch):
    """Makes every `prepare` wait for the event that it returns, and counts those that began."""
    began, opened, prepare = [], threading.Event(), app.prepare

    def wait(*arguments):
        began.append(True)
        assert opened.wait(PATIENCE_SECONDS)
        return prepare(*arguments)

    monkeypatch.setattr(app, "prepare", wait)
    yield began, opened
    opened.set()


def outcomes(service):
    samples = [sample for family in service.metrics.requests.collect() for sample in family.samples]
    return {one.labels["outcome"]: one.value for one in samples if one.name == "edge0_requests_total"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_SECONDS))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


# --- clients that do not read --------------------------------------------------------------------------------------


def test_the_deadline_ends_a_stream_that_nobody_reads(make_service, worker, monkeypatch):
    """First the engine's work, while the client still holds up the stream; then the call."""
    monkeypatch.setattr(streamed, "LAST_EVENT_SECONDS", 1.0)
    service = make_service(request_seconds=1.0)
    step = worker.engine.step
    monkeypatch.setattr(worker.engine, "step", lambda *arguments: threading.Event().wait(0.01) or step(*arguments))

    async def call():
        client = Client(service, BODY | {"stream": True}, reads=2)
        calling = asyncio.create_task(client.call())
        await client.stuck.wait()
        await until(lambda: not worker.running)
        assert not calling.done()
        await calling
        return client

    client = run(call())
    assert client.status == 200 and client.messages[-1].get("more_body")
    assert outcomes(service) == {"deadline": 1}


def test_a_client_that_hangs_up_unread_ends_the_engines_work(make_service, worker):
    service = make_service()

    async def call():
        client = Client(service, BODY | {"stream": True}, reads=2)
        calling = asyncio.create_task(client.call())
        await client.stuck.wait()
        client.gone.set()
        await until(lambda: not worker.running)
        assert not calling.done()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    run(call())
    assert outcomes(service) == {"disconnected": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_cancelled_is_counted_once(make_service, worker, gate, stream):
    service, held = make_service(), gate(worker, free=6)

    async def call():
        client = Client(service, BODY | {"stream": stream})
        calling = asyncio.create_task(client.call())
        await until(held.arrived.is_set)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    run(call())
    held.open()
    assert outcomes(service) == {"disconnected": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_its_client_leaves_is_counted_once(make_service, worker, gate, stream):
    service, held = make_service(), gate(worker, free=6)

    async def call():
        client = Client(service, BODY | {"stream": stream})
        calling = asyncio.create_task(client.call())
        await until(held.arrived.is_set)
        client.gone.set()
        await calling

    run(call())
    held.open()
    assert outcomes(service) == {"disconnected": 1}


# --- before the engine ---------------------------------------------------------------------------------------------


def test_requests_that_are_tokenized_have_places_in_the_queue(make_service, tokenizer):
    service, (began, opened) = make_service(), tokenizer

    async def call():
        short = BODY | {"max_tokens": 2}
        clients = [Client(service, short) for _ in range(3)]
        calling = [asyncio.create_task(client.call()) for client in clients]
        await until(lambda: began)
        late = Client(service, short)
        await late.call()
        opened.set()
        await asyncio.gather(*calling)
        return late.status, {client.status for client in clients}

    assert run(call()) == (429, {200})
    assert outcomes(service) == {"busy": 1, "length": 3}


def test_tokenizing_is_under_the_deadline_and_its_place_is_given_back(make_service, worker, tokenizer):
    service, (began, opened) = make_service(request_seconds=0.1), tokenizer

    async def call():
        for _ in range(2):
            clients = [Client(service) for _ in range(3)]
            await asyncio.gather(*(client.call() for client in clients))
            assert [client.status for client in clients] == [504] * 3
            assert service._tokenizer_free.locked()  # by the thread: nothing piles up behind what it cannot leave
        opened.set()

    run(call())
    assert began == [True] and not worker.running
    assert outcomes(service) == {"deadline": 6}


def test_a_client_that_leaves_while_it_is_tokenized_frees_its_place(make_service, tokenizer):
    service, (began, opened) = make_service(), tokenizer

    async def call():
        clients = [Client(service) for _ in range(3)]
        calling = [asyncio.create_task(client.call()) for client in clients]
        await until(lambda: began)
        for client in clients:
            client.gone.set()
        await asyncio.gather(*calling)
        later = Client(service, BODY | {"max_tokens": 2})
        calling = asyncio.create_task(later.call())
        opened.set()
        await calling
        return later.status

    assert run(call()) == 200
    assert outcomes(service) == {"disconnected": 3, "length": 1}
