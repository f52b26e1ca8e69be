"""Where every process of a session starts: it ends with its parent, whatever ended that one, SIGKILL included.

    python -m experiments.child PARENT_PID (-m MODULE | -c PROGRAM) [ARGUMENT...]

An arm that outlives its session would go on reading and disturb whatever is measured next. Linux tells the child itself
(a signal on the death of the thread that started it); elsewhere a thread looks whether the parent is still there.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

LOOK_EVERY_S = 0.5
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """From now on end when the process `parent` does; at once if it has ended already."""
    if sys.platform.startswith("linux"):
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    else:
        threading.Thread(target=_watch, args=(parent,), name="edge0-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the lines above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parent, way, what, *arguments = sys.argv[1:]
    end_with(int(parent))
    sys.argv = [way, *arguments]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
