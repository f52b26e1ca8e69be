"""Conditions on a real file: parsing, the byte budget under threads that load, the sweep, and verification."""

import mmap
import os
import random
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import filesystem_of
from edge0.telemetry.pagecache import PAGE_BYTES, FilePages, self_test
from experiments.budgets import budget as budget_module
from experiments.budgets import eviction
from experiments.budgets.eviction import CacheBudget
from experiments.conditions import Condition, prepare

MIB = 1 << 20
LAYERS, EXPERTS, RANGES = 4, 16, 3
PART_BYTES = 64 << 10  # a record is three parts of 64 KiB that lie apart, as in stacked tensors
RECORD_BYTES = RANGES * PART_BYTES
HEADER_BYTES = 1000  # data starts unaligned
RECORD_PAGES_BYTES = RANGES * (PART_BYTES + PAGE_BYTES)  # of a record without neighbours
EXPERT_BYTES = LAYERS * EXPERTS * RECORD_BYTES  # 12 MiB over two files
RECLAIMED_BYTES = 4 * PAGE_BYTES  # a kernel that ages pages may take a few between a read and the probe
RECORDS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conditions")
    if filesystem_of(folder)[0] == "tmpfs":
        pytest.skip("the temporary folder is on tmpfs, whose pages are always in memory")
    paths = [folder / "shard-0.bin", folder / "shard-1.bin"]
    for path in paths:
        with open(path, "wb") as out:
            out.write(os.urandom(HEADER_BYTES + EXPERT_BYTES // 2))
            out.flush()
            os.fsync(out.fileno())
    return paths


@pytest.fixture
def files(shards):
    report = self_test(shards[0])
    if not report.evicts:
        pytest.skip(f"eviction does not work here: {report.reason}")
    opened = {path: FilePages(path, report.method) for path in shards}
    for pages in opened.values():
        pages.evict()
    yield opened
    for pages in opened.values():
        pages.close()


@pytest.fixture
def ranges_of(shards):
    def ranges(layer, expert) -> list[tuple[Path, int, int]]:
        tensors = [(layer % 2 * RANGES + part) * EXPERTS + expert for part in range(RANGES)]
        return [(shards[layer // 2], HEADER_BYTES + at * PART_BYTES, PART_BYTES) for at in tensors]

    return ranges


class Loader:
    """Reads records as an engine does: positioned reads on its own descriptors, without read-ahead."""

    def __init__(self, shards, ranges_of):
        self.ranges_of = ranges_of
        self.fds = {path: os.open(path, os.O_RDONLY) for path in shards}
        if hasattr(os, "posix_fadvise"):
            for fd in self.fds.values():
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def load(self, layer, expert):
        buffer = bytearray(PART_BYTES)
        for path, offset, nbytes in self.ranges_of(layer, expert):
            assert os.preadv(self.fds[path], [buffer], offset) == nbytes

    def close(self):
        for fd in self.fds.values():
            os.close(fd)


@pytest.fixture
def loader(shards, ranges_of):
    made = Loader(shards, ranges_of)
    yield made
    made.close()


def cold_bytes(files, ranges_of, record):
    return sum(files[path].residency([(offset, nbytes)]).cold_bytes for path, offset, nbytes in ranges_of(*record))


@given(
    st.one_of(
        st.sampled_from([Condition("warm"), Condition("cold"), Condition("limit")]),
        st.floats(0, 1, exclude_min=True, exclude_max=True).map(lambda share: Condition("budget", fraction=share)),
        st.integers(1, 1 << 45).map(lambda nbytes: Condition("budget", nbytes=nbytes)),
        st.integers(1, 5000).map(lambda mib: Condition("budget", nbytes=mib * MIB)),
    )
)
def test_text_round_trip(condition):
    assert Condition.parse(str(condition)) == condition


@pytest.mark.parametrize(
    "text, canonical, budget_bytes",
    [
        ("warm", "warm", None),
        (" cold ", "cold", 0),
        ("budget:0.25", "budget:0.25", 250),
        ("budget:.5", "budget:0.5", 500),
        ("budget:64MiB", "budget:64MiB", 64 * MIB),
        ("budget:1024MiB", "budget:1GiB", 1 << 30),
        ("budget:3GiB", "budget:3GiB", 3 << 30),
        ("budget:100B", "budget:100B", 100),
        ("budget:3KiB", "budget:3KiB", 3072),
    ],
)
def test_parse(text, canonical, budget_bytes):
    condition = Condition.parse(text)
    assert (str(condition), condition.budget_bytes(1000)) == (canonical, budget_bytes)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("", ErrorKind.CONDITION_UNKNOWN),
        ("lukewarm", ErrorKind.CONDITION_UNKNOWN),
        ("Warm", ErrorKind.CONDITION_UNKNOWN),
        ("hot:0.5", ErrorKind.CONDITION_UNKNOWN),
        ("budget", ErrorKind.OPTION_INVALID),
        ("budget:", ErrorKind.OPTION_INVALID),
        ("budget:0", ErrorKind.OPTION_INVALID),
        ("budget:1", ErrorKind.OPTION_INVALID),
        ("budget:1.5", ErrorKind.OPTION_INVALID),
        ("budget:-0.5", ErrorKind.OPTION_INVALID),
        ("budget:nan", ErrorKind.OPTION_INVALID),
        ("budget:0MiB", ErrorKind.OPTION_INVALID),
        ("budget:64MB", ErrorKind.OPTION_INVALID),
        ("budget:1.5GiB", ErrorKind.OPTION_INVALID),
        ("budget:half", ErrorKind.OPTION_INVALID),
        ("warm:0.5", ErrorKind.OPTION_INVALID),
        ("cold:", ErrorKind.OPTION_INVALID),
    ],
)
def test_parse_errors(text, kind):
    with pytest.raises(Edge0Error) as caught:
        Condition.parse(text)
    assert caught.value.kind is kind
    assert str(caught.value).startswith("condition: ") and "(expected warm, cold, limit, budget:" in str(caught.value)


@pytest.mark.parametrize("values", [{}, {"fraction": 0.5, "nbytes": 5}, {"fraction": 2.0}, {"nbytes": -1}])
def test_a_budget_has_exactly_one_valid_value(values):
    with pytest.raises(Edge0Error) as caught:
        Condition("budget", **values)
    assert caught.value.kind is ErrorKind.OPTION_INVALID


def test_budget_holds_under_threads_that_load_at_random(files, ranges_of, loader):
    budget_bytes = EXPERT_BYTES // 4
    with CacheBudget(files, budget_bytes, ranges_of, RECORDS) as budget:
        budget.prefill(seed=3)

        def work(seed):
            rng = random.Random(seed)
            for _ in range(60):
                record = rng.choice(RECORDS)
                loader.load(*record)
                budget.note(*record)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        budget.drain()
        cached = budget.cached_bytes()
    # A record can be dropped while another thread has just read it again, so a few of the 16 may be short.
    assert budget_bytes * 0.7 <= cached <= budget_bytes * 1.15


def test_least_recently_loaded_records_go_first(files, ranges_of, loader):
    with CacheBudget(files, 4 * RECORD_PAGES_BYTES, ranges_of, RECORDS) as budget:
        for record in [(0, 0), (0, 4), (1, 0), (1, 4), (0, 0), (3, 9)]:  # (0, 0) is renewed, so (0, 4) is oldest
            loader.load(*record)
            budget.note(*record)
        budget.drain()
        assert cold_bytes(files, ranges_of, (0, 4)) == RECORD_BYTES
        for kept in [(0, 0), (1, 0), (1, 4), (3, 9)]:
            assert cold_bytes(files, ranges_of, kept) <= RECLAIMED_BYTES


def test_budget_zero_evicts_each_record_after_its_load(files, ranges_of, loader):
    with CacheBudget(files, 0, ranges_of, RECORDS) as budget:
        assert budget.prefill(seed=1) == []
        for record in RECORDS[::5]:
            loader.load(*record)
            budget.note(*record)
        budget.drain()
        assert budget.cached_bytes() == 0


def test_prefill_is_seeded_and_its_records_are_the_first_to_go(files, ranges_of, loader):
    with CacheBudget(files, EXPERT_BYTES // 2, ranges_of, RECORDS) as budget:

        def choice(seed):
            chosen = budget.prefill(seed)
            assert EXPERT_BYTES // 2 - RECORD_PAGES_BYTES < budget.kept_page_bytes() <= EXPERT_BYTES // 2
            assert all(cold_bytes(files, ranges_of, record) <= RECLAIMED_BYTES for record in chosen)
            return chosen

        first = choice(7)
        assert choice(8) != first
        assert choice(7) == first
        newcomer = next(record for record in RECORDS if record not in first)
        loader.load(*newcomer)
        budget.note(*newcomer)
        budget.drain()
        assert cold_bytes(files, ranges_of, newcomer) <= RECLAIMED_BYTES
        gone = [cold_bytes(files, ranges_of, record) > RECORD_BYTES // 2 for record in first]
        assert 1 <= sum(gone) <= 2 and gone == sorted(gone, reverse=True)


def test_pages_that_no_record_accounts_for_are_swept_out(files, ranges_of, loader, shards, monkeypatch):
    monkeypatch.setattr(budget_module, "SLACK_MIN_BYTES", 1 * MIB)  # the file is smaller than the usual slack
    swept, gaps = [], eviction._Spans.gaps
    monkeypatch.setattr(eviction._Spans, "gaps", lambda *given: swept.append(given) or gaps(*given))
    with CacheBudget(files, 8 * RECORD_PAGES_BYTES, ranges_of, RECORDS) as budget:
        for record in RECORDS[:40:5]:
            loader.load(*record)
            budget.note(*record)
        budget.drain()
        assert swept == []
        for path in shards:
            path.read_bytes()  # with read-ahead, as page faults would
        assert budget.cached_bytes() >= EXPERT_BYTES - RECLAIMED_BYTES
        for _ in range(eviction._CHECK_EVERY_NOTES):
            budget.note(*RECORDS[35])
        budget.drain()
        assert swept
        for record in RECORDS[:40:5]:
            assert cold_bytes(files, ranges_of, record) <= RECLAIMED_BYTES
        assert abs(budget.cached_bytes() - budget.kept_page_bytes()) <= RECLAIMED_BYTES


def test_a_failed_eviction_surfaces_in_drain(files, ranges_of, monkeypatch):
    with CacheBudget(files, 0, ranges_of, RECORDS) as budget:
        budget.note(99, 99)  # no such record
        with pytest.raises(KeyError):
            budget.drain()
    with CacheBudget(files, 0, ranges_of, RECORDS) as budget:

        def broken(self, ranges=None):
            raise OSError("device gone")

        monkeypatch.setattr(FilePages, "evict", broken)
        budget.note(0, 0)
        with pytest.raises(OSError, match="device gone"):
            budget.drain()
        with pytest.raises(OSError, match="device gone"):
            budget.prefill(0)


def test_closed_and_negative_budgets_are_refused(files, ranges_of):
    budget = CacheBudget(files, 0, ranges_of, RECORDS)
    budget.close()
    budget.close()
    with pytest.raises(RuntimeError, match="closed"):
        budget.drain()
    with pytest.raises(Edge0Error) as caught:
        CacheBudget(files, -1, ranges_of, RECORDS)
    assert caught.value.kind is ErrorKind.OPTION_INVALID


def test_prepare_reaches_each_condition(files, ranges_of):
    file_bytes = sum(pages.file_bytes for pages in files.values())
    assert file_bytes - RECLAIMED_BYTES <= prepare(Condition.parse("warm"), files) <= file_bytes
    assert prepare(Condition.parse("cold"), files) == 0
    condition = Condition.parse("budget:0.5")
    limit = condition.budget_bytes(EXPERT_BYTES)
    with CacheBudget(files, limit, ranges_of, RECORDS) as budget:
        cached = prepare(condition, files, budget, seed=11)
        assert limit - RECORD_PAGES_BYTES - RECLAIMED_BYTES <= cached <= limit + RECLAIMED_BYTES
        assert prepare(Condition.parse("cold"), files, budget) == 0
    with pytest.raises(ValueError, match="needs a Budget"):
        prepare(condition, files)


def test_freshly_written_pages_can_be_made_cold(tmp_path, files):
    path = tmp_path / "dirty"
    path.write_bytes(os.urandom(2 * MIB))
    method = self_test(path).method
    with FilePages(path, method) as pages:
        assert pages.cached_bytes() >= 2 * MIB - RECLAIMED_BYTES
        assert prepare(Condition("cold"), {path: pages}) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="pages of another mapping stay on Linux only")
def test_prepare_refuses_when_the_probe_finds_another_state(files, ranges_of, shards, monkeypatch):
    def kind_of(condition, budget=None):
        with pytest.raises(Edge0Error) as caught:
            prepare(condition, files, budget)
        assert "expected" in str(caught.value) and "found" in str(caught.value)
        return caught.value.kind

    with open(shards[0], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as other:
        assert sum(other[::PAGE_BYTES]) > 0  # a stranger that has mapped and touched one shard
        assert kind_of(Condition("cold")) is ErrorKind.PROBE_UNAVAILABLE
        with CacheBudget(files, EXPERT_BYTES // 4, ranges_of, RECORDS) as budget:
            assert kind_of(Condition("budget", fraction=0.25), budget) is ErrorKind.PROBE_UNAVAILABLE
    for pages in files.values():
        pages.evict()
    monkeypatch.setattr(FilePages, "warm", lambda self, ranges=None: None)
    files[shards[1]].evict()
    assert kind_of(Condition("warm")) is ErrorKind.PROBE_UNAVAILABLE
