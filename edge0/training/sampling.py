"""Answers of a student to a batch of prompts, decoded with caches, predictions carried from token to token.

The routes are those of the engine: each forward hands its predictions to the next. Sequences of one prompt length are
decoded together, so that none is padded before its answer. Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from edge0.serving.vocabulary import Vocabulary
from edge0.training.corpus import Batch, Sample, answered
from edge0.training.student import Student, Tensors


def answers(
    student: Student,
    prompts: Sequence[Sequence[int]],
    heads: Tensors | None,
    lora: Tensors | None,
    longest: int,
    end: int,
    key: mx.array | None = None,
    watch: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """What follows each prompt: the likeliest tokens, or with a `key` drawn at temperature 1, to `end` or `longest`.

    `end` is part of an answer that reached it; `watch` is told how many prompts are answered.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        given = mx.array([prompts[n] for n in places])
        if key is not None:
            key, own = mx.random.split(key)
        rows = _together(student, given, heads, lora, longest, end, None if key is None else own)
        for place, row in zip(places, rows, strict=True):
            found[place] = row
        watch(sum(map(bool, found)))
    return found


def own_lines(
    student: Student,
    vocabulary: Vocabulary,
    asked: Sequence[Sample],
    longest: int,
    watch: Callable[[int], None] = lambda done: None,
) -> list[dict[str, object]]:
    """Lines of a corpus: the student's own likeliest answer to each prompt, but for those with no end in `longest`."""
    end = vocabulary.tokenizer.eos_token_id
    prompts = [sample.tokens[: sample.prompt_length] for sample in asked]
    said = answers(student, prompts, None, None, longest, end, watch=watch)
    return [
        answered(sample.messages, vocabulary.tokenizer.decode(row[:-1]))
        for sample, row in zip(asked, said, strict=True)
        if row[-1] == end
    ]


def _together(
    student: Student,
    prompts: mx.array,
    heads: Tensors | None,
    lora: Tensors | None,
    longest: int,
    end: int,
    key: mx.array | None,
) -> list[list[int]]:
    cache, lengths = student.model.make_cache(), mx.full((len(prompts), 1), prompts.shape[1])
    given, carry, said = prompts, None, []
    ended = np.zeros(len(prompts), bool)
    for _ in range(longest):
        logits = student.forward(given, lengths, heads, lora, cache, carry)[:, -1]
        carry = student.executor.next
        if key is None:
            token = mx.argmax(logits, axis=-1)
        else:
            key, own = mx.random.split(key)
            token = mx.random.categorical(logits, key=own)
        mx.eval(token, [state.state for state in cache], list(carry.executed.values()), list(carry.forecast.values()))
        said.append(np.array(token))
        ended |= said[-1] == end
        if ended.all():
            break
        given = token[:, None]
    rows = np.stack(said, axis=1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def sampled(
    student: Student, asked: Batch, heads: Tensors, lora: Tensors, longest: int, end: int, key: mx.array
) -> Batch:
    """The prompts of a batch, each with an answer of the student's own."""
    tokens, lengths = np.array(asked.tokens).tolist(), np.array(asked.prompt_lengths)[:, 0].tolist()
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    said = answers(student, prompts, heads, lora, longest, end, key)
    whole = [Sample((*p, *s), len(p), "") for p, s in zip(prompts, said, strict=True)]
    return Batch.of(whole, end)
