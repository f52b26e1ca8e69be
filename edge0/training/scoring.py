"""How good a student is: exact match, cross-entropy and recall, on problems that were never trained on.

Exact match is of the whole answer, decoded token by token from the prompt, by the likeliest token; cross-entropy is in
nats per answer token, of the answer that counts, in one forward. Rows are per problem, so that two students are
compared problem by problem. Knows nothing of intervals; `analysis` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.nn as nn
import numpy as np

from edge0.training.corpus import Batch, Sample
from edge0.training.sampling import answers
from edge0.training.student import Student, Tensors


@dataclass(frozen=True)
class Score:
    """One problem. `answer` is what was said, without the end of text."""

    exact: bool
    cross_entropy: float
    answer: tuple[int, ...]


def score(
    student: Student,
    samples: Sequence[Sample],
    heads: Tensors | None,
    lora: Tensors | None,
    end: int,
    batch: int = 64,
) -> tuple[list[Score], dict[int, float]]:
    """A score for each sample, in their order, and recall by predicted layer where there are heads."""
    entropies, recalls = teacher_forced(student, samples, heads, lora, end, batch)
    prompts = [sample.tokens[: sample.prompt_length] for sample in samples]
    said = answers(student, prompts, heads, lora, answer_limit(samples), end)
    scores = [
        Score(tuple(row) == sample.tokens[sample.prompt_length :], entropy, tuple(t for t in row if t != end))
        for sample, row, entropy in zip(samples, said, entropies, strict=True)
    ]
    return scores, recalls


@dataclass(frozen=True)
class Quality:
    """Means over held-out samples. `exact_match`: of the `chats` among them, None where nothing was answered;
    `cross_entropy` in nats per answer token; `recall` over the predicted layers, None without heads."""

    samples: int
    chats: int
    exact_match: float | None
    cross_entropy: float
    recall: float | None

    def __str__(self) -> str:
        parts = []
        if self.exact_match is not None:
            parts.append(f"exact match {self.exact_match:.3f} of {self.chats} chats")
        parts.append(f"cross-entropy {self.cross_entropy:.4f} nats per token")
        if self.recall is not None:
            parts.append(f"recall {self.recall:.3f}")
        return f"{', '.join(parts)} ({self.samples} held-out samples)"


def quality(
    student: Student,
    samples: Sequence[Sample],
    heads: Tensors | None,
    lora: Tensors | None,
    end: int,
    answering: bool = True,
) -> Quality:
    """Means of what `score` says; a text has no answer to match. Without `answering` no answer is decoded."""
    entropies, recalls = teacher_forced(student, samples, heads, lora, end)
    chats = [sample for sample in samples if sample.messages]
    exact = None
    if answering and chats:
        exact = float(np.mean([found.exact for found in score(student, chats, heads, lora, end)[0]]))
    recall = float(np.mean(list(recalls.values()))) if recalls else None
    return Quality(len(samples), len(chats), exact, float(np.mean(entropies)), recall)


def answer_limit(samples: Sequence[Sample]) -> int:
    """Tokens after which an answer is cut: two more than the longest that counts."""
    return max(len(sample.tokens) - sample.prompt_length for sample in samples) + 2


def teacher_forced(
    student: Student,
    samples: Sequence[Sample],
    heads: Tensors | None,
    lora: Tensors | None,
    end: int,
    batch: int = 64,
) -> tuple[list[float], dict[int, float]]:
    """Cross-entropy of each sample's answer, and recall by predicted layer, weighted by served positions."""
    order = sorted(range(len(samples)), key=lambda n: len(samples[n].tokens))
    entropies, shares, weights = np.zeros(len(samples)), {}, 0.0
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        given = Batch.of([samples[n] for n in places], end)
        logits = student.forward(given.tokens, given.prompt_lengths, heads, lora)
        values = nn.losses.cross_entropy(logits[:, :-1], given.tokens[:, 1:])
        counted = given.answers[:, :-1]
        entropies[places] = np.array((values * counted).sum(axis=1) / counted.sum(axis=1))
        if heads is not None:
            weight = float((given.lengths - given.prompt_lengths).sum())
            weights += weight
            for layer, share in student.recall(given.prompt_lengths, given.lengths).items():
                shares[layer] = shares.get(layer, 0.0) + weight * float(share)
    return entropies.tolist(), {layer: share / weights for layer, share in shares.items()}
