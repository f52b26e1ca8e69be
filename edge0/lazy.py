"""Arrays that are there already and arrays that are still to be computed, handled alike.

MLX's arrays are lazy: a graph is built, started and awaited. The kernels compute while they are called and return
numpy's. What stands between two layers works on either and never turns one into the other: that costs more than most
of what is done there. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

Array = mx.array | np.ndarray


def start(*arrays: Array) -> None:
    """Have MLX begin with what is not there yet."""
    if pending := [array for array in arrays if isinstance(array, mx.array)]:
        mx.async_eval(*pending)


def finish(*arrays: Array) -> None:
    """Wait until all of them are there."""
    if pending := [array for array in arrays if isinstance(array, mx.array)]:
        mx.eval(*pending)


def take(array: Array, positions: np.ndarray, axis: int) -> Array:
    """A copy of some positions along an axis."""
    if isinstance(array, mx.array):
        return mx.take(array, mx.array(positions), axis)
    return array.take(positions, axis)


def joined(arrays: Sequence[Array], axis: int) -> Array:
    """One after another along an axis."""
    return mx.concatenate(arrays, axis) if isinstance(arrays[0], mx.array) else np.concatenate(arrays, axis)


def as_mlx(array: Array) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)
