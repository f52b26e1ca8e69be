"""Attention over a long prompt, a few tokens at a time, so that its temporaries do not grow with the prompt.

Without a fused kernel (on CPU) attention writes out a score for every pair of tokens, and linear attention keeps one
state per token alive. A prompt's chunk wants to be long, for each chunk reads the experts anew; so attention alone is
cut. The caches make a piece continue where the one before ended: the bits are those of the whole. Knows nothing of
experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edge0.streaming.prefill import even_cuts

Mask = mx.array | str | None


class InPieces(nn.Module):
    """An attention module that is given at most `tokens` tokens at a time; a piece is never a single token.

    Args:
        make_mask: (the piece, the layer's cache) to the mask that the module wants for it.
    """

    def __init__(self, inner: nn.Module, tokens: int, make_mask: Callable[[mx.array, Any], Mask]):
        super().__init__()
        self.inner, self.tokens, self.make_mask = inner, tokens, make_mask

    def __call__(self, x: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        length = x.shape[1]
        if length <= self.tokens:
            return self.inner(x, mask, cache)
        outputs = []
        for cut in even_cuts(length, self.tokens):
            piece = x[:, cut]
            outputs.append(self.inner(piece, self.make_mask(piece, cache), cache))
            mx.eval(outputs[-1], cache.state)
        return mx.concatenate(outputs, axis=1)
