"""How every figure looks: one style, one way to write it, one caption that carries machine, condition and n.

Knows nothing of what is drawn, but for sessions that drifted: these it marks. Colours are Okabe-Ito's; whatever differs
by colour must also differ by marker, hatch or lightness, so that figures read in grey and for colour-blind readers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.rows import NO_VERDICT, Session

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
RC = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
CAPTION_COLUMNS = 118
GROUP_GAP = 0.7  # rows
LINE_INCHES = 0.17  # height of one line of a caption
UNBROKEN = 45  # a part of a caption up to this long stays in one line
TOGETHER = r"\bn = \S+ \w+|session \S+"  # and so do these in a longer one
MARK = {"color": "#B00020", "weight": "bold"}  # what takes a session's verdict away


def drawing(name: str) -> AbstractContextManager:
    """The style, to draw and to save within; `name` seeds the ids of the SVG, so that equal figures are equal files."""
    return mpl.rc_context(RC | {"svg.hashsalt": name})


def save(figure: Figure, stem: Path) -> None:
    """Write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    figure.savefig(stem.with_suffix(".png"), dpi=200)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def caption_lines(parts: Sequence[str], *sessions: Session, columns: int = CAPTION_COLUMNS) -> list[str]:
    """Caption parts (machine, tier, condition, n, session) joined and wrapped to lines of at most `columns`.

    Above them a line for each of the `sessions` that drifted: what is drawn of it is no verdict.
    """
    marks = [f"{session.drift().mark} (session {session.name})" for session in sessions if session.drift().mark]
    whole = [
        re.sub(".+" if len(part) <= UNBROKEN else TOGETHER, lambda found: found[0].replace(" ", "\xa0"), part)
        for part in parts
        if part
    ]
    lines = textwrap.wrap("\xa0· ".join(whole), columns)
    return [*marks, *(line.replace("\xa0", " ").removesuffix(" ·") for line in lines)]


def put_caption(figure: Figure, lines: Sequence[str]) -> None:
    """Write caption lines under the figure; leave 0.12 inch plus `LINE_INCHES` per line for them."""
    place = 0.12 / figure.get_figheight()
    marks = [line for line in lines if line.startswith(NO_VERDICT)]
    about = lines[len(marks) :]
    below = {"ha": "center", "va": "bottom", "fontsize": 8}
    figure.text(0.5, place, "\n".join(about), color="#333333", **below)
    if marks:
        above = place + 0.92 * LINE_INCHES * len(about) / figure.get_figheight()
        figure.text(0.5, above, "\n".join(marks), **MARK, **below)


def places_by_k(ks: pd.Series) -> list[float]:
    """The height of each row of a table sorted by K: one apart, with a gap where K changes."""
    changes = ks.ne(ks.shift()).cumsum() - 1
    return [position + GROUP_GAP * change for position, change in enumerate(changes)]


def name_ks(axes, ks: pd.Series, places: Sequence[float], x: float) -> None:
    """Write each K beside the middle of its rows, at `x` of the axes' width."""
    for k, rows in ks.groupby(ks):
        middle = sum(places[position] for position in rows.index) / len(rows)
        axes.text(x, middle, f"K = {k}", transform=axes.get_yaxis_transform(), weight="bold", va="center")


def dress(axes, title: str) -> None:
    """Title on the left and a quiet grid behind the data."""
    axes.set_title(title, loc="left", weight="bold")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def rounds_bar(axes, place: float, values: Sequence[float], color: str, hatch: str, told: str) -> None:
    """A lying bar of the median of some rounds, a dot for each, a line over their range; `told` if there are none."""
    note = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    if not values:
        axes.annotate(told, (0, place), xytext=(5, 0), style="italic", **note)
        return
    median = float(np.median(values))
    axes.barh(place, median, 0.72, color=color, hatch=hatch, edgecolor="#222222", linewidth=0.6)
    axes.plot([min(values), max(values)], [place, place], color="black", linewidth=1.1)
    axes.plot(values, [place] * len(values), "o", color="white", markeredgecolor="black", markersize=3.6)
    axes.annotate(f"{median:.3g}", (max(*values, median), place), xytext=(6, 0), **note)


def legend_above(axes, handles: list) -> None:
    """One line of legend between a panel and its title."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.015, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.5,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
