"""A budget by a cgroup: the limit that follows, on a made-up group, and what is cached under a real one."""

import json
import mmap
import os
import sys
import time
from pathlib import Path

import pytest

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import filesystem_of
from edge0.telemetry.pagecache import FilePages, self_test
from experiments.budgets.cgroup_budget import MIN_BUDGET_BYTES, CgroupBudget
from experiments.budgets.cgroups import Usage, limited_command
from experiments.budgets.eviction import CacheBudget
from experiments.processes import run_python_limited

MIB = 1 << 20
FILE_BYTES, RECORD_BYTES = 40 * MIB, 512 << 10
BUDGET_BYTES = 12 * MIB
RECORDS = [(0, expert) for expert in range(FILE_BYTES // RECORD_BYTES)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    path = tmp_path_factory.mktemp("limits") / "experts.bin"
    if filesystem_of(path.parent)[0] == "tmpfs":
        pytest.skip("the temporary folder is on tmpfs, whose pages are always in memory")
    with open(path, "wb") as out:
        out.write(os.urandom(FILE_BYTES))
        out.flush()
        os.fsync(out.fileno())
    if not self_test(path).evicts:
        pytest.skip("eviction does not work here")
    return path


@pytest.fixture
def files(scratch):
    with FilePages(scratch, self_test(scratch).method) as pages:
        pages.evict()
        yield {scratch: pages}


@pytest.fixture
def ranges_of(scratch):
    return lambda layer, expert: [(scratch, expert * RECORD_BYTES, RECORD_BYTES)]


class MadeUpGroup:
    def __init__(self, file_bytes=0, other_bytes=100 * MIB):
        self.file_bytes, self.other_bytes, self.limits = file_bytes, other_bytes, []

    def usage(self):
        return Usage(self.file_bytes, self.other_bytes, 0)

    def set_limit(self, nbytes):
        self.limits.append(nbytes)
        return nbytes


def test_the_limit_is_the_budget_and_all_else_that_the_group_holds(files, ranges_of):
    group = MadeUpGroup(file_bytes=7 * MIB)  # nothing of the file is cached: pages of other files
    with CgroupBudget(files, BUDGET_BYTES, ranges_of, RECORDS, group) as budget:
        budget.prefill(0)
        assert group.limits[0] == BUDGET_BYTES + 107 * MIB
        group.file_bytes = budget.cached_bytes() + 7 * MIB
        budget._adjust()
        settled = len(group.limits)
        group.other_bytes += 100 << 10  # too little to move the limit
        budget._adjust()
        assert len(group.limits) == settled
        group.other_bytes += 30 * MIB
        budget._adjust()
        assert group.limits[-1] == BUDGET_BYTES + 137 * MIB + (100 << 10)
    assert group.limits[-1] is None  # lifted again


def test_the_limit_follows_by_itself(files, ranges_of):
    group = MadeUpGroup()
    with CgroupBudget(files, BUDGET_BYTES, ranges_of, RECORDS, group) as budget:
        budget.prefill(0)
        group.file_bytes = budget.cached_bytes()
        group.other_bytes = 200 * MIB
        give_up = time.monotonic() + 10
        while group.limits[-1] != BUDGET_BYTES + 200 * MIB and time.monotonic() < give_up:
            time.sleep(0.02)
        assert group.limits[-1] == BUDGET_BYTES + 200 * MIB


def test_both_ways_begin_with_the_same_records(files, ranges_of):
    with CacheBudget(files, BUDGET_BYTES, ranges_of, RECORDS) as budget:
        expected = budget.prefill(5)
    with CgroupBudget(files, BUDGET_BYTES, ranges_of, RECORDS, MadeUpGroup()) as budget:
        assert budget.prefill(5) == expected and len(expected) == BUDGET_BYTES // RECORD_BYTES
        assert budget.kept_page_bytes() == BUDGET_BYTES


def refused(action):
    with pytest.raises(Edge0Error) as caught:
        action()
    return caught.value.kind


def test_what_drain_refuses(files, ranges_of, monkeypatch):
    group = MadeUpGroup(file_bytes=FILE_BYTES)
    with CgroupBudget(files, MIN_BUDGET_BYTES, ranges_of, RECORDS, group) as budget:
        budget.prefill(0)
        budget.drain()
        for pages in files.values():
            pages.warm()
        assert refused(budget.drain) is ErrorKind.PROBE_UNAVAILABLE  # the made-up limit held nothing back
        group.file_bytes = 0
        assert refused(budget.drain) is ErrorKind.PROBE_UNAVAILABLE  # all of it charged to somebody else

        def broken():
            raise OSError("group gone")

        monkeypatch.setattr(group, "usage", broken)
        give_up = time.monotonic() + 10
        while budget._failure is None and time.monotonic() < give_up:
            time.sleep(0.02)
        with pytest.raises(OSError, match="group gone"):
            budget.drain()


def test_a_budget_that_no_cgroup_keeps_is_refused(files, ranges_of):
    kind = refused(lambda: CgroupBudget(files, MIN_BUDGET_BYTES - 1, ranges_of, RECORDS, MadeUpGroup()))
    assert kind is ErrorKind.OPTION_INVALID


PROGRAM = """
import json, os, random, sys, time
from pathlib import Path
from edge0.telemetry.pagecache import FilePages, self_test
from experiments.budgets.cgroups import own_group
from experiments.budgets.cgroup_budget import CgroupBudget
path, record_bytes, budget_bytes = Path({path!r}), {record}, {budget}
records = [(0, n) for n in range(path.stat().st_size // record_bytes)]
rng, fd, memory = random.Random(1), os.open(path, os.O_RDONLY), bytearray(record_bytes)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
def load(count):
    for _ in range(count):
        _, expert = rng.choice(records)
        os.preadv(fd, [memory], expert * record_bytes)
with FilePages(path, self_test(path).method) as pages:
    ranges_of = lambda layer, expert: [(path, expert * record_bytes, record_bytes)]
    with CgroupBudget({{path: pages}}, budget_bytes, ranges_of, records) as budget:
        budget.prefill(0)
        found, group = [pages.cached_bytes()], own_group()
        load(200)
        budget.drain()
        found.append(pages.cached_bytes())
        before = group.limit_bytes()
        held = []
        for _ in range(6):
            held.append(bytearray(b"x") * (4 << 20))
            budget._adjust()
        load(200)
        budget.drain()
        found.append(pages.cached_bytes())
        print(json.dumps([found, before, group.limit_bytes(), budget.charged_bytes()]))
"""


@pytest.fixture
def possible():
    try:
        with limited_command():
            pass
    except Edge0Error as error:
        pytest.skip(f"no group can be made here: {error}")


def program(scratch):
    return PROGRAM.format(path=str(scratch), record=RECORD_BYTES, budget=BUDGET_BYTES)


def test_a_real_group_holds_the_budget_whatever_else_the_process_holds(scratch, possible, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with FilePages(scratch, self_test(scratch).method) as pages:
        pages.evict()
    said = run_python_limited(["-c", program(scratch)], "a limited program", None)
    cached, before, after, charged = json.loads(said)
    for each in cached:
        assert BUDGET_BYTES - 3 * MIB <= each <= BUDGET_BYTES + 2 * MIB
    assert 16 * MIB <= after - before <= 60 * MIB  # the limit made room for what the process took in between
    assert charged >= cached[-1] - 2 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="pages of another mapping stay on Linux only")
def test_pages_that_another_process_holds_void_a_run(scratch, possible, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with open(scratch, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        with pytest.raises(Edge0Error) as caught:
            run_python_limited(["-c", program(scratch)], "a limited program", None)
    assert "charged to others" in str(caught.value)
