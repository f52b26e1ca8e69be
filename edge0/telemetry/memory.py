"""Memory of this process as separate named counters, and what the machine swapped.

Never one number called "memory": bytes held by the MLX allocator, anonymous pages, and file pages that reads through a
mapping leave in the process are different things. An unknown counter is None, never 0. Does not know the bytes of the
checkpoint in the page cache (that is `pagecache`) nor which part of the allocator is the slot bank.
"""

from __future__ import annotations

import contextlib
import re
import resource
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from edge0.telemetry.pagecache import darwin_rusage


@dataclass(frozen=True)
class MemoryCounters:
    """All in bytes; None where the platform has no such counter.

    alloc_*: MLX allocator: live arrays, freed buffers kept for reuse, highest live bytes since its last reset.
    rss_anon: Linux RssAnon; macOS physical footprint: dirty and compressed pages, so part of it may not be resident.
    rss_file: Linux RssFile: file pages mapped into the process; macOS None.
    rss: Linux VmRSS; macOS resident size by psutil.
    rss_peak: Linux VmHWM, macOS ru_maxrss; it includes mapped file pages and never falls.
    swap: Linux VmSwap; macOS None.
    """

    alloc_active_bytes: int | None
    alloc_cache_bytes: int | None
    alloc_peak_bytes: int | None
    rss_anon_bytes: int | None
    rss_file_bytes: int | None
    rss_bytes: int | None
    rss_peak_bytes: int | None
    swap_bytes: int | None


def memory_counters() -> MemoryCounters:
    """Counters of this process now; about 20 us on Linux. Call between steps, not inside a timed part."""
    alloc = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()
    if sys.platform == "darwin":
        rss, peak = psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return MemoryCounters(*alloc, darwin_rusage()["footprint"], None, rss, peak, None)
    status = parse_status(_read("/proc/self/status"))
    return MemoryCounters(*alloc, *(status.get(key) for key in ("RssAnon", "RssFile", "VmRSS", "VmHWM", "VmSwap")))


def parse_status(text: str) -> dict[str, int]:
    """Bytes of every `Name: N kB` line of a Linux process status."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def process_device_bytes() -> int | None:
    """Bytes that storage delivered so far because of this process, by any of its threads, read-ahead included.

    Take differences. None where unknown.
    """
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            return darwin_rusage()["disk_read"]
        return None
    match = re.search(r"^read_bytes: (\d+)$", _read("/proc/self/io"), re.MULTILINE)
    return int(match.group(1)) if match else None


def process_large_page_bytes() -> int | None:
    """Anonymous memory of this process that lies in pages of 2 MiB (Linux AnonHugePages); None where unknown.

    The kernel walks the whole process for it, which takes milliseconds.
    """
    return parse_status(_read("/proc/self/smaps_rollup")).get("AnonHugePages")


def system_swap_counters() -> tuple[int | None, int | None]:
    """(swap-in, swap-out) bytes of the machine since boot; (None, None) where unknown. A change voids a run.

    Linux: psutil. macOS: `vm_stat`, because psutil reports page-ins there, which count ordinary file reads too.
    """
    if sys.platform == "darwin":
        return parse_vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True, check=False).stdout)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # psutil warns and then says 0 for unknown
        try:
            swap = psutil.swap_memory()
        except (RuntimeWarning, OSError):
            return None, None
    return swap.sin, swap.sout


def parse_vm_stat(text: str) -> tuple[int | None, int | None]:
    """(swap-in, swap-out) bytes from the text of macOS `vm_stat`, which counts pages."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = [re.search(rf"^{name}:\s+(\d+)\.", text, re.MULTILINE) for name in ("Swapins", "Swapouts")]
    if page is None or None in pages:
        return None, None
    swap_in, swap_out = (int(match.group(1)) * int(page.group(1)) for match in pages)
    return swap_in, swap_out


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
