"""The figure of an arm against itself: every pair's ratio in time order on the left, every run's speed on the right.

Knows nothing of files other than the two that it writes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.rows import Session

if TYPE_CHECKING:
    from analysis.noise import Cell

RUN, TWIN, MEAN = "#0072B2", "#D55E00", "#000000"
BAND = "#D9D9D9"


def save_noise_figure(session: Session, cell: Cell, stem: Path) -> None:
    """Draw the pairs and write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("noise"):
        style.save(draw_noise(session, cell), stem)


def draw_noise(session: Session, cell: Cell) -> Figure:
    """The figure itself."""
    parts = [session.info.machine or "machine not named", session.info.tier or "", f"condition {session.condition}"]
    pairs = f"n = {len(cell.pairs)} pairs of {cell.arm} at K={cell.k}"
    caption = style.caption_lines([*parts, pairs, f"session {session.name}"], session)
    height = 3.6 + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    ratios, speeds = figure.subplots(1, 2)
    low = (0.66 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.08, right=0.985, top=1 - 0.62 / height, bottom=low, wspace=0.22)
    _draw_ratios(ratios, cell)
    _draw_speeds(speeds, cell)
    rounds = cell.pairs.index.tolist()
    ticks = range(0, len(rounds), max(1, math.ceil(len(rounds) / 12)))
    for axes in (ratios, speeds):
        axes.set_xlabel("round, in the order in which it was run")
        axes.set_xticks(ticks, [str(rounds[tick] + 1) for tick in ticks])
    style.put_caption(figure, caption)
    return figure


def _draw_ratios(axes, cell: Cell) -> None:
    """Twin over run, with the geometric mean and its interval behind the pairs."""
    ratio, places = cell.ratio, range(len(cell.pairs))
    if not math.isnan(ratio.ci_low):
        axes.axhspan(ratio.ci_low, ratio.ci_high, color=BAND, linewidth=0)
    axes.axhline(1, color="#555555", linewidth=0.8, linestyle="--")
    axes.axhline(ratio.ratio, color=MEAN, linewidth=1.4)
    axes.plot(places, np.exp(cell.logs), "o", color=RUN, markeredgecolor="white", markeredgewidth=0.6, markersize=6)
    axes.set_ylabel("speed of the repeat over the run")
    style.dress(axes, f"A/A ratio: {ratio}")
    handles = [
        Line2D([], [], color=RUN, marker="o", linewidth=0, label="one pair"),
        Line2D([], [], color=MEAN, linewidth=1.4, label="mean"),
        Patch(facecolor=BAND, label="95% interval"),
    ]
    _legend(axes, handles)


def _draw_speeds(axes, cell: Cell) -> None:
    """Both runs of each pair, and the line that says how speed changed over the session."""
    places = np.arange(len(cell.pairs))
    point = {"markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 6}
    axes.plot(places, cell.pairs["arm"], "o", color=RUN, **point)
    axes.plot(places, cell.pairs["aa"], "s", color=TWIN, **point)
    drift, rounds = cell.drift, cell.pairs.index.to_numpy(float)
    title = "Speed"
    if not math.isnan(drift.ci_low):
        middle = np.log(cell.speeds).mean()
        axes.plot(places, np.exp(middle + drift.slope * (rounds - rounds.mean())), color=MEAN, linewidth=1.4)
        low, high = math.expm1(drift.ci_low), math.expm1(drift.ci_high)
        title = f"Drift: {math.expm1(drift.slope):+.1%} per round ({low:+.1%} to {high:+.1%})"
    axes.set_ylabel("tokens per second")
    style.dress(axes, title)
    handles = [
        Line2D([], [], color=RUN, marker="o", linewidth=0, label="run"),
        Line2D([], [], color=TWIN, marker="s", linewidth=0, label="its repeat"),
        Line2D([], [], color=MEAN, linewidth=1.4, label="trend"),
    ]
    _legend(axes, handles)


def _legend(axes, handles: list) -> None:
    """Between the title and the panel."""
    axes.set_title(axes.get_title(loc="left"), loc="left", weight="bold", pad=22)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.015, 1.0), "ncols": len(handles)}
    axes.legend(handles=handles, frameon=False, fontsize=8, handlelength=1.5, borderaxespad=0.2, **place)
