"""The line `a + b x cold` through medians: bins of cold share, least squares, residuals, intervals, measured ends.

Knows nothing of files, ways of reading or units beyond milliseconds. Single loads do not lie on a line (a device has
good and bad moments), medians of enough loads do: each bin gives one point, whatever its size, and a bin of too few
loads gives none. Intervals come from drawing the loads of each bin again, so they know the noise of the loads and not
whether the line is right; residuals and the ends, measured and not fitted, tell that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

LEAST = 30  # loads of a bin
MIDDLE_BINS = 8  # most bins between all warm and all cold, where shares are not set but found
RESAMPLES = 1000
END_AGREEMENT = 0.10  # how far a measured end may lie from the line's, as a share of the line's
SAME_SHARE = 0.005  # cold shares closer than this are one point
LEAST_SPREAD = 0.3  # of cold share between the first and the last bin; less says nothing of the ends
NO_BIN = -1


@dataclass(frozen=True)
class Bin:
    """Medians of the loads of one bin: cold share 0..1 and milliseconds per load."""

    cold: float
    ms: float
    n: int


@dataclass(frozen=True)
class End:
    """One end of the line, measured: the median of the loads that were all warm, or all cold, beside the line there."""

    measured: float
    fitted: float
    n: int

    @property
    def agrees(self) -> bool:
        """Within `END_AGREEMENT` of the line; False where it was not measured."""
        return abs(self.measured - self.fitted) <= END_AGREEMENT * abs(self.fitted)

    @property
    def error(self) -> float:
        """Measured over fitted, less 1."""
        return self.measured / self.fitted - 1 if self.fitted else math.nan


@dataclass(frozen=True)
class ResidualShare:
    """A largest residual: in ms, as a share of a + b with its 95% interval; its loads and the line's bins."""

    ms: float
    share: float
    low: float
    high: float
    n: int
    bins: int


@dataclass(frozen=True)
class Fit:
    """`a + b x cold` in ms per load, through `bins`. Intervals are 95%; `residuals` are measured less fitted, by bin.

    `left_out`: loads in no bin. `drawn`: the medians of every redrawing of the loads, [bins, resamples].
    """

    a: float
    b: float
    a_low: float
    a_high: float
    b_low: float
    b_high: float
    r2: float
    bins: tuple[Bin, ...]
    residuals: tuple[float, ...]
    warm: End
    cold: End
    left_out: int
    drawn: np.ndarray = field(repr=False, compare=False)

    @property
    def n(self) -> int:
        return sum(part.n for part in self.bins)

    @property
    def worst(self) -> float:
        """The largest residual, in ms, without its sign."""
        return max(map(abs, self.residuals))

    def columns(self) -> dict[str, float]:
        """What a table says of the line, by column."""
        return {
            "a_ms": self.a,
            "a_low": self.a_low,
            "a_high": self.a_high,
            "b_ms": self.b,
            "b_low": self.b_low,
            "b_high": self.b_high,
            "r2": self.r2,
            "max_residual_ms": self.worst,
            "bins": len(self.bins),
            "n": self.n,
            "cold0_ms": self.warm.measured,
            "cold1_ms": self.cold.measured,
            "left_out": self.left_out,
        }

    def bin_rows(self) -> list[dict[str, float]]:
        """One row per bin: what was measured, what the line says, and the difference in ms."""
        return [
            {"cold": part.cold, "ms": part.ms, "fitted_ms": self.at(part.cold), "residual_ms": residual, "n": part.n}
            for part, residual in zip(self.bins, self.residuals, strict=True)
        ]

    def residual_share(self, line_from: float = 0.0, from_cold: float = 0.0) -> ResidualShare:
        """The largest residual over a + b of the line through the bins from cold share `line_from` on.

        Residuals of bins from `from_cold` on count. NaN with n 0 where there is none, or no line. The interval leans
        upward, since the largest of several noisy values does.
        """
        x, y = np.array([part.cold for part in self.bins]), np.array([part.ms for part in self.bins])
        used = x >= line_from - SAME_SHARE
        counted = used & (x >= from_cold - SAME_SHARE)
        if used.sum() < 2 or not counted.any():
            return ResidualShare(math.nan, math.nan, math.nan, math.nan, 0, int(used.sum()))
        a, b, _ = line(x[used], y[used])
        starts, slopes = _lines(x[used], self.drawn[used])
        shares = np.abs(self.drawn - starts - x[:, None] * slopes) / np.abs(starts + slopes)
        low, high = np.quantile(shares[counted].max(axis=0), (0.025, 0.975))
        worst = float(np.abs(y - a - b * x)[counted].max())
        n = sum(part.n for part, mine in zip(self.bins, counted, strict=True) if mine)
        return ResidualShare(worst, worst / abs(a + b), float(low), float(high), n, int(used.sum()))

    def at(self, cold: float) -> float:
        return self.a + self.b * cold


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Ordinary least squares: (a, b, R^2) of y = a + b x. R^2 is NaN where y does not vary.

    Raises ValueError when there are fewer than two different x.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.size < 2 or np.ptp(x) < SAME_SHARE:
        raise ValueError(f"a line needs two different cold shares, found {x.size} points over {_range(x)}")
    b = float(np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2))
    a = float(y.mean() - b * x.mean())
    total = float(np.sum((y - y.mean()) ** 2))
    r2 = 1 - float(np.sum((y - a - b * x) ** 2)) / total if total > 0 else math.nan
    return a, b, r2


def level_labels(levels: Sequence[float], least: int = LEAST) -> np.ndarray:
    """A bin for each load whose cold share was set: loads of one target share are one bin. `NO_BIN` for small ones."""
    _, labels, counts = np.unique(np.asarray(levels, float), return_inverse=True, return_counts=True)
    return np.where(counts[labels] >= least, labels, NO_BIN)


def quantile_labels(cold: Sequence[float], least: int = LEAST) -> np.ndarray:
    """A bin for each load whose cold share was found: all warm, all cold, and between them bins of equal size.

    Loads are mostly all warm or all cold. So these are bins of their own, if `least` of them came together, and do not
    mix with partly cold loads. Loads of one share are never in two bins. `NO_BIN` where there are too few in all.
    """
    cold = np.asarray(cold, float)
    labels = np.full(cold.size, NO_BIN)
    number = 0
    for end in (0.0, 1.0):
        here = cold == end
        if here.sum() >= least:
            labels[here] = number
            number += 1
    middle = np.flatnonzero(labels == NO_BIN)
    size = max(least, math.ceil(middle.size / MIDDLE_BINS))
    _, group, counts = np.unique(cold[middle], return_inverse=True, return_counts=True)
    label_of = np.full(counts.size, NO_BIN)  # of each share that occurs, in rising order
    first = gathered = 0
    for value, count in enumerate(counts):
        gathered += count
        if gathered >= size:
            label_of[first : value + 1] = number
            number, first, gathered = number + 1, value + 1, 0
    if first > 0:
        label_of[first:] = number - 1  # what is left over joins the last bin between the ends
    elif gathered >= least:
        label_of[:] = number
    labels[middle] = label_of[group]
    return labels


def fit(cold: Sequence[float], ms: Sequence[float], labels: Sequence[int], *, seed: int = 0) -> Fit:
    """The line through the medians of the labelled bins, each load's cold share 0..1 and milliseconds given.

    Raises ValueError, one line: sides of different length, a value that is not finite, fewer than two bins, or bins
    within less than `LEAST_SPREAD` of one another, whose line would be an extrapolation.
    """
    cold, ms, labels = np.asarray(cold, float), np.asarray(ms, float), np.asarray(labels)
    if not cold.shape == ms.shape == labels.shape or cold.ndim != 1:
        raise ValueError(f"line: {cold.size} cold shares, {ms.size} times, {labels.size} bins; all need the same loads")
    if not (np.all(np.isfinite(cold)) and np.all(np.isfinite(ms))):
        raise ValueError("line: every cold share and time must be a finite number")
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels) if label != NO_BIN]
    if len(groups) < 2:
        raise ValueError(
            f"a line needs 2 bins of cold share, found {len(groups)} of enough loads among {cold.size} loads "
            f"({_range(cold)} cold)"
        )
    groups.sort(key=lambda group: np.median(cold[group]))
    bins = tuple(Bin(float(np.median(cold[g])), float(np.median(ms[g])), g.size) for g in groups)
    x, y = np.array([part.cold for part in bins]), np.array([part.ms for part in bins])
    if np.ptp(x) < LEAST_SPREAD:
        raise ValueError(
            f"bins of cold share {_range(x)} are too close to one another for a line ({LEAST_SPREAD} apart)"
        )
    a, b, r2 = line(x, y)
    residuals = y - a - b * x
    rng = np.random.default_rng(seed)
    drawn = np.array([np.median(rng.choice(ms[g], (RESAMPLES, g.size)), axis=1) for g in groups])  # [bins, resamples]
    starts, slopes = _lines(x, drawn)
    (a_low, a_high), (b_low, b_high) = (np.quantile(v, (0.025, 0.975)).tolist() for v in (starts, slopes))
    return Fit(
        a,
        b,
        a_low,
        a_high,
        b_low,
        b_high,
        r2,
        bins,
        tuple(residuals.tolist()),
        _end(ms[cold == 0], a),
        _end(ms[cold == 1], a + b),
        int((labels == NO_BIN).sum()),
        drawn,
    )


def first_page_cost(found: Fit) -> tuple[float, float, float]:
    """What a load costs more as soon as anything of it is cold, whatever the share, in ms, with its 95% interval.

    Least squares with a step above cold share 0 beside the line. NaN without a warm bin and three others.
    """
    x, y = np.array([part.cold for part in found.bins]), np.array([part.ms for part in found.bins])
    if x.size < 4 or not (x <= SAME_SHARE).any():
        return math.nan, math.nan, math.nan
    step = np.linalg.pinv(np.column_stack([np.ones_like(x), x, x > SAME_SHARE]))[2]
    low, high = np.quantile(step @ found.drawn, (0.025, 0.975))
    return float(step @ y), float(low), float(high)


def place_effect(ms: Sequence[float], places: Sequence[float], labels: Sequence[int]) -> tuple[float, float]:
    """Whether the cold run's place matters: (rank correlation, p) of time with `places` inside bins, bins pooled.

    Ranks are taken inside each bin, so that the share itself plays no part. (NaN, NaN) where nothing varies.
    """
    ms, places, labels = np.asarray(ms, float), np.asarray(places, float), np.asarray(labels)
    left, right = [], []
    for label in np.unique(labels):
        here = labels == label
        if label == NO_BIN or np.ptp(places[here]) == 0:
            continue
        for values, ranks in ((ms[here], left), (places[here], right)):
            ranks.append((stats.rankdata(values) - 0.5) / here.sum() - 0.5)
    if not left:
        return math.nan, math.nan
    found = stats.pearsonr(np.concatenate(left), np.concatenate(right))
    return float(found.statistic), float(found.pvalue)


def _lines(x: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares through every redrawing [bins, resamples]: starts and slopes."""
    slopes = (x - x.mean()) @ drawn / np.sum((x - x.mean()) ** 2)
    return drawn.mean(axis=0) - slopes * x.mean(), slopes


def _end(ms: np.ndarray, fitted: float) -> End:
    return End(float(np.median(ms)) if ms.size else math.nan, fitted, int(ms.size))


def _range(cold: np.ndarray) -> str:
    return f"{cold.min():.2f} to {cold.max():.2f}" if cold.size else "none"
