"""What every small experiment does at its end: rows and what is to be known of them, or one line of error."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind, writing
from edge0.telemetry.host import describe_host, machine_id
from edge0.telemetry.pagecache import UNAVAILABLE, FilePages, self_test
from experiments.finished import point
from experiments.host.storage import lower_cache

STAMP = re.compile(r"\d{8}T\d{6}Z")  # a session's name


def run_command(command: Callable[[], None]) -> int:
    """The exit code of a command; an expected failure is one line on stderr."""
    try:
        command()
    except Edge0Error as error:
        print(f"edge0: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


def publish(out: Path, name: str, rows: pd.DataFrame, model: Path, about: Mapping[str, Any]) -> None:
    """Write `name`.parquet with the rows and `name`.json with what is `about` them, in a folder as `stamped` makes it.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with stamped(out) as folder:
        with writing(folder):
            rows.to_parquet(folder / f"{name}.parquet")
        below = {"lower_cache": lower_cache(model).verdict}
        write_document(folder / f"{name}.json", model, below | dict(about))


@contextmanager
def stamped(out: Path) -> Iterator[Path]:
    """A new folder `out`/SESSION, named by the time; once it is written, `out`/latest.json names it.

    So what was measured before stays where it is.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        while (folder := out / _now()).exists():  # of this very second
            time.sleep(0.1)
        folder.mkdir()
    yield folder
    with writing(out):
        point(out, folder.name)


def write_document(path: Path, model: Path, about: Mapping[str, Any]) -> None:
    """Write a JSON file: session (its folder's name if that is a time, else the time), machine and commit, and what
    else was found out `about` a model.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    host = describe_host(model)
    common = {
        "session": path.parent.name if STAMP.fullmatch(path.parent.name) else _now(),
        "machine": machine_id(),
        "commit": host.get("git_commit"),
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(common | dict(about) | {"host": host}, indent=1, default=str) + "\n")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


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
