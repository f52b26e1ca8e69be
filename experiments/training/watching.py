"""What a training tells while it goes on, and how it ends by a signal: after the step under way, with its state saved.

Knows nothing of training.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 30  # between two lines
Watch = Callable[..., None]  # told how many steps are done, and the last one's loss if it has one


@contextmanager
def watching(what: str, steps: int) -> Iterator[Watch]:
    """As `showing`, for a run that saves its state where its watch raises.

    SIGINT or SIGTERM makes it raise after the step under way, and the program leave with 128 + the signal's number; a
    second one ends it at once.
    """
    with showing(what, steps) as watch, _until_signal() as ended:
        done = 0

        def told(step: int, loss: float) -> None:
            nonlocal done
            done = step
            watch(step, loss)
            if ended:
                raise _Ended

        try:
            yield told
        except _Ended:
            print(f"edge0: {what}: ended at step {done}; the same command goes on from there", file=sys.stderr)
            raise SystemExit(128 + ended[0]) from None


class _Ended(BaseException):
    """A signal came."""


@contextmanager
def showing(what: str, steps: int) -> Iterator[Watch]:
    """A bar on stderr with the time left; a line now and then where stderr is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bar(what, steps, console) if console.is_terminal else _lines(what, steps) as watch:
        yield watch


@contextmanager
def _until_signal() -> Iterator[list[int]]:
    """Yields a list that holds the first signal's number, once there was one."""
    caught: list[int] = []

    def catch(number: int, _frame: object) -> None:
        caught.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        restore()


@contextmanager
def _bar(what: str, steps: int, console: object) -> Iterator[Watch]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ["{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        bar = progress.add_task(what, total=steps, loss="")
        yield lambda done, loss=None: progress.update(bar, completed=done, loss=_loss(loss))


def _loss(loss: float | None) -> str:
    return "" if loss is None else f", loss {loss:.4f}"


@contextmanager
def _lines(what: str, steps: int, now: Callable[[], float] = time.monotonic) -> Iterator[Watch]:
    """The first step, the last one, and what is done every half a minute."""
    first: tuple[int, float] | None = None  # step, time
    said = 0.0

    def watch(step: int, loss: float | None = None) -> None:
        nonlocal first, said
        time_now = now()
        if first is not None and step < steps and time_now - said < EVERY_SECONDS:
            return
        left = ""
        if first is None:
            first = (step, time_now)
        elif step < steps:
            left = f", {(steps - step) * (time_now - first[1]) / (step - first[0]):.0f} s left"
        said = time_now
        print(f"{what}: {step} of {steps}{_loss(loss)}{left}", file=sys.stderr, flush=True)

    yield watch
