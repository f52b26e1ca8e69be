"""Statistics: hand-computed values, and the properties that make a paired ratio one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.statistics import (
    Estimate,
    Ratio,
    batch_mean,
    bootstrap_share,
    cv,
    false_positive_range,
    false_positive_share,
    linear_slope,
    mcnemar,
    mean_of,
    median_spread,
    paired_difference,
    paired_ratio,
    rounds_needed,
    smallest_visible_effect,
    student,
    student_of_log,
    unpaired,
    wilson,
)

speeds = st.floats(0.01, 1e4)
paired_speeds = st.lists(st.tuples(speeds, speeds), min_size=3, max_size=8)


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


@pytest.mark.parametrize("n", [1, 2])
def test_one_round_or_two_have_no_interval(n):
    ratio = paired_ratio([3, 4.4][:n], [2, 3][:n])
    assert ratio.ratio == pytest.approx([1.5, 2.2**0.5][n - 1]) and ratio.n == n
    assert math.isnan(ratio.ci_low) and math.isnan(ratio.ci_high) and math.isnan(ratio.sd_log)
    assert not ratio.contains(1.5) and math.isnan(smallest_visible_effect(n, 0.1))
    assert str(ratio) == f"{['1.50', '1.48'][n - 1]}x (no interval), n={n}"


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


def test_another_confidence_widens_by_the_quantiles_alone():
    """n = 3: t(2) is 4.302653 at 95% and 9.924843 at 99%."""
    ratio = paired_ratio([2, 4, 48], [1, 2, 3])
    wide = ratio.at(0.99)
    half_width = math.log(ratio.ci_high / ratio.ratio)
    assert math.log(wide.ci_high / wide.ratio) == pytest.approx(half_width * 9.924843 / 4.302653, rel=1e-6)
    assert (wide.ratio, wide.n) == (ratio.ratio, 3) and wide.ci_low * wide.ci_high == pytest.approx(ratio.ratio**2)
    same = ratio.at(0.95)
    assert (same.ci_low, same.ci_high) == pytest.approx((ratio.ci_low, ratio.ci_high))
    single = paired_ratio([3], [2])
    assert single.at(0.99) is single


def test_the_inverse_is_the_ratio_of_the_swapped_sides():
    forth, back = paired_ratio([2, 4, 48], [1, 2, 3]).inverse, paired_ratio([1, 2, 3], [2, 4, 48])
    assert (forth.ratio, forth.ci_low, forth.ci_high) == pytest.approx((back.ratio, back.ci_low, back.ci_high))


def test_an_end_that_rounds_to_one_shows_its_side():
    assert Ratio(1.1, 1.0031, 1.22, 3).bare == "1.10x (1.003-1.22)"
    assert Ratio(0.9, 0.8, 0.9984, 3).bare == "0.90x (0.80-0.998)"


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
    assert str(Ratio(1.521, 1.404, 1.659, 3)) == "1.52x (1.40-1.66), n=3"
    assert str(Ratio(math.nan, math.nan, math.nan, 0)) == "no shared round"


@given(st.floats(1.001, 3), st.floats(0, 0.5))
def test_rounds_needed_are_the_fewest_that_would_have_shown_the_effect(effect, sd):
    n = rounds_needed(effect, sd)
    assert n >= 3 and smallest_visible_effect(n, sd) <= effect
    assert n == 3 or smallest_visible_effect(n - 1, sd) > effect


def test_rounds_needed_without_an_effect_or_a_spread():
    assert rounds_needed(1.05, math.nan) is None
    assert rounds_needed(1.01, 0.0) == 3
    for effect in (1.0, 0.9):
        with pytest.raises(ValueError, match="above 1"):
            rounds_needed(effect, 0.1)


def test_false_positives_are_as_many_as_the_interval_allows_where_noise_is_normal():
    logs = np.random.default_rng(3).normal(0, 0.05, 400)
    for n in (3, 5):
        assert false_positive_share(logs, n) == pytest.approx(0.05, abs=0.015)


def test_false_positives_do_not_depend_on_which_half_was_called_the_arm():
    """Pairs that all lie 10% apart, always to the same side, exclude 1 only when every lot falls alike: 2 of 2^n."""
    assert false_positive_share([0.1] * 12, 3) == pytest.approx(2 / 2**3, abs=0.02)
    assert false_positive_share([0.0] * 12, 3) == 0


def test_false_positives_need_as_many_pairs_as_rounds():
    assert math.isnan(false_positive_share([0.1, 0.2], 3)) and math.isnan(false_positive_share([0.1, 0.2], 1))


def test_false_positives_of_few_pairs_are_only_roughly_what_they_mean():
    low, high = false_positive_range(12, 3, pools=100, draws=500)
    assert low < 0.05 < high
    few = np.array(false_positive_range(6, 3, pools=100, draws=500))
    many = np.array(false_positive_range(48, 3, pools=100, draws=500))
    assert many[1] - many[0] < few[1] - few[0]
    assert all(map(math.isnan, false_positive_range(2, 3)))


def test_linear_slope_by_hand():
    """y = 2x + (0, 1, 0): slope 2, residuals -1/3, 2/3, -1/3, standard error sqrt(2/3 / 2), t(1) = 12.7062."""
    slope = linear_slope([0, 1, 2], [0, 3, 4])
    half_width = 12.706204736 * math.sqrt((6 / 9) / 1 / 2)
    assert (slope.slope, slope.n) == (pytest.approx(2), 3)
    assert (slope.ci_low, slope.ci_high) == (pytest.approx(2 - half_width), pytest.approx(2 + half_width))
    two = linear_slope([0, 1], [0, 3])
    assert two.slope == 3 and math.isnan(two.ci_low)
    assert math.isnan(linear_slope([0], [1]).slope)


def test_paired_difference_by_hand():
    """Differences 1, 2 and 3: mean 2, standard deviation 1, t(0.975, 2) = 4.3027."""
    gap = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (gap.mean, gap.n) == (2.0, 3)
    assert gap.ci_high - 2 == pytest.approx(2 - gap.ci_low) == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    alone = paired_difference([5.0], [7.0])
    assert alone.mean == -2 and math.isnan(alone.ci_low) and paired_difference([], []).n == 0


@pytest.mark.parametrize(("left", "right"), [([1.0, 2.0], [1.0]), ([1.0, math.nan], [1.0, 1.0])])
def test_paired_difference_refuses_what_is_no_pair(left, right):
    with pytest.raises(ValueError, match="paired difference"):
        paired_difference(left, right)


def test_a_mean_of_batches_by_hand():
    """Three batches of ten, of means 1, 2 and 3: t(0.975, 2) = 4.3027 times their standard deviation over root 3."""
    found = batch_mean([0, 2] * 5 + [1, 3] * 5 + [2, 4] * 5)
    half_width = 4.3027 / math.sqrt(3)
    assert (found.mean, found.n) == (2, 3) and found.ci_high - found.mean == pytest.approx(half_width, rel=1e-4)
    assert batch_mean(range(1000)).n == 20 and batch_mean([5.0] * 30).ci_low == 5
    alone = batch_mean(range(19))
    assert (alone.mean, alone.n) == (9, 1) and math.isnan(alone.ci_low)
    with pytest.raises(ValueError, match="no value"):
        batch_mean([])


def test_a_share_is_drawn_again_by_its_pairs():
    assert bootstrap_share([2, 3, 5], [4, 6, 10]) == (0.5, 0.5)  # whatever is drawn
    low, high = bootstrap_share([0, 1] * 50, [1, 1] * 50)
    assert low == pytest.approx(0.4, abs=0.03) and high == pytest.approx(0.6, abs=0.03)  # 1.96 x 0.5 / 10
    assert all(map(math.isnan, bootstrap_share([1, 2], [2, 2])))


def test_batches_are_wider_than_single_values_that_repeat_their_neighbours():
    values = np.repeat(np.random.default_rng(0).normal(size=100), 50)
    found = batch_mean(values)
    single = 1.96 * values.std() / len(values) ** 0.5
    assert found.ci_high - found.mean > 4 * single


def test_intervals_of_shares_against_known_ones():
    lows = stats.binomtest(27, 30).proportion_ci(0.95, method="wilson")
    found = wilson(27 / 30, 30)
    assert (found.low, found.high) == (pytest.approx(100 * lows.low), pytest.approx(100 * lows.high))
    # Newcombe (1998), his example 56/70 against 48/80: 0.20 (0.0524 to 0.3339).
    difference = unpaired(wilson(56 / 70, 70), wilson(48 / 80, 80))
    assert (difference.low, difference.high) == (pytest.approx(5.24, abs=0.005), pytest.approx(33.39, abs=0.005))
    assert mean_of([Estimate(1, 0, 4), Estimate(3, 3, 7)]) == Estimate(2, 1.5, 4.5)


def test_mcnemars_p_is_of_a_fair_coin():
    """Of 8 tosses, 0, 1, 7 or 8 of a kind come with 2 * (1 + 8) / 2^8."""
    assert mcnemar(1, 7) == mcnemar(7, 1) == pytest.approx(18 / 256) and mcnemar(0, 0) == 1


def test_a_mean_of_what_is_never_negative_has_an_interval_that_is_not_either():
    """Values 0, 0, 0 and 4: mean 1 and its error 1, t(0.975, 3) = 3.182446."""
    plain, logged = student([0, 0, 0, 4]), student_of_log([0, 0, 0, 4])
    assert plain.low == pytest.approx(1 - 3.182446) and plain.high == pytest.approx(1 + 3.182446)
    assert (logged.low, logged.high) == pytest.approx((math.exp(-3.182446), math.exp(3.182446)))
    assert student_of_log([0, 0, 0]) == Estimate(0, 0, 0) and math.isnan(student_of_log([0, 0]).low)
    assert math.isnan(student_of_log([1, 2]).high) and student_of_log([1, 2]).value == 1.5


def test_the_interval_of_a_skewed_mean_covers_it():
    """Half of the values are 0, the others exponential of mean 1, as answers' losses are: 60 of them, 1,000 times."""
    random = np.random.default_rng(5)
    samples = random.exponential(size=(1000, 60)) * (random.random((1000, 60)) < 0.5)
    covered = sum(found.low <= 0.5 <= found.high for found in map(student_of_log, samples)) / len(samples)
    assert 0.91 < covered < 0.97


def test_an_estimate_shows_itself():
    assert Estimate(86.66, 70.3, 94.7).text() == "86.7 (70.3-94.7)"
    assert Estimate(-0.04, -1.5, 1.2).text("+.1f") == "+0.0 (-1.5 to +1.2)"
    assert Estimate(3, math.nan, math.nan).text(".0f") == "3 (no interval)"
    assert Estimate(math.nan, math.nan, math.nan).text() == "unknown"
