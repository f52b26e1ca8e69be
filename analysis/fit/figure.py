"""Figure 3 from our rows: what a load costs by its cold share, on the left load by load, on the right arm by arm.

Knows nothing of files other than the two that it writes. The paper's line stands in both panels, in another unit of
load and on another machine: its shape compares, its height does not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.fit.paper_loads import PaperLoads
from analysis.fit.points import QUANTITY, READINGS, Points
from analysis.fit.regression import Fit
from analysis.loads import LoadCost

LEFT_LAYOUT = "stacked"  # the released layout, the paper's
DASHES = {"mmap": "-", "pread": "-", "willneed": "-", "direct": (0, (1, 1.2))}
PAPER = {"color": "#000000", "linestyle": "--", "linewidth": 1.2}
READING_MARKERS = dict(zip(READINGS, ("o", "D"), strict=True))
# Colour of the edge and the number, and of the filling, pale against dark: the arms differ in grey, too.
ARM_COLORS = {"ondemand": (style.COLORS[1], "#F9DCC4"), "prerouter": ("white", "#005685")}
EDGES = np.array([0.0, 1.0])


def save_fig3(
    loads: LoadCost, found: dict[tuple[str, str], Fit], points: Points | None, paper: PaperLoads, stem: Path
) -> None:
    """Write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("fig3"):
        style.save(draw_fig3(loads, found, points, paper), stem)


def draw_fig3(loads: LoadCost, found: dict[tuple[str, str], Fit], points: Points | None, paper: PaperLoads) -> Figure:
    caption = _caption(loads, points, paper)
    height = 4.3 + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    left, right = figure.subplots(1, 2)
    low = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.065, right=0.985, top=1 - 0.32 / height, bottom=low, wspace=0.16)
    _draw_loads(left, found, paper)
    _draw_arms(right, points, paper)
    style.put_caption(figure, caption)
    return figure


def _caption(loads: LoadCost, points: Points | None, paper: PaperLoads) -> list[str]:
    sizes = sorted({int(n) for n in loads.rows.groupby(["way", "layout", "target_cold"]).size()})
    n = "-".join(map(str, sorted({sizes[0], sizes[-1]})))
    parts = [
        str(loads.about.get("machine") or "machine not named"),
        str(loads.about.get("tier") or "tier not named"),
        f"left: {loads.mib_per_load:.2f} MiB per load, cold share set per load, n = {n} loads per point, "
        f"session {loads.session}",
    ]
    if points is not None:
        least, most = points.rows["n"].min(), points.rows["n"].max()
        parts.append(
            f"right: condition {points.session.condition}, n = {least}-{most} probed loads per point, session "
            f"{points.session.name}"
        )
    parts.append(f"paper: {paper.machine}; its points, and ours on the right, are waiting per load by our inference")
    return style.caption_lines(parts)


def _draw_loads(axes, found: dict[tuple[str, str], Fit], paper: PaperLoads) -> None:
    """The median of each bin as a point, the line through them, way by way."""
    handles = []
    for number, ((way, _), line) in enumerate(item for item in found.items() if item[0][1] == LEFT_LAYOUT):
        color, marker = style.COLORS[number], style.MARKERS[number]
        drawn = {"color": color, "linestyle": DASHES[way], "linewidth": 1.4}
        axes.plot(EDGES, line.at(EDGES), **drawn)
        axes.plot([part.cold for part in line.bins], [part.ms for part in line.bins], marker, color=color, markersize=5)
        label = f"{way}: {line.a:.2f} {line.b:+.2f} x cold".replace("+", "+ ").replace("-", "- ")
        handles.append(Line2D([], [], marker=marker, markersize=5, label=label, **drawn))
    axes.plot(EDGES, paper.a + paper.b * EDGES, **PAPER)
    handles.append(Line2D([], [], label=f"paper: {paper.a} + {paper.b} x cold", **PAPER))
    _dress(axes, f"One load, {LEFT_LAYOUT} layout", handles)


def _draw_arms(axes, points: Points | None, paper: PaperLoads) -> None:
    handles = []
    axes.plot(EDGES, paper.a + paper.b * EDGES, **PAPER)
    for row in paper.points.itertuples():
        _point(axes, row, "s", hollow=True)
    hollow = {"marker": "s", "markerfacecolor": "white", "color": "#555555", "linewidth": 0}
    handles.append(Line2D([], [], label="paper's six points", **hollow))
    handles.append(Line2D([], [], label="paper's line", **PAPER))
    if points is None:
        axes.text(
            0.5, 0.06, "no session of Table 3 to take arms from", transform=axes.transAxes, ha="center", fontsize=8
        )
    else:
        for row in points.rows.itertuples():
            _point(axes, row, READING_MARKERS[row.reading], hollow=False)
        for reading in dict.fromkeys(points.rows["reading"]):
            drawn = {"marker": READING_MARKERS[reading], "color": "#555555"}
            if reading in points.lines:
                a, b, _ = points.lines[reading]
                axes.plot(EDGES, a + b * EDGES, color="#999999", linewidth=1.2)
                handles.append(Line2D([], [], label=f"ours, {reading}: {a:.2f} + {b:.2f} x cold", **drawn))
            else:
                handles.append(Line2D([], [], label=f"ours, {reading}", linewidth=0, **drawn))
    for arm, (text, face) in ARM_COLORS.items():
        edge = face if text == "white" else text
        handles.append(
            Line2D([], [], marker="s", linewidth=0, markersize=7, color=face, markeredgecolor=edge, label=arm)
        )
    _dress(axes, "Waiting per load of each arm (number: its K)", handles)


def _point(axes, row, marker: str, hollow: bool) -> None:
    """A marker with its K inside."""
    text, face = ARM_COLORS[row.arm.partition("-")[0]]
    place = (row.cold_share, row.ms if hollow else getattr(row, QUANTITY))
    edge = text if text != "white" else face
    if hollow:
        text, face = edge, "white"
    size = 11 if marker == "D" else 12
    axes.plot(*place, marker, color=face, markeredgecolor=edge, markersize=size, markeredgewidth=1.2, zorder=3)
    axes.annotate(f"{row.k}", place, fontsize=7.5, ha="center", va="center", color=text, weight="bold", zorder=4)


def _dress(axes, title: str, handles: list) -> None:
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(0, max(2.8, axes.get_ylim()[1]))
    axes.set_xlabel("cold share of the load")
    axes.set_ylabel("milliseconds per load")
    axes.legend(handles=handles, loc="upper left", fontsize=7.5, frameon=False, labelspacing=0.35)
    style.dress(axes, title)
