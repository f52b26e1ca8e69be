"""Stock mlx-lm with every expert in memory, computed by MLX's operations or by the engine's kernels.

With kernels the forward pass is still mlx-lm's own: its layers and leaves are the ones that the engine has, and its
experts are applied where they lie. What the engine does beyond that (slots, leases, looking whether an expert is there)
is the difference between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from edge0 import models
from edge0.checkpoint.header import CheckpointIndex
from edge0.families import ModelConfig
from edge0.kernels.choice import MLX, resolve, scale_dtype
from edge0.kernels.modules import KernelExperts, Routed
from edge0.kernels.router import KernelRouter
from edge0.kernels.runner import Kernels
from edge0.kernels.swap import use_kernels
from edge0.lazy import as_mlx
from edge0.routing import Router
from edge0.streaming.moe import StreamedMoE


def open_resident(
    directory: Path, config: ModelConfig, k: int, kernels: str = MLX, threads: int | None = None
) -> tuple[models.Model, Kernels | None]:
    """The model, no adapters, choosing `k` experts a token; and the handle that must be closed with it.

    Raises:
        Edge0Error: what `models.load` raises; OPTION_INVALID when kernels are asked for that cannot run here.
    """
    kind, scales = resolve(kernels), scale_dtype(kernels, models.activation_dtype())
    model = models.load(directory, _choosing(config, k), CheckpointIndex.open(directory), streamed=False, scales=scales)
    if kind == MLX:
        return model, None
    handle = Kernels(kind, threads)
    router = KernelRouter(Router.of(config, k), handle)
    for block in models.replace_moe(model).values():
        parts = (block.switch_mlp[name] for name in ("gate_proj", "up_proj", "down_proj"))
        stacks = [array for part in parts for array in (part.weight, part.scales, part.biases)]
        block.executor = _InPlace(router, KernelExperts(handle, stacks), stacks)
    use_kernels(model, handle, None)
    return model, handle


def logits_of(model: models.Model, tokens: Sequence[int], cache: list) -> mx.array:
    """`[vocab]` after the last of some tokens."""
    return as_mlx(model(mx.array([tokens]), cache)[0, -1])


class _InPlace:
    """Routed experts of one layer, all of them there."""

    def __init__(self, router: KernelRouter, experts: KernelExperts, stacks: list[mx.array]):
        self._router, self._experts, self._stacks = router, experts, stacks

    def __call__(self, block: StreamedMoE, x: np.ndarray, shared: None) -> tuple[Routed, np.ndarray]:
        indices, weights = self._router(block.logits(x), block.bias())
        return self._experts.later(x, indices, self._stacks), weights


def _choosing(config: ModelConfig, k: int) -> ModelConfig:
    """The config of the same model with `k` experts per token."""
    key, text = config.family.config_key, {**config.text, "num_experts_per_tok": k}
    return dataclasses.replace(config, text=text, raw=text if key is None else {**config.raw, key: text})
