"""What an experiment found out about the paper's claims: one `Finding` per claim and place, written as compare.csv.

Every experiment judges its own claims, because only it knows what its rows mean; the ledger (`analysis.ledger`) only
collects the files. Knows nothing of how a number came about.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.claims import Claim, Claims

LEDGER_COLUMNS = "id kind status paper ours unit session command why".split()
COMPARE_COLUMNS = [*LEDGER_COLUMNS, "k", "arm", "paper_machine"]


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


def absolute(claim: Claim, ours: str, place: str, *, same: bool = False, **where: Any) -> Finding:
    """A value of the paper's own machine, ours beside it: never judged from elsewhere.

    `place`: what ours was measured on, in words (checkpoint and machine). `same`: it was the claim's own machine and
    the released checkpoint; then the caller judges instead.
    """
    if same:
        raise ValueError(f"claim {claim.id} can be judged here; do so")
    why = f"a value of {claim.machine or 'the paper'} with the released checkpoint; ours is {place}"
    return Finding(claim, Status.NOT_TESTABLE, ours, why, **where)


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
    missing = [column for column in COMPARE_COLUMNS if column not in rows.columns]
    if missing:
        raise ValueError(f"{path}: missing columns: {', '.join(missing)}")
    strange = sorted(set(rows["status"]) - {str(status) for status in Status})
    if strange:
        raise ValueError(f"{path}: unknown status {strange[0]!r}")
    return rows
