"""Where no library was built there is nothing to test but the fallback (test_library.py)."""

import pytest

from edge0.kernels.library import load
from edge0.kernels.runner import Kernels

VARIANTS = [(kind, simd) for kind in ("int8", "exact") for simd in (True, False)]


@pytest.fixture(params=VARIANTS, ids=lambda way: f"{way[0]}-{'simd' if way[1] else 'plain'}")
def kernels(request):
    if load().loaded is None:
        pytest.skip(load().reason)
    kind, simd = request.param
    opened = Kernels(kind, 2, simd)
    yield opened
    opened.close()


@pytest.fixture
def alone(kernels):
    """The same kernels with one thread."""
    opened = Kernels(kernels.kind, 1, kernels.variant != "plain")
    yield opened
    opened.close()
