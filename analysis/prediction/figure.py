"""The figure of the prediction: predicted beside measured speed, here on the left, the paper's machine on the right.

A row for each K and arm: what was measured, 10% either way of it in grey, and what is predicted. Arms differ by colour
and marker as well as by their row's name, so the figure reads in grey. Knows nothing of files other than the two that
it writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.figures import ARM_STYLES

BAND = 0.10
BAND_COLOR = "#D9D9D9"
ROW_INCHES = 0.25
K_POINTS = 128  # from a panel's axis to the left of the names of its groups
WORDS = {"m2-16gb": "M2, 16 GB", "m4pro-24gb": "M4 Pro, 24 GB"}


def save_predict_figure(table: pd.DataFrame, headline: str, papers: Sequence[str], stem: Path) -> None:
    """Draw the summary and write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("predict"):
        style.save(draw_predict(table, headline, papers), stem)


def draw_predict(table: pd.DataFrame, headline: str, papers: Sequence[str]) -> Figure:
    """The figure, not saved. Of the paper's machines only the first reserve of memory is drawn."""
    of_paper = table["machine"].isin(papers)
    here, paper = table[~of_paper], table[of_paper].drop_duplicates(["machine", "k", "arm"])
    drawn = [_rows(part) for part in (here, paper)]
    lines = style.caption_lines(_caption(here, paper))
    below, above = 0.95 + style.LINE_INCHES * len(lines), 0.85
    rows = max(1.0, *((style.places_by_k(part["k"]) or [0])[-1] + 1 for part in drawn))
    height = above + below + ROW_INCHES * rows + 0.3
    figure = Figure(figsize=(9.2, height))
    panels = figure.subplots(1, 2)
    names = " and ".join(WORDS.get(name, name) for name in drawn[1]["machine"].unique())
    _panel(panels[0], drawn[0], "This machine")
    _panel(panels[1], drawn[1], f"The paper's machine: {names}" if names else "The paper's machines")
    figure.suptitle(
        textwrap.fill(headline, style.CAPTION_COLUMNS), x=0.02, y=1 - 0.08 / height, ha="left", fontsize=9, va="top"
    )
    _legend(figure, (below - 0.78) / height)
    style.put_caption(figure, lines)
    figure.subplots_adjust(left=0.2, right=0.985, top=1 - above / height, bottom=below / height, wspace=0.74)
    return figure


def _rows(table: pd.DataFrame) -> pd.DataFrame:
    known = table.dropna(subset=["tok_s", "measured_tok_s"])
    order = known["arm"].map({name: place for place, name in enumerate(ARM_STYLES)})
    return known.assign(order=order).sort_values(["machine", "k", "order"], ignore_index=True)


def _legend(figure: Figure, bottom: float) -> None:
    grey = {"color": "#444444", "linewidth": 0}
    handles = [
        Line2D([], [], marker="|", markersize=11, markeredgewidth=2, label="measured (median, min-max)", **grey),
        Patch(facecolor=BAND_COLOR, label="10% either way"),
        Line2D([], [], marker="o", markersize=6, label="predicted", **grey),
        Line2D([], [], marker="o", markersize=6, markerfacecolor="white", label="predicted, page faults", **grey),
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, bbox_to_anchor=(0.5, bottom)
    )


def _panel(axes, table: pd.DataFrame, title: str) -> None:
    """Rows by K, then in the order of `ARM_STYLES`."""
    style.dress(axes, title)
    axes.set_xlabel("tok/s")
    axes.tick_params(axis="y", length=0)
    if table.empty:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing to compare", ha="center", va="center", transform=axes.transAxes)
        return
    places = style.places_by_k(table["k"])
    for place, row in zip(places, table.itertuples(), strict=True):
        middle, arm = row.measured_tok_s, ARM_STYLES[row.arm]
        axes.barh(place, 2 * BAND * middle, 0.74, left=(1 - BAND) * middle, color=BAND_COLOR, linewidth=0)
        if not pd.isna(row.measured_low):
            axes.hlines(place, row.measured_low, row.measured_high, color="#444444", linewidth=1)
        axes.vlines(middle, place - 0.37, place + 0.37, color="#444444", linewidth=2)
        face = {"markerfacecolor": "white"} if row.arm.endswith("-mmap") else {"markeredgecolor": "white"}
        axes.plot(row.tok_s, place, arm.marker, color=arm.color, markersize=6.5, zorder=3, **face)
    axes.set_ylim(places[-1] + 0.8, -0.8)
    axes.set_xlim(0, 1.1 * table[["tok_s", "measured_tok_s", "measured_high"]].max().max())
    axes.grid(visible=False, axis="y")
    axes.set_yticks(places, table["arm"] + table["note"].ne("").map({True: " *", False: ""}))
    for k in table["k"].unique():
        group = [place for place, value in zip(places, table["k"], strict=True) if value == k]
        place = {"xycoords": axes.get_yaxis_transform(), "xytext": (-K_POINTS, 0), "textcoords": "offset points"}
        axes.annotate(f"K = {k}", (0, sum(group) / len(group)), weight="bold", va="center", **place)


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
            parts.append("machines without a known compute time have no row")
        if paper["note"].ne("").any():
            parts.append("* no prediction: the compute time comes from that row")
    return parts
