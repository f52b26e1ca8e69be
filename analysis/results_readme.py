"""The front page of one machine's results: `python -m analysis.results_readme RESULTS` writes RESULTS/README.md.

For every finished table its title with a link, the session that it is of and its first table. Made of the tables'
own text, so it cannot say anything that they do not. Knows nothing of what a table means.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from analysis.rows import publishing, run_command
from analysis.tables import Table, find_tables

MOST_ROWS = 20
FACTS = ("tier", "condition", "rounds", "n", "session", "note", "drift", "takes", "claims")


def readme(results: Path, tables: list[Table]) -> str:
    """The text of README.md."""
    machine = next((fact for table in tables if (fact := table.fact("machine"))), results.name)
    index = [f"- [{table.title}]({_link(table.path, results)}){_place(table)}" for table in tables]
    blocks = [
        f"# Results of {results.name}",
        f"Machine: {machine}",
        "Made by `snakemake report` from the tables below; each states its session, its noise and how to read it.",
        "\n".join(index),
    ]
    for table in tables:
        blocks += _section(table, results)
    return "\n\n".join(blocks) + "\n"


def _section(table: Table, results: Path) -> list[str]:
    facts = [f"- {name}: {fact}" for name in FACTS if (fact := table.fact(name))]
    lines = table.first_table
    cut = len(lines) - 2 - MOST_ROWS  # a header and a line of dashes come first
    shown = lines[: MOST_ROWS + 2] if cut > 0 else lines
    links = [f"[whole table]({_link(table.path, results)})"]
    links += [f"[figure {path.stem}]({_link(path, results)})" for path in table.figures]
    more = f"{cut} more rows in the whole table. " if cut > 0 else ""
    return [
        f"## {table.title}{_place(table)}",
        *(["\n".join(facts)] if facts else []),
        *(["\n".join(shown)] if shown else []),
        more + ", ".join(links),
    ]


def _place(table: Table) -> str:
    return f", {table.tier}" if table.tier and table.tier not in table.title else ""


def _link(path: Path, results: Path) -> str:
    return Path(os.path.relpath(path, results)).as_posix()


def write(results: Path) -> str:
    """Write README.md; returns its text. Raises ValueError when there is no table."""
    tables = find_tables(results)
    if not tables:
        raise ValueError(f"{results}: no table.md below it; run a target first, such as `snakemake tab3`")
    text = readme(results, tables)
    with publishing(results) as scratch:
        (scratch / "README.md").write_text(text, encoding="utf-8")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.results_readme", description="A machine's front page.")
    parser.add_argument("results", type=Path, metavar="RESULTS", help="one machine's results, results/MACHINE")
    options = parser.parse_args(argv)
    return run_command(lambda: write(options.results), options.results)


if __name__ == "__main__":
    sys.exit(main())
