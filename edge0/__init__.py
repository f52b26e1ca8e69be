"""Edge0: serves mixture-of-experts models from SSD with trained routing prediction.

The public API: open an `Engine` on a checkpoint directory with `EngineOptions`, make a request, `prefill`, `step`, or
`generate`; `synthesise` makes a checkpoint that needs no download. Every expected failure is an `Edge0Error`.
"""

from edge0.checkpoint.synth import synthesise
from edge0.engine import Engine, Request
from edge0.errors import Edge0Error, ErrorKind
from edge0.options import EngineOptions
from edge0.sampling import Sampling
from edge0.tiers import TIERS, find_tier

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
