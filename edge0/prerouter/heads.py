"""Prerouter heads: small networks that predict, one token ahead, which experts the next layer will use (section 3.2).

Head N reads the hidden state that enters layer N's experts, what layer N executed for this token and for the one
before, and gives router logits for layer N+1 at the next token. Heads run batched, one matrix product per weight for
all heads of a launch group. They do not know the routing law, nor whether the prediction will be obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from edge0.checkpoint.adapters import Adapter
from edge0.checkpoint.arrays import load_arrays, reading
from edge0.checkpoint.schema import head_tensors
from edge0.families import ModelConfig
from edge0.lazy import Array
from edge0.routing import multi_hot

PARTS = ("fc1", "fc2", "linear_init")


class Heads:
    """The heads of some owners, stacked per group.

    Args:
        groups: tuples of owners that are evaluated together.
        dtype: of features and weights (files hold F16).

    Raises:
        Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH, ADAPTER_MISMATCH when the file does not fit the model;
            READ_FAILED, FILE_CHANGED when it cannot be read or is no longer the same.
    """

    def __init__(
        self,
        adapter: Adapter,
        config: ModelConfig,
        groups: tuple[tuple[int, ...], ...],
        dtype: mx.Dtype,
    ):
        self._experts, self._dtype = config.experts, dtype
        entries = adapter.find(head_tensors(config, adapter.owners, adapter.inner_width))
        with reading([adapter.header]):
            arrays = load_arrays(entries)
            self._stacks = {
                owners: [_stack(arrays, owners, part, dtype) for part in PARTS] for owners in groups if owners
            }
            mx.eval(self._stacks)

    def __call__(self, owners: tuple[int, ...], features: Array) -> Array:
        """`[G, T, F]` features of one group to `[G, T, E]` logits."""
        return _apply(features, *self._stacks[owners])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for stack in self._stacks.values() for array in stack)

    def features(self, xs: Sequence[Array], executed: Sequence[Array], previous: Sequence[Array]) -> Array:
        """Of each owner `[1, T, D]`, `[1, T, E]` ones and zeros of this token, the same of the token before; together
        `[G, T, D + 2E]`."""
        parts = zip((x.astype(self._dtype) for x in xs), executed, previous, strict=True)
        return mx.concatenate([mx.concatenate(part, axis=-1) for part in parts])

    def one_hot(self, indices: Array) -> Array:
        """`[..., K]` executed experts to `[..., E]`."""
        return multi_hot(indices, self._experts, self._dtype)

    def no_history(self) -> Array:
        """`[1, 1, E]`: the token before, where there is none."""
        return mx.zeros((1, 1, self._experts), dtype=self._dtype)


def head_logits(tensors: Mapping[str, mx.array], owner: int, features: mx.array) -> mx.array:
    """`[..., F]` features to `[..., E]` logits of one head, its weights by the names and shapes of an adapter file."""
    return _apply(features, *(tensors[f"layers.{owner}.{part}.weight"].T for part in PARTS))


def _apply(features: mx.array, fc1: mx.array, fc2: mx.array, linear: mx.array) -> mx.array:
    """L f + W2 gelu(W1 f), exact gelu, no biases (paper section 3.2)."""
    return features @ linear + nn.gelu(features @ fc1) @ fc2


def _stack(arrays: dict[str, mx.array], owners: tuple[int, ...], part: str, dtype: mx.Dtype) -> mx.array:
    """One weight of all these owners' heads, transposed: `[G, in, out]`."""
    return mx.stack([arrays[f"layers.{owner}.{part}.weight"] for owner in owners]).astype(dtype).swapaxes(-1, -2)
