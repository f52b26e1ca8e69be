"""What one session of Table 3 says of the paper's `tab3.*` claims, as findings.

Speeds and waiting times of another machine stand beside the paper's and are not judged. Relations are judged from
intervals alone: one that spans 1, a session that drifted or a condition outside the claim's regime decides nothing. The
one claim about two conditions compares the intervals of two sessions, each of which paired its own rounds; rows of two
sessions never meet.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pandas as pd

from analysis.claims import Claim, Claims
from analysis.findings import Finding, Status, absolute
from analysis.rows import ARMS, GAIN_PAIRS, PairRatios, Session, pair_ratios, paired
from analysis.statistics import Ratio

DRIFTED = "no verdict: the session drifted"


def findings(
    session: Session, table: pd.DataFrame, ratios: PairRatios, claims: Claims, other: Session | None = None
) -> list[Finding]:
    """Findings for every `tab3.*` claim of the paper. `table`: the session's summary.

    `other`: a session of the same tier and machine under the other condition (warm where this one is not, and the
    other way round), for the one claim that needs two.
    """
    found: list[Finding] = []
    for claim in claims.by_id.values():
        if not claim.id.startswith("tab3."):
            continue
        if claim.kind == "absolute":
            found += _absolute(claim, table, session)
        elif claim.id == "tab3.gain":
            found += _gain(claim, ratios, session)
        elif claim.id == "tab3.order_k":
            found += _order(claim, session, table)
        elif claim.id == "tab3.shrinks_when_hot":
            found += _shrinks(claim, session, ratios, other)
        else:
            found.append(Finding(claim, Status.NOT_TESTABLE, "", "Table 3's rows do not show it"))
    return found


def relation(claim: Claim, ratios: Sequence[Ratio], ours: str, why: str = "", blocked: str = "", **where) -> Finding:
    """A claim that every ratio lies above 1: fails if one interval lies below, holds if all lie above.

    Otherwise, and wherever `blocked` gives a reason, it is not testable here. A ratio without an interval (fewer than
    two rounds) decides nothing.
    """
    if blocked:
        return Finding(claim, Status.NOT_TESTABLE, ours, blocked, **where)
    if any(ratio.ci_high < 1 for ratio in ratios):
        return Finding(claim, Status.FAILS, ours, why, **where)
    if ratios and all(ratio.ci_low > 1 for ratio in ratios):
        return Finding(claim, Status.HOLDS, ours, why, **where)
    return Finding(claim, Status.NOT_TESTABLE, ours, undecided([r for r in ratios if not r.ci_low > 1]), **where)


def undecided(ratios: Sequence[Ratio]) -> str:
    """Why ratios decide nothing: `undecided: 1.11x (0.90-1.37), n=3, spans 1`."""
    parts = [
        f"{ratio}, n={ratio.n}, spans 1" if ratio.n > 1 else f"{ratio}, n={ratio.n}, and one round has no interval"
        for ratio in ratios
        if ratio.n
    ]
    return f"undecided: {'; '.join(parts) or 'no round is valid in both arms'}"


def _absolute(claim: Claim, table: pd.DataFrame, session: Session) -> list[Finding]:
    """A claim [on-demand, prerouter] at one K: a finding for each of our arms, page-fault arms too."""
    match = re.fullmatch(r"tab3\.(blocked\.)?k(\d+)", claim.id)
    if match is None:
        return [Finding(claim, Status.NOT_TESTABLE, "", "not a row of this table")]
    column, k = "wait_ms_per_step" if match[1] else "tok_s_median", int(match[2])
    place = f"{table['tier'].iloc[0]} on {session.info.machine or 'a machine without a name'}, {session.condition}"
    found = []
    for arm in _present(table):
        where = {"k": str(k), "arm": arm, "paper": claim.value[arm.startswith("prerouter")]}
        ours = table.loc[(table["arm"] == arm) & (table["k"] == k), column].dropna()
        if len(ours):
            found.append(absolute(claim, f"{ours.iloc[0]:.4g}", place, **where))
        else:
            found.append(Finding(claim, Status.NOT_TESTABLE, "", f"no valid run of {arm} at K={k}", **where))
    return found


def _gain(claim: Claim, ratios: PairRatios, session: Session) -> list[Finding]:
    """The prerouter's gain at each K and for each way of reading: judged by its sign, its size beside the paper's."""
    low, high = claim.value
    blocked = DRIFTED if session.drift().void_verdict else ""
    if session.condition == "warm":
        blocked = f"condition warm is outside the claim's regime ({claim.regime})"
    found = []
    for (k, arm, base), ratio in ratios.items():
        if (arm, base) not in GAIN_PAIRS:
            continue
        size = "inside" if low <= ratio.ratio <= high else "below" if ratio.ratio < low else "above"
        why = f"judged by its sign, n={ratio.n}; its size is {size} the paper's {low}-{high}"
        found.append(relation(claim, [ratio], str(ratio), why, blocked, k=str(k), arm=f"{arm}/{base}"))
    return found or [Finding(claim, Status.NOT_TESTABLE, "", "no pair of arms with and without the prerouter was run")]


def _order(claim: Claim, session: Session, table: pd.DataFrame) -> list[Finding]:
    """Smaller K is faster, arm by arm: each K over the next larger one, paired by round."""
    blocked = DRIFTED if session.drift().void_verdict else ""
    found = []
    for arm in _present(table):
        values = sorted(table.loc[table["arm"] == arm, "k"])
        steps = {
            f"K={k} over K={wider}": paired(session.cell(arm, k), session.cell(arm, wider))
            for k, wider in itertools.pairwise(values)
        }
        text = "; ".join(f"{what}: {ratio}" for what, ratio in steps.items())
        single = "" if steps else "one K only"
        found.append(
            relation(
                claim,
                list(steps.values()),
                text,
                blocked=blocked or single,
                k="<".join(map(str, values)),
                arm=arm,
            )
        )
    return found


def _shrinks(claim: Claim, session: Session, ratios: PairRatios, other: Session | None) -> list[Finding]:
    """Whether each gain is smaller warm than it is with a cache that cannot hold the experts."""
    if other is None:
        kind = "a warm one" if session.condition != "warm" else "one that is not warm"
        why = f"needs two sessions of this tier: this one is {session.condition}, and {kind} is not on disk"
        return [Finding(claim, Status.NOT_TESTABLE, "", why)]
    hot, cold = (session, other) if session.condition == "warm" else (other, session)
    blocked = "; ".join(f"session {s.name} drifted" for s in (hot, cold) if s.drift().void_verdict)
    others = pair_ratios(other)
    found = []
    for key, ratio in ratios.items():
        k, arm, base = key
        if (arm, base) not in GAIN_PAIRS or key not in others:
            continue
        gain_hot, gain_cold = (ratio, others[key]) if hot is session else (others[key], ratio)
        ours = f"warm {gain_hot}, {cold.condition} {gain_cold}"
        why = f"sessions {hot.name} and {cold.name}, each paired within itself"
        if blocked:
            status, why = Status.NOT_TESTABLE, blocked
        elif gain_hot.ci_high < gain_cold.ci_low:
            status = Status.HOLDS
        elif gain_hot.ci_low > gain_cold.ci_high:
            status = Status.FAILS
        else:
            status, why = Status.NOT_TESTABLE, f"undecided: the intervals overlap or are missing; {why}"
        found.append(Finding(claim, status, ours, why, k=str(k), arm=f"{arm}/{base}"))
    reason = f"session {other.name} shares no K and pair of arms with this one"
    return found or [Finding(claim, Status.NOT_TESTABLE, "", reason)]


def _present(table: pd.DataFrame) -> list[str]:
    return [arm for arm in ARMS if arm in set(table["arm"])]
