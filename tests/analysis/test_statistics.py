"""Statistics: hand-computed values, and the properties that make a paired ratio one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics import Ratio, cv, median_spread, paired_ratio, smallest_visible_effect

speeds = st.floats(0.01, 1e4)
paired_speeds = st.lists(st.tuples(speeds, speeds), min_size=2, max_size=8)


def split(pairs):
    return [left for left, _ in pairs], [right for _, right in pairs]


def test_median_spread_by_hand():
    spread = median_spread([3.0, 1.0, math.nan, 2.0, 10.0])
    assert (spread.median, spread.low, spread.high, spread.n) == (2.5, 1.0, 10.0, 4)
    assert median_spread([]).n == 0 and math.isnan(median_spread([]).median)


def test_paired_ratio_by_hand():
    """Ratios 2, 2 and 16: logs ln2 x (1, 1, 4), mean 2 ln2, sd ln2 x sqrt(3), t(2) = 4.302653."""
    ratio = paired_ratio([2, 4, 48], [1, 2, 3])
    half_width = 4.302652729696142 * math.log(2)
    assert ratio.ratio == pytest.approx(4)
    assert ratio.ci_low == pytest.approx(4 * math.exp(-half_width))
    assert ratio.ci_high == pytest.approx(4 * math.exp(half_width))
    assert ratio.n == 3
    assert ratio.sd_log == pytest.approx(math.log(2) * math.sqrt(3))


def test_one_round_has_no_interval():
    ratio = paired_ratio([3], [2])
    assert ratio.ratio == pytest.approx(1.5) and ratio.n == 1
    assert math.isnan(ratio.ci_low) and math.isnan(ratio.ci_high) and math.isnan(ratio.sd_log)
    assert not ratio.contains(1.5)
    assert str(ratio) == "1.50x (no interval)"


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ([1, 2], [1], "the same rounds"),
        ([], [], "no pair"),
        ([1, 0], [1, 1], "positive finite"),
        ([1, 2], [1, -2], "positive finite"),
        ([1, math.nan], [1, 1], "positive finite"),
        ([1, 1], [1, math.inf], "positive finite"),
    ],
)
def test_paired_ratio_refuses(a, b, reason):
    with pytest.raises(ValueError, match=reason):
        paired_ratio(a, b)


@given(paired_speeds)
def test_swapping_the_sides_gives_the_reciprocal(pairs):
    a, b = split(pairs)
    forth, back = paired_ratio(a, b), paired_ratio(b, a)
    assert math.log(forth.ratio) == pytest.approx(-math.log(back.ratio), abs=1e-9)
    for low, high in ((forth.ci_low, back.ci_high), (back.ci_low, forth.ci_high)):
        if low > 0 and math.isfinite(high):
            assert low * high == pytest.approx(1)


@given(paired_speeds, st.floats(0.1, 10))
def test_scaling_one_side_scales_the_ratio_and_not_the_width(pairs, factor):
    a, b = split(pairs)
    plain, scaled = paired_ratio(a, b), paired_ratio([factor * value for value in a], b)
    assert scaled.ratio == pytest.approx(factor * plain.ratio)
    if plain.ci_low > 0 and math.isfinite(plain.ci_high):
        assert scaled.sd_log == pytest.approx(plain.sd_log, abs=1e-9)


@given(paired_speeds)
def test_the_interval_holds_the_ratio(pairs):
    ratio = paired_ratio(*split(pairs))
    assert ratio.ci_low <= ratio.ratio * (1 + 1e-12) and ratio.ratio <= ratio.ci_high * (1 + 1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """1,500 sessions of 4 rounds, true ratio 1.3, round effects shared by both arms: 95% within 4 binomial sd."""
    random = np.random.default_rng(7)
    sessions, truth = 1500, 1.3
    rounds = np.exp(random.normal(0, 0.5, (sessions, 4)))
    a = truth * rounds * np.exp(random.normal(0, 0.05, rounds.shape))
    b = rounds * np.exp(random.normal(0, 0.05, rounds.shape))
    covered = sum(paired_ratio(left, right).contains(truth) for left, right in zip(a, b, strict=True)) / sessions
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / sessions)


def test_cv_by_hand():
    assert cv([1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert math.isnan(cv([1.0]))


def test_smallest_visible_effect_by_hand():
    """n = 4: t(3) quantiles 3.182446 (97.5%) and 0.978472 (80%), over sqrt(4)."""
    assert smallest_visible_effect(4, 0.1) == pytest.approx(math.exp(0.1 * (3.182446 + 0.978472) / 2), rel=1e-5)
    assert smallest_visible_effect(8, 0.1) < smallest_visible_effect(4, 0.1) < smallest_visible_effect(4, 0.2)
    assert smallest_visible_effect(5, 0.0) == 1
    assert math.isnan(smallest_visible_effect(1, 0.1)) and math.isnan(smallest_visible_effect(3, math.nan))


def test_smallest_visible_effect_is_seen_about_four_times_out_of_five():
    random = np.random.default_rng(11)
    sessions, n, sd = 1500, 8, 0.04
    effect = smallest_visible_effect(n, sd)
    logs = math.log(effect) + random.normal(0, sd, (sessions, n))
    seen = sum(paired_ratio(np.exp(row), np.ones(n)).ci_low > 1 for row in logs) / sessions
    assert 0.74 < seen < 0.86


def test_a_ratio_shows_itself():
    assert str(Ratio(1.521, 1.404, 1.659, 3)) == "1.52x (1.40-1.66)"
    assert str(Ratio(math.nan, math.nan, math.nan, 0)) == "no shared round"
