"""Appendix B from one session: `python -m analysis.appxb SESSION_DIR --claims CLAIMS --out DIR`.

What each step from the paper's stacks to slots that readers fill is worth, and where the host's time of a step goes.
Writes summary.csv, pairs.csv, compare.csv, table.md and the figure, all or none, and prints table.md. Speeds are
compared only as paired ratios within the session; the parts of a step are means, set beside the paper's and not judged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.appxb_figure import save_figure
from analysis.heading import heading
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import DRIFTED, Finding, Status, absolute, compare_rows, exact, relation
from analysis.rows import (
    MIB,
    PairRatios,
    Session,
    load_session,
    markdown_table,
    pair_ratios,
    planned,
    publishing,
    run_command,
    the_k,
    write_tables,
)
from analysis.statistics import median_spread
from analysis.tab3 import header_lines, pairs
from analysis.units import interval, number

COMMAND = "snakemake appxB"
TIME_BUDGET = "about 9 minutes with the default configuration on two cores; a larger tier or more rounds cost in step"
# The arms in the order of the story, each in words.
ARMS = {
    "prerouter-stack": "nine stacks rebuilt; engine thread; 1 group",
    "prerouter-patch": "nine stacks, rows patched; engine thread; 1 group",
    "prerouter-fill": "bank, read into slots; engine thread; 1 group",
    "prerouter-groups1": "bank; reader threads; 1 group",
    "prerouter-groups2": "bank; reader threads; 2 groups",
    "prerouter": "bank; reader threads; as configured",
    "prerouter-groups5": "bank; reader threads; 5 groups",
    "ondemand-stack": "own routers; nine stacks rebuilt; engine thread",
    "ondemand-patch": "own routers; nine stacks, rows patched; engine thread",
    "ondemand": "own routers; bank; reader threads",
}
# Arm over base: what one change is worth.
PAIRS = {
    ("prerouter-patch", "prerouter-stack"): "patching instead of stacking anew",
    ("prerouter-fill", "prerouter-patch"): "slots of a bank instead of patched stacks",
    ("prerouter-groups1", "prerouter-fill"): "reader threads instead of the engine's own",
    ("prerouter-groups2", "prerouter-groups1"): "2 launch groups instead of 1",
    ("prerouter", "prerouter-groups1"): "launch groups as configured instead of 1",
    ("prerouter-groups5", "prerouter-groups1"): "5 launch groups instead of 1",
    ("prerouter-groups1", "prerouter-patch"): "bank and readers instead of patched stacks",
    ("prerouter", "prerouter-stack"): "all of it together",
    ("ondemand-patch", "ondemand-stack"): "patching instead of stacking anew, own routers",
    ("ondemand", "ondemand-patch"): "bank and readers instead of patched stacks, own routers",
}
PARTS = ("wait", "route", "build", "launch", "evaluate", "sample")  # of a step's time, on the engine thread
STEP_COLUMNS = [*(f"{part}_ms" for part in PARTS), "step_ms", "cpu_ms", "device_bytes", "loads"]
SUMMARY_COLUMNS = (
    "arm k rounds tok_s_median tok_s_min tok_s_max step_ms "
    + " ".join(f"{part}_ms {part}_share" for part in PARTS)
    + " cpu_ms busy_cores reading_share device_share device_mib_per_step loads_per_step dropped void_runs "
    "condition tier machine session"
).split()
NEAREST = ("prerouter-patch", "prerouter")  # the paper's pipeline and ours
SYNCHRONOUS = ("prerouter-patch", "prerouter-fill")  # all predicted experts are brought in on the engine thread
HOW_TO_READ = (
    "A step's time on the engine thread, without overlap: `wait` for reads (in arms that read, stack or patch on that "
    "thread, this work itself), `route` for the choice of a router, `build` Python and graphs, `launch` handing graphs "
    "to MLX, `evaluate` waiting for them, `sample` bringing the token to the host.",
    "MLX's CPU backend holds the caller while its queue is full, so that `launch` contains computing there; on a GPU "
    "computing is in `evaluate`.",
    "`busy cores` is the CPU time of all threads over the time of the step. `reading` is the share of the time in "
    "which at least one read of the arm was under way, `device` the same for reads that the storage had to serve.",
    "Only ratios are verdicts: the geometric mean of per-round ratios within this session, with a 95% interval. An "
    "interval that spans 1 decides nothing.",
    "All `prerouter` arms choose the same tokens, and all `ondemand` arms do: a run that did not is void.",
    "A prediction's experts arrive one token ahead. More groups let its reads start earlier; each also ends in a wait.",
)


def step_means(session: Session) -> pd.DataFrame:
    """Of each valid run, by run_id: the mean over its timed steps of `STEP_COLUMNS`, and the shares of reading.

    Raises ValueError for a session without the parts of a step.
    """
    missing = [column for column in STEP_COLUMNS if column not in session.steps.columns]
    if missing:
        raise ValueError(f"session {session.name}: steps.parquet lacks {', '.join(missing)}; it was made before them")
    timed = session.steps[session.steps["timed"]]
    means = timed.groupby("run_id")[STEP_COLUMNS].mean()
    step_ns = timed.groupby("run_id")["step_ms"].sum() * 1e6
    loads = session.loads.merge(timed[["run_id", "step"]], on=["run_id", "step"])
    for share, rows in (("reading", loads), ("device", loads[loads["device_bytes"] > 0])):
        covered = pd.Series({run: covered_ns(own) for run, own in rows.groupby("run_id")}, dtype=float)
        means[f"{share}_share"] = covered.reindex(means.index).fillna(0) / step_ns
    return means


def covered_ns(loads: pd.DataFrame) -> int:
    """Nanoseconds in which at least one of these reads was under way."""
    rows = loads[["start_ns", "end_ns"]].to_numpy(np.int64)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = np.maximum.accumulate(rows[:, 1])
    # What each read adds: from its start, or from where an earlier one already reached.
    starts = np.maximum(rows[:, 0], np.concatenate([rows[:1, 0], ends[:-1]]))
    return int(np.clip(rows[:, 1] - starts, 0, None).sum())


def summary(session: Session) -> pd.DataFrame:
    """One row per arm, in the order of `ARMS`, columns `SUMMARY_COLUMNS`: the median over valid rounds of means.

    Raises ValueError for an arm that appendix B does not have, or for more than one K.
    """
    every, k = planned(session, ARMS), the_k(session)
    means, rows = step_means(session), []
    for arm, runs in every.groupby("arm"):
        valid = runs[~runs["void"]]
        speed, own = median_spread(valid["tok_s"]), means.reindex(valid["run_id"])
        row = {
            "arm": arm,
            "k": k,
            "rounds": len(valid),
            "tok_s_median": speed.median,
            "tok_s_min": speed.low,
            "tok_s_max": speed.high,
            "step_ms": own["step_ms"].median(),
            "cpu_ms": own["cpu_ms"].median(),
            "busy_cores": (own["cpu_ms"] / own["step_ms"]).median(),
            "reading_share": own["reading_share"].median(),
            "device_share": own["device_share"].median(),
            "device_mib_per_step": own["device_bytes"].median() / MIB,
            "loads_per_step": own["loads"].median(),
            "dropped": int(runs["dropped"].sum()),
            "void_runs": len(runs) - len(valid),
            "condition": session.condition,
            "tier": runs["tier"].iloc[0],
            "machine": session.info.machine or "",
            "session": session.name,
        }
        for part in PARTS:
            row[f"{part}_ms"] = own[f"{part}_ms"].median()
            row[f"{part}_share"] = (own[f"{part}_ms"] / own["step_ms"]).median()
        rows.append(row)
    rows.sort(key=lambda row: list(ARMS).index(row["arm"]))
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def findings(session: Session, table: pd.DataFrame, ratios: PairRatios, claims: Claims) -> list[Finding]:
    """Findings for every claim whose experiment is appxB."""
    k, rows = int(table["k"].iloc[0]), {row.arm: row for row in table.itertuples() if row.rounds}
    place = f"{table['tier'].iloc[0]} on {session.info.machine or 'this machine'} at K={k}"
    tier, means = table["tier"].iloc[0], step_means(session)
    means["busy_cores"] = means["cpu_ms"] / means["step_ms"]
    # Of each claim: the arms that show it, the quantity of a run, and how it is told.
    beside = {
        "step.graph_floor": (list(rows), "build_ms", lambda row: f"{row.build_ms:.3g} ms"),
        "step.incremental_fill": (SYNCHRONOUS, "wait_ms", lambda row: f"{row.wait_ms:.3g} ms"),
        "step.disk_share": (
            list(rows),
            "reading_share",
            lambda row: f"{row.reading_share:.2f}, by the device {row.device_share:.2f}",
        ),
        "step.cpu_cores": (list(rows), "busy_cores", lambda row: f"{row.busy_cores:.2f} cores"),
        "appxB.pipeline_k8": (list(rows) if k == 8 else (), "tok_s", lambda row: f"{row.tok_s_median:.3g} tok/s"),
    }
    found = []
    for claim in (claim for claim in claims.by_id.values() if claim.experiment == "appxB"):
        if claim.id in beside:
            arms, column, told = beside[claim.id]
            here = []
            for arm in (arm for arm in arms if arm in rows):
                runs = session.cell(arm, k)
                values = runs["tok_s"] if column == "tok_s" else means.reindex(runs["run_id"])[column]
                own = {"machine": session.info.machine, "tier": tier, "spreads": [median_spread(values)]}
                here.append(absolute(claim, told(rows[arm]), place, **own, k=str(k), arm=arm))
            found += here or [Finding(claim, Status.NOT_TESTABLE, "", f"no arm of this session (K={k}) shows it")]
        elif claim.id == "appxB.incr_stack":
            found += _incremental(claim, session, ratios, k)
        elif claim.id == "staged.stack_tensors":
            found.append(_stack_tensors(claim, session))
        elif claim.id == "step.gpu_busy":
            why = "no GPU counter is read: MLX computes on the CPU on Linux, and macOS shows its counters to root only"
            found.append(Finding(claim, Status.NOT_TESTABLE, "", why))
        else:
            found.append(Finding(claim, Status.NOT_TESTABLE, "", "appendix B's rows do not show it"))
    return found


def _incremental(claim, session: Session, ratios: PairRatios, k: int) -> list[Finding]:
    changes = [(f"{route}-patch", f"{route}-stack") for route in ("prerouter", "ondemand")]
    blocked = DRIFTED if session.drift().void_verdict else ""
    places, found = sum((k, *pair) in ratios for pair in changes), []
    for arm, base in changes:
        where = {"k": str(k), "arm": f"{arm}/{base}"}
        ratio = ratios.get((k, arm, base))
        if ratio is None:
            found.append(Finding(claim, Status.NOT_TESTABLE, "", "this session did not run both arms", **where))
        else:
            ours, size = str(ratio) if ratio.n else "", (claim.value,)
            found.append(relation(claim, [ratio], ours, size=size, places=places, blocked=blocked, **where))
    return found


def _stack_tensors(claim, session: Session) -> Finding:
    """An arm that stacks reads each expert's part of every stacked tensor by itself: the reads are counted."""
    stacking = session.runs.loc[session.runs["arm"].str.endswith(("-stack", "-patch")), "run_id"]
    loads = session.loads[session.loads["run_id"].isin(stacking)]
    if "calls" not in loads.columns or loads.empty:
        return Finding(claim, Status.NOT_TESTABLE, "", "no reads of an arm that stacks")
    counts = sorted(set(loads["calls"]))
    if len(counts) > 1:
        return Finding(claim, Status.DIFFERS, ", ".join(map(str, counts)), "experts differ in their number of parts")
    return exact(claim, int(counts[0]))


def markdown(session: Session, table: pd.DataFrame, ratios: PairRatios, found: list[Finding]) -> str:
    """table.md."""
    k = table["k"].iloc[0]
    blocks = [
        f"# Appendix B: from stacks to slots, and where a step's time goes, {table['tier'].iloc[0]}, K={k}",
        *heading(header_lines(session, TIME_BUDGET), session),
        _speed_table(session, table),
        "## The host's time of a step",
        _split_table(table),
        "## What each change is worth",
        _pair_table(ratios),
        "## The paper beside ours",
        _paper_table(found),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def arm_words(session: Session, arm: str) -> str:
    """An arm in words, with the number of launch groups that it really had."""
    runs = session.all_runs
    if "launch_groups" in runs.columns:
        groups = runs.loc[runs["arm"] == arm, "launch_groups"].dropna()
        if len(groups):
            count = int(groups.iloc[0])
            return ARMS[arm].replace("as configured", f"{count} group{'s' * (count > 1)} as configured")
    return ARMS[arm]


def _speed_table(session: Session, table: pd.DataFrame) -> str:
    header = ("arm", "what it is", "rounds", "tok/s median (min-max)", "busy cores", "reading", "device")
    rows = [
        (
            row.arm,
            arm_words(session, row.arm),
            str(row.rounds),
            f"{row.tok_s_median:.2f} ({interval(row.tok_s_min, row.tok_s_max, '.2f')})" if row.rounds else "void",
            number(row.busy_cores, ".2f"),
            number(row.reading_share, ".0%"),
            number(row.device_share, ".0%"),
            number(row.device_mib_per_step, ".1f"),
            number(row.loads_per_step, ".1f"),
            str(row.dropped),
        )
        for row in table.itertuples()
    ]
    return markdown_table((*header, "device MiB/step", "loads/step", "dropped"), rows, right_from=2)


def _split_table(table: pd.DataFrame) -> str:
    rows = [
        (row.arm, f"{row.step_ms:.1f}", *(_part(row, part) for part in PARTS))
        for row in table.itertuples()
        if row.rounds
    ]
    return markdown_table(("arm", "step ms", *(f"{part} ms (share)" for part in PARTS)), rows, right_from=1)


def _part(row, part: str) -> str:
    return f"{getattr(row, f'{part}_ms'):.1f} ({getattr(row, f'{part}_share'):.0%})"


def _pair_table(ratios: PairRatios) -> str:
    rows = [
        (PAIRS.get((arm, base), "the same arm again (A/A)"), f"{arm} over {base}", ratio.bare, str(ratio.n))
        for (_, arm, base), ratio in ratios.items()
    ]
    return markdown_table(("change", "tok/s pair", "ratio (95%)", "n"), rows, right_from=2)


def _paper_table(found: list[Finding]) -> str:
    """Of values that are only set beside each other, those of the paper's pipeline and of ours; compare.csv has all."""
    rows = [
        (one.claim.id, str(one.claim.value), one.claim.unit, one.arm, one.ours, str(one.status), one.why)
        for one in found
        if one.claim.kind != "absolute" or one.arm in ("", *NEAREST) or one.claim.id == "step.incremental_fill"
    ]
    return markdown_table(("claim", "paper", "unit", "arm", "ours", "status", "why"), rows)


def write(session: Session, claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    table, ratios = summary(session), pair_ratios(session, PAIRS)
    found = findings(session, table, ratios, claims)
    text = markdown(session, table, ratios, found)
    words = [f"{row.arm}\n{arm_words(session, row.arm)}" for row in table.itertuples()]
    with publishing(out) as scratch:
        compared = compare_rows(found, claims, session.name, COMMAND)
        write_tables(scratch, text, summary=table, pairs=pairs(session, ratios), compare=compared)
        save_figure(session, table, words, scratch / "appxB")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.appxb", description="Appendix B from one session.")
    parser.add_argument("session", type=Path, metavar="SESSION_DIR")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(load_session(options.session), load_claims(options.claims), options.out), options.out
    )


if __name__ == "__main__":
    sys.exit(main())
