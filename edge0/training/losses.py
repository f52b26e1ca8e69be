"""The losses of the four kinds of training, each a mean over the positions that count.

`counted` is `[B, T]`: of the task loss the positions whose next token belongs to the answer, of the heads' loss those
whose prediction will be served. Knows nothing of models.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

LEAST = 1e-6  # probability of the bucket, so that its logarithm is one


def mean_over(values: mx.array, counted: mx.array) -> mx.array:
    """The mean of `values` `[B, T]` where `counted`; 0 where nothing counts."""
    return (values * counted).sum() / mx.maximum(counted.sum(), 1)


def next_token(logits: mx.array, tokens: mx.array, counted: mx.array) -> mx.array:
    """Cross-entropy in nats per token, of the token after each counted position."""
    values = nn.losses.cross_entropy(logits[:, :-1], tokens[:, 1:])
    return mean_over(values, counted[:, :-1])


def imitation(law: str, target: mx.array, predicted: mx.array, counted: mx.array) -> mx.array:
    """How far a head is from the router it stands for (phase 1), both `[B, T, E]` logits; 0 when they agree.

    softmax: KL of the router's distribution against the head's. sigmoid groups: binary cross-entropy of each expert's
    score less the score's own entropy, summed over experts, as the scores are no distribution.
    """
    target = mx.stop_gradient(target).astype(mx.float32)
    if law == "softmax":
        log_p, log_q = (part - mx.logsumexp(part, axis=-1, keepdims=True) for part in (target, predicted))
        return mean_over((mx.exp(log_p) * (log_p - log_q)).sum(axis=-1), counted)
    score = mx.sigmoid(target)

    def entropy(logits: mx.array) -> mx.array:
        """Binary cross-entropy of `score` against sigmoid(logits), stable at both ends."""
        return mx.logaddexp(0, logits) - score * logits

    return mean_over((entropy(predicted) - entropy(target)).sum(axis=-1), counted)


def reverse_kl(student: mx.array, teacher: mx.array, counted: mx.array, top: int) -> mx.array:
    """KL of the student against the teacher over the teacher's `top` tokens and one bucket for all others (phase 3).

    Both `[B, T, V]` logits. The bucket keeps what the top leaves out from being free.
    """
    chosen = mx.argpartition(teacher, kth=-top, axis=-1)[..., -top:]
    log_q, log_p = (_with_tail(part, chosen) for part in (student, mx.stop_gradient(teacher)))
    return mean_over((mx.exp(log_q) * (log_q - log_p)).sum(axis=-1), counted)


def _with_tail(logits: mx.array, chosen: mx.array) -> mx.array:
    """`[B, T, top + 1]` log probabilities of the chosen tokens, and of all others together."""
    logits = logits.astype(mx.float32)
    every = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    kept = mx.take_along_axis(every, chosen, axis=-1)
    rest = mx.maximum(1 - mx.exp(kept).sum(axis=-1, keepdims=True), LEAST)
    return mx.concatenate([kept, mx.log(rest)], axis=-1)


def balance(logits: mx.array, indices: mx.array, counted: mx.array) -> mx.array:
    """Load balancing of one layer's router while a teacher is made: 1 when all experts share alike, up to E/K.

    The share of tokens that each expert takes, times the mean probability it is given, summed, times the number of
    experts over K.
    """
    experts, k = logits.shape[-1], indices.shape[-1]
    probability = mx.softmax(logits.astype(mx.float32), axis=-1)
    weights = counted[..., None].astype(mx.float32)
    total = mx.maximum(weights.sum(), 1)
    hot = (indices[..., None] == mx.arange(experts)).any(axis=-2)
    taken = mx.stop_gradient((hot * weights).sum(axis=(0, 1)) / total)
    given = (probability * weights).sum(axis=(0, 1)) / total
    return (taken * given).sum() * experts / k
