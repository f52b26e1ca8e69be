"""The figure of the merge study: what survives by kind of projection, and each correction against its grid's step.

Knows nothing of files other than the two that it writes. Kinds differ by marker as well as colour, checkpoints by
filled and hollow markers, so that the figure reads in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from analysis import style
from analysis.figures import CLEAR
from analysis.merge.rows import KINDS, LOGITS, Study
from analysis.paper.claims import Claims

LOOKS = dict(zip((*KINDS, LOGITS), zip(style.COLORS, style.MARKERS, strict=False), strict=False))
# Kind of ours beside which a claim of the paper is drawn.
PAPER = {
    "attention": "lora.survival_attention",
    "shared expert": "lora.survival_dense",
    "dense": "lora.survival_dense",
    "logits": "lora.survival_logits",
}
PAPER_MARK = {"marker": "D", "linewidth": 0, "color": "none", "markeredgecolor": "#B00020", "markersize": 7}
LEAST = -1.0  # of the axis; what lies below is counted at its edge
NOTE = {"va": "center", "fontsize": 7.5, "bbox": CLEAR}
GROUP_GAP = 0.7  # rows between two checkpoints


def save_merge_figure(studies: Sequence[Study], claims: Claims, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("merge"):
        style.save(draw(studies, claims), stem)


def draw(studies: Sequence[Study], claims: Claims) -> Figure:
    """The figure itself."""
    machines = dict.fromkeys(study.about.get("machine") or "machine not named" for study in studies)
    about = [*machines, "dot: a target, at the logits a prompt's median", "bar: mean over units, 95%"]
    for study in studies:
        facts = study.about
        about += [
            f"{study.origin}, K={facts['k']}",
            f"n = {study.sets} adapter set{'s' * (study.sets > 1)}, {study.weights['target'].nunique()} targets",
            f"session {facts['session']}",
        ]
    caption = style.caption_lines(about)
    rows = [(study, kind) for study in studies for kind in (*KINDS, LOGITS) if len(study.of(kind))]
    height = 1.75 + max(2.4, 0.34 * len(rows)) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    low = 0.2 + style.LINE_INCHES * len(caption)  # inches; above it the legend, the axes' names and their ticks
    figure.subplots_adjust(left=0.19, right=0.975, top=1 - 0.4 / height, bottom=(low + 0.75) / height, wspace=0.25)
    _survival(left, rows, claims)
    _steps(right, studies, claims)
    handles = _handles(studies)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, low / height), "ncols": len(handles), "borderaxespad": 0}
    figure.legend(
        handles=handles, frameon=False, fontsize=8, handlelength=1.3, handletextpad=0.4, columnspacing=1.1, **place
    )
    style.put_caption(figure, caption)
    return figure


def _handles(studies: Sequence[Study]) -> list[Line2D]:
    """Kinds by colour and marker, checkpoints by filled and hollow where there are two, the mean and the paper's."""
    handles = [
        Line2D([], [], color=color, marker=marker, linewidth=0, markersize=5, label=kind)
        for kind, (color, marker) in LOOKS.items()
        if kind != LOGITS and any(len(study.of(kind)) for study in studies)
    ]
    if len(studies) > 1:
        grey = {"color": "#555555", "marker": "o", "linewidth": 0, "markersize": 5}
        handles += [
            Line2D([], [], fillstyle=_fill(number), label=study.tier, **grey) for number, study in enumerate(studies)
        ]
    handles.append(Line2D([], [], color="black", linewidth=2.2, label="mean, 95%"))
    return [*handles, Line2D([], [], label="the paper's adapter", **PAPER_MARK)]


def _fill(number: int) -> str:
    return "none" if number else "full"


def _dots(study: Study, kind: str) -> pd.Series:
    """Survival of each target, at the logits the median of each prompt."""
    rows = study.of(kind)
    return rows.groupby(["adapters", "prompt"])["survival"].median() if kind == LOGITS else rows["survival"]


def _survival(axes, rows: list[tuple[Study, str]], claims: Claims) -> None:
    place, places, rng = -1.0, [], np.random.default_rng(0)
    dots = [_dots(study, kind) for study, kind in rows]
    ends = [value for study, kind in rows if not np.isnan(value := study.survival(kind).ci_low)]
    left = max(LEAST, min(-0.05, *ends, *(values.min() for values in dots))) - 0.05
    for number, ((study, kind), values) in enumerate(zip(rows, dots, strict=True)):
        place += 1 + (GROUP_GAP if number and rows[number - 1][0] is not study else 0)
        places.append(place)
        color, marker = LOOKS[kind]
        shown = values[values >= left]
        heights = place + rng.uniform(-0.3, 0.3, len(shown))
        axes.plot(shown, heights, marker, color=color, alpha=0.6, markersize=3.4, markeredgewidth=0, linewidth=0)
        mean = study.survival(kind)
        if mean.mean >= left:
            axes.plot(np.clip([mean.ci_low, mean.ci_high], left, 1), [place, place], color="black", linewidth=2.2)
            axes.plot([mean.mean, mean.mean], [place - 0.33, place + 0.33], color="black", linewidth=2.2)
        if hidden := len(values) - len(shown):
            text = f"◂ {hidden} of {len(values)} below {LEAST:.0f}"
            text += f", mean {mean.mean:.1f}" if mean.mean < left else ""
            axes.annotate(text, (left, place), xytext=(3, 0), textcoords="offset points", **NOTE)
        if kind in PAPER:
            axes.plot(float(claims.by_id[PAPER[kind]].value), place, **PAPER_MARK)
    for tier in dict.fromkeys(study.tier for study, _ in rows):
        own = [at for at, (study, _) in zip(places, rows, strict=True) if study.tier == tier]
        beside = {"transform": axes.get_yaxis_transform(), "rotation": 90, "weight": "bold", "va": "center"}
        axes.text(-0.38, sum(own) / len(own), tier, **beside)
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.set_yticks(places, [kind for _, kind in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(left, 1.05)
    axes.set_xlabel("survival after merging and requantising")
    style.dress(axes, "What survives")
    axes.grid(visible=False, axis="y")


def _steps(axes, studies: Sequence[Study], claims: Claims) -> None:
    steps, deltas = [], []
    for number, study in enumerate(studies):
        for kind in KINDS:
            rows = study.of(kind)
            color, marker = LOOKS[kind]
            look = {"color": color, "markersize": 5, "markeredgewidth": 1, "fillstyle": _fill(number)}
            if len(rows):
                axes.plot(rows["step_median"], rows["delta_rms"], marker, alpha=0.75, linewidth=0, **look)
            steps += [*rows["step_median"]]
            deltas += [*rows["delta_rms"]]
    paper = float(claims.by_id["lora.delta_rms"].value)
    across, up = (min(steps) / 1.6, max(steps) * 1.6), (min(*deltas, *steps, paper) / 1.6, max(*deltas, *steps) * 2.2)
    axes.plot(across, across, color="#555555", linewidth=1, zorder=1)
    axes.axhline(paper, color="#B00020", linewidth=1, linestyle="--", zorder=1)
    for axis, scale, limits, ends in (
        (axes.xaxis, axes.set_xscale, axes.set_xlim, across),
        (axes.yaxis, axes.set_yscale, axes.set_ylim, up),
    ):
        scale("log")
        limits(*ends)
        axis.set_major_locator(FixedLocator(_ticks(*ends)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    line = {"rotation": 45, "transform_rotates_text": True, "rotation_mode": "anchor", "ha": "right", "va": "bottom"}
    axes.text(across[1] / 1.03, across[1] / 1.01, "correction = step", fontsize=8, color="#555555", zorder=1, **line)
    paper_name = {"textcoords": "offset points", "fontsize": 8, "color": "#B00020", "zorder": 1}
    axes.annotate("the paper's adapter", (across[0], paper), xytext=(4, 4), bbox=CLEAR, **paper_name)
    axes.set_xlabel("step of the grid (median of a target's groups)")
    axes.set_ylabel("RMS of the correction")
    style.dress(axes, "Correction against step")


def _ticks(low: float, high: float) -> list[float]:
    """Round values between the ends of a logarithmic axis, at least two and so few that they stand apart."""
    decades = np.log10(high / low)
    parts = (1, 1.5, 2, 3, 5, 7) if decades < 0.8 else (1, 2, 5) if decades < 1.7 else (1, 3) if decades < 2.6 else (1,)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))))
    return [value for power in powers for part in parts if low <= (value := part * 10.0**power) <= high]
