"""Both routing laws against plain numpy in fp64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.routing import Router, multi_hot

EXPERTS = 32


def softmax_law(logits, k):
    """Set and weights of the K largest softmax shares; logits `[E]`."""
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    chosen = np.argsort(shares)[-k:]
    return dict(zip(chosen.tolist(), shares[chosen] / shares[chosen].sum(), strict=True))


def group_law(logits, bias, k, groups, kept, scale):
    """Scores choose groups by their two best, then experts; the bias is in the choice alone."""
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + bias
    by_group = choice.reshape(groups, -1)
    ranks = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
    masked = np.full_like(by_group, -np.inf)
    best = np.argsort(ranks)[-kept:]
    masked[best] = by_group[best]
    chosen = np.argsort(masked.ravel())[-k:]
    return dict(zip(chosen.tolist(), scores[chosen] / scores[chosen].sum() * scale, strict=True))


def routed(router, logits, bias=None):
    """One dict of expert to weight per row."""
    indices, weights = router(
        mx.array(logits.astype(np.float32)), None if bias is None else mx.array(bias.astype(np.float32))
    )
    rows = zip(np.array(indices).reshape(-1, router.k), np.array(weights).reshape(-1, router.k), strict=True)
    return [dict(zip(ids.tolist(), shares.tolist(), strict=True)) for ids, shares in rows]


def agree(found, expected):
    assert found.keys() == expected.keys()
    for expert, weight in expected.items():
        assert found[expert] == pytest.approx(weight, rel=1e-5)


def untied(seed, rows=1):
    """Logits whose order does not hang on a rounding: fp32 values at least 1e-3 apart."""
    rng = np.random.default_rng(seed)
    grid = np.linspace(-3, 3, EXPERTS) + rng.uniform(-0.02, 0.02, (rows, EXPERTS))
    return np.stack([row[rng.permutation(EXPERTS)] for row in grid])


def groups_tie(logits, bias, kept=4, groups=8):
    """Whether it hangs on a rounding which groups are kept."""
    scores = np.sort((1 / (1 + np.exp(-logits)) + bias).reshape(groups, -1), axis=1)[:, -2:].sum(axis=1)
    ranked = np.sort(scores)
    return ranked[-kept] - ranked[-kept - 1] < 1e-5


def sigmoid_router(k, kept=4, groups=8, scale=2.5):
    return Router("sigmoid-groups", k, groups, kept, scale)


@given(st.integers(0, 10_000), st.integers(1, 16))
def test_softmax_law(seed, k):
    router = Router("softmax", k, 1, 1, 1.0)
    logits = untied(seed, 3)
    for row, found in zip(logits, routed(router, logits), strict=True):
        agree(found, softmax_law(row, k))
        assert sum(found.values()) == pytest.approx(1, rel=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_group_law(seed, k, with_bias):
    router = sigmoid_router(k)
    logits = untied(seed, 3)
    bias = np.random.default_rng(seed + 1).normal(0, 0.3, EXPERTS).astype(np.float32) if with_bias else None
    assume(not any(groups_tie(row, 0 if bias is None else bias) for row in logits))
    for row, found in zip(logits, routed(router, logits, bias), strict=True):
        agree(found, group_law(row, 0 if bias is None else bias.astype(np.float64), k, 8, 4, 2.5))
        assert sum(found.values()) == pytest.approx(2.5, rel=1e-6)


def test_the_bias_selects_and_never_weighs():
    router = sigmoid_router(4)
    logits = untied(0)
    plain = routed(router, logits)[0]
    bias = np.zeros(EXPERTS)
    loser = min(set(range(EXPERTS)) - plain.keys(), key=lambda expert: logits[0, expert])
    bias[loser] = 100
    forced = routed(router, logits, bias)[0]
    assert loser in forced and plain.keys() != forced.keys()
    scores = 1 / (1 + np.exp(-logits[0]))
    total = sum(scores[expert] for expert in forced)
    assert forced[loser] == pytest.approx(2.5 * scores[loser] / total, rel=1e-5)
    # A bias that is the same everywhere changes nothing at all.
    assert routed(router, logits, np.full(EXPERTS, 7.0))[0] == plain


def test_all_groups_kept_is_a_plain_top_k():
    router = sigmoid_router(8, kept=8)
    logits = untied(3)
    assert routed(router, logits)[0].keys() == set(np.argsort(logits[0])[-8:].tolist())


def test_groups_bind():
    """The best expert loses when its group does."""
    logits = np.full((1, EXPERTS), -4.0) + np.arange(EXPERTS) * 1e-3
    logits[0, 0] = 0.5  # alone in the first group
    logits[0, 4:20] = np.linspace(0, 0.4, 16)  # groups 1 to 4 have two good ones each
    assert 0 not in routed(sigmoid_router(4), logits)[0]


def test_predicted_logits_are_routed_without_the_models_bias(checkpoints):
    """A bias of zeros and no bias are the same; softmax ignores one altogether."""
    logits = untied(4, 5)
    router = Router.of(read_config(checkpoints["unit-8b"]), 4)
    assert routed(router, logits) == routed(router, logits, np.zeros(EXPERTS))
    router = Router.of(read_config(checkpoints["unit-35b"]), 4)
    assert routed(router, logits) == routed(router, logits, np.linspace(-9, 9, EXPERTS))


def test_routers_of_the_families(checkpoints):
    assert Router.of(read_config(checkpoints["unit-35b"]), 4) == Router("softmax", 4, 1, 1, 1.0)
    assert Router.of(read_config(checkpoints["unit-8b"]), 8) == Router("sigmoid-groups", 8, 8, 4, 2.5)


def test_shapes(checkpoint):
    router = Router.of(read_config(checkpoint), 3)
    indices, weights = router(mx.array(untied(0, 10).astype(np.float32)).reshape(2, 5, EXPERTS))
    assert indices.shape == weights.shape == (2, 5, 3)
    assert indices.dtype == mx.uint32 and weights.dtype == mx.float32


@pytest.mark.parametrize(("name", "bad", "ceiling"), [("unit-35b", (0, -1, 33), 32), ("unit-8b", (0, -1, 17, 32), 16)])
def test_k_bounds(checkpoints, refused, name, bad, ceiling):
    """8b: no more than the experts of the groups that may be selected."""
    config = read_config(checkpoints[name])
    for k in bad:
        refused(ErrorKind.K_INVALID, lambda k=k: Router.of(config, k), f"1 to {ceiling}", k)
    logits = untied(1)
    for k in (1, ceiling):
        assert len(routed(Router.of(config, k), logits)[0]) == k


def test_multi_hot():
    hot = np.array(multi_hot(mx.array([[[1, 3]], [[0, 2]]]), 5, mx.float32))
    assert hot.tolist() == [[[0, 1, 0, 1, 0]], [[1, 0, 1, 0, 0]]]


@pytest.mark.parametrize("bias", [None, np.linspace(-1, 1, EXPERTS)])
@pytest.mark.parametrize("router", [Router("softmax", 4, 1, 1, 1.0), sigmoid_router(4)], ids=lambda router: router.law)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_routers_own_choice_is_weighed_with_the_same_bits(router, bias, rows):
    logits = mx.array(untied(11, rows).astype(np.float32))
    bias = None if bias is None else mx.array(bias.astype(np.float32))
    indices, weights = router(logits, bias)
    for again in (router.weigh(logits, indices), router(logits, bias, forced=indices)[1]):
        assert np.array_equal(np.array(again).view(np.uint32), np.array(weights).view(np.uint32))


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_forced_experts_are_weighed_by_the_law(seed, k):
    rng = np.random.default_rng(seed)
    logits = untied(seed, 2)
    forced = np.stack([rng.permutation(EXPERTS)[:k] for _ in logits])
    for router, values in (
        (Router("softmax", k, 1, 1, 1.0), np.exp(logits)),
        (sigmoid_router(k), 1 / (1 + np.exp(-logits))),
    ):
        indices, weights = router(mx.array(logits.astype(np.float32)), None, mx.array(forced.astype(np.uint32)))
        assert np.array_equal(np.array(indices), forced)
        chosen = np.take_along_axis(values, forced, axis=1)
        expected = chosen / chosen.sum(axis=1, keepdims=True) * router.scale
        np.testing.assert_allclose(np.array(weights), expected, rtol=1e-5)
