"""What a ladder says of the paper's claims about training, and of the three relations that it was built to show.

The claims are relations of a method, so a small model that was trained here may judge them; numbers of rows belong to
the released models and only stand beside ours. Each rule stands here, whatever comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.ladder import training
from analysis.ladder.orders import COLLAPSE, ORDER, decided, more_repetitive
from analysis.ladder.pairs import Measured, nats, points, recalled, share
from analysis.ladder.rows import DISTIL_ALONE, FINAL, INT4, JOINT, PHASE1, PHASE2, SFT_FIRST, UNTRAINED, Ladder, Side
from analysis.paper.claims import Claim, Claims
from analysis.paper.findings import Finding, Status, absolute
from analysis.statistics import CONFIDENCE

EXPERIMENT = "ladder"
LEAST_LOSS, LEAST_SHARE, MOST_BEHIND = 10.0, 0.5, 1.0  # points, share of the loss, points
ORDER_ARMS = (SFT_FIRST, JOINT)
ORDER_CONFIDENCE = 1 - (1 - CONFIDENCE) / 4  # two arms, two measures
LEAST_COLLAPSE = 5.0  # points of repetitive answers more, below which nobody would speak of a collapse
RULES = (
    f"`{ORDER}` is judged by exact match against each of {' and '.join(ORDER_ARMS)}, and where that decides "
    f"nothing by cross-entropy, at {ORDER_CONFIDENCE:.2%} each for four looks. A LoRA of this size may adapt to any "
    "fixed routes, so that exact match need not see what became of the heads: their recall stands in the reason.",
    f"`{COLLAPSE}` is judged by the share of repetitive answers, {DISTIL_ALONE} less final, taken as "
    f"unpaired. An interval wholly below {LEAST_COLLAPSE:.0f} points is no collapse; one above 0 is.",
)


@dataclass(frozen=True)
class Shown:
    """One relation: `value` should be at least `limit`, both in points of exact match."""

    what: str
    figures: str
    value: Measured
    limit: float
    blocked: str = ""  # why it cannot be asked

    @property
    def verdict(self) -> str:
        """As measured, and whether the interval settles it."""
        value = self.value
        if self.blocked:
            return f"**not shown**: {self.blocked}"
        met = round(value.value - self.limit, 9) >= 0
        if met and round(value.low - self.limit, 9) >= 0:
            return "holds"
        if not met and value.high < self.limit:
            return "**fails**"
        return f"{'holds' if met else '**fails**'} as measured; its interval leaves both open"


def must_show(ladder: Ladder) -> list[Shown]:
    """The three relations of the issue."""
    int4, untrained, phase1, final = (Side(rung, ladder.k) for rung in (INT4, UNTRAINED, PHASE1, FINAL))
    loss = points(ladder, {int4: 1, untrained: -1})
    regained = points(ladder, {phase1: 1, untrained: -1})
    over_half = points(ladder, {phase1: 1, untrained: LEAST_SHARE - 1, int4: -LEAST_SHARE})
    end = points(ladder, {final: 1, int4: -1})
    part = f"{regained.value / loss.value:.0%} of the loss regained" if loss.value > 0 else "nothing was lost"
    return [
        Shown(
            f"untrained heads lose at least {LEAST_LOSS:.0f} points against int4", loss.text(".1f"), loss, LEAST_LOSS
        ),
        Shown(
            "phase 1 recovers at least half of that",
            f"{part}; above the half by {over_half.text('+.1f')}",
            over_half,
            0.0,
            "" if loss.value > 0 else part,
        ),
        Shown(
            f"final ends within {MOST_BEHIND:.0f} point of int4, or above", end.text("+.1f"), end, -MOST_BEHIND
        ),
    ]  # fmt: skip


def findings(ladder: Ladder, claims: Claims) -> list[Finding]:
    """A finding for each claim of the ladder, in each place. Raises ValueError for one that nothing here answers."""
    found = []
    for claim in (claim for claim in claims.by_id.values() if claim.experiment == EXPERIMENT):
        where = {"k": str(ladder.k)}
        if claim.id == ORDER:
            found += [_order(claim, ladder, other, where) for other in ORDER_ARMS]
        elif claim.id == COLLAPSE:
            found.append(_collapse(claim, ladder, where))
        elif claim.id in ROWS:
            place = f"{ladder.tier} on {ladder.machine}"
            ours = ROWS[claim.id](ladder)
            found.append(absolute(claim, ours, place, machine=ladder.machine, tier=ladder.tier, **where))
        else:
            raise ValueError(f"claim {claim.id}: the ladder does not answer it")
    return found


def _rows(ladder: Ladder, phase: str, of: str) -> str:
    """How many rows a phase was trained on, the least and the most of the seeds."""
    counts = [training.rows_trained(about, phase) for about in ladder.about]
    if any(map(math.isnan, counts)):
        return f"unknown: steps run of {phase} are not recorded"
    ends = dict.fromkeys((min(counts), max(counts)))
    return f"{'-'.join(f'{count:,}' for count in ends)} rows trained on, of {of}"


def _sft_rows(ladder: Ladder) -> str:
    different = max(int(about["corpus"]["samples"]) for about in ladder.about)
    return _rows(ladder, training.PHASE2, f"{different:,} answers of the teacher")


def _on_policy_rows(ladder: Ladder) -> str:
    return _rows(ladder, training.PHASE3, "the student's own answers")


ROWS = {"train.phase2_rows": _sft_rows, "train.phase3_rows": _on_policy_rows}


def _order(claim: Claim, ladder: Ladder, other: str, where: Mapping[str, str]) -> Finding:
    """Heads first against LoRA first, and against both at once: exact match decides, else cross-entropy."""
    first, later = Side(PHASE2, ladder.k), Side(other, ladder.k)
    where = {**where, "arm": f"{PHASE2}/{other}"}
    if not ladder.has(first, later):
        return _not_run(claim, other, where)
    weights = {first: 1.0, later: -1.0}
    exact, entropy = (measure(ladder, weights, ORDER_CONFIDENCE) for measure in (points, nats))
    sign, said = decided("heads first", exact, entropy)
    said += f" at {ORDER_CONFIDENCE:.2%}"
    status = {1: Status.HOLDS, -1: Status.FAILS, 0: Status.NOT_TESTABLE}[sign]
    ours = f"{exact.text('+.1f')} points, {entropy.text('+.4f')} nats, at {ORDER_CONFIDENCE:.2%}"
    sides = ((PHASE2, first), (other, later), (UNTRAINED, Side(UNTRAINED, ladder.k)))
    shares = {name: recalled(ladder, side, exact.seeds).value / 100 for name, side in sides}
    recall = ", ".join(f"{name} {value:.2f}" for name, value in shares.items())
    parts = (said, f"{exact.of}, of nats over {entropy.over}", f"recall: {recall}", ladder.stands_for)
    return Finding(claim, status, ours, "; ".join(filter(None, parts)), **where)


def _collapse(claim: Claim, ladder: Ladder, where: Mapping[str, str]) -> Finding:
    """Repetitive answers after distillation alone, against the same after answers were learnt first."""
    alone, final = Side(DISTIL_ALONE, ladder.k), Side(FINAL, ladder.k)
    where = {**where, "arm": f"{DISTIL_ALONE}/{FINAL}"}
    if not ladder.has(alone, final):
        return _not_run(claim, DISTIL_ALONE, where)
    seeds = ladder.seeds_of(alone, final)
    shares = [share(ladder.values("repetitive", {side: 1.0}, seeds), seeds) for side in (alone, final)]
    more = more_repetitive(ladder, alone, final)
    told = f"{more.text('+.1f')} points more repetitive answers"
    if more.high < LEAST_COLLAPSE:
        status, words = (Status.DIFFERS, "few") if more.low > 0 else (Status.FAILS, "no collapse")
    elif more.low > 0:
        status, words = Status.HOLDS, "more"
    else:
        status, words = Status.NOT_TESTABLE, "undecided"
    ours = ", ".join(f"{part.text('.1f')}% {side.rung}" for part, side in zip(shares, (alone, final), strict=True))
    worse = f"exact match {points(ladder, {alone: 1, final: -1}).text('+.1f')} points"
    parts = (f"{words}: {told}", worse, shares[0].of, ladder.stands_for)
    return Finding(claim, status, ours, "; ".join(filter(None, parts)), **where)


def _not_run(claim: Claim, rung: str, where: Mapping[str, str]) -> Finding:
    return Finding(
        claim, Status.NOT_TESTABLE, "", f"control {rung} was not run: run the ladder with --controls", **where
    )
