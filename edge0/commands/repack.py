"""Write a checkpoint anew with one page-aligned record per routed expert, so that an expert is one read, not nine.

OUT appears under its name only when it is complete and every byte of it has been read back and compared with DIR. An
interrupted run is continued by the same command; until then its files are kept in .OUT.repacking beside OUT. DIR is not
changed. OUT needs about as much room as DIR.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edge0.commands.progress import bytes_progress

HELP = "write a checkpoint anew with one page-aligned record per expert"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="a checkpoint as released")
    parser.add_argument("output", metavar="OUT", type=Path, help="new directory outside DIR; it appears when complete")


def run(options: argparse.Namespace) -> None:
    from edge0.checkpoint.repack import repack

    with bytes_progress("repacking and reading back") as progress:
        result = repack(options.directory, options.output, progress)
    print(
        f"{result.directory}: {result.layers} layers, {result.records} records of {result.record_bytes:,} bytes, "
        f"{result.expert_bytes:,} bytes of routed experts; {result.total_bytes:,} bytes in {result.files} files, "
        f"{result.kept} of them from an earlier run"
    )
