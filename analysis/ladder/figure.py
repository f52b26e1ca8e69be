"""The figure of the ladder: exact match, cross-entropy and recall, a row per rung, controls below.

Knows nothing of files other than the two that it writes. Rungs and controls differ by marker as well as colour, so that
the figure reads in grey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.figures import CLEAR
from analysis.ladder.pairs import Measured, loss, seeds_text, share
from analysis.ladder.rows import DEPLOYED, INT4, RUNGS, Ladder, Side
from analysis.statistics import LEAST_FOR_INTERVAL

RUNG = {"color": style.COLORS[0], "marker": "o", "markersize": 6}
CONTROL = {"color": style.COLORS[1], "marker": "s", "markersize": 5.5, "markerfacecolor": "white"}
SEED = {"color": "#555555", "marker": "|", "linewidth": 0, "markersize": 7, "markeredgewidth": 1}
NOTE = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
UNITS = ("points of 100", "nats per answer token", "share of experts")
GAP = 0.9  # rows between rungs and controls


def save_ladder_figure(ladder: Ladder, stem: Path) -> None:
    """Write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("ladder"):
        style.save(draw(ladder), stem)


def draw(ladder: Ladder) -> Figure:
    """The figure itself."""
    caption = style.caption_lines(_caption(ladder))
    main = sum(side.rung in RUNGS for side in ladder.sides)
    places = [place + (GAP if place >= main else 0) for place in range(len(ladder.sides))]
    height = 1.5 + 0.3 * (places[-1] + 1) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1.1, 0.9))
    bottom = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.2, right=0.985, top=1 - 0.68 / height, bottom=bottom, wspace=0.07)
    exact = [share(ladder.values("exact", {side: 1.0}), ladder.seeds_of(side)) for side in ladder.sides]
    entropy = [loss(ladder.values("cross_entropy", {side: 1.0}), ladder.seeds_of(side)) for side in ladder.sides]
    _values(axes[0], ladder, places, exact, "exact", 100)
    _values(axes[1], ladder, places, entropy, "cross_entropy", 1)
    _recalls(axes[2], ladder, places)
    low = min(part.low if not math.isnan(part.low) else part.value for part in exact)
    axes[0].set_xlim(max(-2, low - 4), 101.5 + 0.14 * (101.5 - low))
    axes[0].set_xticks([tick for tick in range(0, 101, 20 if low < 50 else 10) if tick >= low - 4])
    axes[1].set_xlim(left=0)
    told = zip(axes, ("Exact match", "Cross-entropy", "Recall"), UNITS, strict=True)
    for panel, title, unit in told:
        style.dress(panel, title)
        panel.set_title(title, loc="left", weight="bold", pad=22)  # the legend stands below the titles
        panel.set_xlabel(unit)
        panel.grid(visible=False, axis="y")
        panel.tick_params(axis="y", length=0)
    axes[0].set_yticks(places, [f"{side.rung}, K={side.k}" for side in ladder.sides])
    axes[0].set_ylim(places[-1] + 0.7, -0.7)
    if main < len(places):
        beside = {"transform": axes[0].get_yaxis_transform(), "ha": "right", "va": "center", "weight": "bold"}
        axes[0].text(-0.02, places[main] - (1 + GAP) / 2, "controls", **beside)
        for panel in axes:
            panel.axhline(places[main] - (1 + GAP) / 2, color="#999999", linewidth=0.6)
    _legend(axes[0], ladder, main < len(places))
    style.put_caption(figure, caption)
    return figure


def _caption(ladder: Ladder) -> list[str]:
    controlled = sorted({seed for side in ladder.sides if side.rung not in RUNGS for seed in ladder.seeds_of(side)})
    return [
        ladder.machine,
        f"{ladder.tier}, K={ladder.k}",
        f"n = {len(next(iter(ladder.cells.values()))):,} held-out problems",
        f"rungs: {seeds_text(ladder.seeds)}",
        f"controls: {seeds_text(controlled)}" if controlled else "",
        "condition: none",
        f"95% intervals over problems{' or seeds, the wider' if len(ladder.seeds) >= LEAST_FOR_INTERVAL else ''}",
        "recall: mean, least and best layer",
        f"session {ladder.session}",
    ]


def _values(axes, ladder: Ladder, places: Sequence[float], values: Sequence[Measured], column: str, unit: float):
    """Mean and interval of each row, every seed as a tick where there are several, the base's value as a line."""
    base = ladder.sides.index(Side(INT4, ladder.k))
    axes.axvline(values[base].value, color="#555555", linewidth=0.9, linestyle="--", zorder=1)
    for side, place, value in zip(ladder.sides, places, values, strict=True):
        if math.isnan(value.value):
            if side.rung == DEPLOYED:
                axes.annotate("not known of the engine", (0, place), xytext=(6, 0), style="italic", bbox=CLEAR, **NOTE)
            continue
        look = RUNG if side.rung in RUNGS else CONTROL
        if not math.isnan(value.low):
            axes.plot([value.low, value.high], [place, place], color=look["color"], linewidth=1.6, zorder=2)
        seeds = unit * ladder.values(column, {side: 1.0}).mean(axis=1)
        if len(seeds) > 1:
            axes.plot(seeds, [place + 0.27] * len(seeds), zorder=2, **SEED)
        axes.plot(value.value, place, linewidth=0, zorder=3, **look)
        if column == "exact":
            end = value.value if math.isnan(value.high) else value.high
            axes.annotate(f"{value.value:.1f}", (end, place), xytext=(6, 0), bbox=CLEAR, **NOTE)


def _recalls(axes, ladder: Ladder, places: Sequence[float]) -> None:
    """Mean over predicted layers and seeds, a thin line from the least layer to the best."""
    for side, place in zip(ladder.sides, places, strict=True):
        values = ladder.recall_of(side)
        if not values.size:
            continue
        look = RUNG if side.rung in RUNGS else CONTROL
        axes.plot([values.min(), values.max()], [place, place], color=look["color"], linewidth=0.9, zorder=2)
        axes.plot(values.mean(), place, linewidth=0, zorder=3, **look)
    axes.set_xlim(0, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])


def _legend(axes, ladder: Ladder, controls: bool) -> None:
    handles = [Line2D([], [], linewidth=1.6, label="rung, 95%", **RUNG)]
    if controls:
        handles.append(Line2D([], [], linewidth=1.6, label="control", **CONTROL))
    if len(ladder.seeds) > 1:
        handles.append(Line2D([], [], label="a seed", **SEED))
    handles.append(Line2D([], [], color="#555555", linewidth=0.9, linestyle="--", label=f"int4, K={ladder.k}"))
    style.legend_above(axes, handles)
