"""What each lever is worth, from one session: `python -m analysis.levers SESSION_DIR --out DIR`.

A lever is one change to an arm; it is judged against the same arm without it, by the paired ratio of their speeds
within the session. Beside the ratio stands what the lever moves: reads, calls, bytes from the device, waiting. Writes
summary.csv, pairs.csv, table.md and the figure, all or none, and prints table.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.heading import heading
from analysis.levers_figure import save_figure
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
from analysis.statistics import Ratio, median_spread
from analysis.tab3 import header_lines, pairs, visible_effect
from analysis.units import interval, number

TIME_BUDGET = "about 10 minutes with the default configuration on two cores"
WINS, LOSES, NOT_VISIBLE, NOT_RUN = "wins", "loses", "not visible", "not run"
EARLY = "prefetch"  # the purpose of reads that nobody needed yet


@dataclass(frozen=True)
class Lever:
    """One change: its name, what it does, and the arms with and without it, in pairs."""

    name: str
    meaning: str
    pairs: tuple[tuple[str, str], ...]


HOT, ADVISE, PREROUTER = "ondemand-hot", "ondemand-hot-advise", "prerouter"
LEVERS = (
    Lever(
        "records",
        "one contiguous record per expert instead of nine pieces",
        ((f"{HOT}-records", HOT), (f"{PREROUTER}-records", PREROUTER)),
    ),
    Lever(
        "a layer's reads together",
        "each thread reads its share of a layer's experts at once, neighbours in one call",
        ((f"{HOT}-layer", HOT), (f"{PREROUTER}-layer", PREROUTER)),
    ),
    Lever(
        "large pages",
        "weights and bank in pages of 2 MiB instead of 4 KiB",
        ((HOT, f"{HOT}-smallpages"), (PREROUTER, f"{PREROUTER}-smallpages")),
    ),
    Lever("advice", "the prediction only starts reads one token ahead", ((ADVISE, HOT),)),
    Lever(
        "launch groups",
        "the predicted layers in 1, 2 or 5 groups instead of as configured",
        tuple((f"{PREROUTER}-groups{count}", PREROUTER) for count in (1, 2, 5)),
    ),
)
PAIRS = tuple(pair for lever in LEVERS for pair in lever.pairs)
ARMS = tuple(dict.fromkeys(arm for pair in PAIRS for arm in reversed(pair)))
MOVED = {  # of a step, the mean over a run: column, its heading, how it is written
    "loads": ("reads", ".1f"),
    "early": ("early", ".1f"),
    "read_calls": ("calls", ".0f"),
    "hits": ("hits", ".1f"),
    "device_mib": ("device MiB", ".2f"),
    "wait_ms": ("wait ms", ".1f"),
}
SUMMARY_COLUMNS = (
    f"arm k rounds tok_s_median tok_s_min tok_s_max {' '.join(f'{column}_per_step' for column in MOVED)} "
    "dropped void_runs condition tier machine session"
).split()
HOW_TO_READ = (
    "Each ratio is tok/s with the lever over tok/s without it: the geometric mean of per-round ratios within this "
    "session, with a 95% interval.",
    "A lever `wins` or `loses` where the interval lies above or below 1, and is `not visible` where it holds 1 or the "
    "ratio is smaller than what the A/A pairs say can be seen. Of 20 levers that do nothing, one is expected to be "
    "called something.",
    "`reads`: experts read, `early`: those of them that nobody had asked for yet, `calls`: reads asked of the system, "
    "`hits`: experts found in memory, `wait`: the engine thread's waiting for reads; each per step, without -> with.",
    "All arms replay one trace of routes. What advice names is made of the trace, right as often as the trace says; "
    "where the prediction is the route it is always right.",
    "No lever changes a route or a bit of any result.",
)


def summary(session: Session) -> pd.DataFrame:
    """One row per arm in the order of `ARMS`, columns `SUMMARY_COLUMNS`: medians over valid rounds of steps' means.

    Raises ValueError for an arm that is no lever's, for more than one K, or rows without what levers move.
    """
    every, k = planned(session, ARMS), the_k(session)
    means, rows = moved(session), []
    for arm in (arm for arm in ARMS if arm in set(every["arm"])):
        runs = every[every["arm"] == arm]
        valid = runs[~runs["void"]]
        speed, own = median_spread(valid["tok_s"]), means.reindex(valid["run_id"])
        rows.append(
            {
                "arm": arm,
                "k": k,
                "rounds": len(valid),
                "tok_s_median": speed.median,
                "tok_s_min": speed.low,
                "tok_s_max": speed.high,
                **{f"{column}_per_step": own[column].median() for column in MOVED},
                "dropped": int(runs["dropped"].sum()),
                "void_runs": len(runs) - len(valid),
                "condition": session.condition,
                "tier": runs["tier"].iloc[0],
                "machine": session.info.machine or "",
                "session": session.name,
            }
        )
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def moved(session: Session) -> pd.DataFrame:
    """Of each valid run, by run_id: the columns of `MOVED`, the mean over its timed steps."""
    if "read_calls" not in session.steps.columns:
        raise ValueError(f"session {session.name}: steps.parquet lacks read_calls; it was made before it")
    timed = session.steps[session.steps["timed"]]
    means = timed.groupby("run_id")[["loads", "read_calls", "hits", "device_bytes", "wait_ms"]].mean()
    loads = session.loads.merge(timed[["run_id", "step"]], on=["run_id", "step"])
    early = loads[loads["purpose"] == EARLY].groupby("run_id").size().reindex(means.index, fill_value=0)
    means["early"] = early / timed.groupby("run_id").size()
    means["device_mib"] = means["device_bytes"] / MIB
    return means[list(MOVED)]


def verdict(ratio: Ratio | None, session: Session, effect: float) -> str:
    """What a ratio says of its lever; nothing where the machine drifted or there is no interval. `effect`: the smallest
    factor that the session could have shown, NaN where that is unknown."""
    if ratio is None or ratio.n == 0:
        return NOT_RUN
    if mark := session.drift().mark:
        return mark
    if math.isnan(ratio.ci_low):
        return f"no interval, n={ratio.n}"
    if max(ratio.ratio, 1 / ratio.ratio) < effect:
        return NOT_VISIBLE
    return WINS if ratio.ci_low > 1 else LOSES if ratio.ci_high < 1 else NOT_VISIBLE


def markdown(session: Session, table: pd.DataFrame, ratios: PairRatios) -> str:
    """table.md."""
    blocks = [
        f"# The levers, {table['tier'].iloc[0]}, K={the_k(session)}, {session.condition}",
        *heading(header_lines(session, TIME_BUDGET), session),
        "## What each lever is worth",
        _lever_table(session, table, ratios),
        "\n".join(f"- {lever.name}: {lever.meaning}" for lever in LEVERS),
        "## The arms",
        _arm_table(table),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _lever_table(session: Session, table: pd.DataFrame, ratios: PairRatios) -> str:
    own, k, effect, lines = table.set_index("arm"), the_k(session), visible_effect(ratios), []
    for lever in LEVERS:
        for arm, base in lever.pairs:
            ratio = ratios.get((k, arm, base))
            shown = ("-", "0") if ratio is None else (ratio.bare, str(ratio.n))
            both = ratio is not None
            moves = [_moves(own, arm, base, column) if both else "" for column in MOVED]
            lines.append((lever.name, f"{arm} over {base}", *shown, verdict(ratio, session, effect), *moves))
    for (_, arm, base), ratio in ratios.items():
        if arm == base:
            lines.append(("none (A/A)", f"{arm} again", ratio.bare, str(ratio.n), "", *[""] * len(MOVED)))
    header = ("lever", "tok/s pair", "ratio (95%)", "n", "verdict", *(words for words, _ in MOVED.values()))
    return markdown_table(header, lines, right_from=5)


def _moves(own: pd.DataFrame, arm: str, base: str, column: str) -> str:
    """What a step takes without and with the lever; once where that is the same."""
    words = MOVED[column][1]
    before, after = (number(own.loc[name, f"{column}_per_step"], words) for name in (base, arm))
    return after if before == after else f"{before} -> {after}"


def _arm_table(table: pd.DataFrame) -> str:
    rows = [
        (
            row.arm,
            str(row.rounds),
            f"{row.tok_s_median:.2f} ({interval(row.tok_s_min, row.tok_s_max, '.2f')})" if row.rounds else "void",
            *(number(getattr(row, f"{column}_per_step"), words) for column, (_, words) in MOVED.items()),
            str(row.dropped),
        )
        for row in table.itertuples()
    ]
    moves = (f"{words}/step" for words, _ in MOVED.values())
    return markdown_table(("arm", "rounds", "tok/s median (min-max)", *moves, "dropped"), rows, right_from=1)


def bars(session: Session, ratios: PairRatios) -> list[tuple[str, str, Ratio, str]]:
    """What the figure draws, in order: lever, pair, ratio, verdict; only of pairs that were run."""
    k, effect = the_k(session), visible_effect(ratios)
    return [
        (lever.name, f"{arm}\nover {base}", ratio, verdict(ratio, session, effect))
        for lever in LEVERS
        for arm, base in lever.pairs
        if (ratio := ratios.get((k, arm, base))) is not None and ratio.n
    ]


def write(session: Session, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    table, ratios = summary(session), pair_ratios(session, PAIRS)
    text = markdown(session, table, ratios)
    rows = pairs(session, ratios)
    effect, own = visible_effect(ratios), [(arm != base, ratio) for (_, arm, base), ratio in ratios.items()]
    rows["verdict"] = [verdict(ratio, session, effect) if judged else "" for judged, ratio in own]
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, pairs=rows)
        save_figure(session, the_k(session), bars(session, ratios), scratch / "levers")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.levers", description="What each lever is worth.")
    parser.add_argument("session", type=Path, metavar="SESSION_DIR")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(lambda: write(load_session(options.session), options.out), options.out)


if __name__ == "__main__":
    sys.exit(main())
