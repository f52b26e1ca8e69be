"""The statistics of the project: medians with their spread, paired ratios, means and shares with an interval.

Knows nothing of arms or files: it takes plain sequences of numbers. Two arms are compared only through the
rounds that they share, because a round is the unit in which this machine was in one state; pooling rounds, or runs of
different sessions, would count the machine's mood as an effect of the arm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.units import interval

CONFIDENCE = 0.95
POWER = 0.80
BATCHES, LEAST_BATCH = 20, 10
# Of two values Student's interval reaches 12.7 standard errors to each side: it says nothing, so there is none.
LEAST_FOR_INTERVAL = 3


@dataclass(frozen=True)
class Spread:
    """Median of `n` values with the smallest and the largest of them; all NaN when `n` is 0."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of `n` per-round ratios with its two-sided 95% interval (NaN for `n` below 3)."""

    ratio: float
    ci_low: float
    ci_high: float
    n: int

    def __str__(self) -> str:
        """As it stands in tables: `1.52x (1.40-1.66), n=5`."""
        return f"{self.bare}, n={self.n}" if self.n else self.bare

    @property
    def bare(self) -> str:
        """Without its n, for tables that have a column of it; an end that rounds to 1.00 has a third decimal."""
        if self.n == 0:
            return "no shared round"
        ends = "no interval" if math.isnan(self.ci_low) else f"{_end(self.ci_low)}-{_end(self.ci_high)}"
        return f"{self.ratio:.2f}x ({ends})"

    def at(self, confidence: float) -> Ratio:
        """The same ratio with its interval at another confidence; itself where it has none.

        Only for a ratio of `paired_ratio`, whose interval is Student's t on log ratios.
        """
        if self.n < LEAST_FOR_INTERVAL:
            return self
        half_width = t_quantile(self.n, (1 + confidence) / 2) * self.sd_log / math.sqrt(self.n)
        return Ratio(self.ratio, self.ratio * math.exp(-half_width), self.ratio * math.exp(half_width), self.n)

    @property
    def inverse(self) -> Ratio:
        """The base over the arm."""
        return Ratio(1 / self.ratio, 1 / self.ci_high, 1 / self.ci_low, self.n)

    @property
    def sd_log(self) -> float:
        """Standard deviation of the log ratios between rounds, recovered from the interval's width; NaN for n < 3."""
        if self.n < LEAST_FOR_INTERVAL:
            return math.nan
        half_width = (math.log(self.ci_high) - math.log(self.ci_low)) / 2
        return half_width * math.sqrt(self.n) / t_quantile(self.n, (1 + CONFIDENCE) / 2)

    def contains(self, value: float) -> bool:
        """Whether the interval holds `value`; False where there is no interval."""
        return self.ci_low <= value <= self.ci_high


@dataclass(frozen=True)
class Difference:
    """A mean of `n` differences (of rounds, of batches) with its two-sided 95% interval (NaN for `n` below 3)."""

    mean: float
    ci_low: float
    ci_high: float
    n: int


@dataclass(frozen=True)
class Estimate:
    """A value, such as a score or a difference of scores, with the ends of its interval (NaN: none)."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".1f") -> str:
        """`86.7 (70.3-94.7)`; in the form `+.1f` as a difference. What rounds to 0 has no minus."""
        if math.isnan(self.value):
            return "unknown"
        value, low, high = (0.0 if float(format(end, form)) == 0 else end for end in (self.value, self.low, self.high))
        return f"{value:{form}} ({'no interval' if math.isnan(low) else interval(low, high, form)})"


NO_RATIO = Ratio(math.nan, math.nan, math.nan, 0)


def median_spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of the values. NaN entries are not values and are left out."""
    kept = np.asarray(values, dtype=float)
    kept = kept[~np.isnan(kept)]
    if kept.size == 0:
        return Spread(math.nan, math.nan, math.nan, 0)
    return Spread(float(np.median(kept)), float(kept.min()), float(kept.max()), int(kept.size))


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """How many times larger `a` is than `b`, pair by pair: `a[i]` and `b[i]` come from the same round.

    The estimate is the geometric mean of `a[i] / b[i]`; the interval is Student's t on the log ratios with n - 1
    degrees of freedom. Logs make the answer symmetric: `paired_ratio(b, a)` is its reciprocal, interval and all.
    With one or two pairs the ratio is given and the interval is NaN, since they say next to nothing of their noise.
    Raises ValueError when the lengths differ, when there is no pair, or when a value is not a positive finite number.
    """
    left, right = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if left.ndim != 1 or left.shape != right.shape:
        raise ValueError(f"paired ratio: {left.size} values against {right.size}; both sides need the same rounds")
    if left.size == 0:
        raise ValueError("paired ratio: no pair of values")
    if not all(np.all(np.isfinite(side)) and np.all(side > 0) for side in (left, right)):
        raise ValueError("paired ratio: every value must be a positive finite number")
    logs = np.log(left) - np.log(right)
    found = student(logs)
    return Ratio(math.exp(found.value), math.exp(found.low), math.exp(found.high), int(logs.size))


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """How much larger `a` is than `b`, pair by pair, with Student's t interval; all NaN without a pair.

    Raises ValueError when the lengths differ or when a value is not finite.
    """
    left, right = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if left.ndim != 1 or left.shape != right.shape:
        raise ValueError(f"paired difference: {left.size} values against {right.size}; both sides need the same rounds")
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ValueError("paired difference: every value must be finite")
    n = int(left.size)
    if n == 0:
        return Difference(math.nan, math.nan, math.nan, 0)
    found = student(left - right)
    return Difference(found.value, found.low, found.high, n)


def student(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of values that vary on their own, with Student's interval; without ends for fewer than three."""
    series = np.asarray(values, dtype=float)
    mean, half_width = float(series.mean()), _half_width(series, confidence)
    return Estimate(mean, mean - half_width, mean + half_width)


def student_of_log(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The same of values of which none is below 0, with an interval that does not reach below 0 either.

    It is Student's on the logarithm of the mean, whose error is that of the mean over the mean (delta method).
    """
    series = np.asarray(values, dtype=float)
    mean, half_width = float(series.mean()), _half_width(series, confidence)
    factor = math.exp(half_width / mean) if mean > 0 else half_width + 1  # all are 0, or there is no interval
    return Estimate(mean, mean / factor, mean * factor)


def _half_width(values: np.ndarray, confidence: float) -> float:
    n = int(values.size)
    if n < LEAST_FOR_INTERVAL:
        return math.nan
    return t_quantile(n, (1 + confidence) / 2) * float(values.std(ddof=1)) / math.sqrt(n)


def wilson(share: float, n: int) -> Estimate:
    """A share of n in points of 100, with Wilson's interval; the share need not be a whole number of them."""
    z2 = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) ** 2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * share * (1 - share) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    return Estimate(100 * share, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def unpaired(left: Estimate, right: Estimate) -> Estimate:
    """left - right of independent estimates, or of which no more is known: Newcombe's interval from theirs."""
    value = left.value - right.value
    below = math.hypot(left.value - left.low, right.high - right.value)
    above = math.hypot(left.high - left.value, right.value - right.low)
    return Estimate(value, value - below, value + above)


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates, its interval from theirs in the way of `unpaired`."""
    value = sum(part.value for part in parts) / len(parts)
    below = math.hypot(*(part.value - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    return Estimate(value, value - below, value + above)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p of as many questions gained as lost; 1 where none changed."""
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def cv(values: Sequence[float]) -> float:
    """Coefficient of variation: sample standard deviation over the mean, a share; NaN for fewer than two values."""
    kept = np.asarray(values, dtype=float)
    if kept.size < 2:
        return math.nan
    return float(kept.std(ddof=1) / kept.mean())


def smallest_visible_effect(n: int, sd_log: float) -> float:
    """Smallest true ratio above 1 that `n` rounds would have shown as "interval above 1" four times out of five.

    `sd_log` is the standard deviation of a per-round log ratio, best taken from an A/A pair. Approximation by the
    sum of the two t quantiles (95% two-sided, 80% power). NaN for n below 3.
    """
    if n < LEAST_FOR_INTERVAL or math.isnan(sd_log):
        return math.nan
    quantiles = t_quantile(n, (1 + CONFIDENCE) / 2) + t_quantile(n, POWER)
    return math.exp(quantiles * sd_log / math.sqrt(n))


def rounds_needed(effect: float, sd_log: float) -> int | None:
    """Fewest rounds whose `smallest_visible_effect` is at most `effect`, a ratio above 1; None for an unknown spread.

    Raises ValueError for an effect of 1 or less, which no number of rounds would show.
    """
    if effect <= 1:
        raise ValueError(f"an effect to be seen is a ratio above 1, found {effect}")
    if math.isnan(sd_log):
        return None
    enough = LEAST_FOR_INTERVAL
    while smallest_visible_effect(enough, sd_log) > effect:
        enough *= 2
    few = max(enough // 2, LEAST_FOR_INTERVAL - 1)  # not enough, or without an interval
    while enough - few > 1:
        middle = (few + enough) // 2
        if smallest_visible_effect(middle, sd_log) > effect:
            few = middle
        else:
            enough = middle
    return enough


def false_positive_share(logs: Sequence[float], n: int, draws: int = 10_000, seed: int = 0) -> float:
    """How often `n` rounds of an arm against itself would have claimed a difference, resampled from A/A pairs.

    `logs`: log ratios of A/A pairs. Each draw takes n different pairs, says of each by lot which half is the arm, and
    forms the interval of `paired_ratio`; counted is where it excludes 1. NaN for n below 3 or fewer pairs than n.
    """
    values = np.asarray(logs, dtype=float)
    if n < LEAST_FOR_INTERVAL or values.size < n:
        return math.nan
    random = np.random.default_rng(seed)
    chosen = np.argsort(random.random((draws, values.size)), axis=1)[:, :n]
    sample = values[chosen] * random.choice((-1.0, 1.0), (draws, n))
    half_widths = t_quantile(n, (1 + CONFIDENCE) / 2) * sample.std(axis=1, ddof=1) / math.sqrt(n)
    return float(np.mean(np.abs(sample.mean(axis=1)) > half_widths))


def false_positive_range(pairs: int, n: int, pools: int = 400, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Between which shares `false_positive_share` lies for 95 of 100 sessions of so many pairs of normal noise.

    With few pairs the same few extreme ones come again and again, so that a session may show 2% or 12% by chance.
    (NaN, NaN) where there is no share.
    """
    if n < LEAST_FOR_INTERVAL or pairs < n:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    shares = [false_positive_share(random.normal(size=pairs), n, draws, seed + pool) for pool in range(pools)]
    low, high = np.quantile(shares, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


@dataclass(frozen=True)
class Slope:
    """Change per unit of x by least squares, with its two-sided 95% interval (NaN for `n` below 3)."""

    slope: float
    ci_low: float
    ci_high: float
    n: int


def linear_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """How y changes with x. All NaN for fewer than two points."""
    n = len(x)
    if n < 2:
        return Slope(math.nan, math.nan, math.nan, n)
    fit = stats.linregress(x, y)
    if n < 3:
        return Slope(float(fit.slope), math.nan, math.nan, n)
    half_width = t_quantile(n - 1, (1 + CONFIDENCE) / 2) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - half_width, float(fit.slope) + half_width, n)


def batch_mean(values: Sequence[float]) -> Difference:
    """Mean of values that depend on their neighbours, in their order: the interval comes from means of batches.

    Batches are consecutive, as long as possible while there are `BATCHES`, and `LEAST_BATCH` long at the least, so that
    what one value does to the next stays inside a batch. Student's t over the batches; NaN for fewer than three. `n`
    are the batches. Raises ValueError for no value.
    """
    series = np.asarray(values, dtype=float)
    if series.size == 0:
        raise ValueError("mean of batches: no value")
    n, mean = max(1, min(BATCHES, series.size // LEAST_BATCH)), float(series.mean())
    half_width = _half_width(np.array([batch.mean() for batch in np.array_split(series, n)]), CONFIDENCE)
    return Difference(mean, mean - half_width, mean + half_width, n)


def bootstrap_share(part: Sequence[float], whole: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95% interval of `sum(part) / sum(whole)`, by drawing the pairs again; (NaN, NaN) for fewer than three pairs.

    A pair must be what varies on its own: values that repeat one another belong into one pair, summed.
    """
    parts, wholes = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    if parts.size < LEAST_FOR_INTERVAL:
        return math.nan, math.nan
    chosen = np.random.default_rng(0).integers(parts.size, size=(draws, parts.size))
    shares = parts[chosen].sum(axis=1) / wholes[chosen].sum(axis=1)
    low, high = np.quantile(shares, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def _end(value: float) -> str:
    text = f"{value:.2f}"
    return f"{value:.3f}" if text == "1.00" else text


def t_quantile(n: int, probability: float) -> float:
    """Of Student's t for a mean, or a spread, taken from `n` values."""
    return float(stats.t.ppf(probability, n - 1))
