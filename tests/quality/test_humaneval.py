"""Verdicts on code: the whole test has to run, whatever the code does."""

import pytest

from experiments.quality import humaneval
from experiments.quality.humaneval import passes

PROBLEM = {
    "prompt": 'def f(x):\n    """Return twice x."""\n',
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}
RIGHT = "    return 2 * x\n"


@pytest.mark.parametrize("said", [RIGHT, f"def f(x):\n{RIGHT}", f"import math\ndef f(x):\n{RIGHT}"])
def test_a_body_or_a_whole_function_passes(said):
    assert passes(PROBLEM, said)


@pytest.mark.parametrize(
    "said",
    [
        "    return 3 * x\n",
        "    return (\n",
        "",
        "no code at all",
        "    raise SystemExit(0)\n",
        "    import os\n    os._exit(0)\n",
        f"{RIGHT}\nimport os\nos.kill(os.getpid(), 9)\n",
        f"x = bytearray(4 << 30)\ndef f(x):\n{RIGHT}",
        "    return 6 if __import__('os').listdir() else 5\n",
    ],
)
def test_whatever_else_does_not(said):
    assert not passes(PROBLEM, said)


def test_what_waits_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(humaneval, "WALL_SECONDS", 1)
    assert not passes(PROBLEM, "    import time\n    time.sleep(3600)\n")


def test_it_sees_nothing_of_our_environment(monkeypatch):
    monkeypatch.setenv("EDGE0_SECRET", "6")
    assert not passes(PROBLEM, "    import os\n    return 6 if 'EDGE0_SECRET' in os.environ else 5\n")
