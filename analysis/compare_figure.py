"""The figure of the comparison: gains within each machine's session on the left, its speeds on the right, K by K.

Rows are shared by both panels, one per K and session; a session keeps its colour and marker in every K, and the legend
below names it with tier and condition. Knows nothing of files other than the two that it writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.rows import NO_VERDICT

if TYPE_CHECKING:
    from analysis.compare import Line

ROW_INCHES, LEGEND_INCHES, GROUP_GAP = 0.24, 0.19, 0.9
HOLLOW, PALE = "white", 0.35
NO_INTERVAL = "no interval"


def save_figure(lines: Sequence[Line], missing: Sequence[str], stem: Path) -> None:
    """Draw and write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("compare"):
        style.save(draw(lines, missing), stem)


def draw(lines: Sequence[Line], missing: Sequence[str] = ()) -> Figure:
    """The figure itself; `lines` sorted by K. `missing`: `MACHINE: why it has no line; more of it`, for the caption."""
    looks = _looks(lines)
    absent = [f"not here: {one.partition(';')[0]}" for one in missing]
    caption = style.caption_lines([*_caption(lines), *absent])
    below = 0.5 + LEGEND_INCHES * (len(looks) + 1) + style.LINE_INCHES * len(caption) + 0.25
    places = _places(lines)
    height = 0.55 + below + ROW_INCHES * (places[-1] + 1.6)
    figure = Figure(figsize=(9.2, height))
    gains, speeds = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.07, right=0.985, top=1 - 0.4 / height, bottom=below / height, wspace=0.06)
    style.dress(gains, "gain of the prerouter, within each session (95%)")
    style.dress(speeds, "speed, tok/s")
    gains.axvline(1, color="#000000", linewidth=0.8)
    drawn = [1.0, *(line.gain for line in lines if not math.isnan(line.gain))]
    middle = (min(drawn) + max(drawn)) / 2
    for line, place in zip(lines, places, strict=True):
        color, marker = looks[line.series]
        alpha = PALE if line.note.startswith(NO_VERDICT) else 1
        if not math.isnan(line.gain):
            if not math.isnan(line.gain_low):
                gains.plot([line.gain_low, line.gain_high], [place, place], color=color, linewidth=1.6, alpha=alpha)
            gains.plot(line.gain, place, marker=marker, color=color, markersize=6, alpha=alpha)
            if math.isnan(line.gain_low):
                side = -1 if line.gain > middle else 1  # towards the middle, where there is room
                at = {"xytext": (7 * side, 0), "textcoords": "offset points", "ha": "right" if side < 0 else "left"}
                gains.annotate(NO_INTERVAL, (line.gain, place), va="center", fontsize=7, color="#444444", **at)
        both = (line.ondemand_tok_s, line.prerouter_tok_s)
        speeds.plot(both, [place, place], color=color, linewidth=1, alpha=0.6)
        for value, face in zip(both, (HOLLOW, color), strict=True):
            speeds.plot(value, place, marker=marker, markeredgecolor=color, markerfacecolor=face, markersize=6)
    _axes(gains, speeds, lines, places)
    _legend(figure, looks, style.LINE_INCHES * len(caption) + 0.2)
    style.put_caption(figure, caption)
    return figure


def _caption(lines: Sequence[Line]) -> list[str]:
    rounds = sorted({line.rounds for line in lines if line.rounds})
    n = f"n = {'-'.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} rounds" if rounds else "n not stated"
    sessions = sorted({line.session for line in lines if line.session != "paper"})
    machines = list(dict.fromkeys(line.machine for line in lines))
    told = "machine, tier and condition in each name; ratios within a session only"
    pale = "pale: no verdict" if any(line.note.startswith(NO_VERDICT) for line in lines) else ""
    return [", ".join(machines), told, pale, n, f"session {', '.join(sessions)}" if sessions else ""]


def _looks(lines: Sequence[Line]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each series, in order of appearance."""
    series = list(dict.fromkeys(line.series for line in lines))
    pairs = zip(itertools.cycle(style.COLORS), itertools.cycle(style.MARKERS), strict=False)
    return dict(zip(series, pairs, strict=False))


def _places(lines: Sequence[Line]) -> list[float]:
    """The height of each line: one apart, with a gap where K changes."""
    place, places = 0.0, []
    for before, line in zip([lines[0], *lines], lines, strict=False):
        place += GROUP_GAP if before.k != line.k else 0
        places.append(place)
        place += 1
    return places


def _axes(gains, speeds, lines: Sequence[Line], places: Sequence[float]) -> None:
    gains.set_ylim(places[-1] + 0.8, -0.8)
    middles = {
        k: sum(group) / len(group)
        for k in dict.fromkeys(line.k for line in lines)
        if (group := [place for line, place in zip(lines, places, strict=True) if line.k == k])
    }
    gains.set_yticks(list(middles.values()), [f"K = {k}" for k in middles], weight="bold")
    gains.tick_params(axis="y", length=0)
    speeds.tick_params(axis="y", length=0, labelleft=False)
    for axes in (gains, speeds):
        axes.grid(visible=False, axis="y")
    gains.set_xlabel("prerouter over on-demand")
    speeds.set_xlabel("tok/s (beside each other, never divided)")
    speeds.set_xlim(left=0)


def _legend(figure: Figure, looks: dict[str, tuple[str, str]], bottom_inches: float) -> None:
    handles = [
        Line2D([], [], color=color, marker=marker, linewidth=1.6, markersize=6, label=name)
        for name, (color, marker) in looks.items()
    ]
    grey = {"linestyle": "none", "marker": "o", "markeredgecolor": "#555555", "markersize": 6}
    kinds = [
        Line2D([], [], markerfacecolor=HOLLOW, label="hollow: on-demand", **grey),
        Line2D([], [], markerfacecolor="#555555", label="filled: prerouter", **grey),
    ]
    place = bottom_inches / figure.get_figheight()
    shared = {"frameon": False, "fontsize": 8, "borderpad": 0, "labelspacing": 0.45}
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.06, place), **shared)
    figure.legend(handles=kinds, loc="lower right", bbox_to_anchor=(0.99, place), **shared)
