"""Losses by hand and by numpy."""

import mlx.core as mx
import numpy as np
import pytest

from edge0.training import losses

RNG = np.random.default_rng(0)


def logits(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


COUNTED = np.array([[True, False, True], [False, True, False]])


def test_next_token_counts_only_what_is_asked_for():
    x, tokens = logits(2, 3, 5), RNG.integers(0, 5, (2, 3))
    counted = np.array([[True, False, False], [False, True, False]])
    found = losses.next_token(mx.array(x), mx.array(tokens), mx.array(counted))
    expected = -(np.log(softmax(x[0, 0])[tokens[0, 1]]) + np.log(softmax(x[1, 1])[tokens[1, 2]])) / 2
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("law", ["softmax", "sigmoid-groups"])
def test_imitation_is_zero_for_the_router_itself_and_its_formula_elsewhere(law):
    target, other = logits(2, 3, 8), logits(2, 3, 8)
    same = losses.imitation(law, mx.array(target), mx.array(target), mx.array(COUNTED))
    assert float(same) == pytest.approx(0, abs=1e-6)
    found = losses.imitation(law, mx.array(target), mx.array(other), mx.array(COUNTED))
    if law == "softmax":
        p, q = softmax(target), softmax(other)
        values = (p * np.log(p / q)).sum(axis=-1)
    else:
        p, q = 1 / (1 + np.exp(-target)), 1 / (1 + np.exp(-other))
        values = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(axis=-1)
    assert float(found) == pytest.approx(values[COUNTED].mean(), rel=1e-4)


def test_the_target_of_imitation_gets_no_gradient():
    target, other = mx.array(logits(1, 2, 4)), mx.array(logits(1, 2, 4))
    ones = mx.ones((1, 2), mx.bool_)
    grad = mx.grad(lambda t: losses.imitation("softmax", t, other, ones))(target)
    assert float(mx.abs(grad).max()) == 0


def test_reverse_kl_has_a_bucket_for_all_other_tokens():
    student, teacher = logits(2, 3, 6), logits(2, 3, 6)
    found = losses.reverse_kl(mx.array(student), mx.array(teacher), mx.array(COUNTED), top=2)
    q, p = softmax(student), softmax(teacher)
    chosen = np.argsort(teacher, axis=-1)[..., -2:]
    kept_q, kept_p = (np.take_along_axis(part, chosen, axis=-1) for part in (q, p))
    kept_q, kept_p = (np.concatenate([part, 1 - part.sum(-1, keepdims=True)], axis=-1) for part in (kept_q, kept_p))
    values = (kept_q * np.log(kept_q / kept_p)).sum(axis=-1)
    assert float(found) == pytest.approx(values[COUNTED].mean(), rel=1e-4)
    everything = losses.reverse_kl(mx.array(student), mx.array(teacher), mx.array(COUNTED), top=5)
    assert float(everything) == pytest.approx((q * np.log(q / p)).sum(axis=-1)[COUNTED].mean(), rel=1e-3)


def test_balance_is_one_for_equal_shares_and_grows_to_e_over_k():
    counted = mx.ones((1, 4), mx.bool_)
    even = mx.array([[[0, 1], [2, 3], [0, 1], [2, 3]]])
    assert float(losses.balance(mx.zeros((1, 4, 4)), even, counted)) == pytest.approx(1)
    one = mx.broadcast_to(mx.array([50.0, 0, 0, 0]), (1, 4, 4))
    assert float(losses.balance(one, mx.zeros((1, 4, 1), mx.int32), counted)) == pytest.approx(4, rel=1e-4)
