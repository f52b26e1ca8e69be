"""Prediction of a machine that can measure: calibrated in sessions of their own, then set beside a session of Table 3's
arms, the target, that was measured in the same stretch of time.

Time of a step besides loads, and what each load adds to it: two warm sessions, one whose bank holds every expert and
one with the target's bank. Which loads, and how cold: simulated. What a load costs, in two ways: by the line of
`snakemake fit`, single loads on an idle machine; and by its two ends in the engine, a warm and a cold session, where
readers share cores, the device and own eviction, and page faults read around into neighbours that are cold too. Nothing
is taken from the session that is predicted but its tokens' routes and its settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.machines import MACHINES, load_machine, read_table
from analysis.prediction.serving_model import Arm, Compute, LoadCost, Workload, loads_of, timed
from analysis.rows import ARMS, Session, load_session, read_json
from analysis.traces import Trace, load_trace
from analysis.units import MIB

FAULTS = "-mmap"
FIT_COLUMNS = "way layout a_ms b_ms build_ms".split()
FIT_WAY = {"": "willneed", FAULTS: "mmap"}  # arm suffix -> way of reading in the fit
NORMAL_95 = 1.96  # standard errors to either side
LEAST_COLD_GAP = 0.5  # how far the cold shares of the cold and the warm session must be apart to say what cold costs
COLUMNS = (
    "machine tier arm k cache_mib tok_s measured_tok_s measured_low measured_high error step_ms measured_step_ms "
    "wait_ms measured_wait_ms wait_error loads measured_loads cold_share measured_cold_share cold_share_error "
    "cold_share_margin mib measured_mib compute_ms load_host_ms load_a_ms load_b_ms source fit_tok_s fit_error "
    "fit_a_ms fit_b_ms rounds session note"
).split()


@dataclass(frozen=True)
class Evidence:
    """What was measured on a machine, apart from and including the session that is predicted (`target`)."""

    folder: Path
    target: Session
    settings: Mapping[str, Any]
    compute: Session
    loads: Session
    cold: Session | None
    fit: pd.DataFrame
    parallel: float
    traces: Mapping[tuple[str, int], Trace]


def read_evidence(folder: Path) -> Evidence:
    """From results/<machine>/<tier>. Raises ValueError, one line, that names what is missing or does not belong."""
    own = folder / "predict" / "sessions"
    needed = [("predict", own / part / "latest.json") for part in ("target", "compute", "loads")]
    for name, place in [*needed, ("fit", folder / "fit/summary.csv")]:
        if not place.is_file():
            raise ValueError(f"{place.parent}: nothing measured yet; run `snakemake {name}` on that machine")
    target, compute, loads = (load_session(place) for _, place in needed)
    cold = load_session(own / "cold/latest.json") if (own / "cold/latest.json").is_file() else None
    for session in filter(None, (compute, loads, cold)):
        for what in ("machine", "tier"):
            ours, theirs = getattr(session.info, what), getattr(target.info, what)
            if ours != theirs:
                raise ValueError(f"session {session.name}: {what}: expected {theirs}, as the target has; found {ours}")
        if session.name == target.name:
            raise ValueError(f"session {session.name}: it is the one to be predicted, and calibrates nothing")
    settings = read_json(own / "target" / target.name / "session.json")
    if settings.get("trace"):
        raise ValueError(f"session {target.name}: it replays {settings['trace']}; a prediction takes its own routes")
    traces = {}
    for path in sorted((own / "traces").glob("*-k*.safetensors")):
        trace = load_trace(path)
        if trace.about.get("source") == "recorded":
            traces["prerouter" if trace.about.get("prerouter") == "route" else "ondemand", trace.k] = trace
    fit = read_table(folder / "fit/summary.csv", FIT_COLUMNS)
    gain = parallel_gain(str(target.info.machine), int(settings["reader_threads"]))
    return Evidence(folder, target, settings, compute, loads, cold, fit, gain, traces)


def parallel_gain(machine: str, threads: int, folder: Path = MACHINES) -> float:
    """How much more the machine's storage delivers to so many readers than to one, by its file; 1 where none says."""
    if not (folder / f"{machine}.yaml").is_file():
        return 1.0
    storage = load_machine(machine, folder).values.get("storage", {})
    rows = storage.get("advised_reads") or storage.get("random_reads") or []
    rates = {row["threads"]: row["mib_s"] for row in rows}
    if 1 not in rates:
        return 1.0
    return max(1.0, rates[min(rates, key=lambda count: abs(count - threads))] / rates[1])


def workload(evidence: Evidence, arm: str, k: int) -> Workload:
    """The session's own tokens: its prompt, its warm-up as often as the arm's runs decoded it, its timed steps."""
    route, runs = arm.partition("-")[0], evidence.target.cell(arm, k)
    settings, traces = evidence.settings, evidence.traces
    prompt_tokens, warm_up = int(settings["prompt_tokens"]), int(settings["warmup_steps"])
    for name in {route, "ondemand"}:
        if (name, k) not in traces:
            raise ValueError(
                f"{evidence.folder / 'predict'}: no trace of route {name} at K={k}; run `snakemake predict`"
            )
    native, trace = traces["ondemand", k], traces[route, k]
    skipped = prompt_tokens - int(native.about["prompt_tokens"])  # decoded one by one, so that their routes are there
    routes = native.routes[skipped:] if route == "ondemand" else trace.routes
    steps = warm_up + int(settings["timed_steps"])
    if len(routes) != steps:
        raise ValueError(
            f"trace of route {route} at K={k}: expected {steps} steps, as the session has; found {len(routes)}"
        )
    predicted = predicted_columns(trace)
    repeats = max(1, round(float(runs["warmup_steps"].median()) / warm_up)) if warm_up else 1
    return Workload(
        routes, trace.experts, expert_bytes(trace), predicted, warm_up, repeats, native.routes[: max(0, skipped)]
    )


def predicted_columns(trace: Trace) -> tuple[bool, ...]:
    """Which columns of a trace are layers that a head predicts."""
    layers = set(yaml.safe_load(trace.about.get("predicted", "[]")))
    return tuple(layer in layers for layer in trace.layers)


def expert_bytes(trace: Trace) -> int:
    if "expert_bytes" not in trace.about:
        raise ValueError(f"trace {trace.name}: about: no expert_bytes; make it anew with `edge0 trace`")
    return int(trace.about["expert_bytes"])


@dataclass(frozen=True)
class Calibration:
    """`cost` is what is predicted with; `fitted` the line of single loads."""

    compute: Compute
    cost: LoadCost
    fitted: LoadCost
    source: str


def calibrate(evidence: Evidence, arm: str, k: int) -> Calibration:
    """Raises ValueError where a calibration session lacks the arm or its cold shares, or the fit its way of reading."""
    faults = arm.endswith(FAULTS)
    (bare, few), (laden, many) = (_besides_loads(s, arm, k) for s in (evidence.compute, evidence.loads))
    slope = max(0.0, (laden - bare) / (many - few)) if many - few > 1 else 0.0
    compute = Compute(bare - slope * few, slope)
    way = FIT_WAY[FAULTS if faults else ""]
    line = evidence.fit[(evidence.fit["way"] == way) & (evidence.fit["layout"] == "stacked")]
    if line.empty:
        raise ValueError(f"{evidence.folder / 'fit/summary.csv'}: no line of {way}, stacked")
    first, built = line.iloc[0], faults * float(line["build_ms"].iloc[0])
    gain = math.inf if faults else evidence.parallel
    fitted = LoadCost(float(first["a_ms"]) + built, float(first["b_ms"]), gain)
    if evidence.cold is None:
        return Calibration(compute, fitted, fitted, f"fit of {way}")
    return Calibration(compute, _load_cost(evidence.loads, evidence.cold, arm), fitted, "warm, cold session")


def rows_here(evidence: Evidence) -> list[dict[str, Any]]:
    """One row per arm and K of the session, columns `COLUMNS`.

    Each error is predicted over measured, less 1: `error` of tok/s, `wait_error`, `cold_share_error`; an error of
    nothing measured is NaN. `cold_share_margin`: half of the 95% interval of the measured cold share, in shares.
    """
    target, settings, rows = evidence.target, evidence.settings, []
    budget = target.info.budget_bytes
    cells = target.runs.loc[target.runs["role"] == "arm", ["k", "arm"]].drop_duplicates()
    for k, arm in sorted(cells.itertuples(index=False, name=None), key=lambda cell: (cell[0], cell[1])):
        if arm not in ARMS:
            continue
        runs, serial = target.cell(arm, k), arm.endswith(FAULTS)
        found = calibrate(evidence, arm, k)
        cache = math.inf if budget is None else budget
        way = Arm(
            bank_slots=int(runs["bank_slots"].iloc[0]),
            cache_bytes=cache,
            prerouter=arm.startswith("prerouter"),
            serial=serial,
            threads=int(settings["reader_threads"]),
            launch_groups=int(settings["launch_groups"]),
        )
        work = workload(evidence, arm, k)
        steps = loads_of(work, way)
        said, by_fit = (timed(work, way, cost, found.compute, steps) for cost in (found.cost, found.fitted))
        speeds = runs["tok_s"]
        measured, waited = float(speeds.median()), float(_waited_for_loads(target, runs, serial).median())
        cold_share = float(runs["cold_share"].mean())
        rows.append(
            {
                "machine": target.info.machine,
                "tier": target.info.tier,
                "arm": arm,
                "k": k,
                "cache_mib": cache / MIB,
                "tok_s": said.tok_s,
                "measured_tok_s": measured,
                "measured_low": float(speeds.min()),
                "measured_high": float(speeds.max()),
                "error": said.tok_s / measured - 1,
                "step_ms": said.step_ms,
                "measured_step_ms": float(runs["step_ms_per_step"].median()),
                "wait_ms": said.wait_ms,
                "measured_wait_ms": waited,
                "wait_error": said.wait_ms / waited - 1 if waited else math.nan,
                "loads": said.loads,
                "measured_loads": float(runs["loads_per_step"].mean()),
                "cold_share": said.cold_share,
                "measured_cold_share": cold_share,
                "cold_share_error": said.cold_share / cold_share - 1 if cold_share else math.nan,
                "cold_share_margin": _cold_share_margin(target, runs, cold_share),
                "mib": said.mib,
                "measured_mib": float((runs["cold_share"] * runs["asked_bytes_per_step"]).mean()) / MIB,
                "compute_ms": found.compute.step_ms,
                "load_host_ms": found.compute.load_ms,
                "load_a_ms": found.cost.a_ms,
                "load_b_ms": found.cost.b_ms,
                "source": found.source,
                "fit_tok_s": by_fit.tok_s,
                "fit_error": by_fit.tok_s / measured - 1,
                "fit_a_ms": found.fitted.a_ms,
                "fit_b_ms": found.fitted.b_ms,
                "rounds": len(runs),
                "session": target.name,
                "note": "",
            }
        )
    return rows


def _besides_loads(session: Session, arm: str, k: int) -> tuple[float, float]:
    """(ms of a step that no load takes, loads of a step), medians over the runs of a cell.

    Where readers read beside the computation, waiting is taken out; where the engine's own thread reads, copies and
    stacks, the loads themselves are, so that stacking stays in.
    """
    runs = session.cell(arm, k)
    if runs.empty:
        raise ValueError(f"session {session.name}: no valid run of {arm} at K={k}, which it is to calibrate")
    taken = _waited_for_loads(session, runs, arm.endswith(FAULTS))
    return float((runs["step_ms_per_step"] - taken).median()), float(runs["loads_per_step"].mean())


def _waited_for_loads(session: Session, runs: pd.DataFrame, serial: bool) -> pd.Series:
    """Milliseconds of a step that loads take from the engine's thread, one value for each run.

    What it waits; where it reads itself (`serial`), the time in its loads: its waiting holds stacking as well.
    """
    if not serial:
        return runs["wait_ms_per_step"]
    spent = _timed_loads(session).groupby("run_id")["ms"].sum()
    return runs["run_id"].map(spent).fillna(0) / runs["timed_steps"]


def _cold_share_margin(session: Session, runs: pd.DataFrame, share: float) -> float:
    """Half of the 95% interval of a cold share, from how many different loads were probed; NaN where none was.

    All rounds replay the same tokens and probe the same loads, so that a load counts once, however many rounds saw it.
    """
    loads = _timed_loads(session)
    seen = loads[loads["run_id"].isin(runs["run_id"]) & (loads["cold_bytes"] >= 0)]
    count = len(seen.drop_duplicates(["step", "layer", "expert", "purpose"]))
    return NORMAL_95 * math.sqrt(share * (1 - share) / count) if count else math.nan


def _load_cost(warm: Session, cold: Session, arm: str) -> LoadCost:
    """The line through the two sessions' loads, at the cold shares that they were measured with."""
    (low_ms, low), (high_ms, high) = (_mean_load(session, arm) for session in (warm, cold))
    if not high - low >= LEAST_COLD_GAP:
        raise ValueError(
            f"sessions {warm.name} and {cold.name}: {arm}: expected cold shares {LEAST_COLD_GAP} apart or more, "
            f"found {low:.3f} and {high:.3f}"
        )
    b_ms = max(0.0, (high_ms - low_ms) / (high - low))
    return LoadCost(max(0.0, low_ms - b_ms * low), b_ms)


def _mean_load(session: Session, arm: str) -> tuple[float, float]:
    """(ms, cold share) of one load of an arm, means over all K: sums are predicted, so a mean and no median. The cold
    share is that of the loads that were probed; NaN where none was."""
    runs = session.runs[(session.runs["role"] == "arm") & (session.runs["arm"] == arm)]
    timed = _timed_loads(session)
    loads = timed[timed["run_id"].isin(runs["run_id"])]
    if loads.empty:
        raise ValueError(f"session {session.name}: {arm} loads nothing there, so a load's cost is unknown")
    probed = loads[loads["cold_bytes"] >= 0]
    cold = probed["cold_bytes"].sum() / probed["asked_bytes"].sum() if len(probed) else math.nan
    return float(loads["ms"].mean()), float(cold)


def _timed_loads(session: Session) -> pd.DataFrame:
    loads = session.loads[(session.loads["step"] >= 0) & (session.loads["expert"] >= 0)]
    return loads.assign(ms=(loads["end_ns"] - loads["start_ns"]) / 1e6)
