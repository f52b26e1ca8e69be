"""Rungs against one another, problem by problem, over seeds. Knows nothing of files, or of what a rung stands for.

A mean is over problems and seeds. Two things vary by themselves: which problems were asked, and how a seed's training
came out. Each gives an interval (seeds only where there are three or more) and the wider one is shown, with the name
of what it is over: where a rung is not trained all seeds are the same, and an interval over them would have no width.
Of recall there are layers in place of problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.ladder.rows import (
    ADVISORY,
    BASE_FEATURES,
    DEPLOYED,
    DISTIL_ALONE,
    FINAL,
    FP,
    FULL_K_SET,
    INT4,
    JOINT,
    NATIVE_PATH,
    OWN_FEATURES,
    PHASE1,
    PHASE2,
    SFT_FIRST,
    UNTRAINED,
    Ladder,
    Side,
)
from analysis.statistics import CONFIDENCE, Estimate, mcnemar, student, student_of_log, wilson

PROBLEMS, LAYERS, SEEDS = "problems", "layers", "seeds"
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
    (BASE_FEATURES, PHASE1, "feature drift: heads that see the base's routes"),
    (OWN_FEATURES, PHASE1, "feature drift: heads trained on routes of their own"),
    (NATIVE_PATH, PHASE2, "LoRA trained on native routes"),
    (SFT_FIRST, PHASE2, "LoRA before heads"),
    (JOINT, PHASE2, "heads and LoRA together"),
    (DISTIL_ALONE, PHASE1, "distillation without answers before it"),
    (DISTIL_ALONE, FINAL, "distillation alone against answers first"),
    (f"{FULL_K_SET}{FULL}", f"{INT4}{FULL}", "the set for the full K, at the full K"),
    (FULL_K_SET, PHASE2, "the full K's set at this K, against swapping the files"),
)


@dataclass(frozen=True)
class Measured(Estimate):
    """A mean over `n` problems or layers and over `seeds`, with its interval (NaN: none), and what that is over."""

    n: int
    seeds: Sequence[int]
    over: str

    @property
    def of(self) -> str:
        """`n=540, seeds 0, 1, 2, interval over seeds`."""
        return f"n={self.n}, {seeds_text(self.seeds)}, interval over {self.over}"


def seeds_text(seeds: Sequence[int]) -> str:
    """`seed 0`, `seeds 0, 1`."""
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"


def mean(values: np.ndarray, seeds: Sequence[int], confidence: float = CONFIDENCE) -> Measured:
    """The mean of `[seeds, problems]` with Student's interval, over problems (each its mean over seeds) or seeds."""
    ends = (student(values.mean(axis=axis), confidence) for axis in (0, 1))
    return _wider(*ends, values.shape[1], seeds, PROBLEMS)


def loss(values: np.ndarray, seeds: Sequence[int]) -> Measured:
    """The same of cross-entropies, which are never below 0, and neither is the interval."""
    return _wider(*(student_of_log(values.mean(axis=axis)) for axis in (0, 1)), values.shape[1], seeds, PROBLEMS)


def share(values: np.ndarray, seeds: Sequence[int]) -> Measured:
    """The mean of right and wrong, or yes and no, in points of 100; Wilson's interval over problems, or over seeds."""
    over_problems = wilson(float(values.mean()), values.shape[1])
    return _wider(over_problems, _within(student(100 * values.mean(axis=1))), values.shape[1], seeds, PROBLEMS)


def recalled(ladder: Ladder, side: Side, seeds: Sequence[int] | None = None) -> Measured:
    """Recall in points of 100, over predicted layers or seeds; NaN where there are no heads."""
    chosen = ladder.seeds_of(side) if seeds is None else seeds
    values = 100 * ladder.recall_of(side, chosen)
    if not values.size:
        return Measured(math.nan, math.nan, math.nan, 0, chosen, LAYERS)
    ends = (_within(student(values.mean(axis=axis))) for axis in (0, 1))
    return _wider(*ends, values.shape[1], chosen, LAYERS)


def _within(found: Estimate) -> Estimate:
    """Ends within 0 and 100, where there are some."""
    return Estimate(found.value, *(float(np.clip(end, 0, 100)) for end in (found.low, found.high)))


def _wider(one: Estimate, seeds: Estimate, n: int, names: Sequence[int], unit: str) -> Measured:
    by_seeds = seeds.high - seeds.low > one.high - one.low  # False where one is NaN
    ends = seeds if by_seeds else one
    return Measured(one.value, ends.low, ends.high, n, tuple(names), SEEDS if by_seeds else unit)


def points(ladder: Ladder, weights: Mapping[Side, float], confidence: float = CONFIDENCE) -> Measured:
    """Weighted exact match of sides, problem by problem, in points of 100, of the seeds that have all of them."""
    return mean(100 * ladder.values("exact", weights), ladder.seeds_of(*weights), confidence)


def nats(ladder: Ladder, weights: Mapping[Side, float], confidence: float = CONFIDENCE) -> Measured:
    """Weighted cross-entropy of sides, problem by problem; NaN for what the engine answered."""
    return mean(ladder.values("cross_entropy", weights), ladder.seeds_of(*weights), confidence)


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
    exact, entropy = mean(100 * steps, seeds), mean(ladder.values("cross_entropy", weights, seeds), seeds)
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
        "seeds": ", ".join(map(str, seeds)),
    }
