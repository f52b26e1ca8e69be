"""The residual of every path, and that a wrong weight, a wrong route or a wrong precision would show in it."""

import numpy as np
import pytest

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import read_config
from experiments.math_residual import PATHS, Applied, Reference, measure, residual, to_bf16


@pytest.fixture
def reference(checkpoint):
    return Reference(ExpertLayout.of(CheckpointIndex.open(checkpoint), read_config(checkpoint)))


def test_every_path_lies_within_the_bound_and_takes_its_own_way(checkpoint):
    rows = {row["path"]: row for row in measure(checkpoint)}
    assert set(rows) == set(PATHS)
    for name, row in rows.items():
        assert 0 < row["overall"] <= row["worst"] < 1e-4 and row["dtype"] == "float32"
        staged = "staged" in name or "predicted" in name
        assert (row["predicted"] > 0) == staged and row["predicted"] < row["outputs"]
        assert 1e-3 < row["bf16_overall"] < 1e-2


def test_a_change_of_one_expert_or_weight_shows(reference):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((2, 128)).astype(np.float32), np.full((2, 3), 0.25, np.float32)
    ids = np.array([[1, 5, 9], [0, 2, 31]])
    layer = 3
    y = reference(Applied(layer, x, ids, weights, np.zeros_like(x), False))
    one_other = ids.copy()
    one_other[0, 0] = 2
    other = reference(Applied(layer, x, one_other, weights, np.zeros_like(x), False))
    assert residual([y], [y]) == {"worst": 0.0, "overall": 0.0}
    assert residual([y], [other])["worst"] > 0.1 and np.array_equal(y[1], other[1])
    assert residual([y], [1.02 * y])["overall"] == pytest.approx(0.02, rel=1e-3)


def test_bf16_rounds_to_the_nearest_and_ties_to_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.14159265, 0.0], np.float32)
    expected = [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.140625, 0.0]
    assert to_bf16(values).tolist() == expected
