"""`edge0 predict`: tok/s from routes, the cost of a load and the memory of a machine.

A machine that measured is calibrated, predicted and set beside a session of Table 3's arms; a machine that only the
paper measured is predicted from its machine file and set beside the paper's rows. Writes summary.csv, gain.csv,
compare.csv, table.md and the figure, all or none, where a folder is named; prints table.md.
"""

from __future__ import annotations

# Nothing heavy: every `edge0` command asks this module for its arguments. What is run is `table`.
import argparse
import sys
from pathlib import Path

HELP = "predict tok/s on a machine, from routes, load cost and memory"
PAPER_MACHINES = ("m2-16gb", "m4pro-24gb")
ZIPF = 1.0  # of a generated trace; the paper states the reuse and no popularity
RESERVES = ("4GiB", "6GiB", "8GiB")  # memory that is no page cache; the middle one is drawn
RESULTS, MACHINES = Path("results"), Path("experiments/machines")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        nargs="+",
        metavar="ID",
        default=list(PAPER_MACHINES),
        help=f"machines, by id: of experiments/machines, or folders of results (default {' '.join(PAPER_MACHINES)})",
    )
    parser.add_argument("--tier", help="of a machine that measured several")
    parser.add_argument(
        "--trace", nargs="+", type=Path, metavar="FILE", help="routes for the paper's machines (default: generated)"
    )
    parser.add_argument(
        "--reserve",
        nargs="+",
        default=list(RESERVES),
        metavar="SIZE",
        help="memory that is no page cache, for the paper's machines; of several the middle one is drawn "
        f"(default {' '.join(RESERVES)})",
    )
    parser.add_argument("--zipf", type=float, default=ZIPF, help=f"popularity in generated routes (default {ZIPF:g})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default results)")
    parser.add_argument("--machines", type=Path, default=MACHINES, help=f"folder of machine files (default {MACHINES})")
    parser.add_argument("--claims", type=Path, default=RESULTS / "paper/claims.yaml", help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, help="folder for the tables and the figure (default: only print)")


def run(options: argparse.Namespace) -> None:
    """`edge0 predict`; ends the process with exit code 2 and one line where it cannot."""
    from analysis.prediction.table import execute
    from analysis.rows import run_command

    code = run_command(lambda: execute(options), options.out or Path())
    if code:
        raise SystemExit(code)


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.prediction.command", description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    try:
        run(parser.parse_args(argv))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
