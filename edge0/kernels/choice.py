"""Who computes on this machine: what `EngineOptions.kernels` comes to, its name, and in which form it wants weights."""

from __future__ import annotations

import logging
import sys
from functools import cache

import mlx.core as mx

from edge0.errors import Edge0Error, ErrorKind
from edge0.kernels.library import load

MLX = "mlx"
log = logging.getLogger(__name__)


def resolve(kernels: str) -> str:
    """What `EngineOptions.kernels` comes to: "int8", "exact" or "mlx".

    Raises:
        Edge0Error: OPTION_INVALID when kernels are asked for by name that cannot run here.
    """
    if kernels == MLX:
        return kernels
    cpu = mx.default_device() == mx.Device(mx.cpu)
    if kernels == "auto":
        if cpu and load().loaded is None and sys.platform.startswith("linux"):
            _warn(load().reason)
        return "int8" if cpu and load().loaded is not None else MLX
    if not cpu or load().loaded is None:
        reason = load().reason if cpu else "MLX computes on a GPU"
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            f"option kernels: {kernels} cannot be used ({reason})",
            hint="kernels=auto or mlx computes with MLX's own",
        )
    return kernels


@cache
def _warn(reason: str) -> None:
    """Once in a process: kernels were to be had here, and are missing."""
    log.warning("no CPU kernels (%s): MLX's own operations are used, which are several times slower", reason)


def kernel_name(kernels: str) -> str:
    """As rows name what computes: `mlx`, `int8-avx2`, `exact-plain`.

    Raises:
        Edge0Error: as `resolve`.
    """
    kind = resolve(kernels)
    return kind if kind == MLX else f"{kind}-{load().variant}"


def scale_dtype(kernels: str, activations: mx.Dtype) -> mx.Dtype:
    """In which dtype the scales and biases of quantised weights stay in memory: MLX wants them as activations are, the
    kernels as files hold them.

    Raises:
        Edge0Error: as `resolve`.
    """
    return activations if resolve(kernels) == MLX else mx.bfloat16
