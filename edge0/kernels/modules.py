"""Modules that take the place of mlx-lm's own leaves: the same call, computed by the kernels.

They take arrays of MLX or numpy and return numpy's, so that between layers nothing is turned into MLX and back. Knows
matrices and adapters; not where in a model a leaf stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear

from edge0.checkpoint.synth import from_bf16
from edge0.families import EXPERT_BITS
from edge0.kernels.runner import Correction, Group, Kernels, Matrix, floats, seen
from edge0.lazy import Array


def matrix(module: nn.Module) -> Matrix:
    """A quantised linear layer, with or without a LoRA beside it.

    Raises:
        Edge0Error: OPTION_INVALID for another quantisation.
    """
    correction = None
    if isinstance(module, LoRALinear):
        down, up = np.asarray(module.lora_a).T, np.asarray(module.lora_b).T
        correction, module = Correction(down, up, module.scale), module.linear
    return Matrix.of(module.weight, module.scales, module.biases, module.bits, correction)


def rows(x: Array) -> np.ndarray:
    """`[..., D]` activations as `[t, D]`, evaluated."""
    return floats(x).reshape(-1, x.shape[-1])


class KernelLinear:
    """A quantised linear layer."""

    def __init__(self, kernels: Kernels, module: nn.Module):
        self._kernels, self._group = kernels, Group([matrix(module)])

    def __call__(self, x: Array) -> np.ndarray:
        (y,) = self._kernels.linears(rows(x), self._group)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class KernelEmbedding:
    """Rows of a quantised table, each exact in fp32, in numpy."""

    def __init__(self, module: nn.QuantizedEmbedding):
        self._words, scales, biases = (seen(part) for part in (module.weight, module.scales, module.biases))
        self._factors = scales, biases
        self._places = np.arange(0, 32, module.bits, dtype=np.uint32)
        self._mask = np.uint32((1 << module.bits) - 1)

    def __call__(self, tokens: mx.array) -> np.ndarray:
        """`[..., T]` to `[..., T, D]`."""
        rows = np.asarray(tokens)
        codes = self._words[rows][..., None] >> self._places & self._mask
        factors = (part[rows][..., None] for part in self._factors)
        scales, biases = (from_bf16(part) if part.dtype == np.uint16 else part for part in factors)
        values = codes.astype(np.float32).reshape(*scales.shape[:-1], -1) * scales + biases
        return values.reshape(*rows.shape, -1)


class KernelGated:
    """A gated MLP: a shared expert, or a dense layer. `share`: the gate `[1, D]` of a shared expert that has one."""

    def __init__(self, kernels: Kernels, module: nn.Module, share: nn.Module | None = None):
        self._kernels = kernels
        parts = [module.gate_proj, module.up_proj, module.down_proj, *([share] if share is not None else [])]
        self.parts = [matrix(part) for part in parts]

    def __call__(self, x: Array) -> np.ndarray:
        return self._kernels.gated(rows(x), *self.parts).reshape(x.shape)


class HostNorm:
    """The RMS norm before the output matrix, in numpy."""

    def __init__(self, norm: nn.RMSNorm):
        self._weight, self._eps = floats(norm.weight), np.float32(norm.eps)

    def __call__(self, x: Array) -> np.ndarray:
        values = floats(x)
        squares = np.mean(np.square(values), axis=-1, keepdims=True)
        return values / np.sqrt(squares + self._eps) * self._weight


class KernelGate:
    """8b's router, a plain matrix; `expert_bias` `[E]` takes part in the choice."""

    def __init__(self, kernels: Kernels, gate: nn.Module):
        self.expert_bias = floats(gate.expert_bias.astype(mx.float32))
        self._kernels, self._weight = kernels, floats(gate.weight)[None]

    def __call__(self, x: Array) -> np.ndarray:
        (y,) = self._kernels.dense(self._weight, rows(x)[None])
        return y.reshape(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class Routed:
    """Experts that are to be applied: rows `[t, K]` of three stacks. What reads them is one call with all that a layer
    adds up; until then their leases are held."""

    slots: np.ndarray
    matrices: Sequence[Matrix]


class KernelExperts:
    """`streaming.experts.expert_mlp` by the kernels.

    Args:
        bank: stacks that stay for as long as this; others are looked at anew by each call, and not kept.
    """

    def __init__(self, kernels: Kernels, bank: Sequence[mx.array] | None):
        self._kernels, self._bank = kernels, bank
        self._matrices = _matrices(bank) if bank is not None else []

    def __call__(self, x: Array, positions: np.ndarray, stacks: Sequence[mx.array]) -> np.ndarray:
        """`[..., D]`, `[..., K]` rows of the nine stacks to `[..., K, D]`, unweighted."""
        routed = self.later(x, positions, stacks)
        y = self._kernels.experts(rows(x), routed.slots, *routed.matrices)
        return y.reshape(*positions.shape, x.shape[-1])

    def later(self, x: Array, positions: np.ndarray, stacks: Sequence[mx.array]) -> Routed:
        """The same, left to the layer that asks (`layers.KernelLayer`)."""
        matrices = self._matrices if stacks is self._bank else _matrices(stacks)
        return Routed(np.ascontiguousarray(positions, np.uint32).reshape(-1, positions.shape[-1]), matrices)


def _matrices(stacks: Sequence[mx.array]) -> list[Matrix]:
    return [Matrix.of(*part, EXPERT_BITS) for part in (stacks[0:3], stacks[3:6], stacks[6:9])]
