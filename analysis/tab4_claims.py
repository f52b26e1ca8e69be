"""The paper's Table 4, and the waiting times of its Table 3, beside one session's rows.

Its rows are its machine's and are set beside ours. Its relation has three parts (fewer, larger and colder loads with
the prerouter, at about equal bytes) and is judged part by part, from ratios paired by round, in both ways of reading.
"""

from __future__ import annotations

import re

import pandas as pd

from analysis.claims import Claim, Claims
from analysis.findings import Finding, Status, absolute
from analysis.rows import ARMS, GAIN_PAIRS, Session, paired
from analysis.spans import Span
from analysis.statistics import Ratio
from analysis.tab3_findings import DRIFTED, undecided

# The parts of the relation: words, what to divide by what, and whether the prerouter's should be the larger.
PARTS = (
    ("fewer loads per step", "loads_per_step", None, False),
    ("larger loads (device MiB per load)", "device_bytes_per_step", "loads_per_step", True),
    ("colder loads (cold share)", "cold_share", None, True),
)
NEAR = 0.05  # "within a few percent"; what lies closer to 1 is neither fewer nor larger nor colder
SAME_LOADS = "a load here is one expert in both arms, and both read through the same page cache"
LAYERS = 40  # of the released 35b, all of them routed


def findings(session: Session, table: pd.DataFrame, claims: Claims) -> list[Finding]:
    """Everything that Table 4 says, `tab3.blocked.*` and `tab4.loads.*` with it, one finding per place."""
    place = f"{table['tier'].iloc[0]} on {session.info.machine or 'this machine'}, condition {session.condition}"
    result = []
    for claim in claims.by_id.values():
        if claim.experiment != "tab4":
            continue
        if match := re.fullmatch(r"tab4\.k(\d+)\.(ondemand|prerouter)", claim.id):
            result += _row(claim, table, int(match[1]), match[2], place)
        elif match := re.fullmatch(r"tab3\.blocked\.k(\d+)", claim.id):
            result += _blocked(claim, table, int(match[1]), place)
        elif match := re.fullmatch(r"tab4\.loads\.k(\d+)", claim.id):
            result.append(_loads(claim, table, int(match[1]), claims))
        elif claim.id == "tab4.shape":
            result += _shape(claim, session)
        else:
            result.append(Finding(claim, Status.NOT_TESTABLE, "", "not a row of this table"))
    return result


def _rows(table: pd.DataFrame, k: int, route: str) -> pd.DataFrame:
    """The rows of one K whose arm routes in one way: explicit reads and page faults."""
    return table[(table["k"] == k) & (table["arm"].isin([route, f"{route}-mmap"]))]


def _row(claim: Claim, table: pd.DataFrame, k: int, route: str, place: str) -> list[Finding]:
    rows = _rows(table, k, route)
    if rows.empty:
        return [Finding(claim, Status.NOT_TESTABLE, "", "not run at this K in this session", k=str(k), arm=route)]
    return [
        absolute(
            claim,
            f"{row.device_mib_per_load:.2f}, {row.cold_share:.2f}, {row.device_mib_per_step:.1f}",
            place,
            k=str(k),
            arm=row.arm,
        )
        for row in rows.itertuples()
    ]


def _blocked(claim: Claim, table: pd.DataFrame, k: int, place: str) -> list[Finding]:
    result = []
    for index, route in enumerate(("ondemand", "prerouter")):
        rows = _rows(table, k, route)
        where = {"k": str(k), "paper": claim.value[index]}
        if rows.empty:
            result.append(
                Finding(claim, Status.NOT_TESTABLE, "", "not run at this K in this session", arm=route, **where)
            )
        result += [
            absolute(
                claim, f"{row.wait_ms_per_step:.1f}", f"{place}; theirs through a third party", arm=row.arm, **where
            )
            for row in rows.itertuples()
        ]
    return result


def _loads(claim: Claim, table: pd.DataFrame, k: int, claims: Claims) -> Finding:
    """A count that nobody stated: the paper's own figures give more loads than its model can ask for."""
    rows = table[(table["k"] == k) & table["arm"].isin(ARMS)]
    ours = ", ".join(f"{row.loads_per_step:.1f} ({row.arm})" for row in rows.itertuples())
    possible, stated = LAYERS * k, claims.by_id.get(f"tab4.k{k}.ondemand")
    if stated is None:
        return Finding(
            claim, Status.NOT_TESTABLE, ours, "the table that it follows from is not among the claims", k=str(k)
        )
    mib_per_load, _, mib_per_step = stated.value
    counted = Span.of(mib_per_step) / Span.of(mib_per_load)
    if counted.low <= possible:
        return Finding(claim, Status.NOT_TESTABLE, ours, "a quotient of rounded numbers of another machine", k=str(k))
    why = (
        f"{mib_per_step} MiB per step over {mib_per_load} MiB per load are {claim.value[0]} loads on demand, at least "
        f"{counted.low:.0f} with rounding, but {LAYERS} layers x {k} experts ask for at most {possible}; ours are "
        "counted, not divided"
    )
    return Finding(claim, Status.CONTRADICTED, ours, why, k=str(k))


def _shape(claim: Claim, session: Session) -> list[Finding]:
    """One finding per way of reading, K and part."""
    result = []
    planned = set(session.runs.loc[session.runs["role"] == "arm", ["arm", "k"]].itertuples(index=False, name=None))
    for arm, base in GAIN_PAIRS:
        for k in sorted({k for _, k in planned}):
            if not {(arm, k), (base, k)} <= planned:
                continue
            sides = session.cell(arm, k), session.cell(base, k)
            for words, column, per, larger in PARTS:
                ratio = _ratio(*sides, column, per)
                result.append(_part(claim, session, words, ratio, larger, {"k": str(k), "arm": f"{arm}/{base}"}))
            ratio = _ratio(*sides, "device_bytes_per_step", None)
            result.append(_bytes(claim, session, ratio, {"k": str(k), "arm": f"{arm}/{base}"}))
    return result or [Finding(claim, Status.NOT_TESTABLE, "", "the session lacks an arm with or without the prerouter")]


def _ratio(left: pd.DataFrame, right: pd.DataFrame, column: str, per: str | None) -> Ratio:
    """Prerouter over on-demand by round; rounds in which a side read or probed nothing are not shared."""
    sides = [side.assign(value=side[column] / (side[per] if per else 1)) for side in (left, right)]
    return paired(*(side[side["value"] > 0] for side in sides), "value")


def _part(claim: Claim, session: Session, words: str, ratio: Ratio, larger: bool, where: dict) -> Finding:
    """One part: holds if the whole interval lies more than `NEAR` on the paper's side of 1, fails if short of that."""
    low, high = (ratio.ci_low, ratio.ci_high) if larger else (1 / ratio.ci_high, 1 / ratio.ci_low)
    if session.drift().void_verdict:
        status, why = Status.NOT_TESTABLE, DRIFTED
    elif low > 1 + NEAR:
        status, why = Status.HOLDS, f"n={ratio.n}"
    elif high < 1 + NEAR:
        status, why = Status.FAILS, f"n={ratio.n}, no more than {NEAR:.0%} that way; {SAME_LOADS}"
    else:
        status = Status.NOT_TESTABLE
        why = undecided([ratio]) if low <= 1 <= high else f"undecided: {ratio}, n={ratio.n}, spans {NEAR:.0%} that way"
    return Finding(claim, status, str(ratio), f"{words}: {why}", **where)


def _bytes(claim: Claim, session: Session, ratio: Ratio, where: dict) -> Finding:
    """Equal bytes: holds if the whole interval is near 1, fails if it lies beyond; the paper's K=4 is 16% more."""
    words = f"bytes within {NEAR:.0%}" + (", K=4 the paper's exception with +16%" if where["k"] == "4" else "")
    low, high = 1 - NEAR, 1 + NEAR
    status, why = (
        Status.NOT_TESTABLE,
        f"undecided: {ratio}, n={ratio.n}, neither inside {low:.2f}-{high:.2f} nor beyond",
    )
    if session.drift().void_verdict:
        why = DRIFTED
    elif low <= ratio.ci_low and ratio.ci_high <= high:
        status, why = Status.HOLDS, f"n={ratio.n}"
    elif ratio.ci_low > high or ratio.ci_high < low:
        status, why = Status.FAILS, f"n={ratio.n}"
    return Finding(claim, status, str(ratio), f"{words}: {why}", **where)
