"""Scores with their intervals, in points of 100: of an arm, of paired and of unpaired differences, and of their mean.

Knows nothing of files or of the paper's claims. Two arms that answered the same questions are compared question by
question: an interval by drawing questions again (each benchmark by itself, so that a mean of benchmarks is stratified)
and McNemar's exact test. Of scores that somebody printed only n is known, so their difference is taken as unpaired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import stats

from analysis.quality.health import Health, health, unit_of
from analysis.quality.rows import ARMS, BENCHMARKS, Benchmark, Quality
from analysis.statistics import CONFIDENCE, LEAST_FOR_INTERVAL
from analysis.units import interval

DRAWS, SEED = 10_000, 0


@dataclass(frozen=True)
class Estimate:
    """A score or a difference with the ends of its 95% interval (NaN: none), all in points of 100."""

    value: float
    low: float
    high: float

    def text(self, sign: str = "") -> str:
        """`86.7 (70.3-94.7)`; with sign `+` as a difference."""
        value, low, high = (round(end, 1) + 0.0 for end in (self.value, self.low, self.high))  # + 0.0: no minus zero
        ends = "no interval" if math.isnan(low) else interval(low, high, f"{sign}.1f")
        return f"{value:{sign}.1f} ({ends})"


@dataclass(frozen=True)
class Flips:
    """Of right and wrong answers: questions that only int4 or only fp answered, with McNemar's exact two-sided p."""

    gained: int
    lost: int

    @property
    def p(self) -> float:
        changed = self.gained + self.lost
        return float(stats.binomtest(self.gained, changed).pvalue) if changed else 1.0


@dataclass(frozen=True)
class Row:
    """One benchmark of one tier: scores and health by arm, int4 - fp, `flips` where every score is 0 or 1 (else None).

    `draws`: int4 - fp in points for each of `DRAWS` sets of questions drawn again; all equal where no score differs.
    """

    benchmark: Benchmark
    label: str
    stands_in: bool
    n: int
    score: Mapping[str, Estimate]
    difference: Estimate
    flips: Flips | None
    health: Mapping[str, Health]
    draws: np.ndarray

    @property
    def has_interval(self) -> bool:
        """False where no score differs between the arms, so that nothing can be drawn, and below three questions."""
        return not math.isnan(self.difference.low)


@dataclass(frozen=True)
class Scores:
    """A tier's rows in the order of `BENCHMARKS`, and their mean, every benchmark with the same weight."""

    quality: Quality
    rows: Sequence[Row]

    @cached_property
    def mean(self) -> Mapping[str, Estimate]:
        """Mean of each arm's scores."""
        return {arm: mean_of([row.score[arm] for row in self.rows]) for arm in ARMS}

    @cached_property
    def draws(self) -> np.ndarray:
        """The mean difference in each set of draws."""
        return np.mean([row.draws for row in self.rows], axis=0)

    @cached_property
    def difference(self) -> Estimate:
        """Mean of int4 - fp over benchmarks."""
        value = float(np.mean([row.difference.value for row in self.rows]))
        if not any(row.has_interval for row in self.rows):
            return Estimate(value, math.nan, math.nan)
        return drawn(value, self.draws)

    @property
    def n(self) -> int:
        return sum(row.n for row in self.rows)


def score(quality: Quality) -> Scores:
    """Every row of a tier."""
    return Scores(quality, [_row(quality, place) for place in range(len(BENCHMARKS))])


def _row(quality: Quality, place: int) -> Row:
    benchmark = BENCHMARKS[place]
    pairs = quality.of(benchmark)
    sides = {arm: pairs[f"score_{arm}"].to_numpy(float) for arm in ARMS}
    steps = 100 * (sides["int4"] - sides["fp"])
    binary = all(np.isin(side, (0, 1)).all() for side in sides.values())
    draws = resampled(steps, np.random.default_rng((SEED, place)))
    unit = unit_of([*pairs["answer_fp"], *pairs["answer_int4"]])
    known = len(steps) >= LEAST_FOR_INTERVAL and steps.any()
    mean = float(steps.mean())
    return Row(
        benchmark=benchmark,
        label=quality.label(benchmark),
        stands_in=quality.stands_in(benchmark),
        n=len(pairs),
        score={
            arm: _score(side, np.random.default_rng((SEED, place, number)))
            for number, (arm, side) in enumerate(sides.items(), start=1)
        },  # fmt: skip
        difference=drawn(mean, draws) if known else Estimate(mean, math.nan, math.nan),
        flips=Flips(int((steps > 0).sum()), int((steps < 0).sum())) if binary else None,
        health={arm: _health(pairs, arm, unit) for arm in ARMS},
        draws=draws,
    )


def _health(pairs: pd.DataFrame, arm: str, unit: str) -> Health:
    return health(pairs[f"answer_{arm}"], pairs[f"stop_{arm}"], pairs[f"answer_tokens_{arm}"], unit)


def _score(values: np.ndarray, random: np.random.Generator) -> Estimate:
    """Wilson's interval where every score is 0 or 1; else, as a binomial it is not, by drawing questions again."""
    share = float(values.mean())
    if np.isin(values, (0, 1)).all():
        return wilson(share, len(values))
    if len(values) < LEAST_FOR_INTERVAL:
        return Estimate(100 * share, math.nan, math.nan)
    return drawn(100 * share, resampled(100 * values, random))


def wilson(share: float, n: int) -> Estimate:
    """A share of n questions with Wilson's interval; the share need not be a whole number of them."""
    z2 = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) ** 2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * share * (1 - share) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    return Estimate(100 * share, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def unpaired(left: Estimate, right: Estimate) -> Estimate:
    """left - right of scores of different questions, or of which no more is known: Newcombe's interval from theirs."""
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


def resampled(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Means of `DRAWS` samples of as many values, with replacement, shape [DRAWS].

    How often each different value comes is drawn, which is the same and keeps 12,032 questions quick.
    """
    different, counts = np.unique(values, return_counts=True)
    return random.multinomial(len(values), counts / len(values), size=DRAWS) @ different / len(values)


def drawn(value: float, draws: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
    """A value with the percentiles of its draws."""
    low, high = np.quantile(draws, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Estimate(value, float(low), float(high))
