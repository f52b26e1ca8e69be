"""From what a client asked for to what the engine is to do: ids, limits and a seed. Touches no engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from edge0.errors import Edge0Error, ErrorKind
from edge0.sampling import Sampling
from edge0.serving.completion import Order
from edge0.serving.requests import CompletionRequest
from edge0.serving.template import render
from edge0.serving.vocabulary import Vocabulary

PLAIN_MAX_TOKENS = 16  # what OpenAI's completions write where nothing is said; a chat ends by itself


@dataclass(frozen=True)
class Limits:
    """`max_tokens` None: as far as the context reaches."""

    vocab: int
    context_tokens: int
    max_tokens: int | None = None


def prepare(request: CompletionRequest, vocabulary: Vocabulary, limits: Limits) -> Order:
    """
    Raises:
        Edge0Error: REQUEST_INVALID, PROMPT_INVALID, TEMPLATE_INVALID.
    """
    if request.messages:
        messages = [{"role": role, "content": content} for role, content in request.messages]
        prompt, max_tokens = render(vocabulary, messages, request.thinking), limits.max_tokens
    else:
        prompt = vocabulary.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        max_tokens = min(PLAIN_MAX_TOKENS, limits.max_tokens or PLAIN_MAX_TOKENS)
    check_prompt(prompt, limits)
    if request.max_tokens is not None:
        max_tokens = request.max_tokens
        if limits.max_tokens is not None and max_tokens > limits.max_tokens:
            raise Edge0Error(
                ErrorKind.REQUEST_INVALID,
                "is more than this server writes",
                tensor="max_tokens",
                expected=f"up to {limits.max_tokens}",
                found=max_tokens,
            )
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    sampling = Sampling(request.temperature, request.top_p, request.top_k, seed)
    return Order(tuple(prompt), max_tokens, sampling, request.stop)


def check_prompt(prompt: list[int] | tuple[int, ...], limits: Limits) -> None:
    """The engine would refuse the same, but only after the request had waited for its turn.

    Raises:
        Edge0Error: PROMPT_INVALID.
    """
    room = limits.context_tokens - 1  # one token at least is to be written
    if not 1 <= len(prompt) <= room:
        raise Edge0Error(
            ErrorKind.PROMPT_INVALID,
            "the prompt is empty or leaves no room in the context",
            expected=f"1 to {room} tokens",
            found=len(prompt),
        )
    wrong = next((token for token in prompt if not 0 <= token < limits.vocab), None)
    if wrong is not None:
        raise Edge0Error(
            ErrorKind.PROMPT_INVALID,
            "a token is outside the vocabulary",
            expected=f"0 to {limits.vocab - 1}",
            found=wrong if abs(wrong) < 2**63 else "a huge number",
        )
