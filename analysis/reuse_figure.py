"""The figure of reuse: neighbouring tokens, the working set, and the bank, side by side; chance is dashed everywhere.

Knows nothing of files other than the two that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import style

OURS, PAPER, OTHER, BEST = style.COLORS[0], style.COLORS[1], style.COLORS[2], style.COLORS[3]
CHANCE = {"color": "#555555", "linestyle": "--", "linewidth": 1.2, "label": "by chance"}


def save_figure(
    overlap: pd.Series,
    chance: float,
    paper: float | None,
    touched: pd.DataFrame,
    hits: pd.DataFrame,
    experts: int,
    caption: Sequence[str],
    stem: Path,
) -> None:
    """Draw and write `stem`.png (200 dpi) and `stem`.svg. OSError passes.

    Args:
        overlap: share that the next token repeats, by layer.
        touched, hits: the frames of `analysis.reuse`.
        experts: of a layer.
    """
    lines = style.caption_lines(caption)
    with style.drawing("reuse"):
        height = 3.9 + style.LINE_INCHES * len(lines)
        figure = Figure(figsize=(9.2, height))
        neighbours, sets, banks = figure.subplots(1, 3)
        bottom = (0.72 + style.LINE_INCHES * len(lines)) / height
        figure.subplots_adjust(left=0.065, right=0.985, top=1 - 0.35 / height, bottom=bottom, wspace=0.28)
        _neighbours(neighbours, overlap, chance, paper)
        _sets(sets, touched, experts)
        _banks(banks, hits)
        style.put_caption(figure, lines)
        style.save(figure, stem)


def _neighbours(axes, overlap: pd.Series, chance: float, paper: float | None) -> None:
    axes.bar(overlap.index, overlap, 0.78, color="#9CC9E5", edgecolor=OURS, linewidth=0.6, label="ours")
    axes.axhline(chance, **CHANCE)
    if paper is not None:
        axes.axhline(paper, color=PAPER, linewidth=1.6, label="paper, its model")
    axes.set_ylim(0, 1.45 * max(overlap.max(), chance, paper or 0))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("share of a layer's experts", labelpad=2)
    _dress(axes, "Repeated by the next token", "upper right")


def _sets(axes, touched: pd.DataFrame, experts: int) -> None:
    axes.plot(touched["tokens"], touched["experts"], "o-", color=OURS, markersize=4.5, label="ours")
    axes.plot(touched["tokens"], touched["by_chance"], **CHANCE)
    axes.axhline(experts, color="black", linewidth=0.8, linestyle=":", label="all of a layer")
    axes.set_xscale("log", base=2)
    axes.set_xticks(touched["tokens"][::2], touched["tokens"][::2])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * experts)
    axes.set_xlabel("consecutive tokens")
    axes.set_ylabel("different experts of a layer", labelpad=2)
    _dress(axes, "Working set", "lower right")


def _banks(axes, hits: pd.DataFrame) -> None:
    for column, color, marker, label in (
        ("best", BEST, "^", "best possible"),
        ("lru", OURS, "o", "LRU"),
        ("popular", OTHER, "s", "most popular"),
    ):
        axes.plot(hits["share"], hits[column], f"{marker}-", color=color, markersize=4.5, linewidth=1.3, label=label)
    axes.plot(hits["share"], hits["by_chance"], **CHANCE | {"label": "LRU by chance"})
    axes.set_xlim(0, 1.03)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("bank, share of all experts")
    axes.set_ylabel("share of asked experts found", labelpad=2)
    _dress(axes, "Hits of a bank", "lower right")


def _dress(axes, title: str, place: str) -> None:
    style.dress(axes, title)
    axes.legend(loc=place, fontsize=8, framealpha=0.9, edgecolor="none")
