"""A balloon: a child that locks memory, so that less is left for the page cache.

`python -m experiments.budgets.balloon BYTES` is the way to a smaller machine where there are no cgroups (macOS). It
squeezes the whole machine and not one process, so what is left for the checkpoint's pages is near the budget, not equal
to it: probe. The content is random, since an operating system that compresses memory would make room out of zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
from types import TracebackType

import numpy as np
import psutil

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind

_CHUNK_BYTES = 8 << 20
_LOCKED = "locked"
_WIRE_LIMITS = ("vm.user_wire_limit", "vm.global_user_wire_limit")


class Balloon:
    """Holds `nbytes` of locked memory in a child process while the context is open. The child ends with this one.

    Raises (on entering): Edge0Error PROBE_UNAVAILABLE when the system does not let so much be locked.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Balloon:
        limit = lock_limit_bytes()
        if self.nbytes < 1 or (limit is not None and self.nbytes > limit):
            expected = "1 byte or more" if limit is None else f"1 to {limit} bytes"
            raise _refused("so much memory may not be locked", expected=expected, found=self.nbytes)
        command = [sys.executable, "-m", "experiments.budgets.balloon", str(self.nbytes)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._child = subprocess.Popen(command, text=True, **pipes)
        if self._child.stdout.readline().strip() != _LOCKED:
            _, said = self._child.communicate()
            self._child = None
            raise _refused("memory could not be locked", found=(said.strip().splitlines() or ["no reason given"])[-1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.communicate()  # closes its input, which is what it waits for
            self._child = None


def only_on_macos() -> None:
    """Raise Edge0Error PROBE_UNAVAILABLE on other systems, which have better ways than to squeeze everything."""
    if sys.platform != "darwin":
        why = "cgroups and eviction act on one process, a balloon on the whole machine"
        raise _refused("used on macOS only", found=why)


def lock_limit_bytes() -> int | None:
    """How many bytes a process of this user may lock; None: no limit is stated."""
    if sys.platform == "darwin":
        stated = [_sysctl(name) for name in _WIRE_LIMITS]
        return min((limit for limit in stated if limit), default=None)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def balloon_bytes(budget_bytes: int) -> int:
    """How large a balloon leaves `budget_bytes` of the memory that is available now."""
    available = psutil.virtual_memory().available
    if available <= budget_bytes:
        raise _refused("less memory is available than the budget", expected=f"> {budget_bytes}", found=available)
    return available - budget_bytes


def lock(nbytes: int) -> mmap.mmap:
    """Anonymous memory of `nbytes`, filled with random bytes and locked, for as long as it is referenced.

    Raises:
        OSError: the system refused.
    """
    memory = mmap.mmap(-1, nbytes)
    view, numbers = np.frombuffer(memory, np.uint8), np.random.default_rng()
    for start in range(0, nbytes, _CHUNK_BYTES):
        part = view[start : start + _CHUNK_BYTES]
        part[:] = np.frombuffer(numbers.bytes(len(part)), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(nbytes)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory


def _sysctl(name: str) -> int | None:
    """A number of the macOS kernel; None if it has no such number."""
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None


def _refused(detail: str, **sides: object) -> Edge0Error:
    return Edge0Error(ErrorKind.PROBE_UNAVAILABLE, detail, hint="keep the budget by eviction", **sides)


def main() -> int:
    memory = None
    try:
        memory = lock(int(sys.argv[1]))
    except OSError as error:
        print(f"edge0: mlock: {error.strerror}", file=sys.stderr)
        return EXIT_CODE
    print(_LOCKED, flush=True)
    sys.stdin.read()  # until whoever started this closes the pipe, or ends
    del memory
    return 0


if __name__ == "__main__":
    sys.exit(main())
