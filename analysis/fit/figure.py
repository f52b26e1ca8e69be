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
ARM_COLORS = {"ondemand": (style.COLORS[1], "#F9DCC4"), "prerouter": ("#005685", "#005685")}
POINT = 7.0  # points, a marker's size
APART = 4.0  # points that a number keeps from markers that are not its own
LINE_SPOTS = 120  # of a straight line, for numbers to keep clear of
AROUND = ((9, 0), (-9, 0), (0, 9.5), (0, -9.5), (8, 7), (-8, 7), (8, -7), (-8, -7))  # points, from a marker's centre
Number = tuple[float, float, str, str]  # cold share, ms, text, colour
EDGES = np.array([0.0, 1.0])


def save_fig3(
    loads: LoadCost, found: dict[tuple[str, str], Fit], points: Points | None, paper: PaperLoads, stem: Path
) -> None:
    """Write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("fig3"):
        style.save(draw_fig3(loads, found, points, paper), stem)


def draw_fig3(loads: LoadCost, found: dict[tuple[str, str], Fit], points: Points | None, paper: PaperLoads) -> Figure:
    caption = _caption(loads, points, paper)
    height = 4.9 + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    left, right = figure.subplots(1, 2)
    low = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.065, right=0.985, top=1 - 0.98 / height, bottom=low, wspace=0.16)
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
    return style.caption_lines(parts, *([points.session] if points is not None else []))


def _draw_loads(axes, found: dict[tuple[str, str], Fit], paper: PaperLoads) -> None:
    """The median of each bin as a point, the line through them, way by way."""
    handles = []
    for number, ((way, _), line) in enumerate(item for item in found.items() if item[0][1] == LEFT_LAYOUT):
        color, marker = style.COLORS[number], style.MARKERS[number]
        drawn = {"color": color, "linestyle": DASHES[way], "linewidth": 1.4}
        axes.plot(EDGES, line.at(EDGES), **drawn)
        axes.plot([part.cold for part in line.bins], [part.ms for part in line.bins], marker, color=color, markersize=5)
        label = f"{way}: {_words(line.a, line.b)}"
        handles.append(Line2D([], [], marker=marker, markersize=5, label=label, **drawn))
    axes.plot(EDGES, paper.a + paper.b * EDGES, **PAPER)
    handles.append(Line2D([], [], label=f"paper: {paper.a} + {paper.b} x cold", **PAPER))
    _dress(axes, f"One load, {LEFT_LAYOUT} layout", handles)


def _words(a: float, b: float) -> str:
    return f"{a:.2f} {'-' if b < 0 else '+'} {abs(b):.2f} x cold"


def _draw_arms(axes, points: Points | None, paper: PaperLoads) -> None:
    handles = []
    axes.plot(EDGES, paper.a + paper.b * EDGES, **PAPER)
    numbers = [_point(axes, row, "s", hollow=True) for row in paper.points.itertuples()]
    hollow = {"marker": "s", "markerfacecolor": "white", "color": "#555555", "linewidth": 0}
    handles.append(Line2D([], [], label="paper's six points", **hollow))
    handles.append(Line2D([], [], label="paper's line", **PAPER))
    if points is None:
        axes.text(
            0.5, 0.06, "no session of Table 3 to take arms from", transform=axes.transAxes, ha="center", fontsize=8
        )
    else:
        rows = points.rows.itertuples()
        numbers += [_point(axes, row, READING_MARKERS[row.reading], hollow=False) for row in rows]
        for reading in dict.fromkeys(points.rows["reading"]):
            drawn = {"marker": READING_MARKERS[reading], "color": "#555555"}
            if reading in points.lines:
                a, b, _ = points.lines[reading]
                axes.plot(EDGES, a + b * EDGES, color="#999999", linewidth=1.2)
                handles.append(Line2D([], [], label=f"ours, {reading}: {_words(a, b)}", **drawn))
            else:
                handles.append(Line2D([], [], label=f"ours, {reading}", linewidth=0, **drawn))
    for arm, (edge, face) in ARM_COLORS.items():
        square = {"marker": "s", "linewidth": 0, "markersize": 7, "color": face, "markeredgecolor": edge}
        handles.append(Line2D([], [], label=arm, **square))
    _dress(axes, "Waiting per load of each arm (number: its K)", handles)
    _number(axes, numbers)


def _point(axes, row, marker: str, hollow: bool) -> Number:
    """Draw one arm's marker; its K, to be written when the axes have their limits."""
    edge, face = ARM_COLORS[row.arm.partition("-")[0]]
    place = (row.cold_share, row.ms if hollow else getattr(row, QUANTITY))
    color = "white" if hollow else face
    axes.plot(*place, marker, color=color, markeredgecolor=edge, markersize=POINT, markeredgewidth=1.2, zorder=3)
    return *place, str(row.k), edge


def _number(axes, numbers: list[Number]) -> None:
    """Write each number beside its marker, where of `AROUND` it covers least of markers, lines and other numbers."""
    centres = axes.transData.transform([number[:2] for number in numbers]) * 72 / axes.figure.dpi
    markers = [_box(centre, POINT / 2 + APART, POINT / 2 + APART) for centre in centres]
    taken = []
    for line in (line for line in axes.lines if line.get_linestyle() != "None"):
        ends = axes.transData.transform(line.get_xydata()) * 72 / axes.figure.dpi
        taken += [_box(spot, 1, 1) for spot in np.linspace(ends[0], ends[-1], LINE_SPOTS)]
    for own, ((*place, text, color), centre) in enumerate(zip(numbers, centres, strict=True)):
        there = [*taken, *markers[:own], *markers[own + 1 :]]
        boxes = {around: _box(centre + around, 3.2 * len(text), 4.2) for around in AROUND}
        shared = {around: sum(_shared(box, other) for other in there) for around, box in boxes.items()}
        best = min(shared, key=shared.get)
        taken.append(boxes[best])
        told = {"fontsize": 7.5, "ha": "center", "va": "center", "color": color, "weight": "bold", "zorder": 4}
        axes.annotate(text, place, xytext=best, textcoords="offset points", **told)


def _box(centre: np.ndarray, half_width: float, half_height: float) -> np.ndarray:
    """Left, bottom, right, top, in points."""
    half = np.array([half_width, half_height])
    return np.concatenate([centre - half, centre + half])


def _shared(one: np.ndarray, other: np.ndarray) -> float:
    """Area that two boxes share."""
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    return float(np.prod(np.clip(sides, 0, None)))


def _dress(axes, title: str, handles: list) -> None:
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(0, max(2.8, 1.06 * axes.get_ylim()[1]))
    axes.set_xlabel("cold share of the load")
    axes.set_ylabel("milliseconds per load")
    style.dress(axes, title)
    axes.set_title(title, loc="left", weight="bold", pad=50)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.015, 1.0), "ncols": 2, "borderaxespad": 0.2}
    axes.legend(handles=handles, fontsize=7.5, frameon=False, labelspacing=0.35, **place)
