"""The recorded benchmark: `python -m analysis.bench --out results/MACHINE/bench --row-files FILE...`.

Collects measures (JSON files, each a list of objects) into bench.csv, the newest, and commits/COMMIT.csv, and prints
them as a Markdown table; also holds the measures that come out of a session's rows. Knows nothing of how a measure in
a file was taken. A measure that misses its goal is written with pass = false like any other: this is a record, not a
test.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.heading import heading
from analysis.rows import MIB, Session, markdown_table, pair_ratios, publishing, read_json, run_command, write_csv
from analysis.statistics import Ratio, paired_ratio

BENCH_COLUMNS = "measure value unit ci_low ci_high goal pass commit session note".split()
NUMBERS = ("value", "ci_low", "ci_high")
EXPLICIT_ARMS = ("ondemand", "prerouter")
WAIT_SHARE_GOAL = 0.25
EXPOSED_WAIT_GOAL = 1.15
MEMORY_GOAL = 1.15
TIME_BUDGET = "about 15 minutes on two cores"


@dataclass(frozen=True)
class Measure:
    """One row of bench.csv. NaN: no number. `passed` is None where the measure has no goal or could not be judged."""

    measure: str
    value: float
    unit: str
    ci_low: float = math.nan
    ci_high: float = math.nan
    goal: str = ""
    passed: bool | None = None
    commit: str = ""
    session: str = ""
    note: str = ""

    def to_row(self) -> dict[str, Any]:
        """The measure as a JSON object with the keys `BENCH_COLUMNS`; NaN becomes null."""
        row = {column: getattr(self, "passed" if column == "pass" else column) for column in BENCH_COLUMNS}
        return row | {key: None if math.isnan(row[key]) else row[key] for key in NUMBERS}


def to_json(measures: Iterable[Measure]) -> str:
    """The text of a measure file."""
    return json.dumps([measure.to_row() for measure in measures], indent=1, allow_nan=False) + "\n"


def overlap(session: Session, k: int) -> list[Measure]:
    """Whether reads hide behind computation in the predicted layers: `prerouter` against `ondemand` at one K.

    All from steps' means per round, in ms: compute is the prerouter arm's step less its waiting, load is the time in
    which at least one of its reads for a predicted layer ran. When compute covers load (medians), the prerouter's
    wait in predicted layers may be at most `WAIT_SHARE_GOAL` of the on-demand arm's; otherwise at most
    `EXPOSED_WAIT_GOAL` times what cannot be hidden, load - compute. Goals are judged on the value, the interval is
    over rounds. Raises ValueError when the arms share no valid round.
    """
    base, arm = session.cell("ondemand", k), session.cell("prerouter", k)
    rounds = base.index.intersection(arm.index)
    if rounds.empty:
        raise ValueError(f"session {session.name}: ondemand and prerouter share no valid round at K={k}")
    base, arm = base.loc[rounds], arm.loc[rounds]
    compute = arm["step_ms_per_step"] - arm["wait_ms_per_step"]
    load = arm["load_busy_predicted_ms_per_step"]
    wait = arm["wait_predicted_ms_per_step"]
    on_demand = base["wait_predicted_ms_per_step"]
    share = _ratio(wait, on_demand)
    covered = compute.median() >= load.median()
    note = (
        f"condition {session.condition}, n={len(rounds)}; compute {compute.median():.2f} ms "
        f"{'covers' if covered else 'is less than'} load {load.median():.2f} ms; "
        f"wait {wait.median():.2f} ms against {on_demand.median():.2f} ms on demand"
    )
    name = f"overlap.k{k}"
    measures = [
        row(place_of(session), f"{name}.compute_ms", compute.median(), "ms per step"),
        row(place_of(session), f"{name}.load_ms", load.median(), "ms per step"),
        row(
            place_of(session),
            f"{name}.load_rows_ms",
            _busy_ms_from_loads(session, arm["run_id"]),
            "ms per step",
            note="the same from the load rows: union of the reads for predicted layers over timed steps",
        ),
        row(place_of(session), f"{name}.wait_ms", wait.median(), "ms per step"),
    ]
    if covered:
        return [*measures, _limited(session, f"{name}.wait_share", share, WAIT_SHARE_GOAL, note)]
    exposed = _ratio(wait, load - compute)
    return [
        *measures,
        row(place_of(session), f"{name}.wait_share", share.ratio, "ratio", share, note="no goal: load exceeds compute"),
        _limited(session, f"{name}.exposed_wait", exposed, EXPOSED_WAIT_GOAL, f"wait over load - compute; {note}"),
    ]


def aa_ratio(session: Session) -> list[Measure]:
    """An arm against itself: the interval must hold 1. Raises ValueError when the session has no A/A run."""
    pairs = [(k, arm, ratio) for (k, arm, base), ratio in pair_ratios(session).items() if arm == base]
    if not pairs:
        raise ValueError(f"session {session.name}: no A/A run")
    return [
        row(
            place_of(session),
            f"aa.{arm}.k{k}",
            ratio.ratio,
            "ratio",
            ratio,
            goal="interval contains 1.00",
            passed=None if math.isnan(ratio.ci_low) else ratio.contains(1.0),
            note=f"condition {session.condition}, n={ratio.n}",
        )
        for k, arm, ratio in pairs
    ]


def memory_peak(session: Session) -> list[Measure]:
    """Allocator peak over resident part plus bank, worst valid run of the explicit arms; anonymous memory beside it.

    Raises ValueError when the session has no valid run of those arms or one lacks a counter.
    """
    runs = session.runs[session.runs["arm"].isin(EXPLICIT_ARMS)]
    shares = runs["alloc_peak_bytes"] / (runs["resident_bytes"] + runs["bank_bytes"])
    if shares.empty or shares.isna().any():
        raise ValueError(f"session {session.name}: no allocator peak, resident or bank bytes for every explicit run")
    worst = runs.loc[shares.idxmax()]
    note = (
        f"worst of {len(runs)} runs: {worst['arm']} at K={worst['k']}, peak {worst['alloc_peak_bytes'] / MIB:.1f} MiB, "
        f"resident {worst['resident_bytes'] / MIB:.1f} MiB, bank {worst['bank_bytes'] / MIB:.1f} MiB"
    )
    peak = Ratio(float(shares.max()), math.nan, math.nan, 1)
    anonymous = float(runs["rss_anon_bytes"].max()) / MIB
    return [
        _limited(session, "memory.alloc_peak", peak, MEMORY_GOAL, note),
        row(
            place_of(session),
            "memory.rss_anon",
            anonymous,
            "MiB",
            note="anonymous memory of the process, largest of the same runs",
        ),
    ]


def dropped(session: Session) -> list[Measure]:
    """Routed experts left out, summed over every run, void ones too: must be 0."""
    total, runs = int(session.all_runs["dropped"].sum()), len(session.all_runs)
    return [row(place_of(session), "dropped", total, "experts", goal="0", passed=total == 0, note=f"{runs} runs")]


def read_measures(path: Path) -> list[Measure]:
    """Read one measure file. Raises ValueError, one line naming the file, when it is not a list of such objects."""
    document = read_json(path)
    if not isinstance(document, list):
        raise ValueError(f"{path}: expected a list of measures, found {type(document).__name__}")
    return [_measure(f"{path}: measure {number + 1}", entry) for number, entry in enumerate(document)]


def collect(paths: Sequence[Path]) -> list[Measure]:
    """The measures of all files in order. Raises ValueError when one session states a measure twice."""
    seen: dict[tuple[str, str], Path] = {}
    measures = []
    for path in paths:
        for measure in read_measures(path):
            key = (measure.measure, measure.session)
            if key in seen:
                raise ValueError(f"{path}: measure {key[0]} of session {key[1] or 'none'} is also in {seen[key]}")
            seen[key] = path
            measures.append(measure)
    return measures


def markdown(measures: Sequence[Measure], title: str, machine: str) -> str:
    """table.md: what is to be known of the measures, and they as a table; "-" where there is nothing to pass."""
    sessions = dict.fromkeys(
        f"{measure.session}, commit {measure.commit or 'unknown'}" for measure in measures if measure.session
    )
    judged = [measure for measure in measures if measure.passed is not None]
    facts = [
        f"machine: {machine}",
        "tier: mini-35b",
        "condition: in each note",
        "n: in each note",
        *(f"session: {session}" for session in sessions),
        f"goals: {sum(bool(measure.passed) for measure in judged)} of {len(judged)} met",
        f"takes: {TIME_BUDGET}",
    ]
    header = ("measure", "value", "unit", "95% interval", "goal", "pass", "session", "note")
    words = {True: "yes", False: "no", None: "-"}
    rows = [
        (
            measure.measure,
            _show(measure.value),
            measure.unit,
            "" if math.isnan(measure.ci_low) else f"{_show(measure.ci_low)} to {_show(measure.ci_high)}",
            measure.goal,
            words[measure.passed],
            measure.session,
            measure.note,
        )
        for measure in measures
    ]
    return "\n\n".join([f"# {title}", *heading(facts), markdown_table(header, rows)])


def write(paths: Sequence[Path], out: Path, title: str) -> str:
    """Write bench.csv into `out`, whole or not at all, and keep it in `out`/commits under its newest session's commit.

    Returns the text of table.md. OSError passes.
    """
    measures = collect(paths)
    rows = pd.DataFrame([measure.to_row() for measure in measures], columns=BENCH_COLUMNS)
    rows["pass"] = rows["pass"].map({True: "true", False: "false"})
    with publishing(out) as scratch:
        write_csv(rows, scratch / "bench.csv")
    if commit := max(measures, key=lambda measure: measure.session).commit:
        with publishing(out / "commits") as scratch:
            write_csv(rows, scratch / f"{commit}.csv")
    return markdown(measures, title, out.resolve().parent.name)


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr; a missed goal is not an error."""
    parser = argparse.ArgumentParser(prog="python -m analysis.bench", description="Collect measures into bench.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for bench.csv")
    parser.add_argument("--title", default="Benchmark", help="of the table")
    parser.add_argument("--row-files", type=Path, nargs="+", required=True, metavar="FILE", help="JSON measure files")
    options = parser.parse_args(argv)
    return run_command(lambda: write(options.row_files, options.out, options.title), options.out)


Place = tuple[str, str]  # commit and session that a measure comes from


def place_of(session: Session) -> Place:
    return session.info.commit or "", session.name


def row(
    place: Place,
    measure: str,
    value: float,
    unit: str,
    interval: Ratio | None = None,
    *,
    goal: str = "",
    passed: bool | None = None,
    note: str = "",
) -> Measure:
    """A measure, with the interval of its ratio where there is one."""
    low, high = (interval.ci_low, interval.ci_high) if interval is not None else (math.nan, math.nan)
    return Measure(measure, float(value), unit, low, high, goal, passed, *place, note)


def _limited(session: Session, measure: str, ratio: Ratio, limit: float, note: str) -> Measure:
    """A ratio that may be at most `limit`."""
    passed = None if math.isnan(ratio.ratio) else bool(ratio.ratio <= limit)
    goal = f"<= {limit:.2f}"
    return row(place_of(session), measure, ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)


def _ratio(left: pd.Series, right: pd.Series) -> Ratio:
    """Paired ratio; where a round has a zero or negative side, the ratio of sums without an interval (NaN if none)."""
    if (left > 0).all() and (right > 0).all():
        return paired_ratio(left.to_numpy(), right.to_numpy())
    whole = float(left.sum() / right.sum()) if right.sum() > 0 else math.nan
    return Ratio(whole, math.nan, math.nan, len(left))


def _busy_ms_from_loads(session: Session, run_ids: pd.Series) -> float:
    """Median over runs of the time, per timed step, in which a read for a predicted layer ran."""
    steps = session.steps
    timed = steps.loc[steps["timed"] & steps["run_id"].isin(run_ids), ["run_id", "step"]]
    loads = session.loads[session.loads["predicted_layer"]].merge(timed, on=["run_id", "step"])
    busy_ms = []
    for run_id, mine in timed.groupby("run_id"):
        reads = loads[loads["run_id"] == run_id].sort_values("start_ns")
        ends = np.maximum.accumulate(reads["end_ns"].to_numpy())
        starts = reads["start_ns"].to_numpy()
        # What each read adds to the union: its end beyond every earlier end, less a gap before its start.
        covered_to = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))
        busy_ms.append(float((ends - np.minimum(covered_to, ends)).sum()) / 1e6 / len(mine))
    return float(np.median(busy_ms))


def _measure(where: str, entry: Any) -> Measure:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object, found {type(entry).__name__}")
    missing = [key for key in ("measure", "value", "unit") if key not in entry]
    unknown = sorted(set(entry) - set(BENCH_COLUMNS))
    if missing or unknown:
        raise ValueError(f"{where}: {'missing ' + missing[0] if missing else 'unknown key ' + unknown[0]}")
    numbers = {key: entry.get(key) for key in NUMBERS}
    for key, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{where}: {key} must be a number or null, found {value!r}")
    if entry.get("pass") not in (True, False, None):
        raise ValueError(f"{where}: pass must be true, false or null, found {entry['pass']!r}")
    numbers = {key: math.nan if value is None else float(value) for key, value in numbers.items()}
    texts = {key: str(entry.get(key) or "") for key in ("measure", "unit", "goal", "commit", "session", "note")}
    return Measure(**numbers, **texts, passed=entry.get("pass"))


def _show(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
