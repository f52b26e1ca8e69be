"""The figure of the merge study: what survives by kind of projection, and each correction against its grid's step.

Knows nothing of files other than the two that it writes. Kinds differ by marker as well as colour, so that the figure
reads in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from analysis import style
from analysis.paper.claims import Claims

if TYPE_CHECKING:
    from analysis.merge import Study

KINDS = ("attention", "linear attention", "shared expert", "dense", "logits")
LOOKS = dict(zip(KINDS, zip(style.COLORS, style.MARKERS, strict=False), strict=False))
# Kind of ours beside which a claim of the paper is drawn.
PAPER = {
    "attention": "lora.survival_attention",
    "shared expert": "lora.survival_dense",
    "dense": "lora.survival_dense",
    "logits": "lora.survival_logits",
}
PAPER_MARK = {"marker": "D", "linewidth": 0, "color": "none", "markeredgecolor": "#B00020", "markersize": 7}
LEAST = -1.0  # of the axis; what lies below is drawn on its edge
GROUP_GAP = 0.7  # rows between two checkpoints


def save_merge_figure(studies: Sequence[Study], claims: Claims, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("merge"):
        style.save(draw(studies, claims), stem)


def draw(studies: Sequence[Study], claims: Claims) -> Figure:
    """The figure itself."""
    machines = dict.fromkeys(study.about.get("machine") or "machine not named" for study in studies)
    about = [*machines, "dot: a target, at the logits a position", "bar: mean over units, 95%"]
    for study in studies:
        facts = study.about
        about += [
            f"{study.origin}, K={facts['k']}",
            f"n = {study.sets} adapter set{'s' * (study.sets > 1)}, {study.weights['target'].nunique()} targets",
            f"session {facts['session']}",
        ]
    caption = style.caption_lines(about)
    rows = [(study, kind) for study in studies for kind in KINDS if len(study.of(kind))]
    height = 1.4 + max(2.4, 0.34 * len(rows)) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    bottom = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.2, right=0.985, top=1 - 0.62 / height, bottom=bottom, wspace=0.22)
    _survival(left, rows, claims)
    _steps(right, studies, claims)
    style.put_caption(figure, caption)
    return figure


def _survival(axes, rows: list[tuple[Study, str]], claims: Claims) -> None:
    place, places, rng = -1.0, [], np.random.default_rng(0)
    for number, (study, kind) in enumerate(rows):
        place += 1 + (GROUP_GAP if number and rows[number - 1][0] is not study else 0)
        places.append(place)
        color, marker = LOOKS[kind]
        values = study.of(kind)["survival"].clip(lower=LEAST)
        heights = place + rng.uniform(-0.3, 0.3, len(values))
        axes.plot(values, heights, marker, color=color, alpha=0.45, markersize=3.2, markeredgewidth=0)
        mean = study.survival(kind)
        seen = np.clip([mean.ci_low, mean.ci_high], LEAST, 1)
        axes.plot(seen, [place, place], color="black", linewidth=2.2)
        axes.plot([max(mean.mean, LEAST)] * 2, [place - 0.33, place + 0.33], color="black", linewidth=2.2)
        if kind in PAPER:
            axes.plot(float(claims.by_id[PAPER[kind]].value), place, **PAPER_MARK)
    for tier in dict.fromkeys(study.tier for study, _ in rows):
        own = [at for at, (study, _) in zip(places, rows, strict=True) if study.tier == tier]
        beside = {"transform": axes.get_yaxis_transform(), "rotation": 90, "weight": "bold", "va": "center"}
        axes.text(-0.36, sum(own) / len(own), tier, **beside)
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.set_yticks(places, [kind for _, kind in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    least = min(study.of(kind)["survival"].min() for study, kind in rows)
    axes.set_xlim(max(LEAST, min(-0.05, least)) - 0.05, 1.05)
    axes.set_xlabel("survival after merging and requantising")
    style.dress(axes, "What survives")
    axes.grid(visible=False, axis="y")
    handles = [
        Line2D([], [], color="black", linewidth=2.2, label="mean, 95%"),
        Line2D([], [], label="the paper's adapter", **PAPER_MARK),
    ]
    _legend(axes, handles)


def _steps(axes, studies: Sequence[Study], claims: Claims) -> None:
    handles, ends = [], []
    for number, study in enumerate(studies):
        for kind in KINDS[:-1]:
            rows = study.of(kind)
            if rows.empty:
                continue
            color, marker = LOOKS[kind]
            look = {"color": color, "markersize": 5, "markeredgewidth": 1}
            look |= {"fillstyle": "none"} if number else {}
            axes.plot(rows["step_median"], rows["delta_rms"], marker, alpha=0.75, **look)
            label = kind if len(studies) == 1 else f"{kind}, {study.tier}"
            handles.append(Line2D([], [], marker=marker, linewidth=0, label=label, **look))
            ends += [*rows["step_median"], *rows["delta_rms"]]
    paper = float(claims.by_id["lora.delta_rms"].value)
    span = np.array([min(*ends, paper) / 1.5, max(ends) * 1.5])
    axes.plot(span, span, color="#555555", linewidth=1)
    axes.axhline(paper, color="#B00020", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    steps = [value for study in studies for value in study.weights["step_median"]]
    axes.set_xlim(min(steps) / 1.5, max(steps) * 1.5)
    axes.set_ylim(*span)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    inside = {"textcoords": "offset points", "fontsize": 8}
    axes.annotate("delta = step", (min(steps), min(steps)), xytext=(6, -10), color="#555555", **inside)
    axes.annotate("the paper's adapter", (min(steps) / 1.5, paper), xytext=(4, 3), color="#B00020", **inside)
    axes.set_xlabel("step of the grid (median of a target's groups)")
    axes.set_ylabel("RMS of the correction")
    style.dress(axes, "Correction against step")
    axes.legend(handles=handles, fontsize=7, frameon=False, loc="best", handletextpad=0.3)


def _legend(axes, handles: list) -> None:
    """Between title and panel."""
    axes.set_title(axes.get_title(loc="left"), loc="left", weight="bold", pad=22)
    style.legend_above(axes, handles)
