"""`edge0 plan`: what a checkpoint will take of memory, part by part, before anything of it is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge0.commands.engine import add_engine_arguments, engine_options

HELP = "show what a checkpoint will take of memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a checkpoint")
    add_engine_arguments(parser)
    parser.set_defaults(large_pages=False)  # it loads nothing


def run(options: argparse.Namespace) -> None:
    from edge0.opening import Opening
    from edge0.plan import MemoryPlan

    print(MemoryPlan.of(Opening.of(options.directory, engine_options(options))).table())
