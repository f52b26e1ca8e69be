"""The two routing laws (paper section 3.2; mlx-lm's own operations, in its order, so that bits agree).

softmax          softmax over all experts, the K largest, their shares renormalised.
sigmoid groups   sigmoid; groups are chosen by the sum of their two best scores, experts within them. A bias takes part
                 in the selection and never in the weight.

`Router` is made once per model; it serves the model's own logits and a head's predicted ones. Knows nothing of
layers, slots or where logits come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.bailing_moe_v3 import _group_expert_select

from edge0.families import ModelConfig


@dataclass(frozen=True)
class Router:
    """Logits `[..., E]` to (indices `[..., K]` uint32, weights `[..., K]`); see the module for the law."""

    law: str
    k: int
    groups: int
    groups_kept: int
    scale: float

    @classmethod
    def of(cls, config: ModelConfig, k: int) -> Router:
        """
        Raises:
            Edge0Error: K_INVALID.
        """
        scale = float(config.text.get("routed_scaling_factor", 1.0))
        return cls(config.family.router, config.check_k(k), config.groups, config.groups_kept, scale)

    def __call__(
        self, logits: mx.array, bias: mx.array | None = None, forced: np.ndarray | None = None
    ) -> tuple[mx.array, mx.array]:
        """Route. `bias` `[E]` is the model's own expert bias; predicted logits are routed without one.

        `forced` `[..., K]`: the experts to route to. The router chooses as ever, so that nobody can look at the route
        any earlier than without, and its choice is dropped.
        """
        if forced is not None:
            chosen, _ = self(logits, bias)
            forced = mx.depends(mx.array(forced), chosen)
            return forced, self.weigh(logits, forced)
        if self.law == "softmax":
            return softmax_topk(logits, self.k)
        if bias is None:
            bias = mx.zeros((logits.shape[-1],), dtype=mx.float32)
        return _group_expert_select(logits, bias, self.k, self.groups, self.groups_kept, self.scale)

    def weigh(self, logits: mx.array, indices: mx.array) -> mx.array:
        """The weights `[..., K]` that the law gives to these experts, had it chosen them. No bias takes part."""
        if self.law == "softmax":
            return softmax_weights(mx.softmax(logits, axis=-1, precise=True), indices)
        selected = mx.take_along_axis(mx.sigmoid(logits.astype(mx.float32)), indices, axis=-1)
        return selected / (selected.sum(axis=-1, keepdims=True) + 1e-20) * self.scale


def softmax_topk(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The K largest softmax shares, renormalised to one."""
    shares = mx.softmax(logits, axis=-1, precise=True)
    indices = mx.stop_gradient(mx.argpartition(shares, kth=-k, axis=-1)[..., -k:])
    return indices, softmax_weights(shares, indices)


def softmax_weights(shares: mx.array, indices: mx.array) -> mx.array:
    """Shares of some experts, renormalised to one."""
    weights = mx.take_along_axis(shares, indices, axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True)


def multi_hot(indices: mx.array, experts: int, dtype: mx.Dtype) -> mx.array:
    """`[..., K]` expert indices to `[..., E]` ones and zeros."""
    zeros = mx.zeros((*indices.shape[:-1], experts), dtype=dtype)
    return mx.put_along_axis(zeros, indices, mx.array(1, dtype=dtype), axis=-1)
