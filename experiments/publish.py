"""What every small experiment does at its end: rows and what is to be known of them, or one line of error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.telemetry.host import describe_host, machine_id
from edge0.telemetry.pagecache import UNAVAILABLE, FilePages, self_test


def run_command(command: Callable[[], None]) -> int:
    """The exit code of a command; an expected failure is one line on stderr."""
    try:
        command()
    except Edge0Error as error:
        print(f"edge0: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


def publish(out: Path, name: str, rows: pd.DataFrame, model: Path, about: Mapping[str, Any]) -> None:
    """Write `name`.parquet with the rows, then `name`.json: time, machine and commit, and what else is `about` them.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(out / f"{name}.parquet")
    write_document(out / f"{name}.json", model, about)


def write_document(path: Path, model: Path, about: Mapping[str, Any]) -> None:
    """Write a JSON file: time, machine and commit, and what else was found out `about` a model.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    host = describe_host(model)
    common = {
        "session": datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
        "machine": machine_id(),
        "commit": host.get("git_commit"),
    }
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(common | dict(about) | {"host": host}, indent=1, default=str) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        detail = f"cannot be written ({error.strerror or error})"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=path) from error


@contextmanager
def open_pages(paths: Sequence[Path]) -> Iterator[dict[Path, FilePages]]:
    """The page cache of some files, by file.

    Raises:
        Edge0Error: PROBE_UNAVAILABLE, with the reason, when it cannot be read on this machine.
    """
    probe = self_test(paths[0])
    if probe.method == UNAVAILABLE:
        raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, "the page cache cannot be read", found=probe.reason)
    with ExitStack() as stack:
        yield {path: stack.enter_context(FilePages(path, probe.method)) for path in paths}
