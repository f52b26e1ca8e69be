"""The line through medians: what it recovers, what it refuses, and what it says of its ends and residuals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.fit.regression import (
    NO_BIN,
    first_page_cost,
    fit,
    level_labels,
    line,
    place_effect,
    quantile_labels,
)

LEVELS = np.repeat([0.0, 0.1, 0.25, 0.5, 0.75, 1.0], 40)


def fitted(ms, cold=LEVELS, **options):
    return fit(cold, ms, level_labels(cold), **options)


@given(a=st.floats(0.05, 10), b=st.floats(0.1, 10), seed=st.integers(0, 1000))
def test_a_known_line_is_recovered_from_noise_with_outliers(a, b, seed):
    """Every tenth load takes ten times as long; medians do not care."""
    rng = np.random.default_rng(seed)
    ms = a + b * LEVELS + rng.normal(0, 0.01 * (a + b), LEVELS.size)
    ms[::10] *= 10
    found = fitted(ms)
    assert found.a == pytest.approx(a, abs=0.03 * (a + b))
    assert found.b == pytest.approx(b, abs=0.05 * (a + b))
    assert found.a_low <= found.a_high and found.b_low < found.b_high
    assert found.n == LEVELS.size and found.left_out == 0


def test_an_exact_line_leaves_nothing_over():
    found = fitted(0.25 + 2.0 * LEVELS)
    assert (found.a, found.b, found.r2) == pytest.approx((0.25, 2.0, 1.0))
    assert found.worst == pytest.approx(0, abs=1e-12) and found.residual_share().share == pytest.approx(0, abs=1e-12)
    assert found.warm.measured == 0.25 and found.cold.measured == 2.25 and found.warm.agrees and found.cold.agrees
    assert [part.n for part in found.bins] == [40] * 6


@given(seed=st.integers(0, 1000))
def test_reads_past_the_page_cache_are_flat(seed):
    rng = np.random.default_rng(seed)
    found = fitted(2.0 + rng.normal(0, 0.05, LEVELS.size))
    assert abs(found.b) < 0.1 and found.a == pytest.approx(2.0, abs=0.05)


def test_a_constant_has_no_r2():
    assert math.isnan(fitted(np.ones(LEVELS.size)).r2)


def test_intervals_hold_the_truth_and_repeat():
    rng = np.random.default_rng(3)
    ms = 1.17 + 1.33 * LEVELS + rng.normal(0, 0.2, LEVELS.size)
    found, again = fitted(ms, seed=5), fitted(ms, seed=5)
    assert found == again
    assert found.a_low <= 1.17 <= found.a_high and found.b_low <= 1.33 <= found.b_high
    worst = found.residual_share()
    assert 0 < worst.low < worst.high


def test_a_step_is_named_and_the_warm_end_differs():
    """0.3 ms more as soon as anything is cold."""
    found = fitted(0.2 + 2.0 * LEVELS + 0.3 * (LEVELS > 0))
    assert not found.warm.agrees and found.cold.agrees
    assert found.warm.measured == pytest.approx(0.2) and found.warm.error < -0.1
    assert first_page_cost(found) == pytest.approx((0.3, 0.3, 0.3))
    assert first_page_cost(fitted(0.2 + 2.0 * LEVELS)) == pytest.approx((0, 0, 0), abs=1e-9)
    noisy = 0.2 + 2.0 * LEVELS + np.random.default_rng(2).normal(0, 0.1, LEVELS.size)
    step, low, high = first_page_cost(fitted(noisy))
    assert low < step < high and low < 0 < high


def test_residual_shares_by_hand():
    """Medians 1, 2, 4: the line is 5/6 + 3 cold, so residuals are 1/6, -1/3, 1/6 and a + b is 23/6."""
    cold = np.repeat([0.0, 0.5, 1.0], 30)
    found = fitted(np.repeat([1.0, 2.0, 4.0], 30), cold)
    assert found.residuals == pytest.approx((1 / 6, -1 / 3, 1 / 6))
    whole = found.residual_share()
    assert (whole.ms, whole.share) == pytest.approx((1 / 3, 1 / 3 / (23 / 6))) and (whole.n, whole.bins) == (90, 3)
    cold_end = found.residual_share(from_cold=0.8)
    assert cold_end.share == pytest.approx(1 / 6 / (23 / 6)) and (cold_end.n, cold_end.bins) == (30, 3)
    # A line through the colder two leaves nothing over, and says so by its bins.
    assert found.residual_share(line_from=0.5).ms == pytest.approx(0) and found.residual_share(line_from=0.5).bins == 2
    assert math.isnan(found.residual_share(from_cold=1.1).share) and found.residual_share(from_cold=1.1).n == 0


def test_small_bins_are_left_out_and_said():
    cold = np.concatenate([LEVELS, np.full(29, 0.4)])
    found = fitted(2 + cold, cold)
    assert found.left_out == 29 and len(found.bins) == 6


@pytest.mark.parametrize(
    "cold, part",
    [
        (np.full(60, 0.5), "a line needs 2 bins of cold share, found 1"),
        (np.repeat([0.0, 1.0], 20), "found 0 of enough loads among 40 loads (0.00 to 1.00 cold)"),
        (np.repeat([0.90, 1.00], 30), "too close to one another"),
        (np.array([]), "found 0"),
    ],
)
def test_too_little_is_refused_in_one_line(cold, part):
    with pytest.raises(ValueError) as caught:
        fit(cold, cold + 1.0, level_labels(cold))
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="same loads"):
        fit([0.0, 1.0], [1.0], [0, 1])
    with pytest.raises(ValueError, match="finite"):
        fitted(np.where(LEVELS == 0.5, np.nan, 1.0))
    with pytest.raises(ValueError, match="two different cold shares"):
        line([0.5, 0.5], [1, 2])


@given(
    warm=st.integers(0, 200),
    cold=st.integers(0, 200),
    middle=st.lists(st.floats(0.001, 0.999), max_size=300),
    least=st.integers(1, 40),
)
def test_natural_bins_are_large_enough_in_order_and_split_no_share(warm, cold, middle, least):
    shares = np.array([0.0] * warm + [1.0] * cold + middle)
    labels = quantile_labels(shares, least)
    used = [label for label in np.unique(labels) if label != NO_BIN]
    assert all((labels == label).sum() >= least for label in used)
    for share in np.unique(shares):
        assert len(set(labels[shares == share])) == 1
    for end, count in ((0.0, warm), (1.0, cold)):
        if count >= least:  # a bin of its own
            own = labels[shares == end][0]
            assert own != NO_BIN and set(shares[labels == own]) == {end}
    ranges = sorted((shares[labels == label].min(), shares[labels == label].max()) for label in used)
    assert all(left[1] < right[0] for left, right in zip(ranges, ranges[1:], strict=False))


def test_natural_bins_of_mostly_warm_and_cold_loads():
    shares = np.array([0.0] * 100 + [1.0] * 100 + list(np.linspace(0.2, 0.8, 60)))
    found = fit(shares, 1 + shares, quantile_labels(shares))
    assert [part.n for part in found.bins] == [100, 30, 30, 100]
    assert (found.a, found.b) == pytest.approx((1, 1))


def test_place_effect():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 100)
    places = rng.integers(1, 9, 300).astype(float)
    strength, chance = place_effect(10 * labels + places + rng.normal(0, 0.5, 300), places, labels)
    assert strength > 0.9 and chance < 1e-6
    assert place_effect(10 * labels + rng.normal(0, 1, 300), places, labels)[1] > 0.001
    assert math.isnan(place_effect(labels, np.ones(300), labels)[0])
