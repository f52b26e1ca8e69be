"""What an experiment found out about the paper's claims: one `Finding` per claim and place, written as compare.csv.

Every experiment judges its own claims, because only it knows what its rows mean, but all by the rules that stand here:
`relation` for signs, orders and sizes of ratios, `absolute` for values of a machine, `exact` for arithmetic. The ledger
(`analysis.paper.ledger`) only collects the files. Knows nothing of how a number came about.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.paper.claims import Claim, Claims
from analysis.paper.spans import Span
from analysis.statistics import CONFIDENCE, Ratio, Spread
from analysis.units import interval, require

LEDGER_COLUMNS = "id kind status paper ours unit session command why".split()
COMPARE_COLUMNS = [*LEDGER_COLUMNS, "k", "arm", "paper_machine"]
DRIFTED = "no verdict: the session drifted"
# Checkpoints with random weights; any other tier is a released model (a test holds this to what can be synthesised).
SYNTHESISED = ("shape-35b", "shape-8b", "mini-35b", "mini-8b", "unit-35b", "unit-8b", "tiny-35b", "tiny-8b")


class Status(enum.StrEnum):
    """What may be said of a claim. `why` must be given with the last two, and says what decided in the others."""

    REPRODUCED = "reproduced"
    WITHIN = "within tolerance"
    DIFFERS = "differs"
    HOLDS = "relation holds"
    FAILS = "relation fails"
    NOT_TESTABLE = "not testable here"
    CONTRADICTED = "contradicted by its own source"


@dataclass(frozen=True)
class Finding:
    """One claim in one place. `ours` is text as it should be read; `k` and `arm` say where, "" for the whole."""

    claim: Claim
    status: Status
    ours: str
    why: str = ""
    k: str = ""
    arm: str = ""
    paper: Any = None  # None: the claim's whole value; else the part of it that is compared

    def __post_init__(self) -> None:
        if self.status in (Status.NOT_TESTABLE, Status.CONTRADICTED) and not self.why:
            raise ValueError(f"claim {self.claim.id}: status {self.status} needs a reason")


def absolute(
    claim: Claim,
    ours: str,
    place: str,
    *,
    machine: str | None,
    tier: str | None,
    spreads: Sequence[Spread] = (),
    **where: Any,
) -> Finding:
    """A value of one machine of the paper: judged on that machine with the released checkpoint, else ours beside it.

    `place`: what ours was measured on, in words. `machine` and `tier`: the same as ids. `spreads`: our median and range
    for each number of the claim (or of `paper`). Where judged: reproduced when every median is a value that the stated
    digits allow, within tolerance when at least every range holds such a value, else it differs.
    """
    if not machine or machine != claim.machine or not tier or tier in SYNTHESISED:
        why = f"a value of {claim.machine or 'the paper'} with the released checkpoint; ours is {place}"
        return Finding(claim, Status.NOT_TESTABLE, ours, why, **where)
    value = claim.value if where.get("paper") is None else where["paper"]
    stated = [Span.of(number) for number in (value if isinstance(value, list) else [value])]
    if len(spreads) != len(stated) or any(spread.n == 0 for spread in spreads):
        why = f"measured where the claim was ({place}), but ours has no range to judge by"
        return Finding(claim, Status.NOT_TESTABLE, ours, why, **where)
    pairs = list(zip(spreads, stated, strict=True))
    if all(span.meets(spread.median) for spread, span in pairs):
        status = Status.REPRODUCED
    elif all(span.meets(Span(spread.low, spread.high)) for spread, span in pairs):
        status = Status.WITHIN
    else:
        status = Status.DIFFERS
    told = "; ".join(f"{s.median:.4g} ({interval(s.low, s.high, '.4g')}), n={s.n}" for s in spreads)
    return Finding(claim, status, ours, f"{told}; by the stated digits, on the claim's machine: {place}", **where)


def relation(
    claim: Claim,
    ratios: Sequence[Ratio],
    ours: str,
    *,
    size: Sequence[float] = (),
    smaller: bool = False,
    places: int = 1,
    why: str = "",
    blocked: str = "",
    **where: Any,
) -> Finding:
    """The one rule for ratios: whether every one lies on the claim's side of 1 and, if it states a size, near that.

    `size`: the stated ratio, or the two ends of the stated range, with its digits; () for a mere sign or order.
    `smaller`: the claim's side is below 1. `places`: in how many places (K, arms) this claim is judged; each interval
    is widened for their number (Bonferroni). `blocked`: a reason not to judge. `why`: what to add to the reason.

    An interval wholly on the other side fails, and so does a count that was equal in every round. All wholly on the
    claim's side: the sign holds; with a size, the claim differs if an interval excludes the stated range. Anything
    else is not testable here: undecided.
    """
    if blocked:
        return Finding(claim, Status.NOT_TESTABLE, ours, blocked, **where)
    wide = [ratio if places == 1 else ratio.at(1 - (1 - CONFIDENCE) / places) for ratio in ratios]
    sided = [ratio.inverse if smaller else ratio for ratio in wide]
    told = "; ".join(_told(ratio, places) for ratio in wide)
    if any(ratio.ci_high < 1 or ratio.ci_low == ratio.ci_high == 1 for ratio in sided):
        status, words = Status.FAILS, f"the sign does not hold: {told}"
    elif ratios and all(ratio.ci_low > 1 for ratio in sided):
        status, words = Status.HOLDS, f"the sign holds: {told}"
        if size:
            stated, text = Span(Span.of(size[0]).low, Span.of(size[-1]).high), "-".join(map(str, size))
            apart = [ratio for ratio in wide if not stated.meets(Span(ratio.ci_low, ratio.ci_high))]
            status = Status.DIFFERS if apart else Status.HOLDS
            far = "below" if apart and apart[0].ratio < stated.low else "above"
            words += f"; its size is {far} the paper's {text}" if apart else f"; its interval meets the paper's {text}"
    else:
        open_ = [whole for whole, side in zip(wide, sided, strict=True) if not side.ci_low > 1]
        status, words = Status.NOT_TESTABLE, undecided(open_, places)
    return Finding(claim, status, ours, "; ".join(filter(None, (words, why))), **where)


def undecided(ratios: Sequence[Ratio], places: int = 1) -> str:
    """Why ratios decide nothing: `undecided: 1.11x (0.90-1.37), n=3, spans 1`."""
    parts = [
        f"{ratio}, too few rounds for an interval" if math.isnan(ratio.ci_low) else f"{_told(ratio, places)}, spans 1"
        for ratio in ratios
        if ratio.n
    ]
    return f"undecided: {'; '.join(parts) or 'no round is valid in both arms'}"


def _told(ratio: Ratio, places: int) -> str:
    wider = f" at {1 - (1 - CONFIDENCE) / places:.1%} for {places} places" if places > 1 else ""
    return f"{ratio}{wider}"


def exact(claim: Claim, ours: float, tolerance: float = 0.0, **where: Any) -> Finding:
    """Arithmetic: equal, or equal within the relative `tolerance` that the claim's own rounding leaves, or not."""
    paper = float(claim.value)
    if ours == paper:
        status = Status.REPRODUCED
    else:
        status = Status.WITHIN if abs(ours - paper) <= tolerance * abs(paper) else Status.DIFFERS
    why = f"rounding of the stated value leaves {tolerance:.1%}" if status is Status.WITHIN else ""
    return Finding(claim, status, f"{ours:.6g}", why, **where)


def compare_rows(findings: Iterable[Finding], claims: Claims, session: str, command: str) -> pd.DataFrame:
    """Findings as a table with `COMPARE_COLUMNS`; `command` is what a reader types to get these rows."""
    rows = [
        {
            "id": finding.claim.id,
            "kind": finding.claim.kind,
            "status": str(finding.status),
            "paper": value_text(finding.claim.value if finding.paper is None else finding.paper),
            "ours": finding.ours,
            "unit": finding.claim.unit,
            "session": session,
            "command": command,
            "why": finding.why,
            "k": finding.k,
            "arm": finding.arm,
            "paper_machine": claims.machine_name(finding.claim),
        }
        for finding in findings
    ]
    return pd.DataFrame(rows, columns=COMPARE_COLUMNS)


def value_text(value: Any) -> str:
    """A claim's value as it stands in tables: `1.8, 3.3` for a list."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_compare(path: Path) -> pd.DataFrame:
    """Read a compare.csv. Raises ValueError, one line, when it is not one."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable table ({str(error).splitlines()[0]})") from error
    require(path, rows.columns, COMPARE_COLUMNS)
    strange = sorted(set(rows["status"]) - {str(status) for status in Status})
    if strange:
        raise ValueError(f"{path}: unknown status {strange[0]!r}")
    return rows
