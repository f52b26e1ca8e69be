"""Speed by arm, a panel per session, of stock mlx-lm or of other engines; an arm without speed says why.

Knows nothing of files other than the two that it writes. Every round is a dot on its bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from analysis import style
from analysis.rows import Session

LOOKS = {
    "ondemand": ("#B8D4E8", ""),
    "prerouter": ("#0072B2", ""),
    "ondemand-direct": ("#B8D4E8", "\\\\\\\\"),
    "prerouter-direct": ("#0072B2", "\\\\\\\\"),
    "resident": ("#E69F00", "////"),
    "ondemand-mmap": ("#F2D2BF", "...."),
    "prerouter-mmap": ("#D55E00", "...."),
    "llama-cpp": ("#CDE8DE", "xxxx"),
    "llama-cpp-repacked": ("#009E73", "xxxx"),
}
ROW_INCHES, CHARACTER_SHARE = 0.5, 0.0095  # of a bar; of the figure's width that a character of a label takes


@dataclass(frozen=True)
class Panel:
    """One session. `bars`: each arm, tok/s of its valid rounds, and what is said where there is none."""

    title: str
    session: Session
    k: int
    bars: Sequence[tuple[str, Sequence[float], str]]


def save_resident_figure(panels: Sequence[Panel], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing(stem.name):
        style.save(draw_resident(panels), stem)


def draw_resident(panels: Sequence[Panel]) -> Figure:
    """The figure itself. Each panel has its own axis: two sessions are not compared by the length of a bar."""
    first = panels[0].session
    about = [first.info.machine or "machine not named", first.all_runs["tier"].iloc[0]]
    about += [
        f"{panel.title}: condition {panel.session.condition}, K={panel.k}, n = "
        f"{max(len(values) for _, values, _ in panel.bars)} rounds, session {panel.session.name}"
        for panel in panels
    ]
    about.append("bar: median; line: least to largest round; dot: a round")
    caption = style.caption_lines(about, *(panel.session for panel in panels))
    height = 0.95 + ROW_INCHES * max(len(panel.bars) for panel in panels) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    bottom = (0.62 + style.LINE_INCHES * len(caption)) / height
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    labels = CHARACTER_SHARE * max(len(arm) for panel in panels for arm, _, _ in panel.bars)
    same = len({tuple(arm for arm, _, _ in panel.bars) for panel in panels}) == 1 and len(panels) > 2
    between = 0.1 if same else 0.22
    figure.subplots_adjust(left=0.005 + labels, right=0.985, top=1 - 0.34 / height, bottom=bottom, wspace=between)
    for axes, panel in zip(grid, panels, strict=True):
        most = max((value for _, values, _ in panel.bars for value in values), default=1)
        for place, (arm, values, told) in enumerate(panel.bars):
            style.rounds_bar(axes, place, values, *LOOKS[arm], told)
        named = axes is grid[0] or not same
        axes.set_yticks(range(len(panel.bars)), [arm if named else "" for arm, _, _ in panel.bars])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(panel.bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.22 * most)
        mark = panel.session.drift().mark
        axes.set_xlabel(
            ("; " if len(panels) < 3 else "\n").join(filter(None, ("tokens per second", mark))),
            **(style.MARK if mark else {}),
        )
        style.dress(axes, f"{panel.title[:1].upper()}{panel.title[1:]}")
        axes.grid(visible=False, axis="y")
    style.put_caption(figure, caption)
    return figure
