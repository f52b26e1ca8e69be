"""Bodies of requests: what is served is read, everything else is refused in one line that names the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.errors import Edge0Error, ErrorKind
from edge0.serving.requests import CompletionRequest, parse_request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PLAIN = {"prompt": "hi"}


def parse(fields, chat=True):
    return parse_request(json.dumps((CHAT if chat else PLAIN) | fields).encode(), chat)


def test_defaults():
    assert parse({}) == CompletionRequest(
        prompt="",
        messages=(("user", "hi"),),
        model=None,
        max_tokens=None,
        temperature=0.7,
        top_p=0.95,
        top_k=64,
        seed=None,
        stop=(),
        stream=False,
        include_usage=False,
        thinking=False,
    )
    assert parse({}, chat=False).prompt == "hi"


def test_every_field_is_read():
    fields = {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "seed": -1,
        "stop": ["a", "b"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "user": "whoever",
        "some_field_of_next_year": {"x": 1},
    }
    found = parse(fields)
    assert (found.model, found.max_tokens, found.temperature, found.top_p, found.top_k) == ("m", 3, 0.0, 1.0, 0)
    assert (found.seed, found.stop, found.stream, found.include_usage, found.thinking) == (
        -1,
        ("a", "b"),
        True,
        True,
        True,
    )
    assert parse({"max_tokens": 3, "max_completion_tokens": 5}).max_tokens == 5
    assert parse({"stop": "x"}).stop == ("x",)
    assert parse({"prompt": [1, 2, 3]}, chat=False).prompt == (1, 2, 3)


def test_messages_may_come_in_parts_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    assert parse({"messages": messages}).messages == (("system", "d"), ("user", "ab"))


@pytest.mark.parametrize(
    "field",
    [
        {"n": 1},
        {"logprobs": False},
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"temperature": None, "max_tokens": None, "stop": None, "stream": None, "stream_options": None},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(field):
    assert parse(field) == parse({})


@pytest.mark.parametrize(
    ("chat", "fields", "param"),
    [
        (True, {"n": 2}, "n"),
        (True, {"n": True}, "n"),
        (False, {"best_of": 3}, "best_of"),
        (True, {"logprobs": True}, "logprobs"),
        (False, {"logprobs": 0}, "logprobs"),
        (True, {"tools": [{"type": "function"}]}, "tools"),
        (True, {"tool_choice": "required"}, "tool_choice"),
        (True, {"functions": [{}]}, "functions"),
        (False, {"echo": True}, "echo"),
        (False, {"suffix": "x"}, "suffix"),
        (True, {"logit_bias": {"5": 1}}, "logit_bias"),
        (True, {"presence_penalty": 0.1}, "presence_penalty"),
        (True, {"frequency_penalty": -1}, "frequency_penalty"),
        (True, {"response_format": {"type": "json_object"}}, "response_format"),
        (True, {"max_tokens": 0}, "max_tokens"),
        (True, {"max_tokens": True}, "max_tokens"),
        (True, {"max_tokens": 2.0}, "max_tokens"),
        (True, {"max_tokens": "7"}, "max_tokens"),
        (True, {"max_tokens": 10**300}, "max_tokens"),
        (True, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (True, {"temperature": -0.1}, "temperature"),
        (True, {"temperature": 10**400}, "temperature"),
        (True, {"temperature": False}, "temperature"),
        (True, {"temperature": "hot"}, "temperature"),
        (True, {"temperature": 1e-300}, "temperature"),
        (True, {"top_p": 0}, "top_p"),
        (True, {"top_p": 1.01}, "top_p"),
        (True, {"top_k": -1}, "top_k"),
        (True, {"top_k": 0.5}, "top_k"),
        (True, {"seed": 2**64}, "seed"),
        (True, {"seed": 1.0}, "seed"),
        (True, {"stop": ""}, "stop"),
        (True, {"stop": ["a", ""]}, "stop"),
        (True, {"stop": ["a"] * 5}, "stop"),
        (True, {"stop": [1]}, "stop"),
        (True, {"stop": {"a": 1}}, "stop"),
        (True, {"stop": "\ud800"}, "stop"),
        (True, {"stream": 1}, "stream"),
        (True, {"stream_options": {"include_usage": True}}, "stream_options"),
        (True, {"stream": True, "stream_options": []}, "stream_options"),
        (True, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (True, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (True, {"model": 3}, "model"),
        (True, {"messages": []}, "messages"),
        (True, {"messages": {}}, "messages"),
        (True, {"messages": ["hi"]}, "messages[0]"),
        (True, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (True, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (True, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (True, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (True, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (True, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (True, {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        (False, {"prompt": None}, "prompt"),
        (False, {"prompt": ["a", "b"]}, "prompt"),
        (False, {"prompt": []}, "prompt"),
        (False, {"prompt": [1, True]}, "prompt"),
        (False, {"prompt": [1.0]}, "prompt"),
        (False, {"prompt": [[1], [2]]}, "prompt"),
        (False, {"prompt": "\ud800"}, "prompt"),
    ],
)
def test_what_is_not_served_is_refused_by_name(refused, chat, fields, param):
    error = refused(ErrorKind.REQUEST_INVALID, lambda: parse(fields, chat), param)
    assert error.tensor == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"prompt": "bom"}',
        b'{"prompt": "\xe9"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
)
def test_what_is_not_json_is_refused(refused, body):
    refused(ErrorKind.REQUEST_INVALID, lambda: parse_request(body, chat=False))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*CompletionRequest.__dataclass_fields__, "n", "tools", "logprobs", "stream_options"}))


@given(st.dictionaries(FIELDS, JSON, max_size=4), st.booleans())
def test_any_value_of_any_field_is_served_or_refused(fields, chat):
    try:
        found = parse(fields, chat)
    except Edge0Error as error:
        assert error.kind is ErrorKind.REQUEST_INVALID and str(error).isprintable()
    else:
        assert isinstance(found, CompletionRequest)
