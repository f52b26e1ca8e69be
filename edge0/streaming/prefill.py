"""Whole layers for long prompts: which layers of a chunk are read whole, and the hand-over of the two layer buffers.

A chunk of T tokens is expected to touch the share 1-(1-K/E)^T of a layer's experts (design, section 3 rule 10). Where
that is nearly all of them, reading the layer from end to end beats waiting for its router: the next layer is read while
this one computes, in nine long reads (paper section 3.1). Knows nothing of routers, arithmetic or MLX.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

WHOLE_LAYER_FROM = 0.9  # expected share of a layer's bytes, read on demand, from which the whole layer is read


def expected_coverage(k: int, experts: int, tokens: int) -> float:
    """Share of `experts` that `tokens` tokens are expected to route to, `k` each, were all equally likely."""
    return 1 - (1 - k / experts) ** tokens


class LayerLease(Protocol):
    slots: np.ndarray  # of the experts, in order

    def wait(self) -> None: ...
    def release(self) -> None: ...


class LayerStore(Protocol):
    def held(self, layer: int, experts: np.ndarray) -> np.ndarray: ...
    def buffer_free(self, buffer: int) -> bool: ...
    def request_layer(self, layer: int, buffer: int) -> LayerLease: ...


def whole_layers(store: LayerStore, layers: Iterable[int], experts: int, k: int, tokens: int, way: str) -> list[int]:
    """The layers of one chunk that are read whole: where on demand most of their bytes would be read anyway.

    Args:
        way: "auto", or "whole-layer" or "ondemand" for all layers. None are read whole where the store has no two
            free layer buffers.
    """
    if way == "ondemand" or tokens < 2 or not (store.buffer_free(0) and store.buffer_free(1)):
        return []
    if way == "whole-layer":
        return list(layers)
    coverage = expected_coverage(k, experts, tokens)
    every = np.arange(experts)
    return [layer for layer in layers if coverage * (1 - store.held(layer, every).mean()) >= WHOLE_LAYER_FROM]


class WholeLayers:
    """The layers of one chunk that are read whole: at most one in use and one on its way."""

    def __init__(self, store: LayerStore, layers: Iterable[int]):
        self._store, self._ahead = store, list(layers)
        self._number = 0
        self._current: LayerLease | None = None
        self._following: LayerLease | None = None
        self._read_ahead()

    def __contains__(self, layer: int) -> bool:
        return bool(self._ahead) and layer == self._ahead[0]

    def enter(self) -> LayerLease:
        """The next layer's lease; the one after it starts to be read into the buffer that was in use until now.

        The caller has evaluated every graph that reads the layer before.
        """
        self.leave()
        self._current, self._following = self._following, None
        self._ahead.pop(0)
        self._read_ahead()
        return self._current

    def leave(self) -> None:
        """Let go of the layer in use; every graph that reads it was evaluated."""
        if self._current is not None:
            self._current.release()
            self._current = None

    def release(self) -> None:
        """Let go of everything: the chunk has ended, or failed."""
        self.leave()
        self._ahead = []
        if self._following is not None:
            self._following.release()
            self._following = None

    def _read_ahead(self) -> None:
        if self._ahead:
            self._following = self._store.request_layer(self._ahead[0], self._number % 2)
            self._number += 1
