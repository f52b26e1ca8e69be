"""The routes: OpenAI's shapes, and a status and an error object for everything that goes wrong."""

import asyncio
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from reference import PROMPT
from starlette.testclient import TestClient

from edge0 import Sampling
from edge0.errors import Edge0Error, ErrorKind
from edge0.serving import app
from edge0.serving.app import Service, ServiceOptions
from edge0.serving.completion import Finished, Order
from edge0.serving.exchange import Exchange
from edge0.serving.refusals import DeadlinePassed, Gone
from edge0.serving.template import render
from edge0.serving.worker import Job

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def events(response):
    """The JSON of every event of a stream; its framing is checked on the way."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    frames = response.content.split(b"\n\n")
    assert frames[-1] == b"" and all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames[:-1])
    data = [frame[len(b"data: ") :] for frame in frames[:-1]]
    assert data[-1] == b"[DONE]"
    return [json.loads(one) for one in data[:-1]]


def error(response, status, **fields):
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"} and found["message"].isprintable()
    assert found | fields == found
    return found["message"]


def metrics(client):
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for one in families for sample in one.samples}


# --- answers -------------------------------------------------------------------------------------------------------


def test_a_completion_is_the_engines_text(client, worker, vocabulary):
    text = client.post(PLAIN, json=GREEDY).json()["choices"][0]["text"]
    heard = []
    worker.submit(Job(Order(tuple(PROMPT), 8, Sampling()), heard.append))
    answer = client.post(PLAIN, json=GREEDY).json()
    assert "".join(heard[:-1]) == text == answer["choices"][0]["text"] != ""
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 8, "total_tokens": len(PROMPT) + 8}
    assert (answer["object"], answer["model"]) == ("text_completion", "unit")
    assert answer["id"].startswith("cmpl-") and abs(answer["created"] - time.time()) < 600


def test_a_chat_completion_renders_the_template(client, vocabulary):
    answer = client.post(CHAT, json=HELLO).json()
    prompt = render(vocabulary, HELLO["messages"])
    text = client.post(PLAIN, json=GREEDY | {"prompt": prompt}).json()["choices"][0]["text"]
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_the_same_in_pieces(client):
    whole = client.post(PLAIN, json=GREEDY).json()
    chunks = events(client.post(PLAIN, json=GREEDY | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_a_chat_stream_begins_with_the_role_and_may_end_with_usage(client):
    whole = client.post(CHAT, json=HELLO).json()
    streamed = HELLO | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(CHAT, json=streamed))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_stop_strings_and_seeds(client):
    whole = client.post(PLAIN, json=GREEDY | {"max_tokens": 16}).json()["choices"][0]["text"]
    stop = whole[2:5]
    stopped = client.post(PLAIN, json=GREEDY | {"max_tokens": 16, "stop": [stop]}).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    texts = [
        client.post(PLAIN, json=GREEDY | {"temperature": 1.5, "seed": seed}).json()["choices"][0]["text"]
        for seed in (7, 7, -7)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_without_max_tokens_a_plain_completion_is_short_and_a_limit_binds(make_client):
    open_ended = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    assert make_client().post(PLAIN, json=open_ended).json()["usage"]["completion_tokens"] == 16
    client = make_client(max_tokens=3)
    assert client.post(PLAIN, json=open_ended).json()["usage"]["completion_tokens"] == 3
    chat = {"messages": HELLO["messages"], "temperature": 0}
    assert client.post(CHAT, json=chat).json()["usage"]["completion_tokens"] == 3
    error(client.post(PLAIN, json=GREEDY), 400, param="max_tokens", code="request_invalid")


def test_models_and_health(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["unit"]
    assert client.get("/v1/models/unit").json() == listed["data"][0]
    error(client.get("/v1/models/other"), 404, code="model_not_found")
    assert client.get("/healthz").json() == {"status": "ok"}


def test_metrics_count(client):
    before = metrics(client)
    assert before["edge0_completion_tokens_total",] == 0 and before["edge0_bank_bytes",] > 0
    client.post(PLAIN, json=GREEDY)
    client.post(CHAT, json=HELLO)
    client.post(CHAT, json={})
    after = metrics(client)
    assert after["edge0_requests_total", PLAIN, "length"] == 1
    assert (after["edge0_requests_total", CHAT, "length"], after["edge0_requests_total", CHAT, "invalid"]) == (1, 1)
    assert after["edge0_completion_tokens_total",] == 16 and after["edge0_prompt_tokens_total",] > len(PROMPT)
    assert after["edge0_time_to_first_token_seconds_count",] == after["edge0_seconds_per_token_count",] == 2
    used = [sum(one[f"edge0_expert_{what}_total",] for what in ("loads", "hits")) for one in (before, after)]
    assert used[1] > used[0] and after["edge0_expert_asked_bytes_total",] >= before["edge0_expert_asked_bytes_total",]
    assert after["edge0_experts_dropped_total",] == after["edge0_queue_depth",] == 0
    assert after["edge0_allocator_peak_bytes",] >= after["edge0_allocator_active_bytes",] > 0


# --- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_refused_and_how(client):
    error(client.post(PLAIN, content=b"{"), 400, type="invalid_request_error", code="request_invalid", param=None)
    error(client.post(PLAIN, json=GREEDY | {"n": 2}), 400, param="n")
    error(client.post(PLAIN, json=GREEDY | {"prompt": ""}), 400, code="prompt_invalid")
    error(client.post(PLAIN, json=GREEDY | {"prompt": [5, 512]}), 400, code="prompt_invalid")
    error(client.post(PLAIN, json=GREEDY | {"prompt": [10**30]}), 400, code="prompt_invalid")
    error(client.post(PLAIN, json=GREEDY | {"prompt": [1] * 4096}), 400, code="prompt_invalid")
    error(client.post(PLAIN, json=GREEDY | {"model": "gpt"}), 404, code="model_not_found", param="model")
    error(client.get("/v1/nothing"), 404)
    assert error(client.get(PLAIN), 405) and client.get(PLAIN).headers["allow"] == "POST"


def test_a_template_that_cannot_be_rendered_says_nothing_of_this_machine(client, vocabulary):
    tokenizer, template = vocabulary.tokenizer, vocabulary.tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    try:
        message = error(client.post(CHAT, json=HELLO), 400, code="template_invalid")
    finally:
        tokenizer.chat_template = template
    assert str(vocabulary.directory) not in message


def test_a_body_that_is_too_large_is_not_read(make_client):
    client = make_client(max_body_bytes=1000)
    big = json.dumps(GREEDY | {"user": "x" * 1000}).encode()

    def pieces():
        yield from (big[start : start + 100] for start in range(0, len(big), 100))

    error(client.post(PLAIN, content=big), 413, code="body_too_large")
    error(client.post(PLAIN, content=pieces()), 413, code="body_too_large")
    assert client.post(PLAIN, json=GREEDY).status_code == 200


def test_the_key(make_client):
    client = make_client(api_key="s3cret")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic s3cret"},
    ):
        for path in (PLAIN, "/v1/models", "/metrics", "/nothing"):
            error(client.post(path, json=GREEDY, headers=headers), 401, code="invalid_api_key")
    assert client.get("/healthz").status_code == 200
    assert client.post(PLAIN, json=GREEDY, headers={"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize(("host", "status"), [("localhost:80", 200), ("[::1]:80", 200), ("evil.example", 400)])
def test_a_server_on_loopback_answers_to_its_own_names_only(client, host, status):
    assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_a_full_queue_says_so(client, worker, gate):
    held = gate(worker)
    heard = [[] for _ in range(3)]
    for one in heard:
        worker.submit(Job(Order(tuple(PROMPT), 2, Sampling()), one.append))
    response = client.post(PLAIN, json=GREEDY)
    error(response, 429, type="rate_limit_error", code="queue_full")
    assert int(response.headers["retry-after"]) > 0
    assert metrics(client)["edge0_queue_depth",] == 2
    held.open()


def test_the_deadline_passes_before_the_first_token(make_client, worker, gate):
    held = gate(worker)
    heard = []
    worker.submit(Job(Order(tuple(PROMPT), 2, Sampling()), heard.append))
    held.arrived.wait()
    client = make_client(request_seconds=0.05)
    for stream in (False, True):
        error(client.post(PLAIN, json=GREEDY | {"stream": stream}), 504, code="deadline", type="server_error")
    assert worker.waiting == 0
    held.open()


def test_the_deadline_passes_after_the_first_token(client, worker, gate, monkeypatch):
    class Late(Exchange):
        async def __anext__(self):
            event = await super().__anext__()
            self._inbox.put_nowait(DeadlinePassed())  # as the clock would, now
            return event

    monkeypatch.setattr(app, "Exchange", Late)
    held = gate(worker, free=6)
    error(client.post(PLAIN, json=GREEDY), 504, code="deadline")
    response = client.post(PLAIN, json=GREEDY | {"stream": True})
    frames = [json.loads(frame[6:]) for frame in response.content.split(b"\n\n")[:-1]]
    assert response.status_code == 200 and frames[0]["choices"] and frames[-1]["error"]["code"] == "deadline"
    assert metrics(client)["edge0_requests_total", PLAIN, "deadline"] == 2
    held.open()


def test_a_failure_of_the_engine_tells_the_kind_and_not_the_place(client, worker, monkeypatch, caplog):
    good = client.post(PLAIN, json=GREEDY).json()["choices"]
    for failure, code in (
        (Edge0Error(ErrorKind.READ_FAILED, "x", path="/secret"), "read_failed"),
        (KeyError(), "internal_error"),
    ):

        def fail(request, token, failure=failure, step=worker.engine.step):
            if request.tokens < len(PROMPT) + 6:  # there is some text by then
                return step(request, token)
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(worker.engine, "step", fail)
            assert "secret" not in error(client.post(PLAIN, json=GREEDY), 500, code=code, type="server_error")
            last = client.post(PLAIN, json=GREEDY | {"stream": True}).content.split(b"\n\n")[-2]
            assert json.loads(last[6:])["error"]["code"] == code
        assert client.post(PLAIN, json=GREEDY).json()["choices"] == good


def test_a_stopped_worker(start_worker, vocabulary):
    worker = start_worker()
    client = TestClient(Service(worker, vocabulary, ServiceOptions("unit")).app(), base_url="http://127.0.0.1")
    assert client.get("/healthz").status_code == 200
    worker.close()
    error(client.post(PLAIN, json=GREEDY), 503, code="shutting_down")
    assert client.get("/healthz").status_code == 503


def test_a_client_that_hangs_up_while_it_waits(worker, gate):
    """Without a socket: the ASGI channel says that the client is gone."""
    held = gate(worker, free=6)

    async def wait():
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def ordered():
            return Order(tuple(PROMPT), 8, Sampling())

        exchange = Exchange(worker, ordered, receive, 30)
        first = await anext(exchange)
        gone.set()
        with pytest.raises(Gone):
            while not isinstance(await anext(exchange), Finished):
                pass
        exchange.close()
        return first

    assert asyncio.run(wait())
    held.open()


# --- bodies that nobody should send --------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SHORT = {"max_tokens": 1, "temperature": 0}
GOOD = SHORT | {"prompt": PROMPT[:4], "max_tokens": 2}
VALID = [
    json.dumps(SHORT | fields).encode()
    for fields in (GOOD, {"messages": [{"role": "user", "content": "."}]}, {"prompt": "a", "stream": True, "stop": "x"})
]


@st.composite
def mutated(draw):
    """A body that is valid but for a few bytes."""
    body = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(body) - 1))
        body[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(body)


@st.composite
def replaced(draw):
    """A valid body with another value in one field."""
    body = json.loads(draw(st.sampled_from(VALID)))
    return json.dumps(body | {draw(st.sampled_from(sorted(body))): draw(JSON)}).encode()


@pytest.fixture(scope="module")
def hardened(shared_worker, vocabulary):
    """A client of a service that writes little, and what it says to a good request."""
    service = Service(shared_worker, vocabulary, ServiceOptions("unit", max_tokens=2))
    client = TestClient(service.app(), raise_server_exceptions=False)
    return client, client.post(PLAIN, json=GOOD).json()["choices"]


@settings(max_examples=100)
@given(
    path=st.sampled_from([CHAT, PLAIN]),
    body=st.binary(max_size=64) | JSON.map(json.dumps).map(str.encode) | mutated() | replaced(),
)
def test_no_body_hurts_the_next_request(path, body, hardened):
    client, good = hardened
    response = client.post(path, content=body)
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        error(response, response.status_code, type="invalid_request_error")
    assert client.post(PLAIN, json=GOOD).json()["choices"] == good
