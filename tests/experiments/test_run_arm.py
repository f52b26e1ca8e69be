"""The arithmetic of one arm's rows: busy time, steady state, and every reason for which a run may not speak."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.telemetry.loads import EVALUATE, LAUNCH, LOADS, ROUTE, SAMPLE, LoadRecord, Recorder
from experiments import run_arm
from experiments.arms import ARMS
from experiments.conditions import Condition
from experiments.decoders import way_of
from experiments.rows import StepTime, busy_ms, load_rows, step_rows
from experiments.steady import agree
from experiments.void import void_reasons

GIB = 1 << 30


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_time_is_the_union_of_the_reads(spans):
    frame = pd.DataFrame({"start_ns": [s for s, _ in spans], "end_ns": [s + n for s, n in spans]}, dtype="int64")
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert busy_ms(frame) == pytest.approx(len(moments) / 1e6)


@pytest.mark.parametrize(
    ("before", "after", "alike"),
    [
        (([70, 80, 75, 66], [0.5] * 4), ([78, 69, 74, 80], [0.5] * 4), True),  # within their scatter
        (([70] * 4, [0.5] * 4), ([72] * 4, [0.54] * 4), True),  # no scatter, a trifle apart
        (([10, 11, 10, 11], [0.5] * 4), ([20, 21, 20, 21], [0.5] * 4), False),  # loads moved
        (([70] * 4, [0.5] * 4), ([70] * 4, [0.6] * 4), False),  # cold share moved
        (([0] * 4, [0.0] * 4), ([0] * 4, [0.0] * 4), True),  # nothing is read any more
    ],
)
def test_windows_agree_within_their_own_scatter_or_a_trifle(before, after, alike):
    assert agree(tuple(map(np.array, before)), tuple(map(np.array, after))) is alike


def row(**changes):
    quiet = {
        "fault_window": "none",
        "reader": "willneed",
        "dropped": 0,
        "steady": True,
        "warmup_steps": 12,
        "timed_steps": 10,
        "foreign_device_bytes": 0,
    }
    return quiet | {"budget_bytes": 100 << 20, "cached_after_bytes": 100 << 20, "checkpoint_bytes": 400 << 20} | changes


def loads(cold_share):
    return pd.DataFrame(
        {"asked_bytes": [1000] * 10, "cold_bytes": [int(1000 * cold_share)] * 10, "device_bytes": [0] * 10}
    )


@pytest.mark.parametrize(
    ("condition", "changes", "cold_share", "swapped", "reason"),
    [
        ("cold", {"cached_after_bytes": 0}, 0.97, False, None),
        ("cold", {"cached_after_bytes": 0}, 0.5, False, "cold asked for"),
        ("cold", {"cached_after_bytes": 0, "fault_window": "lowered"}, 0.8, False, None),
        ("cold", {"cached_after_bytes": 0, "fault_window": "lowered"}, 0.7, False, "cold asked for"),
        ("cold", {"cached_after_bytes": 200 << 20}, 0.97, False, "stayed cached"),
        ("warm", {"cached_after_bytes": 400 << 20}, 0.0, False, None),
        ("warm", {"cached_after_bytes": 400 << 20}, 0.1, False, "warm asked for"),
        ("warm", {"cached_after_bytes": 300 << 20}, 0.0, False, "stayed cached"),
        ("limit", {"cached_after_bytes": 90 << 20, "memory_limit_bytes": 100 << 20}, 0.5, False, None),
        ("limit", {"cached_after_bytes": 101 << 20, "memory_limit_bytes": 100 << 20}, 0.5, False, "than its limit"),
        ("budget:0.5", {}, 0.5, False, None),
        ("budget:0.5", {"cached_after_bytes": 150 << 20}, 0.5, False, "were cached"),
        ("budget:0.5", {"dropped": 3}, 0.5, False, "3 routed experts were dropped"),
        ("budget:0.5", {"steady": False}, 0.5, False, "no steady state after 12"),
        ("budget:0.5", {}, 0.5, True, "swapped"),
        ("budget:0.5", {"foreign_device_bytes": GIB}, 0.5, False, "other processes read"),
        ("budget:0.5", {"foreign_device_bytes": None}, 0.5, False, None),
    ],
)
def test_each_reason_that_makes_a_run_void(condition, changes, cold_share, swapped, reason):
    reasons = list(void_reasons(row(**changes), loads(cold_share), Condition.parse(condition), swapped))
    if reason is None:
        assert reasons == []
    else:
        assert len(reasons) == 1 and reason in reasons[0]


def test_a_run_without_probes_is_judged_by_what_stayed_cached():
    unseen = loads(0).assign(cold_bytes=-1)
    assert list(void_reasons(row(cached_after_bytes=0), unseen, Condition.parse("cold"), False)) == []
    assert list(void_reasons(row(), unseen, Condition.parse("cold"), False)) != []


@pytest.mark.parametrize(
    ("cached", "reader", "void"),
    [(85, "willneed", False), (83, "willneed", True), (83, "direct", False)],  # 16 MiB of slack below 100
)
def test_a_budget_whose_pages_were_taken_away_is_void(cached, reader, void):
    found = row(cached_after_bytes=cached << 20, reader=reader)
    reasons = list(void_reasons(found, loads(0.5), Condition.parse("budget:0.5"), False, 100 << 20))
    assert len(reasons) == void and all("somebody else took pages away" in reason for reason in reasons)


def test_foreign_reads_are_those_of_the_checkpoints_disk(monkeypatch):
    counters = {"dm-0": SimpleNamespace(read_bytes=7), "sda": SimpleNamespace(read_bytes=9)}
    asked = []

    def disk_io_counters(perdisk, nowrap):
        asked.append(perdisk)
        return counters

    monkeypatch.setattr(run_arm.psutil, "disk_io_counters", disk_io_counters)
    assert run_arm._device_reads("dm-0") == 7 and run_arm._device_reads("sdb") is run_arm._device_reads(None) is None
    assert asked == [True] * 3


def test_a_step_has_the_device_bytes_of_its_process_where_loads_have_none_of_their_own():
    recorder = Recorder(rows=True)
    recorder.loads.append(LoadRecord(0, 1, 0, "demand", 1000, 9, 0, device_bytes=-1))
    loads = load_rows(recorder, "x", ())
    (step,) = step_rows(recorder, loads, 0, [StepTime(1, 1, 5, 4096)], ()).to_dict("records")
    assert (step["hits"], step["device_bytes"]) == (5, 4096)
    recorder.loads[0].device_bytes = 512
    (step,) = step_rows(recorder, load_rows(recorder, "x", ()), 0, [StepTime(1, 1, 5)], ()).to_dict("records")
    assert step["device_bytes"] == 512


def test_the_parts_of_a_step_add_up_and_observing_is_in_none_of_them():
    """A step of 10 ms: 4 on loads, of which 1 ms was observing on the engine thread, and 3.5 ms in the other parts."""
    recorder = Recorder(rows=True, step=7)
    ms = 1_000_000
    for step, reason, layer, took in (
        (6, LOADS, 1, 100),  # of a step before the timed ones
        (7, LOADS, 1, 3),
        (7, LOADS, 2, 1),
        (7, ROUTE, 1, 2),
        (7, LAUNCH, 1, 0.5),
        (7, EVALUATE, 2, 0.75),
        (7, SAMPLE, -1, 0.25),
    ):
        recorder.waits.append((step, reason, layer, int(took * ms)))
    recorder.observing.append((7, 1, ms))
    recorder.loads.append(LoadRecord(7, 1, 0, "demand", 1000, 9, 0, 10, 20, cold_bytes=400))
    recorder.loads.append(LoadRecord(7, 2, 5, "prefetch", 1000, 9, 0, 15, 40))  # nobody looked
    loads = load_rows(recorder, "x", predicted=(2,))
    loads["step"] -= 7
    (step,) = step_rows(recorder, loads, 7, [StepTime(10 * ms, 15 * ms, 3)], (2,)).to_dict("records")
    assert (step["step_ms"], step["wait_ms"], step["cpu_ms"]) == (9, 3, 15)
    assert (step["wait_predicted_ms"], step["wait_gate_ms"]) == (1, 2)
    assert (step["route_ms"], step["launch_ms"], step["evaluate_ms"], step["sample_ms"]) == (2, 0.5, 0.75, 0.25)
    assert step["compute_ms"] == 3.25 and step["build_ms"] == pytest.approx(9 - 3 - 3.5)
    assert (step["loads"], step["loads_predicted"], step["asked_bytes"]) == (2, 1, 2000)
    assert (step["probed_bytes"], step["cold_bytes"]) == (1000, 400)
    assert (step["load_busy_ms"], step["load_busy_predicted_ms"]) == (30e-6, 25e-6)


@pytest.mark.parametrize(
    ("arm", "way"),
    [
        ("ondemand", ("willneed", "readers", "bank", 3, "mlx")),
        ("prerouter-mmap", ("mmap", "engine", "stack", 1, "mlx")),
        ("prerouter-stack", ("willneed", "engine", "stack", 1, "mlx")),
        ("resident", ("none", "none", "none", 1, "mlx")),
        ("llama-cpp", ("mmap", "none", "none", 1, "llama.cpp")),
        ("llama-cpp-repacked", ("none", "none", "none", 1, "llama.cpp")),
    ],
)
def test_a_run_says_how_it_reads_fills_assembles_launches_and_computes(arm, way):
    assert tuple(way_of(ARMS[arm], {"launch_groups": 3}).values()) == way
