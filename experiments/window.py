"""How much one page fault reads: the kernel's read-around window of the checkpoint's device, for the mmap arms.

A mapping takes its window from the device when the file is opened. The arms that stand for the paper want the common
128 KiB (also the largest cluster of a fault on macOS); a device set to more would read the whole neighbourhood of every
fault. With permission the window is lowered while the files are opened and put back; without, read-around is switched
off for the mapping. Which of the three ways was taken is written into each run. The device's own window is noted while
it is lowered, so that whoever comes next puts it back where a process was killed meanwhile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WINDOW_KIB = 128
NOTES = Path("/run")  # emptied when the system starts, which is also when a device gets its own window again


@contextmanager
def fault_window(paths: Iterable[Path]) -> Iterator[str]:
    """Yields "as-is" (the window is small enough, or unknown), "lowered", or "random" (read-around must be off)."""
    paths = list(paths)
    put_back(paths)
    wide = [knob for knob in _knobs(paths) if int(knob.read_text()) > WINDOW_KIB]
    way = "lowered" if wide else "as-is"
    try:
        for knob in wide:
            _note(knob).write_text(knob.read_text())
            knob.write_text(str(WINDOW_KIB))
    except OSError:
        put_back(paths)
        way = "random"
    try:
        yield way
    finally:
        put_back(paths)


def put_back(paths: Iterable[Path]) -> None:
    """Undo what `fault_window` did to the devices of some files, here or in a process that was killed meanwhile."""
    for knob in _knobs(paths):
        note = _note(knob)
        with suppress(OSError):  # nothing is noted, or it is for somebody with more rights to undo
            value = note.read_text()
            if int(knob.read_text()) == WINDOW_KIB:
                knob.write_text(value)
            note.unlink()


def _note(knob: Path) -> Path:
    """Where a device's own window is noted."""
    return NOTES / f"edge0-{knob.parent.name}-{knob.name}"


def _knobs(paths: Iterable[Path]) -> list[Path]:
    return sorted({knob for path in paths if (knob := _knob(path)) is not None})


def _knob(path: Path) -> Path | None:
    if not sys.platform.startswith("linux"):
        return None
    device = os.stat(path).st_dev
    knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return knob if knob.exists() else None
