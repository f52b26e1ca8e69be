"""The paper's Table 2 with the intervals that its own numbers of questions leave, and what our rows say of it.

The paper prints scores alone. Where a benchmark's number of questions is known, each is taken as a binomial share of it
and the difference as unpaired. Its scores are those of released models: they are judged against a released model's real
questions and stand beside everything else. Which benchmark loses most is a relation and is judged wherever a tier can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.paper.claims import Claim, Claims
from analysis.paper.findings import Finding, Status, compare_rows
from analysis.paper.spans import Span
from analysis.quality.rows import ARMS, BENCHMARKS, LONG_REASONING, STAND_IN, Benchmark, Quality
from analysis.quality.scores import Row, Scores, drawn
from analysis.statistics import CONFIDENCE, Estimate, mean_of, unpaired, wilson

COMMAND = "snakemake tab2"
EXPERIMENT = "tab2"
LARGEST = "tab2.reasoning_gap"
INT4, FP = 0, 1  # places in a claim's value


@dataclass(frozen=True)
class PaperRow:
    """A benchmark as the paper has it. `printed`: the two numbers as they stand there, int4 then fp."""

    benchmark: Benchmark
    printed: tuple[float, float]
    score: Mapping[str, Estimate]
    difference: Estimate

    @property
    def questions(self) -> float:
        """The difference in questions."""
        return self.difference.value / 100 * self.benchmark.questions

    @property
    def least_p(self) -> float:
        """McNemar's p if as few questions changed as the difference allows, every one to the same side."""
        return min(1.0, 2 * 0.5 ** round(abs(self.questions)))

    def words(self) -> str:
        """The difference in questions, the most that it can show, and scores that no count of right answers gives."""
        n, count = self.benchmark.questions, round(abs(self.questions))
        counted = {0: "less than one question", 1: "one question", 2: "two questions", 3: "three questions"}.get(
            count, f"{count} questions"
        )
        text = f"{self.benchmark.name}: {abs(self.difference.value):.1f} points of {n} questions = {counted}"
        text += f" ({abs(self.questions):.1f})" if count < 10 else ""
        text += " to int4's favour" if self.questions > 0 else ""
        text += f"; if no other answer changed, McNemar's p is {_p(self.least_p)}, and larger if any did"
        odd = [str(value) for value in self.printed if not _whole(value, n)]
        if odd:
            text += f"; {' and '.join(odd)} cannot be rounded from whole questions right out of {n}"
        return text


def _whole(value: float, n: int) -> bool:
    """Whether some number of right answers out of n is the printed score."""
    span = Span.of(value)
    return Span(span.low - 1e-9, span.high + 1e-9).meets(100 * round(value / 100 * n) / n)


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else "below 0.0001"


def paper_rows(claims: Claims, tag: str) -> list[PaperRow]:
    """The paper's rows of one model, in the order of `BENCHMARKS`; those that claims.yaml lacks are left out."""
    rows = []
    for benchmark in BENCHMARKS:
        claim = claims.by_id.get(f"tab2.{tag}.{benchmark.claim}")
        if claim is not None:
            places = {"fp": FP, "int4": INT4}
            scores = {arm: wilson(float(claim.value[places[arm]]) / 100, benchmark.questions) for arm in ARMS}
            printed = (claim.value[INT4], claim.value[FP])
            rows.append(PaperRow(benchmark, printed, scores, unpaired(scores["int4"], scores["fp"])))
    return rows


def paper_mean(rows: Sequence[PaperRow]) -> tuple[Mapping[str, Estimate], Estimate]:
    """Mean over the paper's benchmarks: each arm's score, and int4 - fp."""
    return {arm: mean_of([row.score[arm] for row in rows]) for arm in ARMS}, mean_of([row.difference for row in rows])


def compare(tiers: Sequence[Scores], claims: Claims) -> pd.DataFrame:
    """compare.csv: every claim of Table 2 in every tier that it is about, a row without values where none is."""
    parts = [
        compare_rows(findings(scores, claims, len(tiers)), claims, scores.quality.session, COMMAND) for scores in tiers
    ]
    tags = {scores.quality.tag for scores in tiers}
    missing = [
        Finding(claim, Status.NOT_TESTABLE, "", f"no tier of the {claim.id.split('.')[1]} family was measured")
        for claim in _claims(claims)
        if claim.id != LARGEST and claim.id.split(".")[1] not in tags
    ]
    return pd.concat([*parts, compare_rows(missing, claims, "", COMMAND)], ignore_index=True)


def findings(scores: Scores, claims: Claims, places: int) -> list[Finding]:
    """What one tier says of the claims about its model, and of the relation. `places`: how many tiers are judged.

    Raises ValueError for a claim of Table 2 that names no benchmark.
    """
    quality = scores.quality
    rows = {row.benchmark.claim: row for row in scores.rows}
    stated = {row.benchmark.claim: row for row in paper_rows(claims, quality.tag)}
    arm = f"{quality.tier} int4/fp" if places > 1 else "int4/fp"
    where = {"k": quality.k, "arm": arm}
    found = []
    for claim in _claims(claims):
        _, tag, name = claim.id.split(".") if claim.id != LARGEST else ("", quality.tag, "")
        if claim.id == LARGEST:
            found.append(_largest(claim, scores, list(stated.values()), places, where))
        elif tag != quality.tag:
            continue
        elif name == "gap":
            gap = -scores.difference.value, -scores.difference.high, -scores.difference.low
            found.append(_judged(claim, quality, [Estimate(*gap)], scores.quality.any_stand_in, "", where))
        elif name in rows:
            row = rows[name]
            own = f"the paper's own difference is {stated[name].difference.text('+.1f')} points, unpaired"
            values = [row.score["int4"], row.score["fp"]]
            found.append(_judged(claim, quality, values, row.stands_in, own, where))
        else:
            raise ValueError(f"claim {claim.id}: no row of Table 2 answers it")
    return found


def _claims(claims: Claims) -> list[Claim]:
    return [claim for claim in claims.by_id.values() if claim.experiment == EXPERIMENT]


def _judged(
    claim: Claim, quality: Quality, values: Sequence[Estimate], stands_in: bool, own: str, where: dict
) -> Finding:
    """Scores of a released model's real questions by the paper's digits and our intervals; others only stand beside.

    A score depends on checkpoint and questions, not on the machine, so it is judged on any.
    """
    ours = ", ".join(value.text() for value in values)
    if stands_in or not quality.released:
        reasons = [f"stand-ins: ours are {STAND_IN} questions"] if stands_in else []
        if not quality.released:
            reasons.append(f"{quality.tier} is a checkpoint made here, and the claim is of the released one")
        return Finding(claim, Status.NOT_TESTABLE, ours, "; ".join(filter(None, (*reasons, own))), **where)
    numbers = claim.value if isinstance(claim.value, list) else [claim.value]
    pairs = list(zip(values, map(Span.of, numbers), strict=True))
    if all(span.meets(round(value.value, 1)) for value, span in pairs):
        status, words = Status.REPRODUCED, "by the stated digits"
    elif all(span.meets(Span(value.low, value.high)) for value, span in pairs):
        status, words = Status.WITHIN, "our interval holds each stated value"
    else:
        status, words = Status.DIFFERS, "our interval excludes a stated value"
    return Finding(claim, status, ours, "; ".join(filter(None, (words, own))), **where)


def largest_share(scores: Scores) -> float:
    """In which share of the draws the long reasoning loses more than every other benchmark, and more than nothing."""
    others = [row.draws for row in scores.rows if row.benchmark is not LONG_REASONING]
    own = next(row.draws for row in scores.rows if row.benchmark is LONG_REASONING)
    return float(np.mean(own < np.min([*others, np.zeros_like(own)], axis=0) - 1e-9))


def _largest(claim: Claim, scores: Scores, stated: Sequence[PaperRow], places: int, where: dict) -> Finding:
    """Whether AIME's loss is larger than each other's and than none: five intervals, widened for their number.

    Holds when all lie on the claim's side, fails when one lies wholly on the other, else it is undecided. What the
    paper's own scores say of it stands in the reason.
    """
    row = next(row for row in scores.rows if row.benchmark is LONG_REASONING)
    others = [other for other in scores.rows if other.benchmark is not LONG_REASONING]
    ours = ", ".join(f"{_gap(other)} {other.benchmark.name}" for other in scores.rows)
    label = f"on {STAND_IN}s: " if scores.quality.any_stand_in else ""
    own = _papers_lead(stated)
    if not row.has_interval:
        why = f"{label}undecided: {row.label}'s gap has no interval (no score differs, or too few questions){own}"
        return Finding(claim, Status.NOT_TESTABLE, ours, why, **where)
    confidence = 1 - (1 - CONFIDENCE) / (places * (len(others) + 1))
    margins = {"no loss": drawn(-row.difference.value, -row.draws, confidence)}
    for other in others:
        value = other.difference.value - row.difference.value
        margins[other.benchmark.name] = drawn(value, other.draws - row.draws, confidence)
    share = f"its gap is the largest in {largest_share(scores):.0%} of {len(row.draws)} draws"
    smaller = [name for name, margin in margins.items() if margin.high < 0]
    open_ = [name for name, margin in margins.items() if not margin.low > 0]
    if smaller:
        status, names = Status.FAILS, smaller
    elif not open_:
        status, names = Status.HOLDS, list(margins)
    else:
        status, names = Status.NOT_TESTABLE, open_
    told = "; ".join(f"{margins[name].text('+.1f')} points over {name}" for name in names)
    words = "undecided: " if status is Status.NOT_TESTABLE else ""
    why = f"{label}{words}{LONG_REASONING.name}'s gap {told}, at {confidence:.1%} each; {share}{own}"
    return Finding(claim, status, ours, why, **where)


def _papers_lead(stated: Sequence[PaperRow]) -> str:
    """By how much the long reasoning's gap is ahead of the next in the paper's own scores, "" where it lacks them."""
    gaps = {row.benchmark: unpaired(row.score["fp"], row.score["int4"]) for row in stated}
    own = gaps.pop(LONG_REASONING, None)
    if own is None or not gaps:
        return ""
    nearest, gap = max(gaps.items(), key=lambda item: item[1].value)
    lead = unpaired(own, gap).text("+.1f")
    return f"; in the paper's own scores it is {lead} points ahead of {nearest.name}, from their n"


def _gap(row: Row) -> str:
    return f"{round(-row.difference.value, 1) + 0.0:.1f}"
