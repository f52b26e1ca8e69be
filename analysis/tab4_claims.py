"""The paper's Table 4, and the waiting times of its Table 3, beside one session's rows.

Its rows are its machine's and are set beside ours. Its relation has four parts (fewer, larger and colder loads with
the prerouter, at about equal bytes) and is judged part by part, from ratios paired by round, in both ways of reading.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pandas as pd

from analysis.paper.claims import Claim, Claims, Stated
from analysis.paper.findings import DRIFTED, Finding, Status, absolute, relation
from analysis.paper.source_checks import ONE_EXPERT
from analysis.paper.source_paper import KS, Paper
from analysis.paper.spans import Span
from analysis.rows import ARMS, GAIN_PAIRS, MIB, Session, paired
from analysis.statistics import CONFIDENCE, Ratio, median_spread

# Arms that tell the kernel of a load's ranges before they read them, so that the device delivers what was cold.
ADVISED = ("ondemand", "prerouter")
# The parts of the relation: words, what to divide by what, whether the prerouter's should be the smaller, and the
# paper's own numbers at a K for an arm.
PARTS = (
    ("fewer loads per step", "loads_per_step", None, True, lambda paper, k, arm: paper.loads(k, arm)),
    (
        "larger loads (device MiB per load)",
        "device_bytes_per_step",
        "loads_per_step",
        False,
        lambda paper, k, arm: paper.span(f"tab4.k{k}.{arm}", 0),
    ),
    (
        "colder loads (device over asked bytes, all timed loads)",
        "device_bytes_per_step",
        "asked_bytes_per_step",
        False,
        lambda paper, k, arm: paper.span(f"tab4.k{k}.{arm}", 1),
    ),
)
COLDER = PARTS[2]
NEAR = 0.05  # the claim's "within a few percent"
UNSEEN = (
    "colder loads: undecided: page faults read around what they need, so device bytes do not tell, and the probed "
    "loads are a sample of the same tokens in every round"
)
EXCEPTION = r"([+-]\d+)% at K=(\d+)"  # where the claim states other bytes


def findings(session: Session, table: pd.DataFrame, claims: Claims) -> list[Finding]:
    """Everything that Table 4 says, `tab3.blocked.*` and `tab4.loads.*` with it, one finding per place."""
    result = []
    for claim in claims.by_id.values():
        if claim.experiment != "tab4":
            continue
        if match := re.fullmatch(r"tab4\.k(\d+)\.(ondemand|prerouter)", claim.id):
            result += _row(claim, session, table, int(match[1]), match[2])
        elif match := re.fullmatch(r"tab3\.blocked\.k(\d+)", claim.id):
            result += _blocked(claim, session, table, int(match[1]))
        elif match := re.fullmatch(r"tab4\.loads\.k(\d+)", claim.id):
            result.append(_loads(claim, table, int(match[1]), Paper(claims)))
        elif claim.id == "tab4.shape":
            result += _shape(claim, session, Paper(claims))
        else:
            result.append(Finding(claim, Status.NOT_TESTABLE, "", "not a row of this table"))
    return result


def _own(session: Session, table: pd.DataFrame) -> dict:
    """Where our values are of, as `absolute` takes it."""
    tier, machine = table["tier"].iloc[0], session.info.machine
    place = f"{tier} on {machine or 'this machine'}, condition {session.condition}"
    return {"place": place, "machine": machine, "tier": tier}


def _rows(table: pd.DataFrame, k: int, route: str) -> pd.DataFrame:
    """The rows of one K whose arm routes in one way: explicit reads and page faults."""
    return table[(table["k"] == k) & (table["arm"].isin([route, f"{route}-mmap"]))]


def _row(claim: Claim, session: Session, table: pd.DataFrame, k: int, route: str) -> list[Finding]:
    rows = _rows(table, k, route)
    if rows.empty:
        return [Finding(claim, Status.NOT_TESTABLE, "", "not run at this K in this session", k=str(k), arm=route)]
    result = []
    for row in rows.itertuples():
        runs = session.cell(row.arm, k)
        cold = (
            runs["device_bytes_per_step"] / runs["asked_bytes_per_step"] if row.arm in ADVISED else runs["cold_share"]
        )
        device = runs["device_bytes_per_step"] / MIB
        spreads = [median_spread(values) for values in (device / runs["loads_per_step"], cold, device)]
        cold_text = f"{row.cold_share:.2f}" if row.arm in ADVISED else f"{row.cold_share_probed:.2f} (probed)"
        ours = f"{row.device_mib_per_load:.2f}, {cold_text}, {row.device_mib_per_step:.1f}"
        result.append(absolute(claim, ours, **_own(session, table), spreads=spreads, k=str(k), arm=row.arm))
    return result


def _blocked(claim: Claim, session: Session, table: pd.DataFrame, k: int) -> list[Finding]:
    result = []
    own = _own(session, table)
    own["place"] += "; theirs through a third party"
    for index, route in enumerate(ADVISED):
        rows = _rows(table, k, route)
        where = {"k": str(k), "paper": claim.value[index]}
        if rows.empty:
            why = "not run at this K in this session"
            result.append(Finding(claim, Status.NOT_TESTABLE, "", why, arm=route, **where))
        for row in rows.itertuples():
            spreads = [median_spread(session.cell(row.arm, k)["wait_ms_per_step"])]
            ours = f"{row.wait_ms_per_step:.1f}"
            result.append(absolute(claim, ours, **own, spreads=spreads, arm=row.arm, **where))
    return result


def _loads(claim: Claim, table: pd.DataFrame, k: int, paper: Paper) -> Finding:
    """A count that nobody stated: the paper's own figures give more loads than its model can ask for."""
    rows = table[(table["k"] == k) & table["arm"].isin(ARMS)]
    ours = ", ".join(f"{row.loads_per_step:.1f} ({row.arm})" for row in rows.itertuples())
    layers = paper.count("arch.35b.layers")
    if Span.of(claim.value[0]).low <= layers * k:
        return Finding(claim, Status.NOT_TESTABLE, ours, "a quotient of rounded numbers of another machine", k=str(k))
    why = (
        f"{claim.value[0]} loads per step on demand, where {layers} layers x {k} experts ask for at most {layers * k}, "
        f"{ONE_EXPERT}; ours are counted, not divided"
    )
    return Finding(claim, Status.CONTRADICTED, ours, why, k=str(k))


def _shape(claim: Claim, session: Session, paper: Paper) -> list[Finding]:
    """One finding per way of reading, K and part; each part's intervals are widened for its places."""
    planned = set(session.runs.loc[session.runs["role"] == "arm", ["arm", "k"]].itertuples(index=False, name=None))
    ks = sorted({k for _, k in planned})
    places = [(arm, base, k) for arm, base in GAIN_PAIRS for k in ks if {(arm, k), (base, k)} <= planned]
    advised = sum(base in ADVISED for _, base, _ in places)
    blocked = DRIFTED if session.drift().void_verdict else ""
    result = []
    for arm, base, k in places:
        where = {"k": str(k), "arm": f"{arm}/{base}"}
        sides = session.cell(arm, k), session.cell(base, k)
        for part in PARTS:
            words, column, per, smaller, stated = part
            if part is COLDER and base not in ADVISED:
                result.append(Finding(claim, Status.NOT_TESTABLE, "", blocked or UNSEEN, **where))
                continue
            ratio = _ratio(*sides, column, per)
            about = {"smaller": smaller, "places": advised if part is COLDER else len(places)}
            if k in KS:
                rows = [stated(paper, k, route) for route in ADVISED]
                about["why"] = f"the paper's rows give {(rows[1] / rows[0]).text(2)}x"
            result.append(_part(claim, ratio, words, blocked, **about, **where))
        ratio = _ratio(*sides, "device_bytes_per_step", None)
        result.append(_bytes(claim, ratio, len(places), blocked, where))
    return result or [Finding(claim, Status.NOT_TESTABLE, "", "the session lacks an arm with or without the prerouter")]


def _part(claim: Claim, ratio: Ratio, words: str, blocked: str, **about) -> Finding:
    """`analysis.paper.findings.relation` with the part's words before its reason."""
    found = relation(claim, [ratio], str(ratio), blocked=blocked, **about)
    return found if blocked else replace(found, why=f"{words}: {found.why}")


def _ratio(left: pd.DataFrame, right: pd.DataFrame, column: str, per: str | None) -> Ratio:
    """Prerouter over on-demand by round; rounds in which a side read nothing are not shared."""
    sides = [side.assign(value=side[column] / (side[per] if per else 1)) for side in (left, right)]
    return paired(*(side[side["value"] > 0] for side in sides), "value")


def _bytes(claim: Claim, ratio: Ratio, places: int, blocked: str, where: dict) -> Finding:
    """The bytes of a step: at the exceptional K by the stated size, elsewhere near 1 or not.

    Near 1: holds if the whole interval is within `NEAR`, fails if it lies beyond.
    """
    exception = re.search(EXCEPTION, str(claim.value))
    wide = ratio.at(1 - (1 - CONFIDENCE) / places)
    told, interval = f"{wide}, for {places} places", Span(wide.ci_low, wide.ci_high)
    if exception and where["k"] == exception[2]:
        words = f"bytes, {exception[1]}% in the paper at K={exception[2]}"
        size = Stated(f"{1 + int(exception[1]) / 100:.2f}")
        if blocked or math.isnan(ratio.ci_low) or Span.of(size).meets(interval):
            return _part(claim, ratio, words, blocked, size=(size,), places=places, **where)
        return Finding(claim, Status.DIFFERS, str(ratio), f"{words}: {told}, excludes it", **where)
    low, high = 1 - NEAR, 1 + NEAR
    status, why = Status.NOT_TESTABLE, f"undecided: {told}, neither inside {low:.2f}-{high:.2f} nor beyond"
    if blocked:
        why = blocked
    elif low <= wide.ci_low and wide.ci_high <= high:
        status, why = Status.HOLDS, told
    elif wide.ci_low > high or wide.ci_high < low:
        status, why = Status.FAILS, told
    return Finding(claim, status, str(ratio), f"bytes within {NEAR:.0%}: {why}", **where)
