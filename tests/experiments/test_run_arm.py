"""The arithmetic of one arm's rows: busy time, steady state, and every reason for which a run may not speak."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conditions import Condition
from experiments.run_arm import _agree, busy_ms, void_reasons

GIB = 1 << 30


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_time_is_the_union_of_the_reads(spans):
    frame = pd.DataFrame({"start_ns": [s for s, _ in spans], "end_ns": [s + n for s, n in spans]}, dtype="int64")
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert busy_ms(frame) == pytest.approx(len(moments) / 1e6)


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [
        (([70, 80, 75, 66], [0.5] * 4), ([78, 69, 74, 80], [0.5] * 4), True),  # within their scatter
        (([70] * 4, [0.5] * 4), ([72] * 4, [0.54] * 4), True),  # no scatter, a trifle apart
        (([10, 11, 10, 11], [0.5] * 4), ([20, 21, 20, 21], [0.5] * 4), False),  # loads moved
        (([70] * 4, [0.5] * 4), ([70] * 4, [0.6] * 4), False),  # cold share moved
        (([0] * 4, [0.0] * 4), ([0] * 4, [0.0] * 4), True),  # nothing is read any more
    ],
)
def test_windows_agree_within_their_own_scatter_or_a_trifle(before, after, agree):
    assert _agree(tuple(map(np.array, before)), tuple(map(np.array, after))) is agree


def row(**changes):
    quiet = {
        "fault_window": "none",
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
        ("budget:0.5", {}, 0.5, False, None),
        ("budget:0.5", {"cached_after_bytes": 150 << 20}, 0.5, False, "were cached"),
        ("budget:0.5", {"dropped": 3}, 0.5, False, "3 routed experts were dropped"),
        ("budget:0.5", {"steady": False}, 0.5, False, "no steady state after 12"),
        ("budget:0.5", {}, 0.5, True, "swapped"),
        ("budget:0.5", {"foreign_device_bytes": GIB}, 0.5, False, "other processes read"),
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
