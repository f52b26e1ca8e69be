"""Probes against known patterns on a real file, eviction, device bytes, and the self-test's refusals."""

import functools
import mmap
import os
import shutil
import struct
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry import pagecache
from edge0.telemetry.host import filesystem_of
from edge0.telemetry.pagecache import PAGE_BYTES as PAGE
from edge0.telemetry.pagecache import FilePages, ProbeReport, Residency, self_test, thread_device_bytes

FILE_BYTES = (8 << 20) + 1234  # the last page is partial


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    if filesystem_of(folder)[0] == "tmpfs":
        pytest.skip("the temporary folder is on tmpfs, whose pages are always in memory")
    file = folder / "shard.bin"
    with open(file, "wb") as out:
        out.write(os.urandom(FILE_BYTES))
        out.flush()
        os.fsync(out.fileno())
    return file


@pytest.fixture(scope="module")
def report(path):
    return self_test(path)


@pytest.fixture(params=[pagecache.CACHESTAT, pagecache.MINCORE])
def pages(path, request, report):
    if request.param == pagecache.CACHESTAT and report.method != pagecache.CACHESTAT:
        pytest.skip(f"no cachestat here: {report.reason}")
    with FilePages(path, request.param) as opened:
        opened.evict()
        yield opened


def despite_reclaim(test):
    """Up to three tries from an empty cache: a kernel that ages pages may take one between the read and the probe."""

    @functools.wraps(test)
    def tried(pages, **others):
        for attempt in range(3):
            pages.evict()
            try:
                return test(pages=pages, **others)
            except AssertionError:
                if attempt == 2:
                    raise

    return tried


def read_sequentially(path):
    """What an ordinary reader does: read-ahead caches large folios."""
    with open(path, "rb", buffering=0) as file:
        while file.read(64 << 10):
            pass


@despite_reclaim
def test_evict_and_warm_the_whole_file(pages):
    assert (pages.file_bytes, pages.cached_bytes()) == (FILE_BYTES, 0)
    assert pages.residency([(0, FILE_BYTES)]) == Residency(FILE_BYTES, FILE_BYTES, 0)
    pages.warm(chunk_bytes=1 << 20)
    assert pages.cached_bytes() == FILE_BYTES
    assert pages.residency([(0, FILE_BYTES)]) == Residency(FILE_BYTES, 0, 0)
    pages.evict()
    assert pages.cached_bytes() == 0


@despite_reclaim
def test_warm_half_caches_exactly_half(pages):
    pages.warm([(0, 4 << 20)])
    assert pages.cached_bytes() == 4 << 20
    assert pages.residency([(0, 8 << 20)]) == Residency(8 << 20, 4 << 20, 0)


@despite_reclaim
def test_residency_is_exact_to_the_byte_at_unaligned_edges(pages):
    pages.warm([(10 * PAGE, 2 * PAGE)])  # pages 10 and 11
    cases = {
        (10 * PAGE - 7, 7): 7,
        (10 * PAGE - 7, 100): 7,
        (10 * PAGE + 5, PAGE): 0,
        (11 * PAGE + 5, PAGE): 5,
        (9 * PAGE + 1, 4 * PAGE): PAGE - 1 + PAGE + 1,
        (8 * PAGE + 100, 20): 20,
        (FILE_BYTES - 3, 3): 3,
        (10 * PAGE, 0): 0,
    }
    for (offset, nbytes), cold in cases.items():
        assert pages.residency([(offset, nbytes)]) == Residency(nbytes, cold, 0), (offset, nbytes)
    assert pages.residency(list(cases)).cold_bytes == sum(cases.values())


@despite_reclaim
def test_random_patterns_agree_with_what_was_read(pages):
    rng = np.random.default_rng(5)
    for _ in range(5):
        pages.evict()
        truth = np.zeros(FILE_BYTES, bool)
        for _ in range(12):
            offset, nbytes = int(rng.integers(0, FILE_BYTES - 1)), int(rng.integers(1, 40 * PAGE))
            nbytes = min(nbytes, FILE_BYTES - offset)
            pages.warm([(offset, nbytes)])
            truth[offset // PAGE * PAGE : -(-(offset + nbytes) // PAGE) * PAGE] = True
        for _ in range(30):
            offset, nbytes = int(rng.integers(0, FILE_BYTES - 1)), int(rng.integers(1, 100 * PAGE))
            nbytes = min(nbytes, FILE_BYTES - offset)
            cold = int((~truth[offset : offset + nbytes]).sum())
            assert pages.residency([(offset, nbytes)]) == Residency(nbytes, cold, 0)


@pytest.mark.parametrize("first, count", [(100, 1), (101, 3), (333, 17), (1000, 432)])
@despite_reclaim
def test_eviction_is_exact_although_read_ahead_cached_large_folios(pages, path, first, count):
    read_sequentially(path)
    assert pages.cached_bytes() == FILE_BYTES
    pages.evict([(first * PAGE, count * PAGE)])
    assert pages.residency([(first * PAGE, count * PAGE)]).cold_bytes == count * PAGE
    assert pages.residency([(0, first * PAGE)]).cold_bytes == 0
    assert pages.cached_bytes() == FILE_BYTES - count * PAGE


@despite_reclaim
def test_eviction_rounds_outward_and_merges(pages):
    pages.warm()
    pages.evict([(20 * PAGE + 10, 5), (21 * PAGE, PAGE + 1)])  # pages 20, 21, 22
    assert pages.residency([(0, 100 * PAGE)]).cold_bytes == 3 * PAGE
    assert pages.residency([(20 * PAGE, 3 * PAGE)]).cold_bytes == 3 * PAGE
    assert pagecache.page_spans([(21 * PAGE, PAGE + 1), (5, 0), (20 * PAGE + 10, 5), (0, 1)]) == [
        (0, PAGE),
        (20 * PAGE, 23 * PAGE),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="pages of another mapping stay on Linux only")
def test_pages_that_another_mapping_holds_stay_and_the_probe_says_so(pages, path):
    pages.warm()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as other:
        assert sum(other[: 1 << 20 : PAGE]) > 0
        pages.evict([(0, 1 << 20)])
        assert pages.residency([(0, 1 << 20)]).cold_bytes == 0
    pages.evict([(0, 1 << 20)])
    assert pages.residency([(0, 1 << 20)]).cold_bytes == 1 << 20


def test_queued_reads_are_in_flight_until_readable(path, report):
    if report.method != pagecache.CACHESTAT:
        pytest.skip("needs both probes")
    with FilePages(path) as pages:
        pages.evict()
        os.posix_fadvise(pages._fd, 0, 4 << 20, os.POSIX_FADV_WILLNEED)
        first = pages.residency([(0, 4 << 20)])
        assert first.cold_bytes == 0  # every read is queued, whether or not it has arrived
        assert 0 <= first.inflight_bytes <= 4 << 20
        pages.warm([(0, 4 << 20)])
        assert pages.residency([(0, 4 << 20)]) == Residency(4 << 20, 0, 0)


def test_eviction_waits_for_reads_in_flight(path, report):
    if report.method != pagecache.CACHESTAT:
        pytest.skip("needs both probes")
    with FilePages(path) as pages:
        for _ in range(5):
            os.posix_fadvise(pages._fd, 0, FILE_BYTES, os.POSIX_FADV_WILLNEED)
            pages.evict()
            assert pages.cached_bytes() <= 4 * PAGE


def test_in_flight_bytes_are_split_from_cold_bytes(path, report, monkeypatch):
    """Page 2 is readable; cachestat is made to say that page 1 (an edge of the range) is queued and page 3 is not."""
    if report.method != pagecache.CACHESTAT:
        pytest.skip("needs both probes")
    with FilePages(path) as pages:
        pages.evict()
        pages.warm([(2 * PAGE, PAGE)])
        queued = {1, 2}

        def cachestat(fd, offset, nbytes):
            return len(queued & set(range(offset // PAGE, -(-(offset + nbytes) // PAGE))))

        monkeypatch.setattr(pagecache, "_cachestat", cachestat)
        offset, end = PAGE + 100, 3 * PAGE + 30
        assert pages.residency([(offset, end - offset)]) == Residency(end - offset, 30, PAGE - 100)
        queued.add(3)
        assert pages.residency([(offset, end - offset)]) == Residency(end - offset, 0, PAGE - 100 + 30)


@despite_reclaim
def test_device_bytes_grow_by_what_was_read_cold(pages):
    before = thread_device_bytes()
    pages.warm([(0, 4 << 20)])
    cold = thread_device_bytes() - before
    before = thread_device_bytes()
    pages.warm([(0, 4 << 20)])
    warm = thread_device_bytes() - before
    if sys.platform == "linux":
        assert (cold, warm) == (4 << 20, 0)
    else:
        assert cold >= 4 << 20


@despite_reclaim
def test_probing_from_several_threads_at_once(pages):
    pages.warm([(0, 4 << 20)])
    wrong = []

    def probe(offset, cold):
        for _ in range(200):
            found = pages.residency([(offset, 1 << 20), (offset + 100, 5 * PAGE)])
            if found != Residency((1 << 20) + 5 * PAGE, cold * ((1 << 20) + 5 * PAGE), 0):
                wrong.append(found)

    threads = [threading.Thread(target=probe, args=case) for case in [(0, 0), (2 << 20, 0), (5 << 20, 1), (6 << 20, 1)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_ranges_outside_the_file_are_refused(pages):
    for bad in [(-1, 5), (0, FILE_BYTES + 1), (FILE_BYTES, 1), (5, -2)]:
        for call in (pages.residency, pages.evict, pages.warm):
            with pytest.raises(ValueError, match="outside"):
                call([bad])


def test_empty_file(tmp_path):
    (tmp_path / "empty").touch()
    with FilePages(tmp_path / "empty", pagecache.MINCORE) as pages:
        pages.warm()
        pages.evict()
        assert (pages.cached_bytes(), pages.residency([(0, 0)])) == (0, Residency(0, 0, 0))
    assert self_test(tmp_path / "empty").method == pagecache.UNAVAILABLE


def test_open_errors(tmp_path, path, monkeypatch):
    def kind_of(call, *args):
        with pytest.raises(Edge0Error) as caught:
            call(*args)
        return caught.value.kind

    assert kind_of(FilePages, tmp_path / "absent") is ErrorKind.FILE_MISSING
    assert kind_of(self_test, tmp_path / "absent") is ErrorKind.FILE_MISSING
    assert kind_of(FilePages, path, "vmtouch") is ErrorKind.OPTION_INVALID
    assert kind_of(FilePages, path, pagecache.UNAVAILABLE) is ErrorKind.PROBE_UNAVAILABLE
    monkeypatch.setattr(pagecache, "_SYS_CACHESTAT", 100_000)  # what an older kernel answers
    assert kind_of(FilePages, path, pagecache.CACHESTAT) is ErrorKind.PROBE_UNAVAILABLE


def test_warm_of_a_file_that_shrank_is_a_read_error(tmp_path):
    file = tmp_path / "shrinking"
    file.write_bytes(bytes(10 * PAGE))
    with FilePages(file, pagecache.MINCORE) as pages:
        os.truncate(file, 4 * PAGE)
        with pytest.raises(Edge0Error) as caught:
            pages.warm()
    assert caught.value.kind is ErrorKind.READ_FAILED


def test_self_test_accepts_a_disk_file_and_leaves_nothing_behind(path, report):
    assert isinstance(report, ProbeReport)
    assert report.evicts and report.counts_device_bytes and report.method != pagecache.UNAVAILABLE, report.reason
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(sys.platform != "linux", reason="cachestat is a Linux call")
def test_self_test_falls_back_to_mincore(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pagecache, "_SYS_CACHESTAT", 100_000)
        old_kernel = self_test(path)
    monkeypatch.setattr(pagecache, "_cachestat", lambda fd, offset, nbytes: 0)  # what an overlay filesystem answers
    overlay = self_test(path)
    assert (old_kernel.method, overlay.method) == (pagecache.MINCORE, pagecache.MINCORE)
    assert old_kernel.evicts and "cachestat fails" in old_kernel.reason and "disagree" in overlay.reason


def test_self_test_refuses_a_probe_that_calls_everything_resident(path, monkeypatch):
    monkeypatch.setattr(FilePages, "_resident", lambda self, start, nbytes: b"\1" * -(-nbytes // PAGE))
    monkeypatch.setattr(pagecache, "_cachestat", lambda fd, offset, nbytes: -(-nbytes // PAGE))
    report = self_test(path)
    assert (report.method, report.evicts) == (pagecache.UNAVAILABLE, False)


def test_self_test_refuses_a_memory_filesystem():
    mounts = [part.mountpoint for part in psutil.disk_partitions(all=True) if part.fstype == "tmpfs"]
    folder = next((mount for mount in mounts if os.access(mount, os.W_OK) and filesystem_of(mount)[0] == "tmpfs"), None)
    if folder is None:
        pytest.skip("no writable tmpfs here")
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()
        report = self_test(file.name)
    assert report.method == pagecache.UNAVAILABLE and "tmpfs" in report.reason


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to stop being the owner")
def test_self_test_refuses_a_file_that_is_neither_ours_nor_writable():
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        file = folder / "foreign.bin"
        file.write_bytes(bytes(64 * PAGE))
        file.chmod(0o644)
        with FilePages(file, pagecache.MINCORE) as pages:
            pages.evict()
        os.seteuid(65534)
        try:
            with FilePages(file, pagecache.MINCORE) as pages:
                lie = pages.cached_bytes()
            report = self_test(file)
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)
    assert lie == 64 * PAGE  # why the refusal is needed
    assert report.method == pagecache.UNAVAILABLE and "ownership" in report.reason


def test_macos_usage_record_is_read_at_its_offsets():
    words = list(range(1000, 1029))
    named = pagecache.parse_rusage_v4(b"u" * 16 + struct.pack("<29Q", *words) + bytes(500))
    assert named == {
        "rss": 1006,
        "footprint": 1007,
        "disk_read": 1016,
        "disk_written": 1017,
        "peak_footprint": 1028,
    }
