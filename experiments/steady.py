"""Warming an arm up until what it reads holds still: decided by what was seen, not by a count of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge0.telemetry.loads import Recorder
from experiments.decoders import Decoder

MAX_WARMUPS = 5  # times that a request is warmed up before a run gives up on a steady state
STEADY_ERRORS = 3.0  # two windows agree when they differ by fewer standard errors of their steps' scatter
STEADY_SHARE = 0.05  # or by less than this: of the loads, or as a share of cold bytes

Window = tuple[np.ndarray, np.ndarray]  # loads and cold share of each step


def warm_up(decoder: Decoder, prompt: list[int], tokens: Sequence[int]) -> tuple[int, bool]:
    """Warm up until loads and cold share hold still; returns (steps, whether they did).

    A warm-up is a new request, its prompt and all warm-up tokens: however often it takes, the timed steps begin in the
    same context in every arm, while bank and page cache live on. Its first third still feels the prompt, which goes
    through more experts than memory holds. It was steady when its other two thirds agree, or when the last third
    repeats what the same tokens did in the warm-up before.
    """
    window = max(1, len(tokens) // 3)
    previous = None
    for attempt in range(1, MAX_WARMUPS + 1):
        decoder.begin(prompt)
        for token in tokens:
            decoder.step(token)
        last = decoder.recorder.step
        middle, end = (_window(decoder.recorder, step, window) for step in (last - window, last))
        if agree(middle, end) or (previous is not None and agree(previous, end)):
            return attempt * len(tokens), True
        previous = end
    return MAX_WARMUPS * len(tokens), False


def _window(recorder: Recorder, last: int, steps: int) -> Window:
    """(loads, cold share) of each of some steps up to `last`."""
    loads, asked, cold = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for load in recorder.loads:
        place = load.step - (last - steps + 1)
        if 0 <= place < steps:
            loads[place] += 1
            asked[place] += load.asked_bytes
            cold[place] += max(0, load.cold_bytes)
    return loads, cold / np.maximum(asked, 1)


def agree(a: Window, b: Window) -> bool:
    """Whether two windows' means differ by no more than their steps' own scatter, or by less than a trifle.

    Steps differ in what they route, so that windows of a steady arm differ too.
    """

    def alike(x: np.ndarray, y: np.ndarray, trifle: float) -> bool:
        error = np.sqrt((np.var(x) + np.var(y)) / max(1, len(x) - 1))
        return bool(abs(np.mean(x) - np.mean(y)) <= max(trifle, STEADY_ERRORS * error))

    return alike(a[0], b[0], STEADY_SHARE * np.mean(a[0])) and alike(a[1], b[1], STEADY_SHARE)
