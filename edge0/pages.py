"""Pages of 2 MiB for weights and bank, on Linux systems that leave the choice to programs ("madvise").

A decode step reads all of its resident weights once. In pages of 4 KiB a processor, behind a hypervisor above all,
may look up addresses for a part of that time. The C library asks for large pages wherever it allocates much, if a
variable of the environment says so when a process starts. So whoever starts a process passes `environment`, and a
command starts itself anew before it opens anything. Where the system says "always" or "never", where the C library
is another or older one, and on macOS nothing is done. Whoever has set that variable is left alone.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
FIRST_GLIBC = (2, 35)  # that has the tunable


def setting() -> str | None:
    """What the system does by itself: always, madvise or never; None where there is no such thing."""
    with suppress(OSError):
        found = re.search(r"\[(\w+)\]", SETTING.read_text())
        return found[1] if found else None
    return None


def may_ask() -> bool:
    """Whether a process of this system gets large pages by asking for them, and only so."""
    library, version = platform.libc_ver() if sys.platform == "linux" else ("", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return library == "glibc" and numbers >= FIRST_GLIBC and setting() == "madvise"


def environment(given: Mapping[str, str], large: bool = True) -> dict[str, str]:
    """`given` with what a process needs that is to have large pages where it may ask, or is to have none."""
    told = given.get(VARIABLE, "")
    if TUNABLE in told or not may_ask():
        return dict(given)
    return {**given, VARIABLE: ":".join(filter(None, (told, f"{TUNABLE}={int(large)}")))}


def restart_with_large_pages() -> None:
    """Start this very command anew if that brings it large pages; to be called before it has opened anything."""
    wanted = environment(os.environ)
    if wanted != dict(os.environ):
        with suppress(OSError):  # goes on without
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def describe() -> str:
    """What commands and arms get here, in one line."""
    chosen = setting() if sys.platform == "linux" else None
    if chosen is None:
        return "as the system chooses"
    if chosen == "always":
        return "2 MiB where memory allows, as the system does by itself"
    if chosen == "never":
        return f"4 KiB; with `madvise` in {SETTING} a step's weights are read from pages of 2 MiB"
    if may_ask():
        return "2 MiB where memory allows, asked for by every command that decodes and every arm"
    return "4 KiB; the C library cannot ask for larger ones (glibc 2.35 or newer can)"
