"""Routing by the kernels chooses what MLX's router chooses, and weighs it alike."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from edge0.kernels.router import KernelRouter
from edge0.routing import Router

LAWS = {
    "softmax": Router("softmax", 4, 1, 1, 1.0),
    "sigmoid": Router("sigmoid", 4, 8, 4, 2.5),
    "all groups": Router("sigmoid", 4, 8, 8, 2.5),
}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some.integers(0, 2**32 - 1), some.integers(1, 4), some.booleans(), some.sampled_from(sorted(LAWS)))
def test_choices_and_weights_are_those_of_the_router(kernels, seed, tokens, biased, law):
    rng, router = np.random.default_rng(seed), LAWS[law]
    ours = KernelRouter(router, kernels)
    logits = mx.array(rng.normal(size=(1, tokens, 32)).astype(np.float32))
    bias = mx.array(rng.normal(size=32).astype(np.float32) / 8) if biased and law != "softmax" else None
    pairs, plain = [], None if bias is None else np.array(bias)
    for indices, weights in (router(logits, bias), ours(logits, plain)):
        assert np.array(indices).dtype == np.uint32 and indices.shape == weights.shape == (1, tokens, 4)
        order = np.argsort(np.array(indices), -1)
        pairs.append([np.take_along_axis(np.array(part), order, -1) for part in (indices, weights)])
    assert np.array_equal(pairs[0][0], pairs[1][0])
    assert np.allclose(pairs[0][1], pairs[1][1], rtol=1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_forced_routes_are_weighed_alike(kernels, law):
    rng, router = np.random.default_rng(0), LAWS[law]
    ours = KernelRouter(router, kernels)
    logits = mx.array(rng.normal(size=(3, 1, 32)).astype(np.float32))
    forced = np.stack([rng.permutation(32)[:4] for _ in range(3)])[:, None].astype(np.uint32)
    (indices, weights), (_, expected) = ours(logits, forced=forced), router(logits, forced=forced)
    assert np.array_equal(np.array(indices), np.array(forced))
    assert np.allclose(np.array(weights), np.array(expected), rtol=1e-5)


def test_extreme_logits_give_finite_weights(kernels):
    for law in LAWS.values():
        ours = KernelRouter(law, kernels)
        _, weights = ours(mx.array([[[-1e4] * 16 + [1e4] * 16]]))
        assert np.isfinite(np.array(weights)).all()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_choice_is_of_distinct_experts_whatever_the_logits_hold(kernels, law, wrong):
    logits = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    logits[0, ::3], logits[1] = wrong, wrong
    ids, _ = KernelRouter(LAWS[law], kernels)(logits)
    assert [len(set(row)) for row in ids.tolist()] == [4, 4] and ids.max() < 32
