"""Whether generated text is healthy: loops, variety, how it ended. Knows nothing of models or of benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

REPEATS = 3  # the same piece so often in a row counts as a loop
LEAST_REPEATED = 8  # characters of the loop: `111` is an answer
LEAST_WORDS = 20  # median words of an answer from which n-grams are of words
CUT = "length"  # the stop reason of an answer that reached the limit


@dataclass(frozen=True)
class Health:
    """Of `n` answers: shares that were cut, empty and repetitive, mean distinct-1 and distinct-2 per answer (NaN where
    no answer is long enough), the unit of the n-grams, and the median length in tokens."""

    n: int
    cut: float
    empty: float
    repetitive: float
    distinct_1: float
    distinct_2: float
    unit: str
    median_tokens: float


def repetitive(text: str) -> bool:
    """Whether some piece stands `REPEATS` or more times in a row, and its whole repeats fill at least half of the text.

    A loop of fewer than `LEAST_REPEATED` characters is none. Time grows with the square of the length: a text of
    100,000 characters takes about a second.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    needed = max(LEAST_REPEATED, math.ceil(len(codes) / 2))
    for period in range(1, len(codes) // REPEATS + 1):
        again = codes[period:] == codes[:-period]
        if np.count_nonzero(again) + period < needed:
            continue
        breaks = np.flatnonzero(np.concatenate(([True], ~again, [True])))
        pieces = (int(np.diff(breaks).max()) - 1 + period) // period
        if pieces >= REPEATS and pieces * period >= needed:
            return True
    return False


def unit_of(texts: Sequence[str]) -> str:
    """What n-grams of these answers are made of: `words` where the median answer has `LEAST_WORDS`, else `characters`.

    Both arms must be counted in one unit, so it is chosen from the answers of both.
    """
    return "words" if np.median([len(text.split()) for text in texts]) >= LEAST_WORDS else "characters"


def distinct(text: str, size: int, unit: str) -> float:
    """Different n-grams of `size` over all of them, 0 to 1; NaN for a text that is shorter."""
    units = text.split() if unit == "words" else list(text)
    grams = list(zip(*(units[start:] for start in range(size)), strict=False))
    return len(set(grams)) / len(grams) if grams else math.nan


def health(answers: pd.Series, stops: pd.Series, tokens: pd.Series, unit: str) -> Health:
    """The health of answers with their stop reasons and lengths in tokens, one each. `unit` is that of `unit_of`."""
    return Health(
        n=len(answers),
        cut=float((stops == CUT).mean()),
        empty=float((answers.str.strip() == "").mean()),
        repetitive=float(answers.map(repetitive).mean()),
        distinct_1=float(answers.map(lambda text: distinct(text, 1, unit)).mean()),
        distinct_2=float(answers.map(lambda text: distinct(text, 2, unit)).mean()),
        unit=unit,
        median_tokens=float(tokens.median()),
    )
