"""Giving freed memory back to the system.

MLX keeps freed buffers for reuse, and the C library keeps the heap that they lay in. Attention caches grow by replacing
their buffers with larger ones, so that a long request would leave a trail of smaller ones behind.
"""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx

CACHE_STEP_TOKENS = 256  # by which mlx-lm's attention caches grow

# glibc alone has it: musl and macOS give memory back by themselves.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def release_freed_memory() -> None:
    """Takes some milliseconds. Called by the engine thread."""
    mx.clear_cache()
    if _trim is not None:
        _trim(0)
