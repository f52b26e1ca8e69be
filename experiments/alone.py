"""One measurement at a time on a machine: two beside each other would measure each other.

    with alone("fit"): ...

A file of the machine's temporary folder is locked for as long as the process measures. The system drops the lock when
the process ends, however it ends; so a measurement that outlived the workflow that started it is still seen, and one
that was killed leaves nothing to clean up. It cannot see what runs on another machine with the same disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind

NAME = "edge0-measuring.lock"


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Measure `what` while nothing else does on this machine.

    Raises:
        Edge0Error: MACHINE_BUSY, which names the other process; OUTPUT_UNWRITABLE when the file cannot be opened.
    """
    path = Path(tempfile.gettempdir(), NAME)
    try:
        descriptor = _open(path)
    except OSError as error:
        detail = f"cannot be opened ({error.strerror}), so that no other measurement would be seen"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(descriptor, path) from error
        about = {
            "what": what,
            "process": os.getpid(),
            "folder": os.getcwd(),
            "since": f"{datetime.now(UTC):%H:%M:%S} UTC",
        }
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open the file that all users of the machine share; not inherited by the processes that this one starts."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        os.fchmod(descriptor, 0o666)
        return descriptor


def _busy(descriptor: int, path: Path) -> Edge0Error:
    try:
        other = json.loads(os.pread(descriptor, 4096, 0))
        process = other["process"]
        found = f"{other['what']} since {other['since']}, process {process}, started in {other['folder']}"
    except (ValueError, KeyError, TypeError):  # it took the lock just now
        process, found = "PROCESS", f"the process that holds {path}"
    return Edge0Error(
        ErrorKind.MACHINE_BUSY,
        "another measurement runs on this machine, and each would disturb the other",
        found=found,
        hint=f"wait for its end; if it is yours and was left behind, `kill {process}` and type the same again",
    )
