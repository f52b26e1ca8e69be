"""The JSON bodies that clients send, read into one frozen record or refused in one line that names the field.

What would change the meaning of an answer and is not served is refused; what is unknown is ignored. Knows nothing of
the model, its vocabulary or its context.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import Any

from edge0.errors import Edge0Error, ErrorKind

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_STOPS = 4
SMALLEST = 0.001  # of temperature and top_p above 0: below, rounding leaves no token to choose from
UNSERVED: dict[str, tuple[Any, ...]] = {  # field -> values that ask for nothing, beside null
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
UNSERVED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


@dataclass(frozen=True)
class CompletionRequest:
    """A body that can be served. None: the client left it open."""

    prompt: str | tuple[int, ...]  # empty where there are messages
    messages: tuple[tuple[str, str], ...]  # role, content; empty where there is a prompt
    model: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    thinking: bool


def parse_request(body: bytes, chat: bool) -> CompletionRequest:
    """
    Raises:
        Edge0Error: REQUEST_INVALID; its `tensor` is the field, where one is at fault.
    """
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Edge0Error(ErrorKind.REQUEST_INVALID, f"the body is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _invalid(None, "an object", fields)
    _refuse_unserved(fields, UNSERVED)
    stream = _flag(fields, "stream")
    max_tokens = _integer(fields, "max_completion_tokens", 1, 2**31)
    return CompletionRequest(
        prompt="" if chat else _prompt(fields.get("prompt")),
        messages=_messages(fields.get("messages")) if chat else (),
        model=None if fields.get("model") is None else _text(fields["model"], "model"),
        max_tokens=_integer(fields, "max_tokens", 1, 2**31) if max_tokens is None else max_tokens,
        temperature=_number(fields, "temperature", 2.0, 0.7, zero=True),
        top_p=_number(fields, "top_p", 1.0, 0.95),
        top_k=_integer(fields, "top_k", 0, 2**31, 64),
        seed=_integer(fields, "seed", -(2**63), 2**64 - 1),
        stop=_stop(fields.get("stop")),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        thinking=_thinking(fields.get("chat_template_kwargs")),
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return _text(value, "prompt")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise _invalid("prompt", "one string, or a list of token ids", value)


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "a list of messages", value)
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(value))


def _message(value: Any, name: str) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise _invalid(name, "an object", value)
    _refuse_unserved(value, UNSERVED_IN_MESSAGES, f"{name}.")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"{name}.role", " or ".join(ROLES), role)
    return ROLES[role], _content(value.get("content"), f"{name}.content")


def _content(value: Any, name: str) -> str:
    if not isinstance(value, list):
        return _text(value, name)
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _invalid(f"{name}[{number}]", "a part of type text", part)
    return "".join(_text(part.get("text"), f"{name}[{number}].text") for number, part in enumerate(value))


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or "" in stops:
        raise _invalid("stop", f"a string, or up to {MAX_STOPS} of them, none empty", value)
    return tuple(_text(stop, "stop") for stop in stops)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or not stream:
        raise _invalid("stream_options", "an object, and only where stream is true", value)
    return _flag(value, "include_usage", "stream_options.")


def _thinking(value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or value.keys() - {"enable_thinking"}:
        raise _invalid("chat_template_kwargs", "an object of enable_thinking alone", value)
    return _flag(value, "enable_thinking", "chat_template_kwargs.")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _invalid(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(name, "valid Unicode", value) from None
    return value


def _flag(fields: dict[str, Any], name: str, prefix: str = "") -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise _invalid(prefix + name, "true or false", value)
    return bool(value)


def _integer(fields: dict[str, Any], name: str, low: int, high: int, default: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _invalid(name, f"an integer of {low} to {high}", value)
    return value


def _number(fields: dict[str, Any], name: str, high: float, default: float, zero: bool = False) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not (SMALLEST <= value <= high or zero and value == 0):
        raise _invalid(name, ("0 or " if zero else "") + f"a number of {SMALLEST} to {high}", value)
    return float(value)


def _refuse_unserved(fields: dict[str, Any], unserved: dict[str, tuple[Any, ...]], prefix: str = "") -> None:
    for name, neutral in unserved.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in neutral):
            raise Edge0Error(
                ErrorKind.REQUEST_INVALID, "is not served", tensor=prefix + name, found=reprlib.repr(value)
            )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _invalid(name: str | None, expected: str, found: Any) -> Edge0Error:
    detail = "the body" if name is None else "has a value that cannot be served"
    return Edge0Error(ErrorKind.REQUEST_INVALID, detail, tensor=name, expected=expected, found=reprlib.repr(found))
