"""The figure of the levers: each ratio with its interval, beside the line at 1.

Knows nothing of files other than the two that it writes (PNG and SVG). Verdicts differ by marker as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from analysis import style
from analysis.rows import Session
from analysis.statistics import Ratio

LOOKS = {"wins": ("#0072B2", "o"), "loses": ("#D55E00", "s"), "not visible": ("#777777", "D")}
OTHER = ("#000000", "x")
ROW_INCHES = 0.4


def save_figure(session: Session, k: int, bars: Sequence[tuple[str, str, Ratio, str]], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg. `bars`: lever, pair, ratio, verdict. OSError passes."""
    with style.drawing("levers"):
        style.save(draw(session, k, bars), stem)


def draw(session: Session, k: int, bars: Sequence[tuple[str, str, Ratio, str]]) -> Figure:
    """The figure itself."""
    counts = sorted({ratio.n for _, _, ratio, _ in bars})
    caption = style.caption_lines(
        [
            session.info.machine or "machine not named",
            f"{session.all_runs['tier'].iloc[0]}, K={k}",
            f"condition {session.condition}",
            f"n = {'-'.join(map(str, sorted({counts[0], counts[-1]}))) if counts else 0} rounds",
            f"session {session.name}",
            "line: 95% interval of the paired ratio within the session",
        ],
        session,
    )
    height = 1.15 + ROW_INCHES * len(bars) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    axes = figure.subplots()
    bottom = (0.6 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.42, right=0.87, top=1 - 0.36 / height, bottom=bottom)
    before = None
    for place, (lever, _, ratio, verdict) in enumerate(bars):
        color, marker = LOOKS.get(verdict, OTHER)
        if not math.isnan(ratio.ci_low):
            axes.plot([ratio.ci_low, ratio.ci_high], [place, place], color=color, linewidth=1.8)
        axes.plot(ratio.ratio, place, marker, color=color, markeredgecolor="black", markersize=6)
        words = f"{ratio.ratio:.2f}x, {verdict.partition(':')[0]}"  # the reason stands below the figure
        axes.annotate(
            words, (1.01, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize=8, annotation_clip=False
        )
        if lever != before:
            axes.axhline(place - 0.5, color="#BBBBBB", linewidth=0.6)
            axes.text(-0.72, place, lever, transform=axes.get_yaxis_transform(), va="center", weight="bold", fontsize=8)
        before = lever
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ends = [end for _, _, ratio, _ in bars for end in (ratio.ratio, ratio.ci_low, ratio.ci_high) if end > 0]
    low, high = min([0.9, *ends]), max([1.1, *ends])
    axes.set_xlim(low / 1.05, high * 1.05)
    axes.set_xticks([tick for tick in (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4) if low <= tick <= high])
    axes.set_yticks(range(len(bars)), [pair for _, pair, _, _ in bars], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel("tokens per second with the lever over without it")
    style.dress(axes, "What each lever is worth")
    style.put_caption(figure, caption)
    return figure
