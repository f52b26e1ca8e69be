"""Prediction of the machines that only the paper measured: their load cost and compute time from a machine file, a
generated trace, and as much page cache as their memory leaves; beside the paper's own rows, and what rows cannot hold.

Two ways to serve are predicted. `-mmap` is the paper's: the engine's thread itself loads, a shared LRU of 64 bundles,
and with the prerouter stacks that keep what the token before used. The other two are this engine's: two readers, a bank
at its floor; the paper's load cost is a lower bound of their speed, since it holds the building of bundles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from analysis.claims import Claims
from analysis.machines import Machine
from analysis.predict_here import FAULTS, expert_bytes, predicted_columns
from analysis.rows import ARMS
from analysis.serving_model import Arm, Compute, LoadCost, Workload, predict
from analysis.traces import Trace

SHARED_LRU = 64  # bundles that the paper's engine keeps
COUNTED = 64  # tokens at a trace's end that are counted; those before fill the page cache
TIER = "released shape"
GIB, MIB = 2**30, 2**20


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


def rows_paper(
    machine: Machine, traces: Sequence[Trace], reserves: Sequence[int], claims: Claims
) -> list[dict[str, Any]]:
    """One row per K, arm and reserve (bytes of memory that are no page cache), with the columns of `predict_here`.

    Speeds are NaN where the machine's compute time is not known; loads, cold shares and waiting are there all the same.
    """
    serving, rows = machine.serving, []
    cost = LoadCost(serving["load_a_ms"], serving["load_b_ms"])
    for trace in sorted(traces, key=lambda trace: trace.k):
        work, k = workload(trace), trace.k
        known = serving.get("compute_ms", {}).get(str(k))
        for name in ARMS:
            stated = paper_row(machine, claims, name, k)
            for reserve in reserves:
                cache = serving.get("cache_bytes", machine.values["ram_bytes"] - reserve)
                said = predict(work, arm_of(name, work, k, max(0, cache)), cost, Compute(known or 0.0))
                speed = said.tok_s if known else math.nan
                rows.append(
                    {
                        "machine": machine.id,
                        "tier": TIER,
                        "arm": name,
                        "k": k,
                        "cache_mib": max(0, cache) / MIB,
                        "tok_s": speed,
                        "measured_tok_s": stated["tok_s"],
                        "error": speed / stated["tok_s"] - 1,
                        "step_ms": said.step_ms if known else math.nan,
                        "measured_step_ms": 1e3 / stated["tok_s"],
                        "wait_ms": said.wait_ms,
                        "measured_wait_ms": stated["wait_ms"],
                        "loads": said.loads,
                        "measured_loads": stated["loads"],
                        "cold_share": said.cold_share,
                        "measured_cold_share": stated["cold"],
                        "mib": said.mib,
                        "measured_mib": stated["mib"],
                        "compute_ms": known or math.nan,
                        "load_host_ms": 0.0,
                        "load_a_ms": cost.a_ms,
                        "load_b_ms": cost.b_ms,
                        "source": serving["load_source"],
                        "session": f"trace {trace.name}",
                    }
                )
    return rows


def paper_row(machine: Machine, claims: Claims, arm: str, k: int) -> dict[str, float]:
    """What the paper states for one arm; NaN where it states nothing. Loads are MiB per step over MiB per load."""
    nothing = dict.fromkeys(("tok_s", "wait_ms", "cold", "mib", "loads"), math.nan)
    if not arm.endswith(FAULTS):
        return nothing
    route = arm.removesuffix(FAULTS)
    index = ("ondemand", "prerouter").index(route)
    single = "tab1.35b.decode" if index else "tab1.35b.decode_no_prerouter"
    for name, place in ((f"tab3.k{k}", index), (single, None)):
        claim = claims.by_id.get(name)
        if claim is None or claim.machine != machine.id or (place is None and k != 4):
            continue
        found = nothing | {"tok_s": float(claim.value if place is None else claim.value[place])}
        if place is not None:
            waits, reads = claims.by_id.get(f"tab3.blocked.k{k}"), claims.by_id.get(f"tab4.k{k}.{route}")
            found |= {"wait_ms": float(waits.value[place])} if waits else {}
            if reads:
                per_load, cold, mib = map(float, reads.value)
                found |= {"cold": cold, "mib": mib, "loads": mib / per_load}
        return found
    return nothing


def cannot_be_met(machine: Machine, traces: Sequence[Trace], claims: Claims) -> list[str]:
    """Where the paper's rows contradict its own model, whatever the page cache holds: one line each."""
    a, b = machine.serving["load_a_ms"], machine.serving["load_b_ms"]
    lines = []
    for trace in sorted(traces, key=lambda trace: trace.k):
        k, most = trace.k, len(trace.layers) * trace.k
        for arm in (name for name in ARMS if name.endswith(FAULTS)):
            stated, where = paper_row(machine, claims, arm, k), f"K={k}, {arm.removesuffix(FAULTS)}"
            step, wait = 1e3 / stated["tok_s"], stated["wait_ms"]
            if stated["loads"] > most:
                lines.append(
                    f"{where}: {stated['loads']:.0f} loads per step (MiB per step over MiB per load), and "
                    f"{len(trace.layers)} layers of K={k} experts ask for {most} at the most"
                )
            if wait > step:
                lines.append(f"{where}: {wait:.0f} ms of waiting in a step of {step:.0f} ms ({stated['tok_s']} tok/s)")
            if arm.startswith("ondemand"):
                at_stated = most * (a + b * stated["cold"])
                if at_stated < wait:
                    lines.append(
                        f"{where}: all {most} loads at the stated cold share of {stated['cold']:.2f} wait "
                        f"{at_stated:.0f} ms; stated {wait:.0f} ms, which takes a cold share of "
                        f"{(wait / most - a) / b:.2f}"
                    )
                if math.isnan(wait) and most * a > step:
                    lines.append(
                        f"{where}: {most} loads, all from the page cache, wait {most * a:.0f} ms at {a} ms each; its "
                        f"step takes {step:.0f} ms ({stated['tok_s']} tok/s), so the load cost of "
                        f"{machine.serving.get('load_machine', 'this machine')} is not this machine's, or most loads "
                        "are not made"
                    )
            elif stated["loads"] < 0.5 * most:
                lines.append(
                    f"{where}: {stated['loads']:.0f} loads per step are {stated['loads'] / most:.0%} of the experts "
                    f"routed to, with a reuse between tokens of 25%; a bank would have to find the rest"
                )
    return lines
