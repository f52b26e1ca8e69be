"""What becomes of a session when the process of one of its runs does not do its part."""

import pytest

from edge0.errors import ErrorKind
from experiments import processes


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("import sys; print('edge0: a.safetensors: gone', file=sys.stderr); sys.exit(2)", "arm x: a.safetensors: gone"),
        ("raise KeyError('k')", "arm x ended with exit code 1: KeyError: 'k'"),
        ("import os; os._exit(3)", "arm x ended with exit code 3: it said nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "arm x ended with exit code -9"),
    ],
)
def test_a_process_that_fails_voids_the_session_with_its_last_word(refused, program, part):
    refused(ErrorKind.SESSION_VOID, lambda: processes.run_python(["-c", program], "arm x"), part)


def test_a_process_that_does_not_end_is_ended(refused, monkeypatch):
    monkeypatch.setattr(processes, "RUN_TIMEOUT_S", 0.5)
    sleeping = ["-c", "import time; time.sleep(600)"]
    refused(ErrorKind.SESSION_VOID, lambda: processes.run_python(sleeping, "arm x"), "arm x took longer than 0.5 s")


def test_what_a_process_prints_that_succeeds():
    assert processes.run_python(["-c", "print('done')"], "arm x") == "done\n"
