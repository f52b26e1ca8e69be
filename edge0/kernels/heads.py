"""Prerouter heads by the kernels: features in numpy, weights as files hold them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from edge0.checkpoint.adapters import Adapter
from edge0.families import ModelConfig
from edge0.kernels.runner import Kernels, floats
from edge0.lazy import Array
from edge0.prerouter.heads import Heads
from edge0.trace import multi_hot


class KernelHeads(Heads):
    """As `Heads`, with arrays of numpy."""

    def __init__(self, adapter: Adapter, config: ModelConfig, groups: tuple[tuple[int, ...], ...], kernels: Kernels):
        super().__init__(adapter, config, groups, mx.float16)
        self._kernels = kernels
        # A stack is a view of matrices [out, in], whose rows are what the kernels want.
        self._rows = {
            owners: [np.asarray(part.swapaxes(-1, -2)) for part in stack] for owners, stack in self._stacks.items()
        }

    def __call__(self, owners: tuple[int, ...], features: Array) -> np.ndarray:
        fc1, fc2, linear = self._rows[owners]
        x, dense = floats(features), self._kernels.dense
        return dense(linear, x) + dense(fc2, dense(fc1, x, gelu=True))

    def features(self, xs: Sequence[Array], executed: Sequence[Array], previous: Sequence[Array]) -> np.ndarray:
        parts = zip((floats(x) for x in xs), executed, previous, strict=True)
        return np.concatenate([np.concatenate(part, axis=-1) for part in parts])

    def one_hot(self, indices: np.ndarray) -> np.ndarray:
        return multi_hot(indices, self._experts, np.float32)

    def no_history(self) -> np.ndarray:
        return np.zeros((1, 1, self._experts), np.float32)
