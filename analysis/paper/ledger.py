"""The ledger of claims: `python -m analysis.paper.ledger RESULTS --claims CLAIMS --out DIR [--counts FILE]`.

Collects every compare.csv under one machine's RESULTS, the counts of the models' shapes and what the paper says against
itself into one row per claim, claims.csv, in the order of claims.yaml, and prints table.md. Judges nothing itself.
Several findings of one claim (K, arms, tiers) become one row so:

- contradicted by its own source wins, whatever was measured; our value stays beside it. Where the paper's numbers
  merely do not fit each other, that is noted in `why`;
- else the worst verdict that any place reached counts: fails, differs, within tolerance, holds, reproduced. So a
  relation holds when no place that could judge it failed, and an exact claim is as good as its worst place;
- not testable here is left when no place reached a verdict, or no target that has run says anything.

`why` says how many places reached which verdict, and `ours` names the place of each value. What counts shapes alone
(`COUNTED`) is taken from a checkpoint's files where there are some, else from the shapes; another source may repeat
it, and must not differ. `strict` says whether
exact claims came out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from analysis.paper import architecture, source_checks
from analysis.paper.claims import Claim, Claims, load_claims
from analysis.paper.findings import LEDGER_COLUMNS, Status, compare_rows, read_compare, value_text
from analysis.rows import markdown_table, publishing, run_command, write_tables

COMMAND = "snakemake claims"
WORST_FIRST = (
    Status.CONTRADICTED,
    Status.FAILS,
    Status.DIFFERS,
    Status.WITHIN,
    Status.HOLDS,
    Status.REPRODUCED,
    Status.NOT_TESTABLE,
)
# Order of the groups in table.md: what a reader should see first.
GROUPS = (
    Status.FAILS,
    Status.DIFFERS,
    Status.CONTRADICTED,
    Status.HOLDS,
    Status.WITHIN,
    Status.REPRODUCED,
    Status.NOT_TESTABLE,
)
COUNTED = ("arch.", "staged.")
TIME_BUDGET = "about a minute: it collects finished tables, counts shapes and checks a small model's arithmetic"
MOST_REASONS = 3
KINDS = ("exact", "relation", "absolute")
HOW_TO_READ = (
    "A relation that states a size differs where its sign holds and its size does not.",
    "`exact` is arithmetic that must come out on any machine; `relation` a sign, an order or a ratio that should hold "
    "wherever its regime holds; `absolute` a value of the paper's own machine, beside which ours stands unjudged.",
    "What is counted of the two models is counted from this project's own shape constants unless `why` names the files "
    "of a checkpoint: that it agrees with the paper says that the constants do, not that the released files do.",
    "A claim is contradicted by its own source when no rounding of the paper's own numbers repairs them; see below.",
    "A row's verdict is the worst that any K, arm or tier reached; places that could not judge do not count, and `why` "
    "says how many of the places reached which verdict.",
    "`not testable here` says why: another machine, an interval that spans 1, or the target that would tell.",
)


@dataclass(frozen=True)
class Row:
    """One line of the ledger."""

    claim: Claim
    status: Status
    ours: str
    session: str
    command: str
    why: str

    def values(self) -> dict[str, str]:
        """The line as `LEDGER_COLUMNS`."""
        claim = self.claim
        about = {"id": claim.id, "kind": claim.kind, "paper": value_text(claim.value), "unit": claim.unit}
        found = {"status": str(self.status), "ours": self.ours, "session": self.session, "command": self.command}
        return about | found | {"why": self.why}


def collect(results: Path, claims: Claims, counts: Path | None = None) -> pd.DataFrame:
    """The rows of every compare.csv one or two folders below a machine's results, with the folder `tier` that it is of.

    `counts`: the document of `analysis.paper.architecture`, whose findings come first.
    Raises ValueError, one line, for a file that is not one or that names a claim which claims.yaml lacks.
    """
    parts = []
    if counts is not None:
        document = architecture.load_counts(counts)
        found = architecture.findings(document, claims)
        rows = compare_rows(found, claims, str(document.get("session", "")), COMMAND)
        parts.append(rows.assign(tier="", source=str(counts)))
    for path in sorted({*results.glob("*/compare.csv"), *results.glob("*/*/compare.csv")}):
        try:
            rows = read_compare(path)
        except ValueError as error:
            again = f"snakemake {path.parent.name} --config remeasure=false"
            raise ValueError(f"{error}; made by an older version? `{again}` writes it anew from its rows") from error
        strange = sorted(set(rows["id"]) - set(claims.by_id))
        if strange:
            raise ValueError(f"{path}: claim {strange[0]} is not in claims.yaml")
        folders = path.relative_to(results).parts
        parts.append(rows.assign(tier=folders[0] if len(folders) == 3 else "", source=str(path)))
    if not parts:
        return pd.DataFrame(columns=[*LEDGER_COLUMNS, "k", "arm", "tier"], dtype=str)
    return _without_repeats(pd.concat(parts, ignore_index=True))


def _without_repeats(rows: pd.DataFrame) -> pd.DataFrame:
    """Counts once: of files where there are some, else of the first source.

    Files have headers, which shapes lack, so that one is not held against the other. ValueError, one line, where two
    sources of the same kind differ.
    """
    keep = pd.Series(True, index=rows.index)
    counted = rows[rows["id"].str.startswith(COUNTED) & (rows["ours"] != "")]
    for claim, every in counted.groupby("id", sort=False):
        files = every[every["why"].str.startswith(architecture.FROM_FILES)]
        same = every if files.empty else files
        first = same.iloc[0]
        for row in same.itertuples():
            if row.ours != first["ours"]:
                both = f"{first['source']} has {first['ours']}, {row.source} has {row.ours}"
                raise ValueError(f"claim {claim} is counted twice and differs: {both}")
        keep[rows.index[(rows["id"] == claim)].difference([same.index[0]])] = False
    return rows[keep].reset_index(drop=True)


def ledger(found: pd.DataFrame, claims: Claims, targets: Iterable[str]) -> list[Row]:
    """One row per claim, in the order of claims.yaml. `targets`: the experiments that a target of this release runs."""
    contradictions: dict[str, list[str]] = {}
    for finding in source_checks.findings(claims):
        contradictions.setdefault(finding.claim.id, []).append(finding.why)
    notes = source_checks.notes(claims)
    by_claim = {claim: rows for claim, rows in found.groupby("id", sort=False)}
    targets = {target.lower(): target for target in targets}
    return [
        _noted(_row(claim, by_claim.get(claim.id), contradictions.get(claim.id, []), targets), notes.get(claim.id, []))
        for claim in claims.by_id.values()
    ]


def _row(claim: Claim, rows: pd.DataFrame | None, contradictions: list[str], targets: Mapping[str, str]) -> Row:
    if rows is None:
        status, why = Status.NOT_TESTABLE, _missing(claim, targets)
        return _contradicted(Row(claim, status, "", "", "", why), contradictions)
    reached = set(rows["status"])
    status = next(status for status in WORST_FIRST if status in reached)
    values = [f"{_place(row)}{row.ours}" for row in rows.itertuples() if row.ours]
    deciding = rows[rows["status"] == status]
    reasons = _joined(f"{_place(row)}{row.why}" for row in deciding.itertuples() if row.why)
    if status is Status.NOT_TESTABLE:  # one reason for many places need not name them
        reasons = _joined(deciding["why"])
    shown = reasons[:MOST_REASONS]
    if len(reasons) > len(shown):
        shown.append(f"and {len(reasons) - len(shown)} more")
    if len(rows) > 1:
        shown.insert(0, _verdicts(rows))
    row = Row(
        claim,
        status,
        "; ".join(_joined(values)),
        "; ".join(_joined(rows["session"])),
        "; ".join(_joined(rows["command"])),
        "; ".join(shown),
    )
    return _contradicted(row, contradictions)


def _verdicts(rows: pd.DataFrame) -> str:
    """How many places reached which verdict: `relation holds in 1 of 6 places, not testable here in 5`."""
    counts = rows["status"].value_counts()
    parts = [f"{status} in {counts[status]}" for status in WORST_FIRST if status in counts.index]
    return ", ".join([f"{parts[0]} of {len(rows)} places", *parts[1:]])


def _noted(row: Row, notes: list[str]) -> Row:
    """With what does not fit inside the paper after the reason."""
    return replace(row, why="; ".join(filter(None, (row.why, *(f"the paper's own numbers: {note}" for note in notes)))))


def _contradicted(row: Row, reasons: list[str]) -> Row:
    if not reasons:
        return row
    command = row.command or "python -m analysis.paper.source_checks"
    return Row(row.claim, Status.CONTRADICTED, row.ours, row.session, command, "; ".join(_joined(reasons)))


def _missing(claim: Claim, targets: Mapping[str, str]) -> str:
    target = targets.get(claim.experiment.lower())
    if target is not None:
        return f"not measured yet: run `snakemake {target}`"
    return f"no target of this release is named {claim.experiment}"


def _place(row) -> str:
    """`mini-35b K=8 prerouter: `, or nothing where a finding speaks for the whole."""
    parts = (row.tier, f"K={row.k}" if row.k else "", row.arm)
    words = " ".join(part for part in parts if part)
    return f"{words}: " if words else ""


def _joined(texts: Iterable[str]) -> list[str]:
    """Without repeats and empty ones, in their order."""
    return [text for text in dict.fromkeys(texts) if text]


def markdown(rows: list[Row], claims: Claims, machine: str) -> str:
    """table.md: counts, the claims by status and within it in the paper's order, then the paper against itself."""
    counts = {status: [row for row in rows if row.status is status] for status in GROUPS}
    judged = sum(len(group) for status, group in counts.items() if status is not Status.NOT_TESTABLE)
    blocks = [
        "# Claims of the paper",
        f"- machine: {machine}\n- claims: {len(rows)}, of which {judged} were judged\n- takes: {TIME_BUDGET}",
        markdown_table(
            ("status", *KINDS, "claims"),
            [
                (
                    str(status),
                    *(str(sum(row.claim.kind == kind for row in group)) for kind in KINDS),
                    str(len(group)),
                )
                for status, group in counts.items()
            ],
            right_from=1,
        ),
    ]
    for status, group in counts.items():
        if group:
            blocks += [f"## {status[0].upper()}{status[1:]} ({len(group)})", _group_table(group)]
    blocks += ["## The paper against itself", source_checks.table(claims)]
    blocks += ["## How to read", "\n".join(f"- {line}" for line in HOW_TO_READ)]
    return "\n\n".join(blocks) + "\n"


def _group_table(group: list[Row]) -> str:
    rows = [
        (
            row.claim.where,
            row.claim.id,
            row.claim.kind,
            value_text(row.claim.value),
            row.claim.unit,
            row.ours,
            row.why,
            row.command,
        )
        for row in group
    ]
    header = ("where", "claim", "kind", "paper", "unit", "ours", "why", "command")
    return markdown_table(header, rows, right_from=len(header))


def write(results: Path, claims: Claims, out: Path, counts: Path | None, targets: Iterable[str]) -> str:
    """Write claims.csv and table.md, both or none; returns table.md's text. OSError passes."""
    found = collect(results, claims, counts)
    rows = ledger(found, claims, targets)
    text = markdown(rows, claims, results.name)
    with publishing(out) as scratch:
        table = pd.DataFrame([row.values() for row in rows], columns=LEDGER_COLUMNS)
        write_tables(scratch, text, claims=table)
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.paper.ledger", description="The ledger of claims.")
    parser.add_argument("results", type=Path, metavar="RESULTS", help="one machine's results, results/MACHINE")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--counts", type=Path, help="what experiments.architecture counted")
    parser.add_argument("--targets", nargs="*", default=[], help="the workflow's targets, to name what is to be run")
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(options.results, load_claims(options.claims), options.out, options.counts, options.targets),
        options.out,
    )


if __name__ == "__main__":
    sys.exit(main())
