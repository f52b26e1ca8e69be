"""Fresh interpreters, one after the other, whose failure ends the session with their last word.

Each ends with this process, whatever ends it (`experiments.child`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.pages import environment
from experiments.budgets.cgroups import limited_command

RUN_TIMEOUT_S = 1800


def run_python(arguments: list[str], what: str, timeout_s: float | None = None, large_pages: bool = True) -> str:
    """Run an interpreter, `-m MODULE ...` or `-c PROGRAM ...`, to its end; returns what it printed.

    `timeout_s`: by default `RUN_TIMEOUT_S`. `large_pages`: for its memory, where it may ask for them (`edge0.pages`).

    Raises:
        Edge0Error: SESSION_VOID with its last line of error, when it failed or took too long.
    """
    return _said(_run((), arguments, what, timeout_s, large_pages), what)


def run_python_limited(
    arguments: list[str],
    what: str,
    limit_bytes: int | None,
    timeout_s: float | None = None,
    large_pages: bool = True,
) -> str:
    """The same in a memory group of its own; None: no limit, until the process sets one for itself.

    Raises:
        Edge0Error: as `run_python`; MEMORY_TOO_SMALL when the limit ended the process, or left it so little that it
            took too long; PROBE_UNAVAILABLE where no group can be made.
    """
    with limited_command(limit_bytes) as limited:
        try:
            done = _run(limited.prefix, arguments, what, timeout_s, large_pages)
        except Edge0Error as error:
            if limit_bytes is None:
                raise
            detail = f"{error.detail} under its limit of {limit_bytes} bytes"
            raise Edge0Error(ErrorKind.MEMORY_TOO_SMALL, detail) from error
        if done.returncode and limited.killed(done.returncode):
            limit = "the limit that it set itself" if limit_bytes is None else f"its limit of {limit_bytes} bytes"
            raise Edge0Error(
                ErrorKind.MEMORY_TOO_SMALL,
                f"{what} was killed by {limit} (out of memory in its group, exit by SIGKILL)",
            )
        return _said(done, what)


def _run(
    prefix: Sequence[str], arguments: list[str], what: str, timeout_s: float | None, large_pages: bool
) -> subprocess.CompletedProcess:
    timeout_s = RUN_TIMEOUT_S if timeout_s is None else timeout_s
    command = [*prefix, sys.executable, "-m", "experiments.child", str(os.getpid()), *arguments]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment(os.environ, large_pages),
        )
    except subprocess.TimeoutExpired as error:
        raise Edge0Error(ErrorKind.SESSION_VOID, f"{what} took longer than {timeout_s} s") from error


def _said(done: subprocess.CompletedProcess, what: str) -> str:
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == EXIT_CODE and last.startswith("edge0: "):
        raise Edge0Error(ErrorKind.SESSION_VOID, f"{what}: {last[7:]}")
    if done.returncode:
        raise Edge0Error(ErrorKind.SESSION_VOID, f"{what} ended with exit code {done.returncode}: {last}")
    return done.stdout
