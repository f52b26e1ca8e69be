"""Figure 2: scores of both arms per benchmark on the left, int4 - fp with the paper's beside it on the right.

Knows nothing of files other than the two that it writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.figures import CLEAR
from analysis.paper.claims import Claims
from analysis.quality.claims import paper_mean, paper_rows
from analysis.quality.rows import STAND_IN
from analysis.quality.scores import Scores
from analysis.statistics import Estimate

EDGE = {"edgecolor": "#222222", "linewidth": 0.6}
ARMS = {"fp": (-0.2, "#D6D6D6", ""), "int4": (0.2, "#0072B2", "////")}  # arm to offset in rows, colour, hatch
OURS = {"color": "#0072B2", "marker": "s", "markersize": 5.5}
THEIRS = {"color": "#777777", "marker": "D", "markersize": 5, "markerfacecolor": "white"}
ERROR = {"color": "black", "linewidth": 1.0, "capsize": 2.2, "capthick": 1.0}
GAP = 1.1  # rows between two tiers


def save_tab2_figure(tiers: Sequence[Scores], claims: Claims, stem: Path) -> None:
    """Draw the scores and write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("tab2"):
        style.save(draw_tab2(tiers, claims), stem)


def draw_tab2(tiers: Sequence[Scores], claims: Claims) -> Figure:
    """The figure itself: for each tier a row per benchmark and one for their mean."""
    caption = style.caption_lines(_caption(tiers))
    rows = [row for place, scores in enumerate(tiers) for row in _rows(scores, claims, place * (6 + GAP))]
    last = rows[-1]["place"]
    height = 1.6 + 0.42 * (last + 1) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    left, right = figure.subplots(1, 2, sharey=True)
    low = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.21, right=0.985, top=1 - 0.92 / height, bottom=low, wspace=0.07)
    stand_in = any(scores.quality.any_stand_in for scores in tiers)
    title = f"Quality of int4 against fp{f' · {STAND_IN}' if stand_in else ''}"
    figure.text(0.012, 1 - 0.1 / height, title, ha="left", va="top", fontsize=11, weight="bold")
    _draw_scores(left, rows)
    _draw_differences(right, rows)
    left.set_ylim(last + 0.75, -1.05)
    for place, scores in enumerate(tiers):
        name = f"{scores.quality.tier}, K={scores.quality.k}"
        left.text(1, place * (6 + GAP) - 0.68, name, weight="bold", fontsize=8, va="center")
    left.set_yticks([row["place"] for row in rows], [row["label"] for row in rows])
    for axes in (left, right):
        for row in rows:
            if row["mean"]:
                axes.axhline(row["place"] - 0.5, color="#999999", linewidth=0.6)
    style.put_caption(figure, caption)
    return figure


def _rows(scores: Scores, claims: Claims, first: float) -> list[dict]:
    """What is drawn of a tier, from the row `first` on: place, label, both scores, our difference and the paper's."""
    stated = paper_rows(claims, scores.quality.tag)
    theirs = {row.benchmark: row.difference for row in stated}
    rows = [
        {
            "place": first + place,
            "label": f"{row.benchmark.name}, n = {row.n:,}" + (f"\n{STAND_IN}" if row.stands_in else ""),
            "score": row.score,
            "ours": row.difference,
            "paper": theirs.get(row.benchmark),
            "mean": False,
        }
        for place, row in enumerate(scores.rows)
    ]
    label = "mean of five" + (f"\n{STAND_IN}" if scores.quality.any_stand_in else "")
    paper = paper_mean(stated)[1] if stated else None
    mean = {"place": first + len(rows), "label": label, "score": scores.mean, "ours": scores.difference, "paper": paper}
    return [*rows, mean | {"mean": True}]


def _caption(tiers: Sequence[Scores]) -> list[str]:
    parts = [tiers[0].quality.machine]
    for scores in tiers:
        quality = scores.quality
        parts += [f"{quality.tier}, K={quality.k}, n = {scores.n:,} questions", f"session {quality.session}"]
    return [*parts, "condition: same prompts in both arms", "95% intervals; the paper's from its n alone"]


def _draw_scores(axes, rows: Sequence[dict]) -> None:
    for row in rows:
        for arm, (offset, color, hatch) in ARMS.items():
            place, score = row["place"] + offset, row["score"][arm]
            axes.barh(place, score.value, 0.38, color=color, hatch=hatch, **EDGE)
            _error(axes, score, place, ERROR)
            end = score.value if math.isnan(score.high) else score.high
            _note(axes, end, place, f"{score.value:.1f}")
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("score, points of 100")
    handles = [Patch(facecolor=color, hatch=hatch, label=arm, **EDGE) for arm, (_, color, hatch) in ARMS.items()]
    _dress(axes, "Score", handles)


def _draw_differences(axes, rows: Sequence[dict]) -> None:
    """Ours above the paper's in each row; the numbers stand in a column at the right edge, clear of the intervals."""
    ends = [0.0]
    for row in rows:
        for part, look, offset in ((row["ours"], OURS, -0.2), (row["paper"], THEIRS, 0.2)):
            if part is None:
                continue
            place = row["place"] + offset
            _error(axes, part, place, ERROR | {"color": look["color"]})
            axes.plot(part.value, place, linewidth=0, zorder=3, **look)
            ends += [end for end in (part.low, part.value, part.high) if not math.isnan(end)]
            text = f"{round(part.value, 1) + 0.0:+.1f}" + (", no interval" if math.isnan(part.low) else "")
            edge = {
                "xycoords": axes.get_yaxis_transform(),
                "ha": "right",
                "va": "center",
                "fontsize": 7.5,
                "bbox": CLEAR,
            }
            axes.annotate(text, (0.995, place), color="black" if part is row["ours"] else "#555555", **edge)
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    width = max(max(ends) - min(ends), 1.0)
    axes.set_xlim(min(ends) - 0.06 * width, max(ends) + 0.3 * width)
    axes.set_xlabel("int4 - fp, points (below 0: int4 loses)")
    axes.tick_params(axis="y", labelleft=False)
    handles = [
        Line2D([], [], linewidth=1, label="ours, paired", **OURS),
        Line2D([], [], linewidth=1, label="paper: released model, unpaired", **THEIRS),
    ]
    _dress(axes, "Difference", handles)


def _error(axes, part: Estimate, place: float, look: dict) -> None:
    if not math.isnan(part.low):
        reach = [[max(0.0, part.value - part.low)], [max(0.0, part.high - part.value)]]
        axes.errorbar(part.value, place, xerr=reach, fmt="none", ecolor=look["color"], elinewidth=look["linewidth"],
                      capsize=look["capsize"], capthick=look["capthick"])  # fmt: skip


def _note(axes, x: float, place: float, text: str) -> None:
    axes.annotate(text, (x, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5)


def _dress(axes, title: str, handles: list) -> None:
    style.dress(axes, title)
    axes.set_title(title, loc="left", weight="bold", pad=22)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    style.legend_above(axes, handles)
