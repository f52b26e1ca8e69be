"""The routing laws on the host, in numpy: ten small MLX operations cost more than the few hundred scores they work on.

The same choices and weights as `routing.Router`, to the last digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge0.kernels.runner import floats
from edge0.lazy import Array
from edge0.routing import Router


@dataclass(frozen=True)
class HostRouter(Router):
    """As `Router`, to arrays of numpy."""

    def __call__(
        self, logits: Array, bias: np.ndarray | None = None, forced: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        values = floats(logits)
        rows = values.reshape(-1, values.shape[-1])
        shares = self._shares(rows)
        chosen = self._choose(shares, bias) if forced is None else forced.reshape(len(rows), -1)
        shape = (*values.shape[:-1], chosen.shape[-1])
        return chosen.astype(np.uint32).reshape(shape), self._weights(shares, chosen).reshape(shape)

    def weigh(self, logits: Array, indices: np.ndarray) -> np.ndarray:
        return self(logits, forced=indices)[1]

    def _shares(self, rows: np.ndarray) -> np.ndarray:
        """What the law makes of each expert's logit, `[T, E]`."""
        if self.law == "softmax":
            powers = np.exp(rows - rows.max(-1, keepdims=True))
            return powers / powers.sum(-1, keepdims=True)
        with np.errstate(over="ignore"):  # a share of 0 is meant
            return 1 / (1 + np.exp(-rows))

    def _choose(self, shares: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        if self.law == "softmax":
            return np.argpartition(shares, -self.k, axis=-1)[:, -self.k :]
        scores = shares if bias is None else shares + bias
        grouped = scores.reshape(len(scores), self.groups, -1).copy()
        best = np.partition(grouped, -2, axis=-1)[..., -2:].sum(-1)
        dropped = self.groups - self.groups_kept
        if dropped:
            groups = np.argpartition(best, dropped - 1, axis=-1)[:, :dropped]
            grouped[np.arange(len(grouped))[:, None], groups] = -np.inf
        return np.argpartition(-grouped.reshape(len(scores), -1), self.k - 1, axis=-1)[:, : self.k]

    def _weights(self, shares: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        selected = shares[np.arange(len(shares))[:, None], chosen]
        if self.law == "softmax":
            return selected / selected.sum(-1, keepdims=True)
        return selected / (selected.sum(-1, keepdims=True) + np.float32(1e-20)) * np.float32(self.scale)
