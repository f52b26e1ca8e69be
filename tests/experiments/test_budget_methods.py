"""Ways of keeping a budget: each tried out on a real file, and what is said of one that does not work."""

import os
import subprocess
import sys

import pytest

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import filesystem_of
from edge0.telemetry.pagecache import UNAVAILABLE, FilePages, ProbeReport, self_test
from experiments.budgets import methods as methods
from experiments.budgets.cgroups import V1, V2, Cgroupfs, Group, limited_command

NAMES = ["eviction", V1, V2, "balloon"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("methods") / "model.safetensors"
    if filesystem_of(path.parent)[0] == "tmpfs":
        pytest.skip("the temporary folder is on tmpfs, whose pages are always in memory")
    with open(path, "wb") as out:
        out.write(os.urandom(3 << 20))
        out.flush()
        os.fsync(out.fileno())
    return path


def reports(path, **options):
    found = methods.budget_methods(path, **options)
    assert [report.name for report in found] == NAMES and all(report.reason for report in found)
    return {report.name: report for report in found}


def test_what_works_here_is_found_and_nothing_is_left_behind(checkpoint):
    found = reports(checkpoint)
    assert found["eviction"].works == self_test(checkpoint).evicts
    assert not (found[V1].works and found[V2].works)
    assert found["balloon"].works or sys.platform != "darwin"
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_a_group_that_can_be_made_passes(checkpoint):
    try:
        with limited_command() as limited:
            version = limited.group and limited.method
    except Edge0Error as error:
        pytest.skip(f"no group can be made here: {error}")
    assert version is None or reports(checkpoint)[version].works


def test_no_memory_controller_is_a_reason(checkpoint, tmp_path):
    (tmp_path / "membership").write_text("0::/\n")
    found = reports(checkpoint, places=Cgroupfs(tmp_path, tmp_path / "membership"))
    assert not found[V1].works and not found[V2].works
    assert "memory controller" in found[V1].reason and "memory controller" in found[V2].reason


def test_without_a_probe_no_way_is_used(checkpoint, monkeypatch):
    report = ProbeReport(UNAVAILABLE, False, False, "mincore lies here")
    monkeypatch.setattr(methods, "self_test", lambda path: report)
    for each in reports(checkpoint).values():
        assert not each.works and "cold fraction unavailable: mincore lies here" in each.reason


def test_an_eviction_that_leaves_pages_is_not_used(checkpoint, monkeypatch):
    monkeypatch.setattr(FilePages, "evict", lambda self, ranges=None: None)
    with FilePages(checkpoint) as pages:
        pages.warm()
    assert not reports(checkpoint)["eviction"].works


def test_a_limit_that_holds_nothing_back_is_not_used(checkpoint, monkeypatch):
    try:
        with limited_command() as limited:
            if limited.group is None:
                pytest.skip("a scope is not tried with a file")
    except Edge0Error as error:
        pytest.skip(f"no group can be made here: {error}")
    monkeypatch.setattr(Group, "set_limit", lambda self, nbytes: nbytes)
    found = reports(checkpoint)[limited.method]
    assert not found.works and "leaves too much" in found.reason


def test_a_child_that_fails_is_a_reason(checkpoint):
    def attempt():
        subprocess.run(["sh", "-c", "exit 3"], check=True)

    found = methods._tried("cgroup-v1", attempt)
    assert not found.works and "exit status 3" in found.reason


def test_on_macos_the_balloon_is_tried(checkpoint, monkeypatch):
    asked = []

    class MadeUp:
        def __init__(self, nbytes):
            asked.append(nbytes)

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(methods, "Balloon", MadeUp)
    assert methods._tried("balloon", methods._try_balloon).works and asked == [1 << 20]

    def refuse(nbytes):
        raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, "wire limit reached")

    monkeypatch.setattr(methods, "Balloon", refuse)
    assert methods._tried("balloon", methods._try_balloon) == methods.MethodReport(
        "balloon", False, "wire limit reached"
    )
