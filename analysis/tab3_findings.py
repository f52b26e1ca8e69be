"""What one session of Table 3 says of the paper's `tab3.*` claims, as findings.

Speeds of another machine stand beside the paper's and are not judged. Relations are judged by the rule of
`analysis.paper.findings`; a session that drifted or a condition outside the claim's regime decides nothing. The one
claim about two conditions compares the intervals of two sessions, each of which paired its own rounds; rows of two
sessions never meet.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.paper.claims import Claim, Claims
from analysis.paper.findings import DRIFTED, Finding, Status, absolute, relation
from analysis.rows import ARMS, GAIN_PAIRS, PairRatios, Session, load_session, pair_ratios, paired, read_json
from analysis.statistics import CONFIDENCE, Ratio, median_spread

# What makes two sessions the same but for their condition.
PLAN = (
    "machine tier experiment ks rounds arms timed_steps warmup_steps prompt_tokens bank bank_bytes lora adapter_k "
    "launch_groups reader_threads seed trace records"
).split()


def findings(
    session: Session, table: pd.DataFrame, ratios: PairRatios, claims: Claims, other: Session | None = None
) -> list[Finding]:
    """Findings for every claim whose experiment is tab3. `table`: the session's summary.

    `other`: a session of the same tier and machine under the other condition (warm where this one is not, and the
    other way round), for the one claim that needs two.
    """
    found: list[Finding] = []
    for claim in claims.by_id.values():
        if claim.experiment != "tab3":
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


def outside_regime(session: Session) -> str:
    """Why a claim about a page cache that cannot hold the experts is not judged here, "" where it is."""
    info, condition = session.info, session.condition
    budget = info.budget_bytes if info.budget_bytes is not None else session.runs["budget_bytes"].median()
    if condition != "cold" and condition != "warm" and (info.expert_bytes is None or pd.isna(budget)):
        return f"condition {condition}: the session does not say whether the page cache can hold all experts"
    holds = condition == "warm" or (condition != "cold" and budget >= info.expert_bytes)
    return f"condition {condition}: the page cache can hold all experts" if holds else ""


def _absolute(claim: Claim, table: pd.DataFrame, session: Session) -> list[Finding]:
    """A claim [on-demand, prerouter] of tok/s at one K: a finding for each of our arms, page-fault arms too."""
    match = re.fullmatch(r"tab3\.k(\d+)", claim.id)
    if match is None:
        return [Finding(claim, Status.NOT_TESTABLE, "", "not a row of this table")]
    k, tier = int(match[1]), table["tier"].iloc[0]
    place = f"{tier} on {session.info.machine or 'a machine without a name'}, {session.condition}"
    found = []
    for arm in _present(table):
        where = {"k": str(k), "arm": arm, "paper": claim.value[arm.startswith("prerouter")]}
        speed = median_spread(session.cell(arm, k)["tok_s"])
        if speed.n:
            own = {"machine": session.info.machine, "tier": tier, "spreads": [speed]}
            found.append(absolute(claim, f"{speed.median:.4g}", place, **own, **where))
        else:
            found.append(Finding(claim, Status.NOT_TESTABLE, "", f"no valid run of {arm} at K={k}", **where))
    return found


def _gain(claim: Claim, ratios: PairRatios, session: Session) -> list[Finding]:
    """The prerouter's gain at each K and for each way of reading, a place each."""
    outside = outside_regime(session)
    blocked = f"outside the claim's regime ({claim.regime}): {outside}" if outside else ""
    blocked = DRIFTED if session.drift().void_verdict else blocked
    gains = {key: ratio for key, ratio in ratios.items() if key[1:] in GAIN_PAIRS}
    found = [
        relation(
            claim,
            [ratio],
            str(ratio),
            size=claim.value,
            places=len(gains),
            blocked=blocked,
            k=str(k),
            arm=f"{arm}/{base}",
        )
        for (k, arm, base), ratio in gains.items()
    ]
    return found or [Finding(claim, Status.NOT_TESTABLE, "", "no pair of arms with and without the prerouter was run")]


def _order(claim: Claim, session: Session, table: pd.DataFrame) -> list[Finding]:
    """Smaller K is faster, arm by arm: each K over the next larger one, paired by round."""
    blocked = DRIFTED if session.drift().void_verdict else ""
    steps: dict[str, dict[str, Ratio]] = {}
    for arm in _present(table):
        steps[arm] = {
            f"K={k} over K={wider}": paired(session.cell(arm, k), session.cell(arm, wider))
            for k, wider in itertools.pairwise(sorted(table.loc[table["arm"] == arm, "k"]))
        }
    places = sum(map(len, steps.values()))
    return [
        relation(
            claim,
            list(own.values()),
            "; ".join(f"{what}: {ratio}" for what, ratio in own.items()),
            places=places,
            blocked=blocked or ("" if own else "one K only"),
            k="<".join(map(str, sorted(table.loc[table["arm"] == arm, "k"]))),
            arm=arm,
        )
        for arm, own in steps.items()
    ]


def _shrinks(claim: Claim, session: Session, ratios: PairRatios, other: Session | None) -> list[Finding]:
    """Whether each gain is smaller warm than it is with a cache that cannot hold the experts."""
    if other is None:
        kind = "a warm one" if session.condition != "warm" else "one that is not warm"
        why = f"needs two sessions of one plan: this one is {session.condition}, and {kind} is not on disk"
        return [Finding(claim, Status.NOT_TESTABLE, "", why)]
    hot, cold = (session, other) if session.condition == "warm" else (other, session)
    blocked = "; ".join(f"session {s.name} drifted" for s in (hot, cold) if s.drift().void_verdict)
    blocked = blocked or outside_regime(cold)
    others = pair_ratios(other)
    shared = [key for key in ratios if key[1:] in GAIN_PAIRS and key in others]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(shared))
    found = []
    for key in shared:
        gains = (ratios[key], others[key]) if hot is session else (others[key], ratios[key])
        ours = f"warm {gains[0]}, {cold.condition} {gains[1]}"
        gain_hot, gain_cold = (gain.at(confidence) for gain in gains)
        why = f"{_named(hot)} {gain_hot} and {_named(cold)} {gain_cold}, each paired within itself"
        why += f", intervals at {confidence:.1%} for {len(shared)} places" if len(shared) > 1 else ""
        if blocked:
            status, why = Status.NOT_TESTABLE, blocked
        elif gain_hot.ci_high < gain_cold.ci_low:
            status = Status.HOLDS
        elif gain_hot.ci_low > gain_cold.ci_high:
            status = Status.FAILS
        else:
            status, why = Status.NOT_TESTABLE, f"undecided: the intervals overlap or are missing; {why}"
        k, arm, base = key
        found.append(Finding(claim, status, ours, why, k=str(k), arm=f"{arm}/{base}"))
    reason = f"session {other.name} shares no K and pair of arms with this one"
    return found or [Finding(claim, Status.NOT_TESTABLE, "", reason)]


def _named(session: Session) -> str:
    return f"session {session.name} (commit {session.info.commit or 'unknown'})"


def _present(table: pd.DataFrame) -> list[str]:
    return [arm for arm in ARMS if arm in set(table["arm"])]


def find_other(root: Path, session: Session) -> Session | None:
    """The newest session under `root` of the same plan and tokens that was warm, or was not where `session` was.

    Of the same plan: every key of `PLAN` is equal. One that cannot be read is passed over.
    """
    try:
        plan = _plan(root / session.name)
    except ValueError:
        return None
    warm = session.condition == "warm"
    for path in sorted(root.glob("[!.]*/session.json"), reverse=True):  # folders are named by time
        try:
            if _plan(path.parent) != plan:
                continue
            other = load_session(path.parent)
        except ValueError:
            continue
        if (other.condition == "warm") != warm and _same_tokens(session, other):
            return other
    return None


def _plan(folder: Path) -> dict[str, Any]:
    about = read_json(folder / "session.json")
    if not isinstance(about, dict):
        raise ValueError(f"{folder / 'session.json'}: expected a JSON object")
    return {key: about.get(key) for key in PLAN}


def _same_tokens(left: Session, right: Session) -> bool:
    """Whether every arm at every K that both ran chose the same tokens."""
    hashes = [session.runs.groupby(["arm", "k"])["token_hash"].agg(set) for session in (left, right)]
    shared = hashes[0].index.intersection(hashes[1].index)
    return len(shared) > 0 and all(hashes[0][cell] == hashes[1][cell] for cell in shared)
