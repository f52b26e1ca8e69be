"""The figure of Table 4: MiB per step on the left, how cold the loads were on the right, one row per arm and K.

Knows nothing of files other than the two that it writes.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import style
from analysis.rows import Session

EDGE = {"edgecolor": "#222222", "linewidth": 0.6}
# Summary column, label, colour, hatch.
VOLUMES = (
    ("asked_mib_per_step", "asked for", "#E3E3E3", ""),
    ("device_mib_per_step", "from the device", "#D55E00", ""),
)
KINDS = (
    ("loads_all_cold", "all cold", "#0B3C5D", ""),
    ("loads_partial", "partly cold", "#56B4E9", "////"),
    ("loads_all_warm", "all warm", "#F0E3C0", ""),
)


def save_tab4_figure(session: Session, table: pd.DataFrame, stem: Path) -> None:
    """Draw the summary `table` and write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("tab4"):
        style.save(draw_tab4(session, table), stem)


def draw_tab4(session: Session, table: pd.DataFrame) -> Figure:
    """`table` has the columns of summary.csv, sorted by K then arm."""
    caption = _caption(session, table)
    places = style.places_by_k(table["k"])
    height = 1.3 + 0.3 * (places[-1] + 1) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    volume, kinds = figure.subplots(1, 2, sharey=True)
    low = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.195, right=0.985, top=1 - 0.66 / height, bottom=low, wspace=0.13)
    _draw_volumes(volume, table, places)
    _draw_kinds(kinds, table, places)
    volume.set_ylim(places[-1] + 0.75, -0.75)
    volume.set_yticks(places, table["arm"])
    style.name_ks(volume, table["k"], places, -0.49)
    style.put_caption(figure, caption)
    return figure


def _caption(session: Session, table: pd.DataFrame) -> list[str]:
    rounds = "-".join(map(str, sorted({table["rounds"].min(), table["rounds"].max()})))
    probed = "-".join(map(str, sorted({table["n"].min(), table["n"].max()})))
    n = f"n = {rounds} rounds, {probed} probed loads"
    machine = session.info.machine or "machine not named"
    names = [machine, table["tier"].iloc[0], f"condition {session.condition}", n, f"session {session.name}"]
    return style.caption_lines(names, session)


def _draw_volumes(axes, table: pd.DataFrame, places: list[float]) -> None:
    """Two bars per arm, one before the other, the narrower in front: they do not add up."""
    for (column, _, color, hatch), width in zip(VOLUMES, (0.84, 0.46), strict=True):
        axes.barh(places, table[column].fillna(0), width, color=color, hatch=hatch, **EDGE)
    longest = table[[column for column, *_ in VOLUMES]].max(axis=1)
    for place, row, end in zip(places, table.itertuples(), longest, strict=True):
        _note(axes, end, place, f"{row.device_mib_per_step:.1f} of {row.asked_mib_per_step:.1f}")
    axes.set_xlim(0, 1.3 * max(longest.max(), 1e-9))
    axes.set_xlabel("MiB per step (numbers: device of asked)")
    _dress(axes, "What a step reads", VOLUMES)


def _draw_kinds(axes, table: pd.DataFrame, places: list[float]) -> None:
    reached = pd.Series(0.0, index=table.index)
    for column, _, color, hatch in KINDS:
        widths = table[column].fillna(0)
        axes.barh(places, widths, 0.74, left=reached, color=color, hatch=hatch, **EDGE)
        reached = reached + widths
    for place, row in zip(places, table.itertuples(), strict=True):
        _note(axes, 1.0, place, "not probed" if row.n == 0 else f"{row.cold_share_probed:.2f} cold")
    axes.set_xlim(0, 1.24)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xlabel("share of probed loads (numbers: of their bytes)")
    axes.tick_params(axis="y", labelleft=False)
    _dress(axes, "How cold the probed loads are", KINDS)


def _note(axes, x: float, place: float, text: str) -> None:
    axes.annotate(text, (x, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def _dress(axes, title: str, parts: tuple) -> None:
    style.dress(axes, title)
    axes.set_title(title, loc="left", weight="bold", pad=24)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    handles = [Patch(facecolor=color, hatch=hatch, label=label, **EDGE) for _, label, color, hatch in parts]
    place = {"loc": "lower left", "bbox_to_anchor": (-0.015, 1.0), "ncols": len(handles), "borderaxespad": 0.2}
    axes.legend(handles=handles, frameon=False, fontsize=8, handlelength=1.5, columnspacing=1.2, **place)
