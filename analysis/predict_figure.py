"""The figure of the prediction: predicted against measured speed, here on the left, the paper's machines on the right.

Knows nothing of files other than the two that it writes. Points on the line agree; the band is 10% either way. Arms
differ by colour and marker, K stands beside each point, so the figure reads in grey.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.figures import ARM_STYLES

BAND = 0.10
WORDS = {"m2-16gb": "M2, 16 GB", "m4pro-24gb": "M4 Pro, 24 GB"}


def save_predict_figure(table: pd.DataFrame, headline: str, papers: Sequence[str], stem: Path) -> None:
    """Draw the summary and write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("predict"):
        style.save(draw_predict(table, headline, papers), stem)


def draw_predict(table: pd.DataFrame, headline: str, papers: Sequence[str]) -> Figure:
    """The figure, not saved. Of the paper's machines only the first reserve of memory is drawn."""
    of_paper = table["machine"].isin(papers)
    here, paper = table[~of_paper], table[of_paper].drop_duplicates(["machine", "k", "arm"])
    lines = style.caption_lines(_caption(here, paper))
    height = 4.7 + style.LINE_INCHES * len(lines)
    figure = Figure(figsize=(9, height))
    panels = figure.subplots(1, 2)
    _panel(panels[0], here, "This machine", "measured tok/s (median, smallest to largest round)")
    names = " and ".join(WORDS.get(name, name) for name in paper.dropna(subset=["tok_s"])["machine"].unique())
    _panel(panels[1], paper, f"The paper's machine: {names}" if names else "The paper's machines", "the paper's tok/s")
    figure.suptitle(textwrap.fill(headline, style.CAPTION_COLUMNS), x=0.07, ha="left", fontsize=9)
    handles = [
        Line2D([], [], color=arm.color, marker=arm.marker, linewidth=0, markersize=6, label=name, **_face(name))
        for name, arm in ARM_STYLES.items()
    ]
    handles.append(Line2D([], [], color="black", linewidth=1, label="equal, and 10% either way"))
    bottom = (0.75 + style.LINE_INCHES * len(lines)) / height
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
        bbox_to_anchor=(0.5, bottom - 0.56 / height),
    )
    style.put_caption(figure, lines)
    figure.subplots_adjust(left=0.07, right=0.98, top=1 - 0.75 / height, bottom=bottom + 0.42 / height, wspace=0.18)
    return figure


def _panel(axes, table: pd.DataFrame, title: str, label: str) -> None:
    style.dress(axes, title)
    axes.set_xlabel(label)
    axes.set_ylabel("predicted tok/s")
    drawn = table.dropna(subset=["tok_s", "measured_tok_s"])
    if drawn.empty:
        axes.text(0.5, 0.5, "nothing to compare", ha="center", va="center", transform=axes.transAxes)
        return
    top = 1.15 * max(drawn["tok_s"].max(), drawn["measured_tok_s"].max(), drawn["measured_high"].fillna(0).max())
    axes.fill_between([0, top], [0, (1 - BAND) * top], [0, (1 + BAND) * top], color="#DDDDDD", linewidth=0)
    axes.plot([0, top], [0, top], color="black", linewidth=1)
    for row in drawn.itertuples():
        arm = ARM_STYLES[row.arm]
        if not pd.isna(row.measured_low):
            axes.hlines(row.tok_s, row.measured_low, row.measured_high, color=arm.color, linewidth=1)
        axes.plot(row.measured_tok_s, row.tok_s, arm.marker, color=arm.color, markersize=7, zorder=3, **_face(row.arm))
        right, below = row.arm.startswith("prerouter"), row.arm in ("prerouter", "ondemand-mmap")  # a corner for each
        axes.annotate(
            f"K={row.k}",
            (row.measured_tok_s, row.tok_s),
            xytext=(7 if right else -7, -8 if below else 8),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=7,
        )
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)


def _face(arm: str) -> dict[str, str]:
    """Page faults are drawn hollow."""
    return {"markerfacecolor": "white"} if arm.endswith("-mmap") else {"markeredgecolor": "white"}


def _caption(here: pd.DataFrame, paper: pd.DataFrame) -> list[str]:
    parts = []
    if len(here):
        row = here.iloc[0]
        parts += [f"{row['machine']}, {row['tier']}", f"page cache of {row['cache_mib']:.0f} MiB"]
        parts += [f"n = {here['rounds'].max():.0f} rounds", f"session {row['session']}"]
    if len(paper):
        caches = ", ".join(
            f"{name}: {rows['cache_mib'].iloc[0] / 1024:g} GiB" for name, rows in paper.groupby("machine")
        )
        parts.append(f"the paper's machines: generated routes, page cache of {caches}")
        if paper["tok_s"].isna().any():
            parts.append("machines without a known compute time have no point")
        parts.append("their prerouter points are not predictions: compute time comes from those rows")
    return parts
