"""Choosing a token: greedy, seeded, bounded, and never from what is not a number."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from edge0 import ErrorKind, Sampling

LOGITS = mx.array(np.random.default_rng(0).standard_normal(50).astype(np.float32) * 2)
ORDER = np.argsort(-np.array(LOGITS))


def draws(sampling, count, logits=LOGITS):
    sample = sampling.sampler()
    return [sample(logits) for _ in range(count)]


def test_temperature_zero_is_greedy():
    assert draws(Sampling(), 3) == [int(ORDER[0])] * 3
    assert draws(Sampling(top_p=0.5, top_k=4, seed=9), 1) == [int(ORDER[0])]


def test_a_seed_repeats_its_tokens_and_another_gives_others():
    first = draws(Sampling(temperature=1.0, seed=5), 30)
    assert draws(Sampling(temperature=1.0, seed=5), 30) == first
    assert draws(Sampling(temperature=1.0, seed=6), 30) != first
    assert len(set(first)) > 3


def test_samples_follow_the_temperature():
    counts = Counter(draws(Sampling(temperature=1.0, seed=1), 2000))
    logits = np.array(LOGITS, np.float64)
    shares = np.exp(logits) / np.exp(logits).sum()
    found = np.array([counts[token] for token in range(50)]) / 2000
    assert np.abs(found - shares).max() < 5 * np.sqrt(shares.max() / 2000)
    cold = Counter(draws(Sampling(temperature=0.2, seed=1), 300))
    assert cold[int(ORDER[0])] > 300 * found[ORDER[0]]


def test_top_k_and_top_p_bound_the_choice():
    assert set(draws(Sampling(temperature=3.0, top_k=4), 300)) == set(ORDER[:4].tolist())
    shares = np.sort(np.exp(np.array(LOGITS)) / np.exp(np.array(LOGITS)).sum())[::-1]
    inside = int(np.searchsorted(np.cumsum(shares), 0.6) + 1)
    assert set(draws(Sampling(temperature=1.0, top_p=0.6), 300)) <= set(ORDER[:inside].tolist())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_numbers(refused, value, temperature):
    logits = mx.where(mx.arange(50) == 7, value, LOGITS)
    refused(ErrorKind.NUMERIC, lambda: draws(Sampling(temperature=temperature), 1, logits), "not finite")


def test_nothing_to_choose_from(refused):
    refused(ErrorKind.NUMERIC, lambda: draws(Sampling(), 1, mx.full((50,), float("-inf"))), "not finite")


def test_single_masked_tokens_are_allowed():
    masked = mx.where(mx.arange(50) == int(ORDER[0]), float("-inf"), LOGITS)
    assert draws(Sampling(), 1, masked) == [int(ORDER[1])]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("seed", -1),
    ],
)
def test_options_out_of_range(refused, name, value):
    refused(ErrorKind.OPTION_INVALID, lambda: draws(Sampling(**{name: value}), 1), f"option {name}", value)
