"""The objects that clients of OpenAI's completions and chat completions expect, whole or as a stream of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from edge0.serving.completion import Finished

DONE = b"data: [DONE]\n\n"


def event_bytes(value: dict) -> bytes:
    """One server-sent event. JSON has no bare line ends, so one `data:` line holds it all."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True)
class Reply:
    """The frame of one answer."""

    model: str
    chat: bool
    include_usage: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finished: Finished) -> dict:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        frame = self._frame("chat.completion" if self.chat else "text_completion", content, finished.reason)
        return frame | {"usage": usage(finished)}

    def opening(self) -> Iterator[dict]:
        """What a stream begins with: in a chat, who speaks."""
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict:
        return self._chunk({"content": text} if self.chat else text)

    def closing(self, finished: Finished) -> Iterator[dict]:
        """Why it ended and, if it was asked for, what it took."""
        yield self._chunk({} if self.chat else "", finished.reason)
        if self.include_usage:
            yield self._chunk("") | {"choices": [], "usage": usage(finished)}

    def _chunk(self, content: dict | str, reason: str | None = None) -> dict:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        frame = self._frame(kind, {"delta": content} if self.chat else {"text": content}, reason)
        return frame | {"usage": None} if self.include_usage else frame

    def _frame(self, kind: str, content: dict, reason: str | None) -> dict:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0} | content | {"logprobs": None, "finish_reason": reason}],
        }


def usage(finished: Finished) -> dict[str, int]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
