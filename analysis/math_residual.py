"""The contract of 1%: `python -m analysis.math_residual FILE... --claims CLAIMS --out DIR`, a file per model.

Writes summary.csv, compare.csv and table.md, all or none, and prints table.md. Knows nothing of how a residual was
measured. The bound holds on any machine; the paper's own residual is one of bf16 on Metal, so it is judged only where
activations are bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.paper.claims import Claim, Claims, load_claims
from analysis.paper.findings import Finding, Status, compare_rows, value_text
from analysis.rows import markdown_table, named, publishing, read_json, run_command, write_tables

COMMAND = "snakemake math"
TIME_BUDGET = "about half a minute"
COLUMNS = "tier path k dtype outputs predicted worst overall bf16_overall".split()
HOW_TO_READ = (
    "A row is one way of applying routed experts. Each output of a layer is compared with the same experts unpacked to "
    "fp32 by numpy, with the same input, route and weights: relative L2, the worst output and over all of them.",
    "`predicted` counts the outputs whose route a prerouter head had chosen one token before.",
    "`bf16 alone` is the reference against itself with every intermediate result rounded to bf16: what that precision "
    "costs, whoever computes. The paper's residual is of this size; in fp32 nothing of it is left.",
)


def load_paths(files: Sequence[Path]) -> tuple[pd.DataFrame, list[Mapping[str, Any]]]:
    """Rows of all files, and what is known of each. Raises ValueError, one line, for a file that is none."""
    rows, documents = [], []
    for file in files:
        path = named(file, "residuals.json")
        document = read_json(path)
        if not isinstance(document, dict) or not document.get("paths") or "tier" not in document:
            raise ValueError(f"{path}: expected the residuals of a tier's paths")
        measured = [row for row in document["paths"] if "refused" not in row]
        missing = [key for row in measured for key in COLUMNS[1:] if key not in row]
        if missing:
            raise ValueError(f"{path}: a path without {missing[0]}")
        if not measured:
            raise ValueError(f"{path}: no path of it was measured")
        rows += [{"tier": document["tier"]} | row for row in measured]
        documents.append(document)
    return pd.DataFrame(rows, columns=COLUMNS), documents


def findings(table: pd.DataFrame, documents: Sequence[Mapping[str, Any]], claims: Claims) -> list[Finding]:
    """A finding for each `math.*` claim. Raises ValueError for one that nothing here answers."""
    found = []
    for claim in claims.by_id.values():
        if not claim.id.startswith("math."):
            continue
        if claim.id == "math.tolerance":
            found.append(_tolerance(claim, table, documents))
        elif claim.id == "math.residual":
            found.append(_residual(claim, table))
        else:
            raise ValueError(f"claim {claim.id}: no residual answers it")
    return found


def _tolerance(claim: Claim, table: pd.DataFrame, documents: Sequence[Mapping[str, Any]]) -> Finding:
    worst = table.loc[table["worst"].idxmax()]
    status = Status.REPRODUCED if worst["worst"] <= float(claim.value) else Status.DIFFERS
    why = (
        f"a bound: the worst of {table['outputs'].sum()} outputs on {table['path'].nunique()} paths of "
        f"{' and '.join(dict.fromkeys(table['tier']))} ({worst['path']} of {worst['tier']}, {worst['dtype']})"
    )
    refused = sorted({row["path"] for document in documents for row in document["paths"] if "refused" in row})
    if refused:
        why += f"; not measured: {', '.join(refused)}"
    return Finding(claim, status, f"{worst['worst']:.2g}", why)


def _residual(claim: Claim, table: pd.DataFrame) -> Finding:
    overall, bf16 = table["overall"].max(), table["bf16_overall"]
    rounded = f"rounding every result to bf16 alone costs {bf16.min():.4f} to {bf16.max():.4f}"
    if set(table["dtype"]) != {"bfloat16"}:
        why = f"the paper's is of bf16 on Metal, ours of {', '.join(sorted(set(table['dtype'])))}; {rounded}"
        return Finding(claim, Status.NOT_TESTABLE, f"{overall:.2g}", why)
    holds = overall <= float(claim.value)
    why = f"largest overall residual of a path, at most the paper's if it holds; {rounded}"
    return Finding(claim, Status.HOLDS if holds else Status.FAILS, f"{overall:.4f}", why)


def markdown(table: pd.DataFrame, documents: Sequence[Mapping[str, Any]], found: Sequence[Finding]) -> str:
    """table.md."""
    heads = [
        f"machine: {', '.join(dict.fromkeys(str(document.get('machine')) for document in documents))}",
        f"tier: {', '.join(document['tier'] for document in documents)}",
        "condition: none: arithmetic does not depend on what is in memory",
        "n: one run per path; arithmetic is repeatable, no speed is measured",
        *(
            f"session: {document.get('session')}, commit {document.get('commit') or 'unknown'}, of {document['tier']} "
            f"on device {document.get('mlx_device')}"
            for document in documents
        ),
        f"takes: {TIME_BUDGET}",
    ]
    for document in documents:
        heads += [f"{row['path']}: refused ({row['refused']})" for row in document["paths"] if "refused" in row]
    rows = [
        [row.tier, row.path, str(row.k), row.dtype, str(row.outputs), str(row.predicted)]
        + [f"{value:.2g}" for value in (row.worst, row.overall, row.bf16_overall)]
        for row in table.itertuples()
    ]
    header = ("tier", "path", "K", "activations", "outputs", "predicted", "worst", "overall", "bf16 alone")
    claims = [
        (one.claim.id, f"{value_text(one.claim.value)} {one.claim.unit}", one.ours, str(one.status), one.why)
        for one in found
    ]
    blocks = [
        "# Arithmetic of every path against unpacked weights",
        "\n".join(f"- {line}" for line in heads),
        markdown_table(header, rows, right_from=4),
        "## The paper beside ours",
        markdown_table(("claim", "paper", "ours", "status", "why"), claims),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def write(files: Sequence[Path], claims: Claims, out: Path) -> str:
    """Write every output, all or none; returns the text of table.md. OSError passes."""
    table, documents = load_paths(files)
    found = findings(table, documents, claims)
    text = markdown(table, documents, found)
    session = "+".join(str(document.get("session", "")) for document in documents)
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, compare=compare_rows(found, claims, session, COMMAND))
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.math_residual", description="The contract of 1%.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    return run_command(lambda: write(options.files, load_claims(options.claims), options.out), options.out)


if __name__ == "__main__":
    sys.exit(main())
