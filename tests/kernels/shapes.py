"""Random quantised matrices with their fp64 values, and the bounds that results must keep."""

import mlx.core as mx
import numpy as np

from edge0.kernels.runner import Correction, Matrix

BOUND = {"int8": 1e-2, "exact": 1e-6}  # relative L2 of a product of real size
FEW = {"int8": 3e-2, "exact": 5e-6}  # of any size: a mean over few values, or products one after another


def packed(rng, n, k, bits=4, wide=False, stack=(), rank=0):
    """A matrix `[*stack, n, k]` and its values, correction included, of about unit gain."""
    plain = mx.array(rng.normal(size=(*stack, n, k)).astype(np.float32) / np.sqrt(k))
    dtype = mx.float32 if wide else mx.bfloat16
    weight, *factors = mx.quantize(plain, 64, bits)
    scales, biases = (part.astype(mx.bfloat16).astype(dtype) for part in factors)
    mx.eval(weight, scales, biases)
    codes = (np.array(weight)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    s, b = (np.repeat(np.array(part.astype(mx.float32)).astype(np.float64), 64, -1) for part in (scales, biases))
    values = codes.reshape(plain.shape) * s + b
    correction = None
    if rank:
        down, up = (rng.normal(size=size) / 4 for size in ((rank, k), (n, rank)))
        correction = Correction((down / np.sqrt(k)).astype(np.float16), up.astype(np.float16), 2.0)
        values = values + 2.0 * correction.up.astype(np.float64) @ correction.down.astype(np.float64)
    return Matrix.of(weight, scales, biases, bits, correction), values, (weight, scales, biases)


def activations(rng, t, k):
    return rng.normal(size=(t, k)).astype(np.float32)


def distance(found, expected):
    """Relative L2; few values may by chance be small, and count as values of unit size then."""
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), np.sqrt(expected.size))


def silu(x):
    return x / (1 + np.exp(-x))
