"""Edge0: serves mixture-of-experts models from SSD with trained routing prediction.

The public API: open an `Engine` on a checkpoint directory with `EngineOptions`, make a request, `prefill`, `step`, or
`generate`; `synthesise` makes a checkpoint that needs no download. Every expected failure is an `Edge0Error`. Names are
loaded on first use, so that commands which need no model do not wait for MLX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge0.checkpoint.synth import synthesise
    from edge0.engine import Engine
    from edge0.errors import Edge0Error, ErrorKind
    from edge0.options import EngineOptions
    from edge0.request import Request
    from edge0.sampling import Sampling
    from edge0.tiers import TIERS, find_tier

_HOME = {
    "TIERS": "tiers",
    "Edge0Error": "errors",
    "Engine": "engine",
    "EngineOptions": "options",
    "ErrorKind": "errors",
    "Request": "request",
    "Sampling": "sampling",
    "find_tier": "tiers",
    "synthesise": "checkpoint.synth",
}

__all__ = [
    "TIERS",
    "Edge0Error",
    "Engine",
    "EngineOptions",
    "ErrorKind",
    "Request",
    "Sampling",
    "find_tier",
    "synthesise",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"edge0.{_HOME[name]}"), name)
    raise AttributeError(f"module 'edge0' has no attribute {name!r}")
