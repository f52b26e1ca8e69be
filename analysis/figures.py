"""The figure of Table 3: speed of each arm on the left, where a step's time went on the right.

Knows nothing of files other than the two that it writes (PNG and SVG). Both panels share their rows, one per K and
arm, so a name stands once; arms differ by marker as well as colour, and the parts of a step by lightness and hatch, so
the figure reads in grey and for colour-blind readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.rows import DIRECT_ARMS, GAIN_BASES, PairRatios, Session


@dataclass(frozen=True)
class ArmStyle:
    """How an arm is drawn: an Okabe-Ito colour, a pale shade of it for the bar, a hatch for its way of reading."""

    color: str
    pale: str
    marker: str
    hatch: str


ARM_STYLES = {
    "ondemand": ArmStyle("#D55E00", "#F9DCC4", "o", ""),
    "prerouter": ArmStyle("#0072B2", "#9CC9E5", "s", ""),
    "ondemand-mmap": ArmStyle("#D55E00", "#F9DCC4", "o", "////"),
    "prerouter-mmap": ArmStyle("#0072B2", "#9CC9E5", "s", "////"),
    "ondemand-direct": ArmStyle("#D55E00", "#F9DCC4", "o", "...."),
    "prerouter-direct": ArmStyle("#0072B2", "#9CC9E5", "s", "...."),
}
# Summary column, label, colour, hatch; from the row's start outwards, dark to light.
STEP_PARTS = (
    ("wait_predicted_ms_per_step", "wait, predicted", "#0B3C5D", ""),
    ("wait_gate_ms_per_step", "wait, gate", "#E69F00", "////"),
    ("compute_ms_per_step", "computing", "#D6D6D6", ""),
    ("host_ms_per_step", "host", "#FFFFFF", "...."),
)
# Behind a number, so that no grid line runs through it.
CLEAR = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}


def caption_lines(session: Session, table: pd.DataFrame) -> list[str]:
    """The caption under the figure, wrapped: machine, tier, condition, rounds and session."""
    rounds = "-".join(map(str, sorted({table["rounds"].min(), table["rounds"].max()})))
    machine = session.info.machine or "machine not named"
    condition, name = f"condition {session.condition}", f"session {session.name}"
    return style.caption_lines([machine, table["tier"].iloc[0], condition, f"n = {rounds} rounds", name], session)


def save_tab3_figure(session: Session, table: pd.DataFrame, ratios: PairRatios, stem: Path) -> None:
    """Draw the summary `table` of a session and write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("tab3"):
        style.save(draw_tab3(session, table, ratios), stem)


def draw_tab3(session: Session, table: pd.DataFrame, ratios: PairRatios) -> Figure:
    """The figure itself. `table` has the columns of summary.csv, sorted by K then arm."""
    caption = caption_lines(session, table)
    places = style.places_by_k(table["k"])
    height = 1.3 + 0.27 * (places[-1] + 1) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    speed, steps = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.15))
    figure.subplots_adjust(
        left=0.19,
        right=0.985,
        top=1 - 0.66 / height,
        bottom=(0.62 + style.LINE_INCHES * len(caption)) / height,
        wspace=0.08,
    )
    _draw_speed(speed, session, table, ratios, places)
    _draw_steps(steps, table, places)
    speed.set_ylim(places[-1] + 0.75, -0.75)
    speed.set_yticks(places, table["arm"])
    style.name_ks(speed, table["k"], places, -0.5)
    style.put_caption(figure, caption)
    return figure


def _draw_speed(axes, session: Session, table: pd.DataFrame, ratios: PairRatios, places: list[float]) -> None:
    """Median as a bar, one point per round on its end (first round on top), the gain beside a prerouter arm."""
    for place, row in zip(places, table.itertuples(), strict=True):
        if row.rounds == 0:
            _note(axes, 0, place, "void")
            continue
        look = ARM_STYLES[row.arm]
        bar = {"color": look.pale, "hatch": look.hatch, "edgecolor": look.color, "linewidth": 0.6}
        axes.barh(place, row.tok_s_median, 0.74, **bar)
        axes.vlines(row.tok_s_median, place - 0.37, place + 0.37, color="black", linewidth=2, zorder=2)
        values = session.cell(row.arm, row.k)["tok_s"]
        gap = min(0.2, 0.6 / max(1, len(values) - 1))
        heights = [place + gap * (index - (len(values) - 1) / 2) for index in range(len(values))]
        points = {"color": look.color, "markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 4.2}
        axes.plot(values, heights, look.marker, zorder=3, **points)
        gain = ratios.get((row.k, row.arm, GAIN_BASES.get(row.arm)))
        text = f"{row.tok_s_median:.1f}" + (f"  ({gain.ratio:.2f}x)" if gain is not None and gain.n else "")
        _note(axes, row.tok_s_max, place, text)
    axes.set_xlim(0, 1.36 * table["tok_s_max"].max())
    void = session.drift().void_verdict
    axes.set_xlabel(f"tokens per second (in brackets: {'gain, no verdict' if void else 'paired gain'})")
    point = {"color": "#555555", "marker": "o", "linewidth": 0, "markeredgecolor": "white", "markersize": 6}
    handles = [
        Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=2, linewidth=0, label="median"),
        Line2D([], [], label="one round", **point),
        *(
            Patch(facecolor="white", hatch=ARM_STYLES[arm].hatch, edgecolor="#555555", linewidth=0.6, label=label)
            for arm, label in (("ondemand-mmap", "page faults"), (DIRECT_ARMS[0], "direct"))
            if arm in set(table["arm"])
        ),
    ]
    _dress(axes, "Decode speed", handles)


def _draw_steps(axes, table: pd.DataFrame, places: list[float]) -> None:
    reached = pd.Series(0.0, index=table.index)
    for column, _, color, hatch in STEP_PARTS:
        widths = table[column].fillna(0)
        axes.barh(places, widths, 0.74, left=reached, color=color, hatch=hatch, edgecolor="#222222", linewidth=0.6)
        reached = reached + widths
    for place, row, total in zip(places, table.itertuples(), reached, strict=True):
        _note(axes, total, place, f"{total:.3g} ms" if row.rounds else "void")
    axes.set_xlim(0, 1.16 * reached.max())
    axes.set_xlabel("milliseconds per decode step")
    axes.tick_params(axis="y", labelleft=False)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="#222222", linewidth=0.6, label=label)
        for _, label, color, hatch in STEP_PARTS
    ]
    _dress(axes, "Where a step's time goes", handles)


def _note(axes, x: float, place: float, text: str) -> None:
    axes.annotate(text, (x, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, bbox=CLEAR)


def _dress(axes, title: str, handles: list) -> None:
    """Title, legend between the title and the panel, and a quiet grid."""
    axes.set_title(title, loc="left", weight="bold", pad=24)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    style.legend_above(axes, handles)
