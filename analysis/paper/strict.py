"""Whether arithmetic came out: `python -m analysis.paper.strict CLAIMS.csv` for continuous integration.

Exit code 1, and a line for each, when an exact claim of the ledger differs or has no evidence. Judges nothing itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from analysis.paper.findings import LEDGER_COLUMNS, Status
from analysis.rows import run_command

FAILED = 1
GOOD = (Status.REPRODUCED, Status.WITHIN)


def failures(rows: pd.DataFrame) -> list[str]:
    """One line for each exact claim of the ledger that is not as the paper states it, or that nothing judged."""
    lines = []
    for row in rows[rows["kind"] == "exact"].itertuples():
        if row.status == Status.NOT_TESTABLE:
            lines.append(f"exact claim {row.id} has no evidence: {row.why}")
        elif row.status not in GOOD:
            lines.append(f"exact claim {row.id} {row.status}: the paper has {row.paper}, ours is {row.ours}")
    return lines


def read_ledger(path: Path) -> pd.DataFrame:
    """claims.csv. Raises ValueError, one line, when it is none or holds no exact claim."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable table ({str(error).splitlines()[0]})") from error
    if list(rows.columns) != LEDGER_COLUMNS or not (rows["kind"] == "exact").any():
        raise ValueError(f"{path}: not a ledger of claims (expected the columns {', '.join(LEDGER_COLUMNS)})")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, `FAILED` with a line for each claim, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.paper.strict", description="Whether exact claims came out."
    )
    parser.add_argument("ledger", type=Path, metavar="CLAIMS.csv")
    options = parser.parse_args(argv)
    lines: list[str] = []

    def command() -> str:
        rows = read_ledger(options.ledger)
        lines.extend(failures(rows))
        exact = int((rows["kind"] == "exact").sum())
        return f"strict: {exact - len(lines)} of {exact} exact claims came out"

    code = run_command(command, options.ledger)
    for line in lines:
        print(f"strict: {line}", file=sys.stderr)
    return code or (FAILED if lines else 0)


if __name__ == "__main__":
    sys.exit(main())
