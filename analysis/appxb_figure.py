"""The figure of appendix B: where the host's time of a step goes, one bar per arm.

Knows nothing of files other than the two that it writes (PNG and SVG). The parts of a step differ by colour and by
hatch or lightness, so that the figure reads in grey.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.rows import Session

# Summary column, label, colour, hatch; in the order of a step.
PARTS = (
    ("wait_ms", "wait for reads, or read, stack, patch", "#0B3C5D", ""),
    ("route_ms", "router's choice", "#E69F00", "////"),
    ("build_ms", "build graphs", "#F4D9B0", ""),
    ("launch_ms", "launch", "#56B4E9", "...."),
    ("evaluate_ms", "evaluate", "#DDE8F0", ""),
    ("sample_ms", "sample", "#CC79A7", "xxxx"),
)
ROW_INCHES = 0.42


def save_figure(session: Session, table: pd.DataFrame, words: list[str], stem: Path) -> None:
    """Draw the summary `table` of a session and write `stem`.png and `stem`.svg. OSError passes.

    `words`: for each row of the table its name and, on a second line, what the arm is.
    """
    with style.drawing("appxB"):
        style.save(draw(session, table, words), stem)


def draw(session: Session, table: pd.DataFrame, words: list[str]) -> Figure:
    """The figure itself."""
    rounds = "-".join(map(str, sorted({table["rounds"].min(), table["rounds"].max()})))
    caption = style.caption_lines(
        [
            session.info.machine or "machine not named",
            f"{table['tier'].iloc[0]}, K={table['k'].iloc[0]}",
            f"condition {session.condition}",
            f"n = {rounds} rounds, medians",
            f"session {session.name}",
        ],
        session,
    )
    height = 1.5 + ROW_INCHES * len(table) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    axes = figure.subplots()
    figure.subplots_adjust(
        left=0.37, right=0.985, top=1 - 0.85 / height, bottom=(0.62 + style.LINE_INCHES * len(caption)) / height
    )
    reached = pd.Series(0.0, index=table.index)
    for column, label, color, hatch in PARTS:
        widths = table[column].fillna(0)
        axes.barh(
            table.index, widths, 0.66, left=reached, label=label, color=color, hatch=hatch, edgecolor="#222222", lw=0.6
        )
        reached = reached + widths
    for place, row, end in zip(table.index, table.itertuples(), reached, strict=True):
        text = f"{row.step_ms:.0f} ms, {row.tok_s_median:.1f} tok/s" if row.rounds else "void"
        axes.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(0, 1.28 * reached.max())
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_yticks(table.index, words, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds of the engine thread per decode step")
    style.dress(axes, "")
    axes.grid(visible=False, axis="y")
    figure.text(0.012, 1 - 0.1 / height, "Where the host's time of a step goes", weight="bold", va="top", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.005, 1 - 0.38 / height),
        ncols=len(PARTS),
        frameon=False,
        fontsize=8,
        handlelength=1.5,
        handletextpad=0.5,
        columnspacing=1.1,
    )
    style.put_caption(figure, caption)
    return figure
