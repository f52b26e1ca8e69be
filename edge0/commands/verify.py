"""Check everything about a checkpoint that can be checked without a weight, and say all that is wrong in one run.

Checked are config.json, the header of every safetensors file, the index against the files, every tensor that the config
calls for, the files of expert records where DIR was repacked, every adapter, whether a model can be built, and whether
the tokenizer can be served. One line per problem, one per note (unusual, but harmless), then a summary. With --sha256
every safetensors file is read and its digest printed, and compared with SHA256SUMS where DIR has one. The exit code is
2 if there was a problem.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edge0.commands.progress import bytes_progress
from edge0.errors import Edge0Error, ErrorKind

HELP = "say everything that is wrong with a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="a checkpoint, as released or repacked")
    parser.add_argument("--sha256", action="store_true", help="read every file and check its SHA-256 too")


def run(options: argparse.Namespace) -> None:
    """
    Raises:
        Edge0Error: CHECKPOINT_INVALID when there are problems.
    """
    from edge0.verification import verify

    with bytes_progress("hashing") as progress:
        report = verify(options.directory, options.sha256, progress)
    for name, digest in report.digests.items():
        print(f"sha256 {digest} {name}")
    for problem in report.problems:
        print(f"problem: {problem}")
    for note in report.notes:
        print(f"note: {note}")
    print(
        f"{options.directory}: {report.files} files, {report.tensors} tensors, "
        f"{report.expert_bytes:,} bytes of routed experts, {report.other_bytes:,} bytes of the rest"
    )
    if report.problems:
        count = len(report.problems)
        detail = f"{count} problem{'s' if count > 1 else ''} found, each on a line of its own"
        raise Edge0Error(ErrorKind.CHECKPOINT_INVALID, detail, path=options.directory)
