"""Products with quantised matrices and routed experts: near fp64, and the same bits whatever is computed beside."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from edge0.kernels.library import Mixture
from edge0.kernels.modules import KernelEmbedding
from edge0.kernels.runner import Group
from tests.kernels.shapes import BOUND, FEW, activations, distance, packed, silu

quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEED = some.integers(0, 2**32 - 1)


@quick
@given(
    SEED, some.integers(1, 90), some.integers(1, 20), some.integers(1, 5), some.booleans(), some.sampled_from((0, 4))
)
def test_linears_are_near_fp64(kernels, seed, n, groups, t, wide, rank):
    rng, k = np.random.default_rng(seed), 64 * groups
    first, values, _ = packed(rng, n, k, wide=wide, rank=rank)
    second, others, _ = packed(rng, 3, k, wide=not wide)
    x = activations(rng, t, k)
    y, z = kernels.linears(x, Group([first, second]))
    assert distance(y, x @ values.T) < FEW[kernels.kind]
    assert distance(z, x @ others.T) < FEW[kernels.kind]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_of_real_size_is_within_one_percent_or_a_millionth(kernels, bits):
    rng = np.random.default_rng(1)
    matrix, values, _ = packed(rng, 256, 1088, bits)
    x = activations(rng, 2, 1088)
    bound = BOUND[kernels.kind if bits == 4 else "exact"]
    assert distance(kernels.linears(x, Group([matrix]))[0], x @ values.T) < bound


@quick
@given(SEED, some.integers(1, 40), some.integers(1, 20), some.integers(1, 3))
def test_routers_of_eight_bits_are_exact_in_every_kind(kernels, seed, n, groups, t):
    rng = np.random.default_rng(seed)
    matrix, values, _ = packed(rng, n, 64 * groups, bits=8)
    x = activations(rng, t, 64 * groups)
    assert distance(kernels.linears(x, Group([matrix]))[0], x @ values.T) < FEW["exact"]


def stacks(rng, slots, width, hidden, wide=False):
    shapes = (width, hidden), (width, hidden), (hidden, width)
    made = [packed(rng, *shape, wide=wide, stack=(slots,)) for shape in shapes]
    return [one[0] for one in made], [one[1] for one in made], [part for one in made for part in one[2]]


@quick
@given(SEED, some.integers(1, 3), some.integers(1, 3), some.integers(1, 6), some.integers(1, 9), some.integers(1, 9))
def test_experts_are_near_fp64(kernels, seed, width, hidden, slots, t, k):
    rng = np.random.default_rng(seed)
    matrices, (gate, up, down), _ = stacks(rng, slots, 64 * width, 64 * hidden)
    x, rows = activations(rng, t, 64 * hidden), rng.integers(0, slots, (t, k)).astype(np.uint32)
    pairs = zip(x, rows, strict=True)
    expected = np.stack([[down[r] @ (silu(gate[r] @ one) * (up[r] @ one)) for r in row] for one, row in pairs])
    assert distance(kernels.experts(x, rows, *matrices), expected) < FEW[kernels.kind]


def test_experts_are_near_mlx(kernels):
    from edge0.streaming.experts import expert_mlp

    rng = np.random.default_rng(3)
    matrices, _, arrays = stacks(rng, 5, 128, 192, wide=True)
    x, rows = activations(rng, 4, 192), rng.integers(0, 5, (4, 8)).astype(np.uint32)
    expected = np.array(expert_mlp(mx.array(x), mx.array(rows), arrays))
    assert distance(kernels.experts(x, rows, *matrices), expected) < FEW[kernels.kind]


def test_a_gated_layer_is_near_fp64(kernels):
    rng = np.random.default_rng(4)
    (gate, g, _), (up, u, _), (down, d, _) = (
        packed(rng, *shape, rank=8) for shape in ((128, 64), (128, 64), (64, 128))
    )
    x = activations(rng, 3, 64)
    expected = (silu(x @ g.T) * (x @ u.T)) @ d.T
    assert distance(kernels.gated(x, gate, up, down), expected) < FEW[kernels.kind]


@pytest.mark.parametrize("gated_by_itself", [True, False])
def test_all_of_a_layers_experts_in_one_call_give_the_bits_of_three(kernels, gated_by_itself):
    rng = np.random.default_rng(10)
    matrices, _, _ = stacks(rng, 6, 128, 192)
    shared = [packed(rng, *shape, rank=4)[0] for shape in ((128, 192), (128, 192), (192, 128))]
    shared += [packed(rng, 1, 192, bits=8)[0]] if gated_by_itself else []
    x, normed, weights = activations(rng, 3, 192), activations(rng, 3, 192), activations(rng, 3, 4)
    slots = rng.integers(0, 6, (3, 4)).astype(np.uint32)
    mixture = Mixture(*(matrix.pointer for matrix in (*matrices, *shared)))
    y = kernels.experts(normed, slots, *matrices)
    expected = kernels.combine(x, y, weights, kernels.gated(normed, *shared), 2.0)
    assert np.array_equal(kernels.mixture(x, normed, slots, mixture, weights, 2.0), expected)


@pytest.mark.parametrize("wide", [True, False])
def test_bits_depend_on_neither_threads_nor_neighbours(kernels, alone, wide):
    """One token alone, or in a batch; one expert alone, or among others; one thread, or two; wide scales, or bf16."""
    rng = np.random.default_rng(5)
    matrix, _, _ = packed(rng, 200, 704, wide=wide, rank=16)
    x = activations(rng, 7, 704)
    (together,) = kernels.linears(x, Group([matrix]))
    assert np.array_equal(together, alone.linears(x, Group([matrix]))[0])
    assert all(np.array_equal(kernels.linears(x[t : t + 1], Group([matrix]))[0][0], together[t]) for t in range(7))
    matrices, _, _ = stacks(rng, 6, 128, 704)
    rows = rng.integers(0, 6, (7, 8)).astype(np.uint32)
    together = kernels.experts(x, rows, *matrices)
    assert np.array_equal(together, alone.experts(x, rows, *matrices))
    for t in range(7):
        for place in range(8):
            one = kernels.experts(x[t : t + 1], rows[t : t + 1, place : place + 1].copy(), *matrices)
            assert np.array_equal(one[0, 0], together[t, place])


def test_scales_of_bf16_and_the_same_in_fp32_give_the_same_bits(kernels):
    rng = np.random.default_rng(6)
    narrow, _, (weight, scales, biases) = packed(rng, 40, 576)
    wide = type(narrow).of(weight, *(mx.array(np.array(part.astype(mx.float32))) for part in (scales, biases)), 4)
    x = activations(rng, 2, 576)
    assert np.array_equal(*(kernels.linears(x, Group([matrix]))[0] for matrix in (narrow, wide)))


def test_zeros_and_large_values_stay_finite(kernels):
    rng = np.random.default_rng(7)
    matrix, values, _ = packed(rng, 10, 128)
    x = np.zeros((3, 128), np.float32)
    x[1] = 1e4 * rng.normal(size=128)
    x[2, 64:] = 1e-30
    (y,) = kernels.linears(x, Group([matrix]))
    assert np.array_equal(y[0], np.zeros(10, np.float32)) and np.isfinite(y).all()
    assert distance(y[1] / 1e4, x[1] @ values.T / 1e4) < FEW[kernels.kind]


def test_a_matrix_of_another_form_is_refused(refused):
    from edge0 import ErrorKind
    from edge0.kernels.runner import Matrix

    weight, scales = mx.zeros((4, 32), mx.uint32), mx.zeros((4, 8))
    refused(ErrorKind.OPTION_INVALID, lambda: Matrix.of(weight, scales, scales, 4), "kernels=mlx")


# --- plain matrices, and what adds a layer up -------------------------------------------------------------------------


@quick
@given(SEED, some.integers(1, 3), some.integers(1, 3), some.integers(1, 70), some.integers(1, 70), some.booleans())
def test_plain_matrices_are_near_fp64(kernels, seed, count, t, n, k, half):
    rng = np.random.default_rng(seed)
    weight = (rng.normal(size=(count, n, k)) / np.sqrt(k)).astype(np.float16 if half else np.float32)
    x = rng.normal(size=(count, t, k)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.astype(np.float64).swapaxes(-1, -2)
    assert distance(kernels.dense(weight, x), expected) < FEW["exact"]
    gelu = expected * (1 + np.vectorize(math.erf)(expected / math.sqrt(2))) / 2
    assert distance(kernels.dense(weight, x, gelu=True), gelu) < FEW["exact"]


def test_halves_of_every_kind_are_widened_exactly(kernels):
    """Among them the smallest, which are not normal."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    weight, x = finite[None, :, None].copy(), np.ones((1, 1, 1), np.float32)
    assert np.array_equal(kernels.dense(weight, x)[0, 0], finite.astype(np.float32))
    wide = np.repeat(finite[None, :, None], 16, 2)  # by vectors, where a processor has them
    one = np.zeros((1, 1, 16), np.float32)
    one[..., 3] = 1
    assert np.array_equal(kernels.dense(wide, one)[0, 0], finite.astype(np.float32))


@pytest.mark.parametrize("clip", [None, 2.0])
def test_a_layers_parts_are_added_and_held_within_the_clip(kernels, clip):
    rng = np.random.default_rng(8)
    x, shared = activations(rng, 3, 70), activations(rng, 3, 70)
    y, weights = rng.normal(size=(3, 4, 70)).astype(np.float32), activations(rng, 3, 4)
    expected = x + (weights.astype(np.float64)[..., None] * y).sum(1) + shared
    x[1, 5] = np.nan
    out = kernels.combine(x, y, weights, shared, clip)
    expected[1, 5] = 0 if clip else np.nan
    if clip:
        expected = expected.clip(-clip, clip)
    assert np.allclose(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_gates_saturate(kernels):
    """silu far from zero, through a gated layer: no overflow; NaN stays where activations are not rounded."""
    (gate, _, _), (up, _, _), (down, _, _) = (packed(np.random.default_rng(9), 64, 64) for _ in range(3))
    x = np.zeros((4, 64), np.float32)
    x[0], x[1], x[2, 0] = 1e4, -1e4, np.nan
    y = kernels.gated(x, gate, up, down)
    assert np.isfinite(y[[0, 1, 3]]).all() and np.array_equal(y[3], np.zeros(64, np.float32))
    assert np.isnan(y[2]).all() == (kernels.kind == "exact")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", [mx.bfloat16, mx.float32])
def test_rows_of_a_table_are_those_of_mlx_in_fp32(bits, scales):
    """Scales of 16 bits are widened before anything is multiplied."""
    table = nn.QuantizedEmbedding(50, 128, 64, bits)
    table.weight, table.scales, table.biases = mx.quantize(mx.random.normal((50, 128)), 64, bits)
    table.scales, table.biases = table.scales.astype(mx.bfloat16), table.biases.astype(mx.bfloat16)
    tokens = mx.array([[3, 49, 0, 3]])
    wide = mx.dequantize(
        table.weight[tokens], *(part[tokens].astype(mx.float32) for part in (table.scales, table.biases)), 64, bits
    )
    table.scales, table.biases = table.scales.astype(scales), table.biases.astype(scales)
    found = KernelEmbedding(table)(tokens)
    assert found.dtype == np.float32 and found.shape == (1, 4, 128)
    np.testing.assert_allclose(found, np.array(wide), rtol=1e-6, atol=1e-7)
