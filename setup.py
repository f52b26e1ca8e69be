"""Builds the CPU kernels where they can run (Linux on x86-64 or aarch64); everything else is in pyproject.toml.

Optional: without a C compiler the install succeeds, and MLX's own operations take the kernels' place.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("edge0/kernels")
kernels = Extension(
    "edge0.kernels._cpu",
    [str(SOURCES / "cpu.c")],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    extra_compile_args=["-O3", "-g0", "-std=gnu11", "-fvisibility=hidden", "-pthread", "-Wno-psabi"],
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)
runs_here = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")

setup(ext_modules=[kernels] if runs_here else [])
