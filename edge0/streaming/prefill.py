"""Whole layers for long prompts: which layers of a chunk are read whole, and the hand-over of the two layer buffers.

A chunk of T tokens is expected to touch the share 1-(1-K/E)^T of a layer's experts (design, section 3 rule 10). Where
that is nearly all of them, reading the layer from end to end beats waiting for its router: the next layer is read while
this one computes, in nine long reads (paper section 3.1). Knows nothing of routers, arithmetic or MLX.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from edge0.errors import Edge0Error, ErrorKind

WHOLE_LAYER_FROM = 0.9  # expected share of a layer's bytes, read on demand, from which the whole layer is read


def even_cuts(length: int, most: int) -> list[slice]:
    """As few runs of at most `most` items as there can be, of nearly equal length: no short one at the end.

    A single token is a run only where that cannot be avoided; some attention takes it by another path, with other bits.
    """
    count = -(-length // most)
    edges = [length * number // count for number in range(count + 1)]
    return [slice(start, end) for start, end in zip(edges, edges[1:], strict=False)]


def expected_coverage(k: int, experts: int, tokens: int) -> float:
    """Share of `experts` that `tokens` tokens are expected to route to, `k` each, were all equally likely."""
    return 1 - (1 - k / experts) ** tokens


class LayerLease(Protocol):
    slots: np.ndarray  # of the experts, in order

    def wait(self) -> None: ...
    def release(self) -> None: ...


class LayerStore(Protocol):
    capacity: int  # experts

    def held(self, layer: int, experts: np.ndarray) -> np.ndarray: ...
    def kept(self, layer: int) -> int: ...
    def buffer_free(self, buffer: int) -> bool: ...
    def request_layer(self, layer: int, buffer: int) -> LayerLease: ...


def whole_layers(store: LayerStore, layers: Iterable[int], experts: int, k: int, tokens: int, way: str) -> list[int]:
    """The layers of one chunk that are read whole: where on demand most of their bytes would be read anyway.

    Args:
        way: "auto", or "whole-layer" or "ondemand" for all layers. "auto" reads none whole where the store has no two
            free layer buffers, or room for all layers.

    Raises:
        Edge0Error: BANK_TOO_SMALL when whole layers were asked for and another request holds a buffer.
    """
    if way == "ondemand" or tokens < 2:
        return []
    free = store.buffer_free(0) and store.buffer_free(1)
    if way == "whole-layer":
        if not free:
            raise Edge0Error(
                ErrorKind.BANK_TOO_SMALL,
                "whole layers were asked for, and another request holds part of a layer buffer",
                hint="release that request, or leave the choice to prefill=auto",
            )
        return list(layers)
    coverage, every, layers = expected_coverage(k, experts, tokens), np.arange(experts), list(layers)
    keeps_all = store.capacity >= len(layers) * experts  # then on demand reads each expert once and for all
    if (
        not free
        or keeps_all
        or all(coverage * (1 - store.held(layer, every).mean()) < WHOLE_LAYER_FROM for layer in layers)
    ):
        return []
    # Some layer will be read whole, over whatever lies in the buffers now: only what lies elsewhere stays.
    return [layer for layer in layers if coverage * (1 - store.kept(layer) / experts) >= WHOLE_LAYER_FROM]


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
