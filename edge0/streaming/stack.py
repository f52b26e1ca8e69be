"""The paper's way of holding experts, kept as a labelled arm: nine tensors stacked out of bundles for every step.

Each request builds nine stacked tensors out of its experts' bundles (paper section 3.1, appendix B). Same interface as
the bank; nothing is read before `wait`, which is what makes a prediction's fill synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from edge0.streaming.bundles import Bundles, stacked


class StackLease:
    """Some experts of one layer; `wait` reads what is missing and stacks."""

    def __init__(self, store: StackStore, layer: int, experts: np.ndarray, purpose: str):
        self.layer, self.experts, self.purpose = layer, experts, purpose
        self.slots = np.arange(len(experts), dtype=np.uint32)
        self.stacks: Sequence[mx.array] = ()
        self._store = store

    @property
    def waits(self) -> bool:
        return not self.stacks

    def ready(self) -> np.ndarray:
        """Nothing computes ahead of its neighbours here: a step's stack is built of all its experts at once."""
        return np.zeros(len(self.experts), bool)

    def wait(self) -> None:
        """
        Raises:
            Edge0Error: READ_FAILED.
        """
        if not self.stacks:
            self.stacks, self.slots = self._store.stacks(self.layer, self.experts, self.purpose)

    def release(self) -> None:
        self.stacks = ()


class StackStore:
    """Stacks anew for every request, out of an LRU of bundles."""

    def __init__(self, bundles: Bundles):
        self._bundles = bundles
        self.capacity = bundles.capacity
        self.nbytes = bundles.capacity * bundles.bundle_bytes

    def request(self, layer: int, experts: np.ndarray, purpose: str) -> StackLease:
        return StackLease(self, layer, experts, purpose)

    def stacks(self, layer: int, experts: np.ndarray, purpose: str) -> tuple[list[mx.array], np.ndarray]:
        """Nine evaluated tensors that hold some experts (distinct ids), and the row of each.

        Raises:
            Edge0Error: READ_FAILED.
        """
        rows = np.arange(len(experts), dtype=np.uint32)
        return stacked(self._bundles.of(layer, experts.tolist(), purpose)), rows

    def held(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """Nothing is known to be there before somebody waits for it."""
        return np.zeros(len(experts), bool)

    def kept(self, layer: int) -> int:
        return 0

    @property
    def available(self) -> int:
        return self.capacity

    def buffer_free(self, buffer: int) -> bool:
        """There are no layer buffers."""
        return False
