"""Scores with their intervals, in points of 100: of an arm, of paired differences, and of their mean.

Knows nothing of files or of the paper's claims. Two arms that answered the same questions are compared question by
question: an interval by drawing questions again (each benchmark by itself, so that a mean of benchmarks is stratified)
and McNemar's exact test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.quality.health import Health, health, unit_of
from analysis.quality.rows import ARMS, BENCHMARKS, Benchmark, Quality
from analysis.statistics import CONFIDENCE, LEAST_FOR_INTERVAL, Estimate, mcnemar, mean_of, wilson

DRAWS, SEED = 10_000, 0


@dataclass(frozen=True)
class Flips:
    """Of right and wrong answers: questions that only int4 or only fp answered, with McNemar's exact two-sided p."""

    gained: int
    lost: int

    @property
    def p(self) -> float:
        return mcnemar(self.gained, self.lost)


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
