"""The line of load cost through anybody's cold reads: `python -m analysis.fit.regress ROWS --out DIR`.

ROWS is a .csv or .parquet table with one row per read: its cold share (or cold bytes and asked bytes) and its time. The
rows of `experiments.load_cost` and of a session are understood as they are. Cold shares here were found, not set: bins
are all warm, all cold, and equal parts of what lies between. Writes summary.csv, residuals.csv, table.md and the figure
`regress`, all or none, and prints table.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.fit import regression
from analysis.fit.regression import Fit
from analysis.heading import guest_cold
from analysis.loads import read_table, require
from analysis.rows import MIB, markdown_table, publishing, read_json, run_command, write_tables
from analysis.units import GIB, interval, number

SUMMARY_COLUMNS = (
    "group a_ms a_low a_high b_ms b_low b_high r2 max_residual_ms bins n cold0_ms cold1_ms mib_per_load left_out"
).split()
COLD_NAMES, MS_NAMES = ("cold_share", "cold"), ("ms", "ms_per_load", "load_ms")
GROUP_NAMES = (("way", "layout"), ("arm", "k"))
FIRST_ROWS = 5  # that a message lists
PERCENT = 1.5  # a cold share above this was written in per cent, or is no share
HOW_TO_READ = (
    "`a` is where the line meets a read that is all in the page cache, `a + b` one that comes from the device; "
    "brackets are 95% intervals of drawing each bin's reads again.",
    "Bins: all warm, all cold, and parts of equal size between them; reads in no bin are `left out`.",
    "A line through medians says how a typical read behaves; it says nothing of the slowest ones.",
)


@dataclass(frozen=True)
class Columns:
    """Which columns of a table to take; "" where the usual names are to be looked for."""

    cold: str = ""
    ms: str = ""
    group: tuple[str, ...] = ()
    asked: str = ""


def read_rows(path: Path, columns: Columns) -> pd.DataFrame:
    """A table brought into the columns cold (0..1), ms, asked_bytes (NaN where unknown) and group (text).

    Raises ValueError, one line that names file and column: what is missing and what is there; how many rows hold
    something else than is expected there, and which are the first; no row.
    """
    rows = _of_session(path, read_table(path))
    named = [name for name in (columns.cold, columns.ms, columns.asked, *columns.group) if name]
    require(path, rows, named)
    rows = _single_reads(path, rows)
    if rows.empty:
        raise ValueError(f"{path}: no row of a single read whose cold share is known")
    group = columns.group or next((names for names in GROUP_NAMES if set(names) <= set(rows.columns)), ())
    for name in group:
        _refuse(path, name, rows[name].isna(), rows[name], "the name of a group")
    asked = columns.asked or "asked_bytes"
    taken = {
        "cold": _cold(path, rows, columns),
        "ms": _ms(path, rows, columns.ms),
        "asked_bytes": _numbers(path, rows, asked, gaps=True) if asked in rows.columns else np.nan,
        "group": rows[list(group)].astype(str).agg(", ".join, axis=1) if group else "all reads",
    }
    return pd.DataFrame(taken).reset_index(drop=True)


def _of_session(path: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """A session's loads with arm and K of their runs; other tables as they are. Rows keep their index.

    Timed steps of valid runs of arms only: A/A and drift runs repeat an arm, and are no loads of it.
    """
    runs = path.parent / "runs.parquet"
    if "run_id" not in rows.columns or not runs.exists():
        return rows
    known = read_table(runs)
    require(runs, known, ("run_id", "role", "arm", "k", "void"))
    kept = known[~known["void"].astype(bool) & (known["role"] == "arm")].set_index("run_id")[["arm", "k"]]
    joined = rows[rows["run_id"].isin(kept.index)].join(kept, on="run_id")
    return joined[joined["step"] >= 0] if "step" in joined.columns else joined


def _single_reads(path: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Without reference loads, reads of whole layers, and reads before which nobody looked."""
    keep = pd.Series(True, index=rows.index)
    if "role" in rows.columns:
        keep &= rows["role"] != "reference"
    for name in ("expert", "cold_bytes"):
        if name in rows.columns:
            keep &= _numbers(path, rows, name, gaps=True) >= 0
    return rows[keep]


def _cold(path: Path, rows: pd.DataFrame, columns: Columns) -> pd.Series:
    """The cold share of each read, 0 to 1."""
    asked = columns.asked or "asked_bytes"
    name = columns.cold or next((name for name in COLD_NAMES if name in rows.columns), None)
    if name is not None:
        shares = _numbers(path, rows, name)
        hint = "in per cent? divide by 100" if shares.min() >= 0 and PERCENT < shares.max() <= 100 else ""
    elif {"cold_bytes", asked} <= set(rows.columns):
        name, total = f"cold_bytes over {asked}", _numbers(path, rows, asked)
        _refuse(path, asked, total <= 0, total, "above 0")
        shares, hint = _numbers(path, rows, "cold_bytes") / total, ""
    else:
        raise _missing(path, rows, f"{' or '.join(COLD_NAMES)}, or cold_bytes with {asked}", "--cold-column")
    _refuse(path, name, (shares < 0) | (shares > 1), shares, "a cold share of 0 to 1", hint)
    return shares


def _ms(path: Path, rows: pd.DataFrame, column: str) -> pd.Series:
    """Milliseconds of each read, 0 or more."""
    name = column or next((name for name in MS_NAMES if name in rows.columns), None)
    if name is not None:
        times = _numbers(path, rows, name)
    elif "ns" in rows.columns:
        name, times = "ns", _numbers(path, rows, "ns") / 1e6
    elif {"start_ns", "end_ns"} <= set(rows.columns):
        name = "end_ns less start_ns"
        times = (_numbers(path, rows, "end_ns") - _numbers(path, rows, "start_ns")) / 1e6
    else:
        raise _missing(path, rows, f"{' or '.join(MS_NAMES)}, or ns, or start_ns with end_ns", "--ms-column")
    _refuse(path, name, times < 0, times, "a time of 0 or more")
    return times


def _numbers(path: Path, rows: pd.DataFrame, name: str, gaps: bool = False) -> pd.Series:
    """A column as floats, each a finite number; with `gaps` an empty cell is NaN. Raises ValueError."""
    numbers = pd.to_numeric(rows[name], errors="coerce").astype(float)
    bad = ~np.isfinite(numbers)
    _refuse(path, name, bad & rows[name].notna() if gaps else bad, rows[name], "a number")
    return numbers


def _refuse(path: Path, name: str, bad: pd.Series, values: pd.Series, expected: str, hint: str = "") -> None:
    """Raise ValueError where rows are bad: what stands in the first, how many they are, and which are the first of them
    (1: the first row below the header)."""
    if not bad.any():
        return
    value, rows, count = values[bad].iloc[0], values.index[bad] + 1, int(bad.sum())
    found = "nothing" if pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)[:40]
    listed = ", ".join(map(str, rows[:FIRST_ROWS])) + (", ..." if count > FIRST_ROWS else "")
    told = f"expected {expected} in every row, found {found} in row {rows[0]}"
    which = f"{count} of {len(bad)} rows are not so: {listed}"
    raise ValueError(f"{path}: {name}: {told} ({which}); {hint or 'mend them or leave them out'}")


def _missing(path: Path, rows: pd.DataFrame, wanted: str, option: str) -> ValueError:
    there = ", ".join(map(str, rows.columns)) or "none"
    return ValueError(f"{path}: missing column: {wanted}; it has {there}; name another with {option}")


def fits(path: Path, rows: pd.DataFrame, least: int) -> tuple[dict[str, Fit], dict[str, str]]:
    """Group -> its line, and group -> why it has none. Raises ValueError when no group has one."""
    found, why_not = {}, {}
    for group, here in rows.groupby("group"):
        try:
            found[group] = regression.fit(here["cold"], here["ms"], regression.quantile_labels(here["cold"], least))
        except ValueError as error:
            why_not[group] = f"{error}; a bin takes {least}"
    if not found:
        group, why = next(iter(why_not.items()))
        raise ValueError(f"{path}: no line to be drawn; {group}: {why}")
    return found, why_not


def summary(rows: pd.DataFrame, found: dict[str, Fit]) -> pd.DataFrame:
    """One row per group, columns `SUMMARY_COLUMNS`."""
    table = [
        {
            "group": group,
            **line.columns(),
            "mib_per_load": rows.loc[rows["group"] == group, "asked_bytes"].median() / MIB,
        }
        for group, line in found.items()
    ]
    return pd.DataFrame(table, columns=SUMMARY_COLUMNS)


def residual_table(found: dict[str, Fit]) -> pd.DataFrame:
    """One row per bin: what was measured, what the line says, and the difference in ms."""
    rows = [{"group": group} | row for group, line in found.items() for row in line.bin_rows()]
    return pd.DataFrame(rows)


def about_lines(path: Path, rows: pd.DataFrame) -> list[str]:
    """Where the rows come from: the document beside them, where there is one, and how many they are."""
    beside = next((p for p in (path.with_suffix(".json"), path.parent / "session.json") if p.is_file()), None)
    document = read_json(beside) if beside is not None else {}
    about = document if isinstance(document, dict) else {}
    names = ("machine", "tier", "condition", "session", "commit")
    lines = [f"{name}: {about[name]}" for name in names if about.get(name)]
    lines = lines or ["machine: not named by the rows"]
    return [*lines, f"n: {len(rows)} reads, of {path.name}", *guest_cold(about.get("lower_cache"))]


def markdown(path: Path, rows: pd.DataFrame, found: dict[str, Fit], why_not: dict[str, str]) -> str:
    """table.md: the lines and what they leave over."""
    table = summary(rows, found)
    header = "group|a ms (95%)|b ms (95%)|R^2|largest residual ms|bins|n|left out|warm ms|cold ms|MiB/read".split("|")
    header += ["GiB/s warm", "GiB/s cold"]
    lines = []
    for row in table.itertuples():
        speed = [row.mib_per_load * MIB / GIB / ms * 1e3 for ms in (row.cold0_ms, row.cold1_ms)]
        numbers = (row.cold0_ms, row.cold1_ms, row.mib_per_load, *speed)
        lines.append(
            (
                row.group,
                f"{row.a_ms:.3f} ({interval(row.a_low, row.a_high, '.3f')})",
                f"{row.b_ms:.3f} ({interval(row.b_low, row.b_high, '.3f')})",
                number(row.r2, ".3f"),
                f"{row.max_residual_ms:.3f}",
                str(row.bins),
                str(row.n),
                str(row.left_out),
                *(number(value, ".3f") for value in numbers),
            )
        )
    blocks = [
        "# Load cost against cold share",
        "\n".join(f"- {line}" for line in [*about_lines(path, rows), "takes: seconds"]),
        markdown_table(header, lines, right_from=1),
        *(["\n".join(f"- no line for {group}: {why}" for group, why in why_not.items())] if why_not else []),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def draw(path: Path, rows: pd.DataFrame, found: dict[str, Fit]) -> Figure:
    """Every read as a dot, the medians of the bins, and the line, a panel per group."""
    caption = style.caption_lines(about_lines(path, rows))
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    height = 3.1 * lines + 0.3 + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    low = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.07, right=0.985, top=1 - 0.32 / height, bottom=low, wspace=0.08, hspace=0.28)
    for place, (axes, (group, line)) in enumerate(zip(panels, found.items(), strict=False)):
        here = rows[rows["group"] == group]
        axes.plot(here["cold"], here["ms"], ".", color="#BBBBBB", markersize=3, rasterized=True)
        axes.plot([0, 1], [line.at(0), line.at(1)], color=style.COLORS[0], linewidth=1.4)
        axes.plot(
            [part.cold for part in line.bins], [part.ms for part in line.bins], "s", color="black", markersize=4.5
        )
        sign = "+" if line.b >= 0 else "-"
        text = f"{line.a:.2f} {sign} {abs(line.b):.2f} x cold, n = {line.n}"
        axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=8, bbox={"fc": "white", "ec": "none"})
        if place % columns == 0:
            axes.set_ylabel("milliseconds per read")
        if place + columns >= len(found):
            axes.set_xlabel("cold share of the read")
            axes.tick_params(labelbottom=True)
        style.dress(axes, group)
    for axes in panels:
        axes.set_visible(False)
    top = max(
        max(1.25 * rows.loc[rows["group"] == group, "ms"].quantile(0.98), line.at(1)) for group, line in found.items()
    )
    figure.axes[0].set_ylim(0, top)
    style.put_caption(figure, caption)
    return figure


def write(path: Path, columns: Columns, least: int, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    rows = read_rows(path, columns)
    found, why_not = fits(path, rows, least)
    text = markdown(path, rows, found, why_not)
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=summary(rows, found), residuals=residual_table(found))
        with style.drawing("regress"):
            style.save(draw(path, rows, found), scratch / "regress")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.fit.regress", description="Load cost through any rows.")
    parser.add_argument("rows", type=Path, metavar="ROWS", nargs="?", help="a .csv or .parquet table, one row per read")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    parser.add_argument("--cold-column", default="", help="the cold share, 0 to 1")
    parser.add_argument("--ms-column", default="", help="milliseconds of the read")
    parser.add_argument("--group-column", nargs="+", default=[], help="a line for each value of these columns")
    parser.add_argument("--bytes-column", default="", help="bytes asked for, for GiB/s")
    parser.add_argument("--least", type=int, default=regression.LEAST, help="reads that make a bin (default 30)")
    options = parser.parse_args(argv)
    columns = Columns(options.cold_column, options.ms_column, tuple(options.group_column), options.bytes_column)

    def action() -> str:
        if options.rows is None:
            raise ValueError("no rows given: snakemake regress --config rows=PATH (a .csv or .parquet table)")
        if options.least < 1:
            raise ValueError(f"--least: expected 1 read or more in a bin, found {options.least}")
        return write(options.rows, columns, options.least, options.out)

    return run_command(action, options.out)


if __name__ == "__main__":
    sys.exit(main())
