"""A faster BLAS for MLX on Linux CPUs, where one is installed: loaded before MLX, it answers in place of MLX's own.

MLX's Linux wheel carries the reference BLAS, some thirty times slower at fp32 matrix products. A BLAS that is loaded
first, with its symbols for all, is found before it; nothing is linked or patched. OpenBLAS (Debian:
libopenblas0-pthread) and MKL (PyPI: mkl) are looked for. Quantised products do not go through BLAS. A product's last
digits then depend on which library, and on how many rows are multiplied together: whoever compares bits does without.
Knows nothing of what is computed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from functools import cache
from pathlib import Path

NONE = "MLX's own BLAS"
# Of MKL and of OpenBLAS. One thread: at a tiny model's sizes more gain nothing, and results keep their bits anywhere.
THREADS = ("MKL_Set_Num_Threads", "openblas_set_num_threads")


def libraries() -> Iterator[tuple[str, str]]:
    """(name, what the loader is asked for) of each BLAS that may be installed, the fastest first."""
    if name := find_library("openblas"):
        yield "OpenBLAS", name
    for folder in (Path(sys.prefix) / "lib", *(Path(entry).parents[1] for entry in sys.path if "-packages" in entry)):
        for path in sorted(folder.glob("libmkl_rt.so*")):
            yield "MKL", str(path)


@cache
def load() -> str:
    """Load the first BLAS that can be, for one thread; returns its name and file, or `NONE`: of whoever loaded MLX
    before, and where MLX brings a fast one along."""
    if not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return NONE
    for name, file in libraries():
        try:
            library = ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
            library.cblas_sgemm  # noqa: B018 (raises AttributeError where the library has no C interface)
        except (OSError, AttributeError):
            continue
        for setter in THREADS:
            if hasattr(library, setter):
                getattr(library, setter)(1)
        return f"{name} ({file})"
    return NONE


def describe() -> str:
    """What training would load here, in one line; nothing is loaded."""
    if not sys.platform.startswith("linux"):
        return "the one that MLX brings along"
    found = next(libraries(), None)
    if found is None:
        return f"{NONE}, which is slow: libopenblas0-pthread (Debian) or mkl (PyPI) would be used by `edge0 train`"
    return f"{found[0]} ({Path(found[1]).name}), loaded by `edge0 train`; quantised products need none"
