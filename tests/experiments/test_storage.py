"""Random reads in every way that the system has, and the judgement on a cache below the page cache."""

import os
import random

import pytest

from edge0.errors import ErrorKind
from edge0.telemetry.pagecache import self_test
from experiments.host import storage
from experiments.host.storage import ADVISED, BUFFERED, DIRECT, NONE, SUSPECTED, UNKNOWN, judge_times, lower_cache

FILE_BYTES = 4 << 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.safetensors"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


def test_direct_reads_where_the_file_system_takes_them(file):
    heard = []
    reads = storage.random_reads(file, 100_000, threads=(1, 3), seconds=0.02, report=heard.append)
    assert reads.way == (DIRECT if storage._takes_direct(file) else BUFFERED)
    assert reads.read_bytes == 102_400  # 25 blocks of 4 KiB
    assert [row.threads for row in reads.rows] == [1, 3]
    assert heard == [f"{reads.way} reads, 1 thread", f"{reads.way} reads, 3 threads"]
    for row in reads.rows:
        assert row.n >= 4 and row.mib_s > 0 and row.median_ms > 0


def test_several_files_are_read_as_if_they_were_one(file, tmp_path):
    short, other = tmp_path / "short", tmp_path / "other"
    short.write_bytes(b"x" * 1000)  # holds no whole read
    other.write_bytes(os.urandom(FILE_BYTES))
    (row,) = storage.random_reads([file, short, other], 1 << 20, threads=(2,), seconds=60, way=ADVISED).rows
    assert row.n == 2 * FILE_BYTES >> 20
    places = storage._anywhere([(3, 10_000), (4, 4096)], 4096, seed=1)
    assert {next(places) for _ in range(200)} == {(3, 0), (3, 4096), (4, 0)}


@pytest.mark.parametrize("way", [ADVISED, BUFFERED])
def test_reads_through_the_cache_read_each_byte_once_and_end_with_the_file(file, way):
    (row,) = storage.random_reads(file, 1 << 20, threads=(2,), seconds=60, way=way).rows
    assert row.n == FILE_BYTES >> 20
    if self_test(file).counts_device_bytes:
        assert row.device_share == pytest.approx(1, abs=0.1)


def test_more_threads_than_places(file):
    (row,) = storage.random_reads(file, FILE_BYTES, threads=(8,), seconds=60, way=ADVISED).rows
    assert row.n == 1


def test_a_file_shorter_than_one_read_is_refused(file, tmp_path, refused):
    refused(ErrorKind.OPTION_INVALID, lambda: storage.random_reads(file, FILE_BYTES + 1), file, FILE_BYTES)
    refused(ErrorKind.FILE_MISSING, lambda: storage.random_reads(tmp_path / "none", 4096))


def test_a_short_read_is_no_result(file, refused):
    descriptor = os.open(file, os.O_RDONLY)
    try:
        view = memoryview(bytearray(8192))
        call = lambda: storage._read(file, descriptor, FILE_BYTES - 4096, view)  # noqa: E731
        refused(ErrorKind.READ_FAILED, call, file, "short read", 8192, 4096)
    finally:
        os.close(descriptor)


def times(median: float, seed: int = 0, n: int = 300) -> list[float]:
    rng = random.Random(seed)
    return [median * rng.uniform(0.9, 1.1) for _ in range(n)]


def test_a_plain_device_hints_at_nothing():
    found = judge_times(times(90), times(90, 1), hypervisor=False, device="nvme0n1p2")
    assert found.verdict == NONE and "nothing hints" in found.reason
    assert found.first_median_us == pytest.approx(90, rel=0.05)
    assert set(found.times()) == {"first_median_us", "again_median_us", "first_p90_us", "again_p90_us"}


def test_a_hypervisor_decides_alone():
    found = judge_times(times(90), times(90, 1), hypervisor=True, device="nvme0n1")
    assert found.verdict == SUSPECTED and "guest" in found.reason


def test_a_cache_that_the_first_pass_filled():
    slow_tail = times(100, n=250) + times(5000, n=50)
    found = judge_times(slow_tail, times(95, 1), hypervisor=False, device="sda1")
    assert found.verdict == SUSPECTED and "much faster" in found.reason
    assert found.first_p90_us > 3 * found.again_p90_us
    assert judge_times(times(200), times(100), False, "sda1").verdict == SUSPECTED


@pytest.mark.parametrize(("device", "verdict"), [("sda1", SUSPECTED), (None, SUSPECTED), ("nvme0n1", NONE)])
def test_faster_than_flash_memory(device, verdict):
    assert judge_times(times(40), times(40, 1), hypervisor=None, device=device).verdict == verdict


def test_macos_without_a_hypervisor_has_no_host_below(monkeypatch):
    monkeypatch.setattr(storage, "DARWIN", True)
    assert judge_times(times(40), times(20), hypervisor=False, device="disk3s5").verdict == NONE
    assert judge_times(times(90), times(90), hypervisor=True, device="disk3s5").verdict == SUSPECTED


@pytest.mark.parametrize(("hypervisor", "verdict"), [(False, UNKNOWN), (True, SUSPECTED)])
def test_too_few_blocks_say_nothing(hypervisor, verdict):
    found = judge_times(times(90, n=29), times(90, n=29), hypervisor, "sda")
    assert found.verdict == verdict and "29 blocks" in found.reason and found.first_median_us is None


def test_the_largest_file_of_a_checkpoint_is_asked(file, tmp_path, refused):
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts" / "small.safetensors").write_bytes(b"x")
    assert storage.largest_file(tmp_path) == file
    host = {"filesystem": "ext4", "hypervisor": True, "device": "vda"}
    found = lower_cache(tmp_path, host)
    assert found.verdict == (SUSPECTED if storage._takes_direct(file) else UNKNOWN)
    empty = tmp_path / "experts" / "none"
    empty.mkdir()
    refused(ErrorKind.FILE_MISSING, lambda: storage.largest_file(empty), empty)


def test_memory_and_refused_direct_reads_are_unknown(file, monkeypatch):
    host = {"filesystem": "tmpfs", "hypervisor": True, "device": None}
    assert lower_cache(file, host).verdict == UNKNOWN
    monkeypatch.setattr(storage, "_takes_direct", lambda path: False)
    found = lower_cache(file, host | {"filesystem": "ext4"})
    assert found.verdict == UNKNOWN and "refuses" in found.reason
