"""Prediction of the machines that only the paper measured: their load cost and compute time from a machine file, a
generated trace, and as much page cache as their memory leaves; beside the paper's own rows, and what rows cannot hold.

Two ways to serve are predicted. `-mmap` is the paper's: the engine's thread itself loads, a shared LRU of 64 bundles,
and with the prerouter stacks that keep what the token before used. The other two are this engine's: two readers, a bank
at its floor; the paper's load cost is a lower bound of their speed, since it holds the building of bundles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from analysis.machines import Machine
from analysis.paper.claims import Claims
from analysis.paper.source_checks import run_checks
from analysis.paper.source_paper import ARMS as PAPER_ARMS
from analysis.paper.source_paper import KS, Outcome, Paper
from analysis.paper.spans import Span
from analysis.prediction.here import FAULTS, expert_bytes, predicted_columns
from analysis.prediction.serving_model import Arm, Compute, LoadCost, Workload, predict
from analysis.rows import ARMS
from analysis.traces import Trace
from analysis.units import GIB, MIB

SHARED_LRU = 64  # bundles that the paper's engine keeps
LENDS_COMPUTE = "prerouter-mmap"  # the arm whose rows a machine file took the computation's time from
SINGLE_K = 4  # of the one speed that the paper states of its larger machine
COUNTED = 64  # tokens at a trace's end that are counted; those before fill the page cache
TIER = "released shape"
DERIVED = (
    "time besides waiting is derived from the rows of this arm: the error tests what is predicted of waiting alone"
)


def workload(trace: Trace) -> Workload:
    """A trace whose last tokens count. Raises ValueError where it is too short or does not name predicted layers."""
    tokens = len(trace.routes)
    if tokens <= COUNTED:
        raise ValueError(f"trace {trace.name}: expected more than {COUNTED} tokens, found {tokens}")
    predicted = predicted_columns(trace)
    if not any(predicted):
        raise ValueError(f"trace {trace.name}: about: no predicted layers; make it with `edge0 trace generate --tier`")
    return Workload(trace.routes, trace.experts, expert_bytes(trace), predicted, tokens - COUNTED)


def arm_of(name: str, work: Workload, k: int, cache_bytes: float) -> Arm:
    prerouter, serial = name.startswith("prerouter"), name.endswith(FAULTS)
    predicted = sum(work.predicted)
    slots = SHARED_LRU + k * predicted * prerouter if serial else k * (work.columns + predicted)
    return Arm(slots, cache_bytes, prerouter, serial)


def compute_times(machine: Machine) -> dict[int, float]:
    """Milliseconds of a step besides waiting, by K: the machine file's, levelled so that they do not fall with K.

    The nearest such times, by least squares: more experts do not compute for less time, and where a file derives that
    from rounded or second-hand rows, a prediction from it would be faster with more experts. Empty where none is known.
    """
    derived = sorted((int(k), float(ms)) for k, ms in machine.serving.get("compute_ms", {}).items())
    if not derived:
        return {}
    ks, times = zip(*derived, strict=True)
    return dict(zip(ks, isotonic_regression(np.array(times)).x.tolist(), strict=True))


def cache_bytes(machine: Machine, reserve: int) -> int:
    """The page cache that a machine's memory leaves beside `reserve` bytes; its file's, where that states one.

    Raises ValueError, one line, for a reserve that leaves none.
    """
    memory = machine.values["ram_bytes"]
    if "cache_bytes" in machine.serving:
        return machine.serving["cache_bytes"]
    if reserve >= memory:
        raise ValueError(
            f"--reserve: {machine.id}: expected less than its memory of {memory / GIB:g} GiB, found "
            f"{reserve / GIB:g} GiB; what is reserved is no page cache"
        )
    return memory - reserve


def rows_paper(
    machine: Machine, traces: Sequence[Trace], reserves: Sequence[int], claims: Claims
) -> list[dict[str, Any]]:
    """One row per K, arm and size of the page cache, in this order, with the columns `COLUMNS` of `here`.

    A row has a `note` where its arm's rows gave the compute time. Speeds are NaN where the machine's compute time is
    not known; loads, cold shares and waiting are there all the same. Raises ValueError as `cache_bytes` does.
    """
    serving, computes, rows = machine.serving, compute_times(machine), []
    cost = load_cost(machine)
    caches = sorted({cache_bytes(machine, reserve) for reserve in reserves})
    for trace in sorted(traces, key=lambda trace: trace.k):
        work, k = workload(trace), trace.k
        known = computes.get(k)
        for name in ARMS:
            stated = paper_row(machine, claims, name, k)
            for cache in caches:
                said = predict(work, arm_of(name, work, k, cache), cost, Compute(known or 0.0))
                speed = said.tok_s if known else math.nan
                rows.append(
                    {
                        "machine": machine.id,
                        "tier": TIER,
                        "arm": name,
                        "k": k,
                        "cache_mib": cache / MIB,
                        "tok_s": speed,
                        "measured_tok_s": stated["tok_s"],
                        "error": speed / stated["tok_s"] - 1,
                        "step_ms": said.step_ms if known else math.nan,
                        "measured_step_ms": 1e3 / stated["tok_s"],
                        "wait_ms": said.wait_ms,
                        "measured_wait_ms": stated["wait_ms"],
                        "wait_error": said.wait_ms / stated["wait_ms"] - 1,
                        "loads": said.loads,
                        "measured_loads": stated["loads"],
                        "cold_share": said.cold_share,
                        "measured_cold_share": stated["cold"],
                        "cold_share_error": said.cold_share / stated["cold"] - 1,
                        "mib": said.mib,
                        "measured_mib": stated["mib"],
                        "compute_ms": known or math.nan,
                        "load_host_ms": 0.0,
                        "load_a_ms": cost.a_ms,
                        "load_b_ms": cost.b_ms,
                        "source": serving["load_source"],
                        "session": f"trace {trace.name}",
                        "note": DERIVED if known and name == LENDS_COMPUTE else "",
                    }
                )
    return rows


def load_cost(machine: Machine) -> LoadCost:
    return LoadCost(machine.serving["load_a_ms"], machine.serving["load_b_ms"])


def paper_speed(machine: Machine, claims: Claims, route: str, k: int) -> float | None:
    """tok/s that the paper states of a route there; None where it states none."""
    index = PAPER_ARMS.index(route)
    single = "tab1.35b.decode" if index else "tab1.35b.decode_no_prerouter"
    for name, place in ((f"tab3.k{k}", index), (single, None)):
        claim = claims.by_id.get(name)
        if claim is not None and claim.machine == machine.id and (place is not None or k == SINGLE_K):
            return claim.value if place is None else claim.value[place]
    return None


def paper_row(machine: Machine, claims: Claims, arm: str, k: int) -> dict[str, float]:
    """What the paper states for one arm; NaN where it states nothing. Loads are MiB per step over MiB per load."""
    found = dict.fromkeys(("tok_s", "wait_ms", "cold", "mib", "loads"), math.nan)
    route = arm.removesuffix(FAULTS)
    speed = paper_speed(machine, claims, route, k) if arm.endswith(FAULTS) else None
    if speed is None:
        return found
    found["tok_s"] = float(speed)
    waits, reads = claims.by_id.get(f"tab3.blocked.k{k}"), claims.by_id.get(f"tab4.k{k}.{route}")
    if waits and waits.machine == machine.id:
        found["wait_ms"] = float(waits.value[PAPER_ARMS.index(route)])
    if reads and reads.machine == machine.id:
        per_load, cold, mib = map(float, reads.value)
        found |= {"cold": cold, "mib": mib, "loads": mib / per_load}
    return found


def unexplained(machine: Machine, claims: Claims) -> list[str]:
    """What of the paper's rows of a machine its own model does not give whatever the page cache holds, one line each.

    By the ranges that the printed digits allow (`analysis.paper.source_checks`), and with the largest residual that is
    stated of the load cost. Raises ValueError for a claims file that lacks what is checked.
    """
    checks, paper = run_checks(claims), Paper(claims)
    a, b, off = (paper.span(name) for name in ("fit.intercept", "fit.slope", "fit.residual_all"))
    lines = []
    if claims.by_id["tab3.k8"].machine == machine.id:
        lines += [
            f"{check.what}: {check.found}"
            for check in checks
            if check.against and check.outcome is not Outcome.AGREES
            if check.claims[0].startswith(("tab4.", "tab3.blocked."))
        ]
        lines += _falling_compute(paper)
        for k in KS:
            most, cold = paper.count("arch.35b.layers") * k, paper.span(f"tab4.k{k}.ondemand", 1)
            wait, longest = paper.blocked_ms(k, "ondemand"), (a + b * cold).high + off.high
            if most * longest < wait.low:
                needs = (wait.low / most - off.high - a.high) / b.high
                lines.append(
                    f"ondemand at K={k}: all {most} loads at the stated cold share of {cold.text(3)}, each "
                    f"{off.high:.3f} ms above the fit, wait {most * longest:.0f} ms; stated are {wait.text(2)} ms, "
                    f"which takes a cold share of {needs:.2f} at the least"
                )
    single = claims.by_id["tab1.35b.decode_no_prerouter"]
    if single.machine == machine.id:
        most = paper.count("arch.35b.layers") * SINGLE_K
        shortest, step = most * (a.low - off.high), Span(1000, 1000) / paper.span(single.id)
        if shortest > step.high:
            lines.append(
                f"ondemand at K={SINGLE_K}: {most} loads, all from the page cache, wait {shortest:.0f} ms or more by "
                f"the fit of {machine.serving.get('load_machine', 'this machine')}; its step takes {step.text(1)} ms "
                f"({single.value} tok/s), so that load cost is not this machine's, or most loads are not made"
            )
    return lines


def _falling_compute(paper: Paper) -> list[str]:
    """Where an arm's rows leave less for computing at the larger of two K, whatever rounding the digits allow."""
    lines = []
    for arm in PAPER_ARMS:
        left = {k: paper.step_ms(k, arm) - paper.blocked_ms(k, arm) for k in KS}
        lines += [
            f"{arm}: the step (1000 over tok/s) less its wait leaves {left[low].text(1)} ms for computing at K={low} "
            f"and {left[high].text(1)} ms at K={high}, but more experts do not compute for less time"
            for low, high in pairwise(KS)
            if 0 < left[high].high < left[low].low
        ]
    return lines


def implications(machine: Machine, claims: Claims) -> list[str]:
    """What the paper's rows ask of the bank: not impossible, but to be explained. One line each."""
    if claims.by_id["tab3.k8"].machine != machine.id:
        return []
    paper, reuse = Paper(claims), claims.by_id.get("reuse.adjacent")
    stated = f"; the next token repeats a share of {reuse.value} by the paper" if reuse is not None else ""
    lines = []
    for k in KS:
        loads, most = paper.loads(k, "prerouter"), paper.count("arch.35b.layers") * k
        if loads.high < most:
            share = loads / most
            lines.append(
                f"prerouter at K={k}: {loads.text(1)} loads per step are {share.low:.0%} to {share.high:.0%} of the "
                f"{most} experts routed to, so that a bank has to find the others{stated}"
            )
    return lines
