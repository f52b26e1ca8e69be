"""A server on a real socket: the official client, clients that hang up, and signals."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys

import openai
import pytest
from patience import PATIENCE_SECONDS, until
from reference import PROMPT

from edge0.errors import ErrorKind
from edge0.serving import app
from edge0.serving.server import allowed_hosts, is_loopback, listen

LONG = {"prompt": PROMPT, "temperature": 0, "max_tokens": 3000}


def post(url, body, path="/v1/completions"):
    """A request on a connection of its own; returns the socket."""
    host, port = url.removeprefix("http://").split(":")
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
    connection.sendall(head.encode() + text)
    return connection


def read_until(connection, mark):
    seen = b""
    while mark not in seen:
        piece = connection.recv(4096)
        assert piece, seen
        seen += piece
    return seen


def whole(connection):
    """Status and body of one response."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def test_the_official_client(serve):
    with serve(api_key="s3cret", max_tokens=64) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["unit"]

        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        chat = {"model": "unit", "messages": messages, "max_completion_tokens": 8, "temperature": 1, "seed": 4}
        answer = client.chat.completions.create(**chat)
        said = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 8
        assert client.chat.completions.create(**chat).choices[0].message.content == said
        chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage == answer.usage

        plain = {"model": "unit", "prompt": PROMPT, "max_tokens": 8, "seed": 4}
        text = client.completions.create(**plain).choices[0].text
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**plain, stream=True)) == text

        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**plain | {"model": "other"})
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**plain, n=2)
        assert caught.value.param == "n" and caught.value.code == "request_invalid"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_answer(serve, stream):
    with serve() as (url, worker):
        connection = post(url, LONG | {"stream": stream})
        if stream:
            read_until(connection, b"data: ")
        until(lambda: worker.running)
        connection.close()
        until(lambda: not worker.running)
        assert worker.alive and sum(worker.engine.store._pins) == 0
        status, body = whole(post(url, LONG | {"max_tokens": 2}))
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2


def test_a_client_that_hangs_up_frees_its_place_in_the_queue(serve, gate):
    with serve(queue=1) as (url, worker):
        held = gate(worker)
        first = post(url, LONG)
        held.arrived.wait()
        second = post(url, LONG)
        until(lambda: worker.waiting == 1)
        assert whole(post(url, LONG))[0] == 429
        second.close()
        until(lambda: not worker.waiting)
        third = post(url, LONG | {"max_tokens": 2})
        until(lambda: worker.waiting == 1)
        first.close()
        held.open()
        assert whole(third)[0] == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(serve):
    with serve(max_body_bytes=1000) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            assert whole(connection)[0] == 413


def test_a_body_that_does_not_come_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    with serve() as (url, worker):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as connection:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt"')
            assert whole(connection)[0] == 408
        assert whole(post(url, LONG | {"max_tokens": 2}))[0] == 200


def test_a_signal_ends_running_answers_and_the_server(checkpoints):
    command = [sys.executable, "-m", "edge0.cli", "serve", str(checkpoints["unit-35b"]), "--port", "0", "--k", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            line = next(line for line in lines if line.startswith("serving "))
            url = re.search(r"serving unit-35b at (http://127\.0\.0\.1:\d+)/v1", line).group(1)
            connection = post(url, LONG | {"stream": True})
            read_until(connection, b"data: ")
            process.send_signal(signal.SIGTERM)
            assert b'"code":"shutting_down"' in read_until(connection, b'shutting_down"}}\n\n')
            assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        finally:
            process.kill()


def test_loopback_and_the_names_of_a_server():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org", "", "localhost.example.org")))
    assert allowed_hosts("0.0.0.0") is None and "[::1]" in allowed_hosts("::1")


def test_an_address_that_cannot_be_listened_on(refused):
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        refused(ErrorKind.OPTION_INVALID, lambda: listen("127.0.0.1", port), port)
    refused(ErrorKind.OPTION_INVALID, lambda: listen("127.0.0.1", 99999), 99999)
    refused(ErrorKind.OPTION_INVALID, lambda: listen("no.such.host.invalid", 80), "no.such.host")
