"""An engine's own kernels: their threads, matrices as they want them, and the calls.

Every call is synchronous and eager: what goes in is evaluated, what comes out is there. Memory is not copied on the way
in: weights are the model's and the bank's own arrays, seen through numpy. Whoever calls holds the leases of what is
read. One thread at a time.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from edge0.errors import Edge0Error, ErrorKind
from edge0.families import EXPERT_BITS, GROUP_SIZE
from edge0.kernels.library import LINEAR, Linear, Mixture, load
from edge0.lazy import Array

Kind = Literal["int8", "exact"]


def seen(array: mx.array) -> np.ndarray:
    """The memory of an evaluated array, shared; bf16 as the integers that hold it."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def floats(array: Array) -> np.ndarray:
    """The values of fp32 activations in order, evaluated here; copied only where they lie out of order."""
    values = np.asarray(array)
    if values.dtype != np.float32:
        raise TypeError(f"kernels take fp32 activations, found {array.dtype}")
    return np.ascontiguousarray(values)


def address(array: np.ndarray) -> int:
    """Where an array's first element lies. Called twenty times a layer: numpy's own way takes a microsecond."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    except (TypeError, ValueError):  # memory that is not to be written, or none
        return array.__array_interface__["data"][0]


@dataclass(frozen=True)
class Correction:
    """An unmerged LoRA beside a matrix: `down` `[rank, in]`, `up` `[out, rank]`, kept in fp16, as files hold them."""

    down: np.ndarray
    up: np.ndarray
    scale: float


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix `[n, k]`, or a stack of them, in the form that C takes; keeps its arrays alive."""

    struct: Linear
    kept: tuple[np.ndarray, ...] = field(repr=False)
    pointer: object = field(repr=False)

    @classmethod
    def of(
        cls, weight: mx.array, scales: mx.array, biases: mx.array, bits: int, correction: Correction | None = None
    ) -> Matrix:
        """`weight` `[.., n, k * bits / 32]`, `scales` and `biases` `[.., n, k / 64]`, bf16 or fp32."""
        n, k = weight.shape[-2], weight.shape[-1] * 32 // bits
        if bits not in (EXPERT_BITS, 2 * EXPERT_BITS) or scales.shape[-1] * GROUP_SIZE != k:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "option kernels: a matrix is not quantised as the kernels want it",
                expected=f"{EXPERT_BITS} or {2 * EXPERT_BITS} bits in groups of {GROUP_SIZE}",
                found=f"{bits} bits, {scales.shape[-1]} groups of {k} columns",
                hint="use kernels=mlx",
            )
        parts = [seen(part) for part in (weight, scales, biases)]
        rank, extra = 0, (0, 0)
        if correction is not None:
            both = [np.ascontiguousarray(part, np.float16) for part in (correction.down, correction.up)]
            rank, extra = len(both[0]), tuple(address(part) for part in both)
            parts += both
        if not all(part.flags.c_contiguous for part in parts):
            raise ValueError("a matrix whose memory is not in order")
        scale = correction.scale if correction is not None else 0.0
        wide = int(parts[1].dtype == np.float32)
        struct = Linear(*(address(part) for part in parts[:3]), *extra, n, k, bits, wide, rank, scale)
        return cls(struct, tuple(parts), ctypes.pointer(struct))

    @property
    def n(self) -> int:
        return self.struct.n

    @property
    def k(self) -> int:
        return self.struct.k


class Group:
    """Matrices of equal input and bits that are applied together."""

    def __init__(self, matrices: Sequence[Matrix]):
        self.matrices = tuple(matrices)
        self.pointers = (LINEAR * len(matrices))(*(matrix.pointer for matrix in matrices))
        self.outputs = (ctypes.c_void_p * len(matrices))()


class Kernels:
    """The handle of one engine. `kind`: activations in 8 bits per group of 64, or fp32 as they are.

    Args:
        threads: with the caller's; None: as many as there are cores for this process.
        simd: use the variant for this processor where there is one; False: plain C.
    """

    def __init__(self, kind: Kind, threads: int | None = None, simd: bool = True):
        found = load()
        if found.loaded is None:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                f"option kernels: {kind} cannot be used ({found.reason})",
                hint="kernels=auto or mlx computes with MLX's own",
            )
        self.kind, self.variant = kind, found.variant if simd else "plain"
        self.library = found.loaded
        self.spent: Counter[str] = Counter()  # ns in each function since it was opened
        self.handle = self.library.edge0_open(threads or len(os.sched_getaffinity(0)), int(kind == "int8"), int(simd))
        if not self.handle:
            raise MemoryError("no memory for the kernels")
        self.threads = self.library.edge0_threads(self.handle)  # fewer than asked for where the system gave no more

    def close(self) -> None:
        """End the threads; no call may follow."""
        if self.handle:
            self.library.edge0_close(self.handle)
            self.handle = None

    def run(self, name: str, *arguments: Any) -> None:
        """Call one of the library's functions with this handle."""
        begun = time.monotonic_ns()
        getattr(self.library, name)(self.handle, *arguments)
        self.spent[name] += time.monotonic_ns() - begun

    @property
    def spent_ns(self) -> int:
        return self.spent.total()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    def linears(self, x: np.ndarray, group: Group) -> list[np.ndarray]:
        """`[t, k]` to `[t, n]` of each matrix."""
        results = [np.empty((len(x), matrix.n), np.float32) for matrix in group.matrices]
        group.outputs[:] = [address(result) for result in results]
        self.run("edge0_linears", address(x), len(x), len(results), group.pointers, group.outputs)
        return results

    def gated(self, x: np.ndarray, gate: Matrix, up: Matrix, down: Matrix, share: Matrix | None = None) -> np.ndarray:
        """`[t, k]` to `[t, n]`: down(silu(gate x) * up x), times sigmoid(share x) where there is one."""
        y = np.empty((len(x), down.n), np.float32)
        shared = None if share is None else share.pointer
        self.run("edge0_gated", gate.pointer, up.pointer, down.pointer, shared, address(x), len(x), address(y))
        return y

    def combine(
        self, x: np.ndarray, y: np.ndarray, weights: np.ndarray, shared: np.ndarray, clip: float | None
    ) -> np.ndarray:
        """`x + (weights y + shared)`, within +-`clip` and without NaN where that is given.

        `[t, D]`, `[t, K, D]`, `[t, K]` and `[t, D]` to `[t, D]`.
        """
        (t, k, width), out = y.shape, np.empty_like(x)
        inputs = (address(part) for part in (x, y, weights, shared))
        self.run("edge0_combine", *inputs, t, k, width, clip or 0.0, address(out))
        return out

    def mixture(
        self,
        x: np.ndarray,
        normed: np.ndarray,
        slots: np.ndarray,
        parts: Mixture,
        weights: np.ndarray,
        clip: float | None,
    ) -> np.ndarray:
        """What `experts` and `gated` of `normed` `[t, D]` come to by `combine` with `x` `[t, D]`, in one call.

        `slots` and `weights` are `[t, K]`.
        """
        out = np.empty_like(x)
        inputs = (address(x), address(normed), len(x), address(slots), slots.shape[1], address(weights))
        self.run("edge0_mixture", parts, *inputs, clip or 0.0, address(out))
        return out

    def experts(self, x: np.ndarray, slots: np.ndarray, gate: Matrix, up: Matrix, down: Matrix) -> np.ndarray:
        """`[t, D]` and `[t, K]` uint32 rows of the stacks to `[t, K, D]`, unweighted."""
        y = np.empty((*slots.shape, down.n), np.float32)
        self.run(
            "edge0_experts",
            gate.pointer,
            up.pointer,
            down.pointer,
            address(x),
            len(x),
            address(slots),
            slots.shape[1],
            address(y),
        )
        return y

    def dense(self, weight: np.ndarray, x: np.ndarray, gelu: bool = False) -> np.ndarray:
        """fp16 or fp32 `[count, n, k]` and `[count, t, k]` to `[count, t, n]`, through the exact gelu where wanted."""
        (count, n, k), t, half = weight.shape, x.shape[1], int(weight.dtype == np.float16)
        y = np.empty((count, t, n), np.float32)
        self.run("edge0_dense", address(weight), half, address(x), count, t, n, k, int(gelu), address(y))
        return y
