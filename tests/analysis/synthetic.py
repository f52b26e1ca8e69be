"""Small synthetic session folders with numbers that a person can check by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

MIB = 2**20
ARMS = ("ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap")
# Steps of each run: one warm-up with absurd values, then two timed ones that differ by +-10%.
STEPS = ((0, False, 50.0), (1, True, 0.9), (2, True, 1.1))
BASE_TOK_S = {"ondemand": 10.0, "prerouter": 18.0, "ondemand-mmap": 5.0, "prerouter-mmap": 6.0}
BASE_TOK_S |= {"ondemand-direct": 10.0, "prerouter-direct": 20.0}
WAIT_MS = {"ondemand": 60.0, "prerouter": 10.0, "ondemand-mmap": 120.0, "prerouter-mmap": 90.0}
WAIT_MS |= {"ondemand-direct": 60.0, "prerouter-direct": 10.0}
COMPUTE_MS = 40.0
LOAD_BUSY_PREDICTED_MS = 30.0
ROUND_FACTORS = (1.0, 1.02, 0.98, 1.01, 0.99)

Change = Callable[[dict[str, pd.DataFrame], dict], None]


def tok_s(arm: str, k: int, round_: int) -> float:
    """Speed of a run: inversely as K, with the round's factor, and one more per cent each round with the prerouter."""
    own = 1.01**round_ if arm.startswith("prerouter") else 1.0
    return BASE_TOK_S[arm] * 8 / k * ROUND_FACTORS[round_] * own


def make_session(
    folder: Path,
    *,
    arms: tuple[str, ...] = ARMS,
    k_values: tuple[int, ...] = (2, 4, 8),
    rounds: int = 3,
    name: str = "s1",
    condition: str = "budget:0.25",
    change: Change | None = None,
) -> Path:
    """Write a session folder; `change(frames, info)` edits the frames runs, steps, loads and session.json first."""
    plan = []
    for round_ in range(rounds):
        plan += [(round_, "arm", arm, k) for k in k_values for arm in arms]
        plan.append((round_, "aa", arms[0], max(k_values)))
    plan.append((rounds - 1, "drift", arms[0], k_values[0]))
    runs, steps, loads = [], [], []
    for order, (round_, role, arm, k) in enumerate(plan):
        run_id = f"{role}-{arm}-k{k}-r{round_}"
        speed = tok_s(arm, k, 0 if role == "drift" else round_) * (1.005 if role == "aa" else 1.0)
        runs.append(_run(name, run_id, order, round_, role, arm, k, speed, condition))
        for step, timed, factor in STEPS:
            steps.append(_step(run_id, step, timed, factor, arm, k))
            loads.append(_load(run_id, step))
    frames = {"runs": pd.DataFrame(runs), "steps": pd.DataFrame(steps), "loads": pd.DataFrame(loads)}
    info = {
        "session": name,
        "machine": "testbox",
        "tier": "mini-35b",
        "experiment": "tab3",
        "condition": condition,
        "k_values": list(k_values),
        "arms": list(arms),
        "rounds": rounds,
        "host": {"cpu": "Some CPU", "cores": 2},
        "commit": "abc123",
        "created": "2026-01-02T03:04:05Z",
        "budget_bytes": 100 * MIB,
        "expert_bytes": 400 * MIB,
    }
    if change is not None:
        change(frames, info)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "session.json").write_text(json.dumps(info))
    for stem, frame in frames.items():
        frame.to_parquet(folder / f"{stem}.parquet")
    return folder


def row(table: pd.DataFrame, **where) -> pd.Series:
    """The one row where every column has its value."""
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, f"{len(table)} rows for {where}"
    return table.iloc[0]


def set_runs(column: str, value, **where) -> Change:
    """A change that sets a column of the runs that match."""

    def change(frames, info):
        runs = frames["runs"]
        mine = pd.Series(True, index=runs.index)
        for key, wanted in where.items():
            mine &= runs[key] == wanted
        assert mine.any()
        runs.loc[mine, column] = value

    return change


def change_info(key: str, value) -> Change:
    """A change of one key of session.json."""

    def change(frames, info):
        info[key] = value

    return change


def void_run(run_id: str, reason: str) -> Change:
    """A change that marks one run void and gives it a speed that no number may show."""

    def change(frames: dict[str, pd.DataFrame], info: dict) -> None:
        mine = frames["runs"]["run_id"] == run_id
        assert mine.sum() == 1
        frames["runs"].loc[mine, ["void", "void_reason", "tok_s"]] = [True, reason, 9999.0]

    return change


def _run(
    session: str, run_id: str, order: int, round_: int, role: str, arm: str, k: int, speed: float, condition: str
) -> dict:
    return {
        "session": session,
        "run_id": run_id,
        "order": order,
        "round": round_,
        "role": role,
        "arm": arm,
        "k": k,
        "tier": "mini-35b",
        "condition": condition,
        "tok_s": speed,
        "timed_steps": 2,
        "warmup_steps": 1,
        "bank_bytes": 60 * MIB,
        "bank_slots": 120,
        "resident_bytes": 40 * MIB,
        "alloc_peak_bytes": (105 + k) * MIB,
        "alloc_active_bytes": 100 * MIB,
        "rss_anon_bytes": 150 * MIB,
        "rss_file_bytes": 20 * MIB,
        "rss_peak_bytes": 180 * MIB,
        "cached_before_bytes": 0,
        "cached_after_bytes": (90 + round_) * MIB,
        "budget_bytes": 100 * MIB,
        "dropped": 0,
        "token_hash": "t0",
        "void": False,
        "void_reason": "",
    }


def _step(run_id: str, step: int, timed: bool, factor: float, arm: str, k: int) -> dict:
    wait = WAIT_MS[arm] * k / 8 * factor
    compute = COMPUTE_MS * factor
    return {
        "run_id": run_id,
        "step": step,
        "timed": timed,
        "step_ms": wait + compute,
        "wait_ms": wait,
        "wait_predicted_ms": 0.8 * wait,
        "wait_gate_ms": 0.2 * wait,
        "compute_ms": compute,
        "loads": 10 * k * factor,
        "loads_predicted": 8 * k * factor,
        "hits": 2 * k * factor,
        "asked_bytes": 20 * k * MIB * factor,
        "cold_bytes": 15 * k * MIB * factor,
        "device_bytes": 16 * k * MIB * factor,
        "load_busy_ms": 40.0 * factor,
        "load_busy_predicted_ms": LOAD_BUSY_PREDICTED_MS * factor,
        "dropped": 0,
    }


def _load(run_id: str, step: int) -> dict:
    """One predicted read of 3 ms per step, 100 ms apart."""
    start_ns = step * 100_000_000
    return {
        "run_id": run_id,
        "step": step,
        "layer": 7,
        "expert": step,
        "purpose": "prefetch",
        "predicted_layer": True,
        "asked_bytes": 2 * MIB,
        "cold_bytes": MIB,
        "inflight_bytes": 0,
        "device_bytes": MIB,
        "submit_ns": start_ns - 1000,
        "start_ns": start_ns,
        "end_ns": start_ns + 3_000_000,
    }
