"""What a merge study says of the paper's claims: orders and signs wherever a LoRA was trained, sizes of released ones.

Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from analysis.merge.rows import ATTENTION, DENSE, KINDS, LOGITS, Study
from analysis.paper.claims import Claim, Claims
from analysis.paper.findings import Finding, Status, relation
from analysis.paper.spans import Span
from analysis.statistics import LEAST_FOR_INTERVAL, NO_RATIO, Difference, paired_difference, paired_ratio
from analysis.units import interval

LEFT = 0.5  # less than this left of a correction: most of it is lost


def findings(study: Study, claims: Claims) -> list[Finding]:
    """A finding for each `lora.*` claim. Raises ValueError for one that nothing here answers."""
    judges = {
        "lora.survival_attention": _more_in_attention,
        "lora.survival_dense": lambda claim, study, where: _left(claim, study, DENSE, where),
        "lora.survival_logits": lambda claim, study, where: _left(claim, study, (LOGITS,), where),
        "lora.delta_rms": _below_the_step,
    }
    where = {"k": str(study.about["k"]), "arm": study.tier}
    found = []
    for claim in (claim for claim in claims.by_id.values() if claim.id.startswith("lora.")):
        if claim.id not in judges:
            raise ValueError(f"claim {claim.id}: the merge study does not answer it")
        found.append(judges[claim.id](claim, study, where))
    return found


def _more_in_attention(claim: Claim, study: Study, where: Mapping[str, str]) -> Finding:
    """More survives in attention than in dense projections, set by set or layer by layer."""
    if study.random:
        return Finding(claim, Status.NOT_TESTABLE, told(study.survival(*ATTENTION)), study.origin, **where)
    attention, dense = (study.units(study.of(*kinds), "survival") for kinds in (ATTENTION, DENSE))
    shared = attention.index.intersection(dense.index)
    more = paired_difference(attention.loc[shared], dense.loc[shared])
    ours = f"{told(study.survival(*ATTENTION))}, in {_names(study, DENSE)} {told(study.survival(*DENSE))}"
    what = f"attention less {_names(study, DENSE)}, paired by {study.unit_name('')}: {told(more)}"
    return _signed(claim, more, 0, 1, ours, f"{what}; {study.origin}", where)


def _left(claim: Claim, study: Study, kinds: tuple[str, ...], where: Mapping[str, str]) -> Finding:
    """How much is left: a size that follows from delta over step, and so belongs to the adapter that it was said of."""
    left = study.survival(*kinds)
    if left.n == 0:
        refused = study.about["logits_refused"] if kinds == (LOGITS,) else ""
        return Finding(claim, Status.NOT_TESTABLE, "", refused or "no correction of this kind", **where)
    size = f"{told(left)} over {study.unit_name(kinds[0])}"
    if not study.released:
        ratio = study.of(*KINDS)["delta_over_step"].median()
        why = f"a size that follows from delta over step, {ratio:.2f} here: {size}; {study.origin}"
        return Finding(claim, Status.NOT_TESTABLE, told(left), why, **where)
    found = _signed(claim, left, LEFT, -1, told(left), f"less than {LEFT} survives: {size}; {study.origin}", where)
    if found.status is Status.HOLDS and not Span.of(claim.value).meets(Span(left.ci_low, left.ci_high)):
        return replace(found, status=Status.DIFFERS, why=f"{found.why}; the paper's {claim.value} is outside")
    return found


def _below_the_step(claim: Claim, study: Study, where: Mapping[str, str]) -> Finding:
    """The correction is smaller than the distance of two neighbouring weights."""
    rows = study.of(*KINDS)
    deltas, steps = study.units(rows, "delta_rms"), study.units(rows, "step_median")
    ratio = paired_ratio(deltas, steps) if len(rows) else NO_RATIO
    sizes = f"{rows['delta_rms'].median():.2g}, of a step of {rows['step_median'].median():.2g}"
    why = f"delta RMS over the median step, by {study.unit_name('')}; {study.origin}"
    blocked = study.origin if study.random else ""
    return relation(claim, [ratio], sizes if len(rows) else "", smaller=True, why=why, blocked=blocked, **where)


def _signed(
    claim: Claim, value: Difference, limit: float, side: int, ours: str, why: str, where: Mapping[str, str]
) -> Finding:
    """Whether an interval lies above `limit` (`side` 1) or below it (-1)."""
    low, high = sorted((side * (value.ci_low - limit), side * (value.ci_high - limit)))
    status = Status.HOLDS if low > 0 else Status.FAILS if high < 0 else Status.NOT_TESTABLE
    words = "undecided: " if status is Status.NOT_TESTABLE else ""
    return Finding(claim, status, ours, f"{words}{why}", **where)


def told(value: Difference) -> str:
    """`0.34 (0.31-0.37), n=8`."""
    if value.n == 0:
        return "none"
    ends = interval(value.ci_low, value.ci_high, ".2f") if value.n >= LEAST_FOR_INTERVAL else "no interval"
    return f"{value.mean:.2f} ({ends}), n={value.n}"


def _names(study: Study, kinds: Sequence[str]) -> str:
    return " and ".join(kind for kind in kinds if kind in set(study.weights["kind"])) or "dense projections"
