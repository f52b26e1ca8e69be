"""A budget by a made-up balloon: when it is filled and let go, what is verified, and where it is refused."""

import os
import sys

import pytest
import yaml

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.telemetry.host import filesystem_of
from edge0.telemetry.pagecache import FilePages, self_test
from experiments.budgets import balloon_budget
from experiments.budgets.balloon_budget import BalloonBudget
from experiments.budgets.eviction import CacheBudget
from experiments.conditions import BUDGET_BY, Condition, open_budget, prepare
from experiments.config import SCHEMA
from experiments.options import BUDGET_WAYS, SessionOptions
from experiments.preflight import preflight

MIB = 1 << 20
RECORD_BYTES, RECORDS = 256 << 10, [(0, expert) for expert in range(128)]
BUDGET_BYTES = 4 * MIB


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(os.urandom(len(RECORDS) * RECORD_BYTES))
    if filesystem_of(path)[0] == "tmpfs" or not self_test(path).evicts:
        pytest.skip("eviction does not work here")
    with FilePages(path, self_test(path).method) as pages:
        yield {path: pages}


@pytest.fixture
def held(files, monkeypatch):
    """Sizes of the balloons that are filled now; each finds nothing of the files cached when it is filled."""
    sizes = []

    class MadeUp:
        def __init__(self, nbytes):
            self.nbytes = nbytes

        def __enter__(self):
            assert sum(pages.cached_bytes() for pages in files.values()) == 0
            sizes.append(self.nbytes)
            return self

        def __exit__(self, *exc_info):
            sizes.remove(self.nbytes)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(balloon_budget, "Balloon", MadeUp)
    monkeypatch.setattr(balloon_budget, "balloon_bytes", lambda budget_bytes: 100 * MIB - budget_bytes)
    return sizes


def ranges_of(files):
    (path,) = files
    return lambda layer, expert: [(path, expert * RECORD_BYTES, RECORD_BYTES)]


def test_the_balloon_is_filled_with_the_budget_and_let_go_at_the_end(files, held):
    budget = BalloonBudget(files, BUDGET_BYTES, ranges_of(files), RECORDS)
    assert held == []
    first = budget.prefill(5)
    assert held == [96 * MIB] and len(first) == BUDGET_BYTES // RECORD_BYTES
    assert budget.prefill(5) == first and held == [96 * MIB]  # the old one went before the new one came
    assert budget.cached_bytes() == budget.kept_page_bytes() == BUDGET_BYTES
    budget.note(0, 3)
    budget.drain()
    budget.close()
    budget.close()
    assert held == []
    with CacheBudget(files, BUDGET_BYTES, ranges_of(files), RECORDS) as other:
        assert other.prefill(5) == first  # runs under either begin alike


def test_what_the_probe_finds_decides(files, held, refused, monkeypatch):
    condition = Condition("budget", nbytes=BUDGET_BYTES)
    budget = BalloonBudget(files, BUDGET_BYTES, ranges_of(files), RECORDS)
    assert prepare(condition, files, budget, 1) == BUDGET_BYTES
    for pages in files.values():
        pages.warm()
    refused(ErrorKind.PROBE_UNAVAILABLE, budget.drain, "left too much", len(RECORDS) * RECORD_BYTES)
    monkeypatch.setattr(FilePages, "warm", lambda self, ranges=None: None)  # a balloon that left nothing
    refused(ErrorKind.PROBE_UNAVAILABLE, lambda: prepare(condition, files, budget, 1), "not reached")
    budget.close()


def test_it_is_opened_by_its_name_and_refused_elsewhere(unit_35b, refused, monkeypatch):
    layout = ExpertLayout.of(CheckpointIndex.open(unit_35b), read_config(unit_35b))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(open_budget("balloon", {}, MIB, layout), BalloonBudget)
    monkeypatch.setattr(sys, "platform", "linux")
    refused(ErrorKind.PROBE_UNAVAILABLE, lambda: open_budget("balloon", {}, MIB, layout), "used on macOS only")


@pytest.mark.skipif(sys.platform == "darwin", reason="a balloon is used there")
def test_a_session_that_asks_for_it_elsewhere_is_refused_at_once(unit_35b, refused):
    options = SessionOptions(str(unit_35b), "unit-35b", ks=(4,), condition="budget:8MiB", budget_by="balloon")
    refused(ErrorKind.PROBE_UNAVAILABLE, lambda: preflight(options), "budget_by", "used on macOS only")


def test_every_way_can_be_asked_for():
    asked = yaml.safe_load(SCHEMA.read_text())["properties"]["budget_by"]["enum"]
    assert set(asked) == set(BUDGET_WAYS) == {*BUDGET_BY, "auto"}
