"""The agreement experiment on the smallest checkpoint: its streams, its rows, and a way that does not work."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.pagecache import self_test
from experiments.budgets import agreement as budget_agreement
from experiments.budgets import run as budget_run
from experiments.budgets.agreement import available_ways, measure
from experiments.budgets.methods import MethodReport
from experiments.budgets.run import COLUMNS, MEASURED, START, WARM_UP, BudgetSpec, stream

RECORDS = 256  # of unit-35b


@given(st.integers(2, 50), st.sampled_from([0.0, 0.8, 1.1]), st.integers(0, 5))
@settings(max_examples=30)
def test_streams_are_seeded_and_parts_differ_but_not_their_popularity(records, exponent, seed):
    first = stream(records, exponent, 4000, seed, 0)
    assert np.array_equal(first, stream(records, exponent, 4000, seed, 0))
    other = stream(records, exponent, 4000, seed, 1)
    assert not np.array_equal(first, other)
    shares = [np.bincount(each, minlength=records) / 4000 for each in (first, other)]
    assert np.abs(shares[0] - shares[1]).max() < 0.08
    if exponent == 0.0:
        assert shares[0].max() < 1 / records + 0.06
    else:
        assert shares[0].argmax() == np.random.default_rng(seed).permutation(records)[0] or shares[0].max() < 0.3


@pytest.fixture
def evicting(unit_35b):
    shard = next(unit_35b.glob("model-*.safetensors"))
    if not self_test(shard).evicts:
        pytest.skip("eviction does not work here")
    return unit_35b


def test_a_run_leaves_a_row_for_each_load_and_each_record_it_began_with(evicting, monkeypatch):
    monkeypatch.setattr(budget_run, "MAX_WINDOWS", 3)
    spec = BudgetSpec(str(evicting), "eviction", 0.8, 1 << 20, loads=60, window=50, seed=1)
    rows, about = budget_run.measure(spec)
    assert list(rows.columns) == COLUMNS
    counts = rows["phase"].value_counts()
    assert counts[MEASURED] == 60 and counts[WARM_UP] == about["warm_up_loads"] <= 150 and counts[START] > 0
    loads = rows[rows["phase"] != START]
    assert (loads["asked_bytes"] == about["record_bytes"]).all() and about["records"] == RECORDS
    assert (loads["cold_bytes"] <= loads["asked_bytes"]).all()
    assert (loads["cold_page_bytes"] >= loads["cold_bytes"]).all()
    assert (rows["record"].between(0, RECORDS - 1)).all()
    started = rows[rows["phase"] == START]["record"]
    assert started.is_unique
    assert about["cached_mean_bytes"] <= about["cached_high_bytes"] <= (1 << 20) + (256 << 10)
    assert rows[rows["phase"] == MEASURED]["record"].tolist() == stream(RECORDS, 0.8, 60, 1, 0).tolist()


def test_a_way_that_does_not_work_has_its_reason_and_no_rows(evicting, monkeypatch):
    found = [MethodReport("eviction", True, "fine"), MethodReport("cgroup-v1", False, "no rights")]
    found += [MethodReport("cgroup-v2", False, "no group"), MethodReport("balloon", False, "no need")]
    monkeypatch.setattr(budget_agreement, "budget_methods", lambda path: found)
    started = []

    def made_up(arguments, what):
        started.append(json.loads(open(arguments[2]).read()))
        raise Edge0Error(ErrorKind.SESSION_VOID, what)

    monkeypatch.setattr(budget_agreement, "run_python", made_up)
    ways = available_ways(evicting)
    assert ways["eviction"] == "" and ways["cgroup"] == "cgroup-v1: no rights; cgroup-v2: no group"
    with pytest.raises(Edge0Error) as caught:
        measure(evicting, 0.5, 10, 10, 0)
    assert caught.value.kind is ErrorKind.SESSION_VOID
    assert [spec["by"] for spec in started] == ["eviction"]
    monkeypatch.setattr(
        budget_agreement, "budget_methods", lambda path: [MethodReport(r.name, False, "x") for r in found]
    )
    rows, about = measure(evicting, 0.5, 10, 10, 0)
    assert rows.empty and about["runs"] == [] and set(about["unavailable"]) >= {"eviction", "cgroup"}


@pytest.mark.parametrize("option, value", [("share", 0.0), ("share", 1.0), ("loads", 0), ("window", 0)])
def test_options_out_of_range_are_refused(unit_35b, option, value):
    options = {"share": 0.5, "loads": 10, "window": 10, "seed": 0} | {option: value}
    with pytest.raises(Edge0Error) as caught:
        measure(unit_35b, **options)
    assert caught.value.kind is ErrorKind.OPTION_INVALID and option in str(caught.value)
