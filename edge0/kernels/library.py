"""Finds the built kernels, loads them, and says which variant runs here and why.

The library is plain C without Python or MLX in it: ctypes calls it, nothing is pinned to a version of either, and an
install without a compiler merely lacks it. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class Linear(ctypes.Structure):
    """A quantised matrix as types.h has it; whoever makes one keeps the arrays that it points to."""

    _fields_ = [
        *((name, c_void_p) for name in ("w", "s", "b", "down", "up")),
        *((name, c_int32) for name in ("n", "k", "bits", "wide", "rank")),
        ("lora", c_float),
    ]


LINEAR = POINTER(Linear)
FLOATS = c_void_p  # an address; numpy gives it faster than a typed pointer


def _struct(name: str, linears: str, floats: str, integers: str, numbers: str) -> type[ctypes.Structure]:
    """A structure of types.h that begins with `Norms`: its fields by kind, in the order of the header."""
    kinds = ((linears, LINEAR), (floats, FLOATS), (integers, c_int32), (numbers, c_float))
    fields = [("norms", Norms), *((field, kind) for names, kind in kinds for field in names.split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Norms(ctypes.Structure):
    _fields_ = [("before", FLOATS), ("after", FLOATS), ("eps", c_float), ("hidden", c_int32)]


Attention = _struct("Attention", "q k v o", "q_norm k_norm turns", "heads pairs width rotated", "eps scale")
Latent = _struct(
    "Latent",
    "q_a q_b kv_a gate o",
    "q_norm kv_norm turns keys values",
    "heads latent plain rotated width q_rank",
    "q_eps kv_eps scale",
)
Delta = _struct(
    "Delta",
    "in0 in1 in2 in3 in4 in5 o",
    "taps0 taps1 taps2 rate shift norm",
    "streams key_heads heads key value count",
    "eps lower",
)


class Mixture(ctypes.Structure):
    """As types.h has it."""

    _fields_ = [(name, LINEAR) for name in "gate up down shared_gate shared_up shared_down share".split()]


class Routing(ctypes.Structure):
    """As router.h has it."""

    _fields_ = [("k", c_int32), ("groups", c_int32), ("kept", c_int32), ("scale", c_float)]


ABI = 4  # as cpu.c has it

SIGNATURES = {
    "edge0_abi": (c_int,),
    "edge0_variant": (c_char_p,),
    "edge0_threads": (c_int, c_void_p),
    "edge0_open": (c_void_p, c_int, c_int, c_int),
    "edge0_close": (None, c_void_p),
    "edge0_linears": (None, c_void_p, FLOATS, c_int, c_int, POINTER(LINEAR), POINTER(FLOATS)),
    "edge0_experts": (None, c_void_p, LINEAR, LINEAR, LINEAR, FLOATS, c_int, c_void_p, c_int, FLOATS),
    "edge0_gated": (None, c_void_p, LINEAR, LINEAR, LINEAR, LINEAR, FLOATS, c_int, FLOATS),
    "edge0_combine": (None, c_void_p, *[FLOATS] * 4, c_int, c_int, c_int, c_float, FLOATS),
    "edge0_mixture": (
        None,
        c_void_p,
        POINTER(Mixture),
        FLOATS,
        FLOATS,
        c_int,
        c_void_p,
        c_int,
        FLOATS,
        c_float,
        FLOATS,
    ),
    "edge0_dense": (None, c_void_p, c_void_p, c_int, FLOATS, *[c_int] * 5, FLOATS),
    "edge0_route": (None, c_void_p, POINTER(Routing), FLOATS, FLOATS, *[c_int] * 3, c_void_p, FLOATS),
    "edge0_attention": (
        None,
        c_void_p,
        POINTER(Attention),
        FLOATS,
        c_int,
        c_int,
        FLOATS,
        FLOATS,
        c_int,
        FLOATS,
        FLOATS,
    ),
    "edge0_latent": (None, c_void_p, POINTER(Latent), FLOATS, c_int, c_int, FLOATS, FLOATS, FLOATS, FLOATS),
    "edge0_delta": (None, c_void_p, POINTER(Delta), FLOATS, c_int, POINTER(FLOATS), FLOATS, FLOATS, FLOATS),
}


@dataclass(frozen=True)
class Library:
    """What was found: the loaded library, or None and why; `variant` is avx2, neon-dotprod or plain."""

    loaded: ctypes.CDLL | None
    variant: str
    reason: str


@cache
def load(folder: Path = Path(__file__).parent) -> Library:
    """Load what was built into `folder`; never an error."""
    if not sys.platform.startswith("linux"):
        return Library(None, "none", f"they are for Linux, this is {sys.platform}")
    # Builds for several interpreters may lie side by side; there is no Python in them, so another's serves as well.
    own = folder / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    files = [own] if own.exists() else sorted(folder.glob("_cpu*.so"))
    if not files:
        return Library(None, "none", "they were not built: no C compiler was there at install, or another processor")
    try:
        library = ctypes.CDLL(str(files[0]), mode=ctypes.RTLD_LOCAL)
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if library.edge0_abi() != ABI:
            raise OSError(f"it is version {library.edge0_abi()} and not {ABI}")
    except (OSError, AttributeError) as error:
        why = str(error).replace(f"{folder}/", "")
        return Library(None, "none", f"{files[0].name} cannot be used ({why}); install again")
    variant = library.edge0_variant().decode()
    why = "this processor has no vectors that the kernels know" if variant == "plain" else "this processor has them"
    return Library(library, variant, why)


def describe() -> str:
    """Which kernel an engine on the CPU would use here, and why, in one line."""
    found = load()
    if found.loaded is None:
        return f"MLX's own: {found.reason}"
    return f"own, {found.variant}: {found.reason}"
