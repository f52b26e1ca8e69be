"""`edge0 synth`: make a checkpoint that needs no download."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge0.commands.progress import bytes_progress
from edge0.errors import Edge0Error, ErrorKind
from edge0.tiers import TIERS, find_tier

HELP = "make a seeded random checkpoint in the released layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tier", help=f"one of {', '.join(TIERS)}")
    parser.add_argument("directory", type=Path, help="new directory; it appears when complete")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.add_argument("--layers", type=int, help="fewer layers than the tier has, with everything else as it is")
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="headers and file sizes only, for `plan`, `verify` and arithmetic on bytes: the weights are holes",
    )
    parser.add_argument("--log", type=Path, help="write a line about the result to this file")


def run(options: argparse.Namespace) -> None:
    from edge0.checkpoint.synth import synthesise

    tier = find_tier(options.tier)
    if options.layers is not None:
        tier = tier.with_layers(options.layers)
    if options.log is not None:
        try:
            options.log.parent.mkdir(parents=True, exist_ok=True)
            options.log.touch()
        except OSError as error:
            raise Edge0Error(
                ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=options.log
            ) from error
    with bytes_progress(f"synthesising {tier.name}") as progress:
        synthesise(tier, options.directory, options.seed, progress, options.sparse)
    contents = "headers only, the weights are holes" if options.sparse else f"seed {options.seed}"
    line = f"{tier.name} ({contents}) in {options.directory}"
    print(line)
    if options.log is not None:
        options.log.write_text(line + "\n")
