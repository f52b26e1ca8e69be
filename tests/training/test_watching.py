"""What is told while a training goes on, and how a signal ends it."""

import os
import signal

import pytest

from experiments.training import watching


def test_without_a_terminal_there_is_a_line_now_and_then(capsys):
    clock = iter([100, 110, 131, 140, 141])
    with watching._lines("heads", 50, lambda: next(clock)) as watch:
        for step in (11, 12, 14, 15, 50):
            watch(step, step / 10)
    assert capsys.readouterr().err.splitlines() == [
        "heads: 11 of 50, loss 1.1000",
        "heads: 14 of 50, loss 1.4000, 372 s left",
        "heads: 50 of 50, loss 5.0000",
    ]


def test_what_has_no_loss_tells_none(capsys):
    with watching.showing("generate", 3) as watch:
        watch(1)
    assert capsys.readouterr().err == "generate: 1 of 3\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_step_under_way(number, capsys):
    before, steps = signal.getsignal(number), []
    with pytest.raises(SystemExit) as left, watching.watching("heads", 9) as watch:
        for step in range(1, 9):
            if step == 3:
                os.kill(os.getpid(), number)
            steps.append(step)
            watch(step, 0.5)
    assert steps == [1, 2, 3] and left.value.code == 128 + number
    assert (
        capsys.readouterr().err.splitlines()[-1] == "edge0: heads: ended at step 3; the same command goes on from there"
    )
    assert signal.getsignal(number) is before


@pytest.fixture
def interruptible():
    """What a shell starts in the background is deaf to SIGINT; these tests are not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_it_at_once(interruptible):
    with pytest.raises(KeyboardInterrupt), watching.watching("heads", 9):
        signal.raise_signal(signal.SIGINT)  # to this thread: two that are sent to the process may arrive as one
        signal.raise_signal(signal.SIGINT)
