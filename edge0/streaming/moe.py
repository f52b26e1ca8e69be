"""The module that takes the place of a mixture-of-experts block, for both families.

It keeps the block's router and shared expert (they stay resident) and hands the routed experts to an *executor*,
which the engine sets. The position `layer.mlp` is the whole cut into mlx-lm's models: its input is the hidden state
after the post-attention norm, which is also what a prerouter head wants (paper section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from edge0.lazy import Array

# (block, x [B, T, D], the shared expert's output) -> (expert outputs [B, T, K, D], weights [B, T, K])
Apply = Callable[["StreamedMoE", Array, Array | None], tuple[Array, Array]]
Gated = Callable[[Array], Array]


class StreamedMoE(nn.Module):
    """Common part; a family says how it computes router logits and its shared expert."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer
        self.executor: Apply | None = None

    def logits(self, x: Array) -> Array:
        """The model's own router: `[..., D]` to `[..., E]`."""
        raise NotImplementedError

    def bias(self) -> Array | None:
        """The selection bias `[E]` of the model's own router, if it has one."""
        return None

    def shared(self, x: Array) -> Array:
        """The shared expert's output."""
        raise NotImplementedError

    def use_kernels(self, gated: Callable[..., Gated]) -> Gated:
        """Have the shared expert computed by own kernels: what does. `gated`: (a gated MLP[, its gate]) to that."""
        raise NotImplementedError

    def __call__(self, x: mx.array) -> mx.array:
        shared = self.shared(x)
        outputs, weights = self.executor(self, x, shared)
        routed = (outputs * weights[..., None]).sum(axis=-2).astype(x.dtype)
        return routed + shared
