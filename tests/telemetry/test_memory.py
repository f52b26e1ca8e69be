"""Counters move with what they count; unknown is None."""

import mmap
import os
import sys
import threading
import warnings

import mlx.core as mx
import numpy as np
import psutil
import pytest

from edge0.telemetry import memory
from edge0.telemetry.memory import (
    memory_counters,
    parse_status,
    parse_vm_stat,
    process_device_bytes,
    system_swap_counters,
)
from edge0.telemetry.pagecache import FilePages, thread_device_bytes

MIB = 1 << 20


def test_allocator_counters_follow_an_array():
    before = memory_counters()
    array = mx.ones((4 * MIB,), mx.float32)
    mx.eval(array)
    during = memory_counters()
    assert 16 * MIB <= during.alloc_active_bytes - before.alloc_active_bytes <= 17 * MIB
    assert during.alloc_peak_bytes >= during.alloc_active_bytes
    del array
    assert memory_counters().alloc_active_bytes <= during.alloc_active_bytes - 16 * MIB


def test_anonymous_memory_is_counted_apart_from_file_pages():
    before = memory_counters()
    anonymous = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    anonymous.write(b"\1" * (32 * MIB))
    during = memory_counters()
    assert during.rss_anon_bytes - before.rss_anon_bytes >= 24 * MIB
    assert during.rss_bytes - before.rss_bytes >= 24 * MIB
    assert during.rss_peak_bytes >= during.rss_bytes - 4 * MIB
    anonymous.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux splits resident memory by backing")
def test_mapped_file_pages_raise_the_file_part_only(tmp_path):
    file = tmp_path / "mapped"
    file.write_bytes(os.urandom(16 * MIB))
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8)
    before = memory_counters()
    assert view[:: mmap.PAGESIZE].sum() > 0
    during = memory_counters()
    assert during.rss_file_bytes - before.rss_file_bytes >= 15 * MIB
    assert during.rss_anon_bytes - before.rss_anon_bytes < 4 * MIB
    assert during.swap_bytes is not None


def test_status_lines_become_bytes_and_absent_ones_none(monkeypatch):
    text = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t       4 kB\nThreads:\t3\n"
    assert parse_status(text) == {"VmHWM": 2048 * 1024, "VmRSS": 1024 * 1024, "RssAnon": 4096}
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory, "_read", lambda path: text)
    found = memory_counters()
    assert (found.rss_anon_bytes, found.rss_bytes, found.rss_peak_bytes) == (4096, 1 << 20, 2 << 20)
    assert found.rss_file_bytes is None and found.swap_bytes is None


def test_swap_counters_never_fall():
    first, second = system_swap_counters(), system_swap_counters()
    for earlier, later in zip(first, second, strict=True):
        assert earlier is None or 0 <= earlier <= later


def test_unknown_swap_is_none_although_psutil_says_zero(monkeypatch):
    def swap_memory():
        warnings.warn("swap counters could not be determined and were set to 0", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(psutil, "swap_memory", swap_memory)
    assert system_swap_counters() == (None, None)


def test_vm_stat_counts_swapped_pages_and_not_page_ins():
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               5000.\n"
        "Pageins:                               9999999.\n"
        "Swapins:                                     3.\n"
        "Swapouts:                                   70.\n"
    )
    assert parse_vm_stat(text) == (3 * 16384, 70 * 16384)
    assert parse_vm_stat("") == (None, None)


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no such counter")
def test_device_bytes_of_the_process_are_at_least_those_of_one_thread(tmp_path):
    """Read by a second thread, which the counter of a thread would miss."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8 * MIB))
    with FilePages(file) as pages:
        pages.evict()
    seen = []

    def read():
        before = thread_device_bytes()
        file.read_bytes()
        seen.append(thread_device_bytes() - before)

    before = process_device_bytes()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert process_device_bytes() - before >= seen[0]


def test_unknown_device_bytes_are_none(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory, "_read", lambda path: "rchar: 7\nread_bytes: 4096\ncancelled_write_bytes: 0\n")
    assert process_device_bytes() == 4096
    monkeypatch.setattr(memory, "_read", lambda path: "")
    assert process_device_bytes() is None
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory, "darwin_rusage", lambda: {"disk_read": 5})
    assert process_device_bytes() == 5
