"""Measures of speed: own kernels against MLX's, the engine against what has everything in memory, cost against work,
reads against the paper's and against the bound of two things that run side by side.

Knows nothing of how the rows were measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.bench import Measure, Place, place_of, row
from analysis.loads import session_loads
from analysis.rows import Session, paired, read_json
from analysis.statistics import paired_ratio
from analysis.tab4 import device_over_cold

KERNELS_GOAL = 8.0
STREAMED_GOAL = 0.97
WORK_GOAL = 0.10  # of a step's time: what may lie beside a line
PAPER_GOAL = 2.0
OVERLAP_GOAL, BALANCE = 1.5, 1.5  # judged where compute and load are within this factor of each other
DEVICE_GOAL = 1.02


def place_in(about: dict[str, Any]) -> Place:
    """Commit and session of rows that were published with what is about them."""
    return about.get("commit") or "", about["session"]


def kernels_measures(path: Path) -> list[Measure]:
    """A decode step with MLX's own operations over one with own kernels, all experts in memory, paired by round; `path`
    is the kernels.json of the rows. Where no kernels were built there is nothing to compare.

    Raises ValueError, one line, when the files are not readable.
    """
    about = read_json(path)
    every = pd.read_parquet(path.with_suffix(".parquet"))
    if "served" not in every:
        raise ValueError(f"{path}: rows of an older version, which do not say who decoded; measure again")
    rows = every[every.served == "engine"]
    place, times = place_in(about), rows.pivot(index="round", columns="kernels", values="step_ms")
    measures = _streamed(every, place, about["k"])
    for name in sorted(set(times) - {"mlx"}):
        own, kind = rows[rows.kernels == name], name.partition("-")[0]
        ratio = paired_ratio(times["mlx"].to_numpy(), times[name].to_numpy())
        inside = own.filter(regex="_ms$").drop(columns=["step_ms", "cpu_ms"]).sum(axis=1)
        note = (
            f"{name}, {own.threads.iloc[0]} threads, n={ratio.n}; median {times['mlx'].median():.1f} against "
            f"{times[name].median():.1f} ms per step, of it {inside.median():.1f} ms in kernels; "
            f"{own.loads.sum()} experts read"
        )
        judged = kind == "int8"
        goal, passed = (f">= {KERNELS_GOAL:.0f}", bool(ratio.ratio >= KERNELS_GOAL)) if judged else ("", None)
        name = f"kernels.{kind}.step_ratio.k{about['k']}"
        measures.append(row(place, name, ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note))
    return measures


def _streamed(rows: pd.DataFrame, place: Place, k: int) -> list[Measure]:
    """A step of mlx-lm's own forward over one of the engine without adapters, both by the same kernels."""
    bare, resident = (rows[rows.served == served].set_index("round") for served in ("engine-bare", "resident"))
    if bare.empty:
        return []
    ratio = paired_ratio(resident.step_ms.to_numpy(), bare.step_ms.loc[resident.index].to_numpy())
    note = (
        f"tok/s over stock mlx-lm with every expert in memory and the same kernels ({bare.kernels.iloc[0]}), no "
        f"adapters, {bare.threads.iloc[0]} threads, n={ratio.n}; medians: engine {bare.step_ms.median():.2f}, "
        f"stock {resident.step_ms.median():.2f} ms per step; {bare.loads.sum()} experts read"
    )
    goal, passed = f">= {STREAMED_GOAL:.2f}", bool(ratio.ratio >= STREAMED_GOAL)
    return [
        row(place, f"kernels.streamed_ratio.k{k}", ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)
    ]


def work_measures(path: Path) -> list[Measure]:
    """Whether a step's time lies on a line over K, layers and experts, and how much of it grows with experts; `path` is
    the work.json of the rows. Paired by round.

    Raises ValueError, one line, when the files are not readable.
    """
    about = read_json(path)
    rows, place, measures = pd.read_parquet(path.with_suffix(".parquet")), place_in(about), []
    shapes = ["k", "layers", "experts"]
    base = tuple(rows.groupby(shapes).size().index.to_frame(index=False).mode().iloc[0])  # what two of three share
    for name in shapes:
        others = [shape for shape in shapes if shape != name]
        here = rows[(rows[others] == [base[shapes.index(shape)] for shape in others]).all(axis=1)]
        times = here.pivot(index="round", columns=name, values="step_ms")
        low, middle, high = sorted(times)
        share = (middle - low) / (high - low)
        line = times[low] + share * (times[high] - times[low])
        fixed = ", ".join(f"{shape} {base[shapes.index(shape)]}" for shape in others)
        medians = " / ".join(f"{times[value].median():.2f}" for value in (low, middle, high))
        note = f"{name} {low} / {middle} / {high}: median {medians} ms per step; {fixed}; n={len(times)}"
        off = paired_ratio(times[middle].to_numpy(), line.to_numpy())
        passed = bool(abs(off.ratio - 1) <= WORK_GOAL)
        goal = f"{1 - WORK_GOAL:.2f} to {1 + WORK_GOAL:.2f}"
        measures.append(row(place, f"work.{name}.linear", off.ratio, "ratio", off, goal=goal, passed=passed, note=note))
        growth = paired_ratio(times[high].to_numpy(), times[low].to_numpy())
        judged = name == "experts"
        goal, passed = (f"<= {1 + WORK_GOAL:.2f}", bool(growth.ratio <= 1 + WORK_GOAL)) if judged else ("", None)
        measure = row(place, f"work.{name}.growth", growth.ratio, "ratio", growth, goal=goal, passed=passed, note=note)
        measures.append(measure)
    return measures


def speed_measures(session: Session) -> list[Measure]:
    """Explicit reads over the paper's page faults on demand; the prerouter over on demand, each way of reading, beside
    the bound of two things that run side by side; bytes of the device over cold bytes. At the session's largest K.

    Raises ValueError where arms share no valid round.
    """
    k = int(session.runs["k"].max())
    place, condition = place_of(session), f"condition {session.condition}"
    ondemand, faults = session.cell("ondemand", k), session.cell("ondemand-mmap", k)
    ratio = paired(ondemand, faults)
    if not ratio.n:
        raise ValueError(f"session {session.name}: its arms share no valid round at K={k}")
    waits = [cell["wait_ms_per_step"].median() for cell in (ondemand, faults)]
    note = f"{condition}, n={ratio.n}; waiting {waits[0]:.1f} against {waits[1]:.1f} ms per step"
    passed, goal = bool(ratio.ratio >= PAPER_GOAL), f">= {PAPER_GOAL:.1f}"
    name = f"speed.explicit_over_faults.k{k}"
    measures = [row(place, name, ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)]
    for way in ("", "-records", "-direct"):
        measures += _ahead(session, k, way)
    loads = session_loads(session)
    for arm in ("ondemand", "prerouter"):
        seen = loads[(loads["arm"] == arm) & (loads["k"] == k)]
        over = device_over_cold(seen)
        passed, goal = bool(over <= DEVICE_GOAL), f"<= {DEVICE_GOAL:.2f}"
        note = f"{condition}; in whole pages, of the {len(seen)} loads that were looked at"
        measures.append(row(place, f"speed.device_over_cold.{arm}", over, "ratio", goal=goal, passed=passed, note=note))
    return measures


def _ahead(session: Session, k: int, way: str) -> list[Measure]:
    """The prerouter over on demand, both by one way of reading; judged where computing and waiting are of one size."""
    ondemand, prerouter = (session.cell(f"{arm}{way}", k) for arm in ("ondemand", "prerouter"))
    ratio = paired(prerouter, ondemand)
    if not ratio.n:
        if way and not {f"ondemand{way}", f"prerouter{way}"} & set(session.all_runs["arm"]):
            return []  # a session without a repacked checkpoint
        arms = f"prerouter{way} and ondemand{way}"
        raise ValueError(f"session {session.name}: {arms} share no valid round at K={k}")
    load = ondemand["wait_ms_per_step"].median()
    compute = ondemand["step_ms_per_step"].median() - load
    bound = (compute + load) / max(compute, load)
    note = (
        f"condition {session.condition}, n={ratio.n}; on demand {compute:.1f} ms computing and {load:.1f} ms waiting "
        f"for reads: with all of the smaller hidden {bound:.2f}; {ratio.ratio / bound:.2f} of that"
    )
    balanced = max(compute, load) <= BALANCE * min(compute, load)
    goal, passed = (f">= {OVERLAP_GOAL:.1f}", bool(ratio.ratio >= OVERLAP_GOAL)) if balanced else ("", None)
    name = f"speed.prerouter_over_ondemand{way.replace('-', '.')}.k{k}"
    return [row(place_of(session), name, ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)]
