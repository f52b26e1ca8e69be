"""What becomes of a session when the process of one of its runs does not do its part."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from edge0 import pages
from edge0.errors import ErrorKind
from experiments import child, processes


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


def test_how_long_a_process_may_take_is_its_callers_choice(refused, monkeypatch):
    sleeping = ["-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(processes, "limited_command", limited_to(None, False))
    for run in (
        lambda: processes.run_python(sleeping, "arm x", 0.5),
        lambda: processes.run_python_limited(sleeping, "arm x", None, 0.5),
    ):
        refused(ErrorKind.SESSION_VOID, run, "arm x took longer than 0.5 s")


def test_what_a_process_prints_that_succeeds():
    assert processes.run_python(["-c", "print('done')"], "arm x") == "done\n"


def test_the_pages_that_a_process_is_to_have_reach_it(monkeypatch):
    monkeypatch.setattr(pages, "may_ask", lambda: True)
    monkeypatch.setattr(processes, "limited_command", limited_to(None, False))
    monkeypatch.delenv(pages.VARIABLE, raising=False)
    said = ["-c", f"import os; print(os.environ[{pages.VARIABLE!r}])"]
    for large, told in ((True, "glibc.malloc.hugetlb=1\n"), (False, "glibc.malloc.hugetlb=0\n")):
        assert processes.run_python(said, "arm x", None, large) == told
        assert processes.run_python_limited(said, "arm x", None, None, large) == told


CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
PARENT = "import sys; from experiments.processes import run_python; run_python(['-c', *sys.argv[1:]], 'child')"


def test_a_child_ends_with_its_parent_even_when_that_is_killed(tmp_path):
    place = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(place)])
    while not (place.exists() and place.read_text()):
        assert parent.poll() is None
        time.sleep(0.02)
    child = psutil.Process(int(place.read_text()))
    parent.kill()
    parent.wait()
    child.wait(timeout=60)


def test_a_child_whose_parent_has_ended_already_ends_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    start = [sys.executable, "-m", "experiments.child", str(gone.pid), "-c", "print('alive')"]
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and done.stdout == ""


def test_where_the_system_does_not_tell_a_child_a_thread_looks(monkeypatch):
    parents, killed = [7, 7, 1], []
    monkeypatch.setattr(child.os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(child.os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(child, "LOOK_EVERY_S", 0)
    child._watch(7)
    assert killed == [(os.getpid(), signal.SIGKILL)] and parents == []


def limited_to(nbytes, killed):
    @contextmanager
    def limited_command(limit_bytes):
        assert limit_bytes == nbytes
        yield SimpleNamespace(prefix=("/usr/bin/env",), killed=lambda code: killed)

    return limited_command


def test_a_process_that_its_memory_limit_killed_says_so(refused, monkeypatch):
    kill = ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]

    def run(killed, program=kill, limit=1 << 20):
        monkeypatch.setattr(processes, "limited_command", limited_to(limit, killed))
        return processes.run_python_limited(program, "arm x", limit)

    refused(ErrorKind.MEMORY_TOO_SMALL, lambda: run(True), "arm x was killed by its limit of 1048576 bytes")
    refused(ErrorKind.MEMORY_TOO_SMALL, lambda: run(True, limit=None), "the limit that it set itself")
    refused(ErrorKind.SESSION_VOID, lambda: run(False), "arm x ended with exit code -9")
    assert run(False, ["-c", "print('done')"]) == "done\n"
