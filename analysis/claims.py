"""The paper's claims: reads claims.yaml and sets those of Table 3 beside one session's numbers.

Knows nothing of files other than claims.yaml. A claim of kind "absolute" was measured on the paper's machine and is
only ever set beside ours; a claim of kind "relation" is judged, and only from an interval, never from a point.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.rows import ARMS, GAIN_PAIRS, PairRatios, Session, paired
from analysis.statistics import Ratio

HOLDS, FAILS, UNDECIDED = "relation holds", "relation fails", "undecided"
KINDS = ("absolute", "relation", "exact")
COMPARE_COLUMNS = "id k arm paper paper_machine unit ours kind status note".split()


@dataclass(frozen=True)
class Claim:
    """One number or ordering that the paper states. `machine` is the paper's machine id, "" where none is named."""

    id: str
    value: Any
    unit: str
    kind: str
    where: str
    experiment: str
    machine: str = ""
    source: str = ""
    regime: str = ""


@dataclass(frozen=True)
class Claims:
    """Every claim by id, and the paper's machines in words by their id."""

    by_id: dict[str, Claim]
    machines: dict[str, str]

    def machine_name(self, claim: Claim) -> str:
        """The claim's machine in words, its id where the file does not describe it, "" where it names none."""
        return self.machines.get(claim.machine, claim.machine)


def load_claims(path: Path) -> Claims:
    """Read claims.yaml. Raises ValueError, one line, when it is not such a file or names a claim twice.

    Keys that `Claim` does not have are left out: an unquoted comma in a flow mapping makes keys of a unit's words.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(document, dict) or not isinstance(document.get("claims"), list):
        raise ValueError(f"{path}: expected a mapping with a list 'claims'")
    known = {f.name for f in fields(Claim)}
    by_id: dict[str, Claim] = {}
    for number, entry in enumerate(document["claims"]):
        try:
            claim = Claim(**{key: value for key, value in entry.items() if key in known})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{path}: claim number {number + 1} is malformed ({error})") from error
        if claim.kind not in KINDS:
            raise ValueError(f"{path}: claim {claim.id} has kind {claim.kind!r}, expected one of {', '.join(KINDS)}")
        if claim.id in by_id:
            raise ValueError(f"{path}: claim {claim.id} is stated twice")
        by_id[claim.id] = claim
    machines = {key: f"{entry['name']}, {entry['ram_gb']} GB" for key, entry in document.get("machines", {}).items()}
    return Claims(by_id, machines)


def judge(ratios: list[Ratio]) -> str:
    """Whether every ratio lies above 1: holds if every interval does, fails if one lies below, else undecided.

    A ratio without an interval (one round) decides nothing; neither does an empty list.
    """
    if any(ratio.ci_high < 1 for ratio in ratios):
        return FAILS
    return HOLDS if ratios and all(ratio.ci_low > 1 for ratio in ratios) else UNDECIDED


def compare(session: Session, table: pd.DataFrame, ratios: PairRatios, claims: Claims) -> pd.DataFrame:
    """The paper's `tab3.*` claims beside ours, columns `COMPARE_COLUMNS`; `table` is the session's summary.

    Relations are judged from intervals, and stay undecided when the session drifted or lies outside their regime.
    """
    rows = []
    for claim in claims.by_id.values():
        if not claim.id.startswith("tab3."):
            continue
        if claim.kind == "absolute":
            found = _absolute(claim, table, session.info.machine)
        elif claim.id == "tab3.gain":
            found = _gain(claim, ratios, session.condition)
        elif claim.id == "tab3.order_k":
            found = _order(session, table)
        else:
            found = [{"status": UNDECIDED, "note": "needs sessions under two conditions; sessions are never joined"}]
        shared = {"id": claim.id, "paper": claim.value, "paper_machine": claims.machine_name(claim)}
        rows += [shared | {"unit": claim.unit, "kind": claim.kind, "note": ""} | row for row in found]
    if session.drift().void_verdict:
        for row in rows:
            if row["kind"] == "relation":
                row |= {"status": UNDECIDED, "note": "; ".join(filter(None, ("no verdict: drift", row["note"])))}
    return pd.DataFrame(rows, columns=COMPARE_COLUMNS)


def _absolute(claim: Claim, table: pd.DataFrame, machine: str | None) -> list[dict]:
    """A claim [on-demand, prerouter] at one K: a row for each of our arms, page-fault arms too (the paper's way)."""
    match = re.fullmatch(r"tab3\.(blocked\.)?k(\d+)", claim.id)
    if match is None:
        return [{"status": UNDECIDED, "note": "not a row of this table"}]
    column, k = "wait_ms_per_step" if match[1] else "tok_s_median", int(match[2])
    rows = []
    for arm in _present(table):
        ours = table.loc[(table["arm"] == arm) & (table["k"] == k), column]
        rows.append(
            {
                "k": k,
                "arm": arm,
                "paper": claim.value[arm.startswith("prerouter")],
                "ours": f"{ours.iloc[0]:.6g}" if len(ours) else "",
                "status": f"absolute: {'same' if machine == claim.machine else 'other'} machine",
                "note": "" if len(ours) else "not run at this K",
            }
        )
    return rows


def _gain(claim: Claim, ratios: PairRatios, condition: str) -> list[dict]:
    """The prerouter's gain at each K, with explicit reads and with page faults: above 1, and in the paper's range?"""
    low, high = claim.value
    outside = condition == "warm"
    regime = f"condition {condition} is outside the claim's regime ({claim.regime}); " if outside else ""
    rows = []
    for (k, arm, base), ratio in ratios.items():
        if (arm, base) not in GAIN_PAIRS:
            continue
        place = "inside" if low <= ratio.ratio <= high else "below" if ratio.ratio < low else "above"
        place = "" if ratio.n == 0 else f", n={ratio.n}; {place} the paper's {low:.2f}-{high:.2f}"
        rows.append(
            {
                "k": k,
                "arm": f"{arm}/{base}",
                "paper": f"{low:.2f}-{high:.2f}",
                "ours": f"{ratio.ratio:.6g}" if ratio.n else "",
                "status": UNDECIDED if outside else judge([ratio]),
                "note": f"{regime}{ratio}{place}",
            }
        )
    return rows


def _order(session: Session, table: pd.DataFrame) -> list[dict]:
    """Smaller K is faster, arm by arm: each K over the next larger one, paired by round."""
    rows = []
    for arm in _present(table):
        values = sorted(table.loc[table["arm"] == arm, "k"])
        steps = {
            f"K={k} over K={wider}": paired(session.cell(arm, k), session.cell(arm, wider))
            for k, wider in itertools.pairwise(values)
        }
        text = "; ".join(f"{what}: {ratio}" for what, ratio in steps.items())
        rows.append({"k": "<".join(map(str, values)), "arm": arm, "ours": text, "status": judge(list(steps.values()))})
    return rows


def _present(table: pd.DataFrame) -> list[str]:
    return [arm for arm in ARMS if arm in set(table["arm"])]
