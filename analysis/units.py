"""Units, the writing of numbers, and two checks that many tables share. Knows nothing of what is measured."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

import pandas as pd

MIB, GIB = 2**20, 2**30
DEVICE_TOLERANCE = 0.02  # how far what a device delivered may be from the cold bytes, as a share


def number(value: float, form: str) -> str:
    """A number in the form given, "" where there is none."""
    return "" if pd.isna(value) else format(value, form)


def interval(low: float, high: float, form: str) -> str:
    """The two ends of an interval or a range in one form: `1.40-1.66`, and `-0.05 to 0.20` where an end has a sign."""
    ends = format(low, form), format(high, form)
    return (" to " if any(end.startswith(("-", "+")) for end in ends) else "-").join(ends)


def device_agrees(device_over_cold: float) -> bool:
    """Whether a device delivered the cold bytes, within `DEVICE_TOLERANCE`; a ratio that is unknown does not agree."""
    return abs(device_over_cold - 1) <= DEVICE_TOLERANCE


def require(path: Path, found: Container[str], expected: Iterable[str], what: str = "columns") -> None:
    """Raises ValueError, one line naming the file and all that it lacks."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(f"{path}: missing {what}: {', '.join(missing)}")
