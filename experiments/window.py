"""How much one page fault reads: the kernel's read-around window of the checkpoint's device, for the mmap arms.

A mapping takes its window from the device when the file is opened. The arms that stand for the paper want the common
128 KiB (also the largest cluster of a fault on macOS); a device set to more would read the whole neighbourhood of every
fault. With permission the window is lowered while the files are opened and put back; without, read-around is switched
off for the mapping. Which of the three ways was taken is written into each run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

WINDOW_KIB = 128


@contextmanager
def fault_window(paths: Iterable[Path]) -> Iterator[str]:
    """Yields "as-is" (the window is small enough, or unknown), "lowered", or "random" (read-around must be off)."""
    knobs = [knob for knob in {_knob(path) for path in paths} if knob is not None]
    wide = {knob: knob.read_text() for knob in knobs if int(knob.read_text()) > WINDOW_KIB}
    if not wide:
        yield "as-is"
        return
    try:
        for knob in wide:
            knob.write_text(str(WINDOW_KIB))
    except OSError:
        way = "random"
    else:
        way = "lowered"
    try:
        yield way
    finally:
        for knob, value in wide.items():
            if way == "lowered" or knob.read_text() != value:
                knob.write_text(value)


def _knob(path: Path) -> Path | None:
    if not sys.platform.startswith("linux"):
        return None
    device = os.stat(path).st_dev
    knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return knob if knob.exists() else None
