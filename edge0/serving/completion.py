"""One answer: a prompt is read, tokens are chosen until something ends it, and what that cost is said at the end.

Runs on the thread that owns the engine. Knows nothing of queues, clients or clocks that run out: whoever waits says
through `cancelled` that nobody does any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from edge0.sampling import Sampling
from edge0.serving.text import TextStream
from edge0.serving.vocabulary import Vocabulary
from edge0.telemetry.loads import Totals
from edge0.telemetry.memory import process_device_bytes

if TYPE_CHECKING:
    from edge0.engine import Engine


@dataclass(frozen=True)
class Order:
    """What is to be written. `max_tokens` None: as far as the context reaches."""

    prompt: tuple[int, ...]
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Phase:
    """Prefill or decode: what it did and what was read for it."""

    tokens: int  # read as prompt, or decoded by a step: one fewer than were written
    duration_ns: int
    loads: int
    hits: int
    asked_bytes: int
    device_bytes: int | None  # that storage delivered to this process meanwhile; None: unknown

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.duration_ns * 1e9 if self.duration_ns else 0.0


@dataclass(frozen=True)
class Finished:
    """The end of an answer. `completion_tokens` counts the token that ended it, too."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    first_token_ns: int  # monotonic
    prefill: Phase
    decode: Phase


class Cancelled(Exception):
    """Nobody waits for this answer any more."""


def complete(
    engine: Engine, vocabulary: Vocabulary, order: Order, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[str | Finished]:
    """Yield pieces of text and then `Finished`. `cancelled` is asked after every chunk of the prompt and every token.

    Raises:
        Edge0Error: PROMPT_INVALID, READ_FAILED, NUMERIC and what else ends a step; the engine goes on.
        Cancelled
    """

    def check(_: int = 0) -> None:
        if cancelled():
            raise Cancelled

    check()
    sample = order.sampling.sampler()
    text = TextStream(vocabulary.token_bytes, order.stop)
    room = max(1, engine.context_tokens - len(order.prompt))
    limit = room if order.max_tokens is None else min(order.max_tokens, room)
    prompt_tokens, written = len(order.prompt), 0
    request = engine.new_request()
    try:
        meter = _Meter(engine)
        logits = engine.prefill(request, order.prompt, check)
        token = sample(logits)
        prefill, first_token_ns = meter.phase(prompt_tokens), time.monotonic_ns()
        reason = None
        while reason is None:
            written += 1
            if token in vocabulary.ends:
                reason = "stop"
                break
            if piece := text.add(token):
                yield piece
            if text.stopped:
                reason = "stop"
            elif written == limit:
                reason = "length"
            else:
                check()
                token = sample(engine.step(request, token))
        decode = meter.phase(written - 1)
    finally:
        request.release()
    if piece := text.finish():
        yield piece
    yield Finished(reason, prompt_tokens, written, first_token_ns, prefill, decode)


class _Meter:
    """Cuts the engine's running totals into phases."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._last = self._now()

    def _now(self) -> tuple[int, Totals, int | None]:
        return time.monotonic_ns(), replace(self._engine.recorder.totals), process_device_bytes()

    def phase(self, tokens: int) -> Phase:
        """What happened since the last phase."""
        (before_ns, before, before_device), self._last = self._last, self._now()
        now_ns, now, device = self._last
        return Phase(
            tokens,
            now_ns - before_ns,
            now.loads - before.loads,
            now.hits - before.hits,
            now.asked_bytes - before.asked_bytes,
            None if device is None or before_device is None else device - before_device,
        )
