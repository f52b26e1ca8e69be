"""Rungs against one another, problem by problem, over seeds. Knows nothing of files, or of what a rung stands for.

A mean is over problems and seeds. Two things vary by themselves: which problems were asked, and how a seed's training
came out. Each gives an interval (seeds only where there are three or more) and the wider one is shown, with the name
of what it is over: where a rung is not trained all seeds are the same, and an interval over them would have no width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from analysis.ladder.rows import (
    ADVISORY,
    DEPLOYED,
    DISTIL_ALONE,
    FINAL,
    FP,
    FULL_K_SET,
    INT4,
    JOINT,
    PHASE1,
    PHASE2,
    SFT_FIRST,
    UNTRAINED,
    Ladder,
    Side,
)
from analysis.quality.scores import wilson
from analysis.statistics import CONFIDENCE, LEAST_FOR_INTERVAL, t_quantile
from analysis.units import interval

PROBLEMS, SEEDS = "problems", "seeds"
ALL = "all"  # in place of a seed
FULL = "*"  # behind a rung's name in `PAIRS`: at the full K, not at the ladder's
# A rung, what it is set against, what the difference says.
PAIRS = (
    (INT4, FP, "quantisation"),
    (f"{INT4}{FULL}", f"{FP}{FULL}", "quantisation at the full K"),
    (INT4, f"{INT4}{FULL}", "fewer experts"),
    (UNTRAINED, INT4, "predictions as routes, heads untrained"),
    (PHASE1, UNTRAINED, "training the heads"),
    (PHASE1, INT4, "predictions as routes, heads trained"),
    (PHASE2, PHASE1, "recovery LoRA"),
    (PHASE2, INT4, "heads and LoRA against the routers' own choice"),
    (FINAL, PHASE2, "on-policy distillation"),
    (FINAL, INT4, "the whole set against the routers' own choice"),
    (FINAL, f"{FP}{FULL}", "the whole set against the teacher"),
    (DEPLOYED, FINAL, "the engine against the evaluation in training"),
    (ADVISORY, INT4, "must be nothing: the router decides in both"),
    (ADVISORY, PHASE1, "authority: the same heads as advice and as route"),
    ("base-features", PHASE1, "feature drift: heads that see the base's routes"),
    ("own-features", PHASE1, "feature drift: heads trained on routes of their own"),
    ("lora-native-path", PHASE2, "LoRA trained on native routes"),
    (SFT_FIRST, PHASE2, "LoRA before heads"),
    (JOINT, PHASE2, "heads and LoRA together"),
    (DISTIL_ALONE, PHASE1, "distillation without answers before it"),
    (DISTIL_ALONE, FINAL, "distillation alone against answers first"),
    (f"{FULL_K_SET}{FULL}", f"{INT4}{FULL}", "the set for the full K, at the full K"),
    (FULL_K_SET, PHASE2, "the full K's set at this K, against swapping the files"),
)


@dataclass(frozen=True)
class Measured:
    """A mean over `n` problems and some seeds with its interval (NaN: none), and what that interval is over."""

    value: float
    low: float
    high: float
    n: int
    seeds: int
    over: str

    def text(self, form: str) -> str:
        """`+3.1 (+0.5 to +5.7)`."""
        if math.isnan(self.value):
            return "unknown"
        value, low, high = (_no_minus_zero(end, form) for end in (self.value, self.low, self.high))
        return f"{value:{form}} ({'no interval' if math.isnan(low) else interval(low, high, form)})"

    @property
    def of(self) -> str:
        """`n=540, 3 seeds, interval over seeds`."""
        return f"n={self.n}, {self.seeds} seed{'s' * (self.seeds != 1)}, interval over {self.over}"


def _no_minus_zero(value: float, form: str) -> float:
    return 0.0 if not math.isnan(value) and float(format(value, form)) == 0 else value


def mean(values: np.ndarray, confidence: float = CONFIDENCE) -> Measured:
    """The mean of `[seeds, problems]` with Student's interval, over problems (each its mean over seeds) or seeds."""
    return _measured(values, confidence, _student(values.mean(axis=0), confidence))


def share(values: np.ndarray) -> Measured:
    """The mean of right and wrong, or yes and no, in points of 100; Wilson's interval over problems, or over seeds."""
    score = wilson(float(values.mean()), values.shape[1])
    found = _measured(100 * values, CONFIDENCE, (score.low, score.high))
    return Measured(found.value, max(0.0, found.low), min(100.0, found.high), found.n, found.seeds, found.over)


def _measured(values: np.ndarray, confidence: float, over_problems: tuple[float, float]) -> Measured:
    seeds, n = values.shape
    over_seeds = _student(values.mean(axis=1), confidence)
    by_seeds = over_seeds[1] - over_seeds[0] > over_problems[1] - over_problems[0]  # False where one is NaN
    ends = over_seeds if by_seeds else over_problems
    return Measured(float(values.mean()), *ends, n, seeds, SEEDS if by_seeds else PROBLEMS)


def _student(values: np.ndarray, confidence: float) -> tuple[float, float]:
    n, middle = len(values), float(values.mean())
    if n < LEAST_FOR_INTERVAL:
        return math.nan, math.nan
    half = t_quantile(n, (1 + confidence) / 2) * float(values.std(ddof=1)) / math.sqrt(n)
    return middle - half, middle + half


def points(ladder: Ladder, weights: Mapping[Side, float], confidence: float = CONFIDENCE) -> Measured:
    """Weighted exact match of sides, problem by problem, in points of 100."""
    return mean(100 * ladder.values("exact", weights), confidence)


def nats(ladder: Ladder, weights: Mapping[Side, float], confidence: float = CONFIDENCE) -> Measured:
    """Weighted cross-entropy of sides, problem by problem; NaN for what the engine answered."""
    return mean(ladder.values("cross_entropy", weights), confidence)


def sides_of(ladder: Ladder) -> list[tuple[Side, Side, str]]:
    """The `PAIRS` that some seed ran."""
    found = []
    for *names, what in PAIRS:
        side, base = (
            Side(name.removesuffix(FULL), ladder.full_k if name.endswith(FULL) else ladder.k) for name in names
        )
        known = [(ours, theirs) for ours, theirs, _ in found]
        if side != base and (side, base) not in known and ladder.has(side, base):
            found.append((side, base, what))
    return found


def pairs(ladder: Ladder) -> pd.DataFrame:
    """A row per pair over all seeds that ran both, and where these are several, one per seed.

    McNemar's exact test is of one seed's problems: over several seeds, which answered the same ones, there is none.
    """
    rows = []
    for side, base, what in sides_of(ladder):
        seeds = ladder.seeds_of(side, base)
        for name, chosen in [(ALL, seeds), *((seed, [seed]) for seed in seeds if len(seeds) > 1)]:
            rows.append(_pair(ladder, side, base, name, chosen) | {"what": what})
    return pd.DataFrame(rows)


def _pair(ladder: Ladder, side: Side, base: Side, name: int | str, seeds: Sequence[int]) -> dict:
    weights = {side: 1.0, base: -1.0}
    steps = ladder.values("exact", weights, seeds)
    exact, entropy = mean(100 * steps), mean(ladder.values("cross_entropy", weights, seeds))
    gained, lost = int((steps > 0).sum()), int((steps < 0).sum())
    return {
        "rung": side.rung,
        "k": side.k,
        "base": base.rung,
        "base_k": base.k,
        "seed": name,
        "points": exact.value,
        "ci_low": exact.low,
        "ci_high": exact.high,
        "over": exact.over,
        "ce": entropy.value,
        "ce_low": entropy.low,
        "ce_high": entropy.high,
        "ce_over": entropy.over,
        "gained": gained,
        "lost": lost,
        "mcnemar_p": mcnemar(gained, lost) if len(seeds) == 1 else math.nan,
        "n": exact.n,
        "seeds": len(seeds),
    }


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p of as many problems gained as lost; 1 where none changed."""
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
