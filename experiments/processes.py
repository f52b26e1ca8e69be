"""Fresh interpreters, one after the other, whose failure ends the session with their last word."""

from __future__ import annotations

import subprocess
import sys

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind

RUN_TIMEOUT_S = 1800


def run_python(arguments: list[str], what: str) -> str:
    """Run an interpreter to its end; returns what it printed.

    Raises:
        Edge0Error: SESSION_VOID with its last line of error, when it failed or took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Edge0Error(ErrorKind.SESSION_VOID, f"{what} took longer than {RUN_TIMEOUT_S} s") from error
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == EXIT_CODE and last.startswith("edge0: "):
        raise Edge0Error(ErrorKind.SESSION_VOID, f"{what}: {last[7:]}")
    if done.returncode:
        raise Edge0Error(ErrorKind.SESSION_VOID, f"{what} ended with exit code {done.returncode}: {last}")
    return done.stdout
