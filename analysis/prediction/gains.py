"""The prerouter's gain over on-demand, predicted beside measured or published: a ratio, so a common error cancels.

One row per machine, K and way of reading. Of a machine whose compute time is not known the gain is a range: over every
time from none to the whole of the step that the paper's own speed leaves. Knows nothing of how a gain is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.machines import Machine
from analysis.paper.claims import Claims
from analysis.paper.spans import Span
from analysis.prediction.here import FAULTS, Evidence
from analysis.prediction.paper import arm_of, cache_bytes, load_cost, paper_speed, workload
from analysis.prediction.serving_model import Compute, loads_of, timed
from analysis.rows import GAIN_PAIRS, pair_ratios
from analysis.traces import Trace

COLUMNS = (
    "machine k arm base gain_low gain_high measured_gain measured_low measured_high difference_low difference_high "
    "session"
).split()
COMPUTE_TIMES = 9  # tried from none to a whole step, where it is not known


def gains_here(evidence: Evidence, table: pd.DataFrame) -> list[dict[str, Any]]:
    """Of the session's own rows of `rows_here`, beside its paired ratio with its 95% interval."""
    target, rows = evidence.target, []
    speeds = table.set_index(["k", "arm"])["tok_s"]
    for (k, arm, base), ratio in pair_ratios(target).items():
        if (arm, base) in GAIN_PAIRS and ratio.n:
            gain = float(speeds[k, arm] / speeds[k, base])
            measured = (ratio.ratio, ratio.ci_low, ratio.ci_high)
            rows.append(_row(target.info.machine, k, arm, base, (gain, gain), measured, target.name))
    return rows


def gains_paper(
    machine: Machine, traces: Sequence[Trace], reserves: Sequence[int], table: pd.DataFrame, claims: Claims
) -> list[dict[str, Any]]:
    """At every K for which the paper states one; least and largest over the page caches.

    `table`: the machine's rows of `rows_paper`. The paper's gain is that of its printed speeds, and its range what
    their rounding allows; it belongs to the paper's way of reading, so that the other way has none beside it.
    """
    rows = []
    for trace in sorted(traces, key=lambda trace: trace.k):
        k = trace.k
        for arm, base in GAIN_PAIRS:
            stated = [paper_speed(machine, claims, name.removesuffix(FAULTS), k) for name in (arm, base)]
            if None in stated:
                continue
            fast, slow = (table.loc[(table["k"] == k) & (table["arm"] == name), "tok_s"] for name in (arm, base))
            if fast.notna().all():
                found = (fast.to_numpy() / slow.to_numpy()).tolist()
            else:
                found = _gains_of_any_compute(machine, trace, reserves, (arm, base), 1e3 / float(stated[0]))
            spans = [Span.of(value) for value in stated]
            ratio = spans[0] / spans[1]
            measured = (float(stated[0]) / float(stated[1]), ratio.low, ratio.high)
            if not arm.endswith(FAULTS):
                measured = (math.nan,) * 3
            rows.append(_row(machine.id, k, arm, base, (min(found), max(found)), measured, f"trace {trace.name}"))
    return rows


def _gains_of_any_compute(
    machine: Machine, trace: Trace, reserves: Sequence[int], pair: tuple[str, str], step_ms: float
) -> list[float]:
    work, cost, found = workload(trace), load_cost(machine), []
    for cache in {cache_bytes(machine, reserve) for reserve in reserves}:
        arms = [arm_of(name, work, trace.k, cache) for name in pair]
        loads = [loads_of(work, way) for way in arms]
        for compute_ms in np.linspace(0, step_ms, COMPUTE_TIMES):
            fast, slow = (
                timed(work, way, cost, Compute(float(compute_ms)), steps)
                for way, steps in zip(arms, loads, strict=True)
            )
            found.append(slow.step_ms / fast.step_ms)
    return found


def _row(machine, k, arm, base, gain: tuple[float, float], measured: tuple[float, float, float], session) -> dict:
    """`gain`: least and largest; `measured`: the gain, its low and its high end."""
    values = (machine, k, arm, base, *gain, *measured, gain[0] - measured[0], gain[1] - measured[0], session)
    return dict(zip(COLUMNS, values, strict=True))
