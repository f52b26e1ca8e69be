"""The faster BLAS: loaded before MLX or not at all, and told apart from MLX's own."""

import subprocess
import sys
from ctypes.util import find_library

import pytest

from edge0 import blas

PROGRAM = """
from edge0 import blas
print(blas.load())
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
left, right = (np.random.default_rng(n).normal(size=(96, 96)).astype(np.float32) for n in range(2))
assert np.allclose(np.array(mx.array(left) @ mx.array(right)), left @ right, atol=1e-4)
print(blas.load())
"""


def test_it_answers_for_the_whole_process_and_products_are_right():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, again = done.stdout.splitlines()
    assert first == again and first.startswith(("OpenBLAS (", "MKL (", blas.NONE))
    if sys.platform.startswith("linux") and find_library("openblas"):
        assert first.startswith("OpenBLAS (")


def test_once_mlx_is_loaded_it_stays_with_mlx():
    program = "import mlx.core; from edge0 import blas; print(blas.load())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == blas.NONE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looked for on Linux alone")
def test_a_library_that_is_none_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "libmkl_rt.so.2").write_text("no library")
    monkeypatch.setattr(blas, "libraries", lambda: [("MKL", str(tmp_path / "libmkl_rt.so.2"))])
    monkeypatch.setattr(blas.sys, "modules", {})
    assert blas.load.__wrapped__() == blas.NONE


def test_what_would_be_loaded_is_said_without_loading_it(monkeypatch):
    monkeypatch.setattr(blas, "libraries", lambda: iter([("OpenBLAS", "/usr/lib/libopenblas.so.0")]))
    monkeypatch.setattr(blas.ctypes, "CDLL", None)
    monkeypatch.setattr(blas.sys, "platform", "linux")
    assert blas.describe().startswith("OpenBLAS (libopenblas.so.0)")
    monkeypatch.setattr(blas, "libraries", lambda: iter(()))
    assert "libopenblas0-pthread" in blas.describe() and blas.NONE in blas.describe()
