"""Two recorded benchmarks side by side: `python -m analysis.bench_compare A B --bench results/MACHINE/bench`.

A and B are files as `analysis.bench` writes them, or commits (their first letters will do) whose file is kept in
BENCH/commits. Prints a table and writes nothing. Knows nothing of how a measure was taken: a quotient of two recordings
also holds what else had changed between them, and only intervals that do not meet are called apart.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.bench import BENCH_COLUMNS
from analysis.heading import heading
from analysis.rows import markdown_table, run_command
from analysis.units import interval, number, require

HOW_TO_READ = (
    "B over A is a quotient of two recordings, which were made at other times: it is no paired ratio. Measures that "
    "are ratios themselves were paired within their session.",
    "Apart: whether the two 95% intervals have no value in common; empty where one has none. One session: both "
    "recordings hold the same rows, since a benchmark keeps what was not measured anew.",
)


@dataclass(frozen=True)
class Recording:
    """One bench.csv, a row per measure. A measure of several sessions is the newest session's."""

    path: Path
    rows: pd.DataFrame

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Raises ValueError, one line naming the file."""
        try:
            rows = pd.read_csv(path, dtype={column: str for column in ("pass", "commit", "session", "note", "goal")})
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a benchmark ({str(error).splitlines()[0]})") from error
        require(path, rows.columns, BENCH_COLUMNS)
        texts = rows.select_dtypes(exclude="number").columns
        rows[texts] = rows[texts].fillna("")
        return cls(path, rows.sort_values("session", kind="stable").drop_duplicates("measure", keep="last"))

    @property
    def words(self) -> str:
        """What it is, in one line."""
        commits = ", ".join(dict.fromkeys(filter(None, self.rows["commit"]))) or "unknown"
        sessions = ", ".join(dict.fromkeys(filter(None, self.rows["session"]))) or "none"
        return f"{self.path}: {len(self.rows)} measures, commit {commits}, sessions {sessions}"


def find(named: str, bench: Path) -> Path:
    """The file of a name. Raises ValueError where there is none, or more than one commit begins so."""
    if Path(named).is_file():
        return Path(named)
    kept = sorted((bench / "commits").glob("*.csv"))
    found = [path for path in kept if named and path.stem.startswith(named)]
    if len(found) != 1:
        what = f"{len(found)} commits begin so" if found else "neither a file nor a commit that was kept"
        known = ", ".join(path.stem[:10] for path in kept) or "none"
        raise ValueError(f"{named or 'nothing'}: {what}; kept in {bench / 'commits'}: {known}")
    return found[0]


def side_by_side(a: Recording, b: Recording) -> list[list[str]]:
    """A line for each measure of either, in A's order, then B's own."""
    left, right = (each.rows.set_index("measure") for each in (a, b))
    return [_line(name, _at(left, name), _at(right, name)) for name in dict.fromkeys([*left.index, *right.index])]


def _at(rows: pd.DataFrame, name: str) -> dict[str, Any] | None:
    return rows.loc[name].to_dict() if name in rows.index else None


def _line(name: str, a: dict[str, Any] | None, b: dict[str, Any] | None) -> list[str]:
    both = a is not None and b is not None
    quotient = b["value"] / a["value"] if both and a["value"] > 0 and b["value"] > 0 else math.nan
    one = b if a is None else a
    return [
        name,
        *(_shown(each) for each in (a, b)),
        number(quotient, ".3f"),
        _apart(a, b) if both else "",
        one["unit"],
        *_changes(a, b),
    ]


def _shown(measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "not there"
    low, high = measure["ci_low"], measure["ci_high"]
    ends = "" if pd.isna(low) else f" ({interval(low, high, '.4g')})"
    return number(measure["value"], ".4g") + ends


def _apart(a: dict[str, Any], b: dict[str, Any]) -> str:
    if a["session"] and (a["session"], a["commit"]) == (b["session"], b["commit"]):
        return "one session"
    if any(pd.isna(each[end]) for each in (a, b) for end in ("ci_low", "ci_high")):
        return ""
    return "yes" if a["ci_high"] < b["ci_low"] or b["ci_high"] < a["ci_low"] else "no"


def _changes(a: dict[str, Any] | None, b: dict[str, Any] | None) -> list[str]:
    """The goal with how each side fares, and in which of goal and unit the two differ."""
    words = {"true": "met", "false": "missed", "": "not judged"}
    sides = [each for each in (a, b) if each is not None]
    goals = list(dict.fromkeys(each["goal"] for each in sides if each["goal"]))
    fares = [words.get(each["pass"].lower(), each["pass"]) for each in sides] if goals else []
    differs = [key for key in ("unit", "goal") if len({each[key] for each in sides}) > 1]
    return [", ".join(goals), " then ".join(dict.fromkeys(fares)), ", ".join(differs)]


def markdown(a: Recording, b: Recording) -> str:
    lines = side_by_side(a, b)
    facts = [f"A: {a.words}", f"B: {b.words}"]
    header = ("measure", "A (95%)", "B (95%)", "B over A", "apart", "unit", "goal", "goal met", "differs in")
    return "\n\n".join(
        [
            "# Two benchmarks",
            *heading(facts),
            markdown_table(header, lines),
            "\n".join(f"- {line}" for line in HOW_TO_READ),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.bench_compare", description="Two benchmarks.")
    parser.add_argument("a", metavar="A", help="file or commit")
    parser.add_argument("b", metavar="B", help="file or commit")
    parser.add_argument("--bench", type=Path, required=True, help="folder of the machine's benchmark")
    options = parser.parse_args(argv)

    def command() -> str:
        return markdown(*(Recording.read(find(named, options.bench)) for named in (options.a, options.b)))

    return run_command(command, options.bench)


if __name__ == "__main__":
    sys.exit(main())
