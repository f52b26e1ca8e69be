"""The figure of memory: what each arm's process holds on the left, what the page cache holds of the checkpoint right.

Knows nothing of files other than the two that it writes. Parts differ by lightness and hatch as well as by colour.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import style
from analysis.rows import Session

# Label, colour, hatch; from the axis outwards.
PARTS = (
    ("weights and heads", "#0B3C5D", ""),
    ("bank, or bundles", "#56B4E9", ""),
    ("other live arrays", "#E69F00", "////"),
    ("allocator's free buffers", "#F5DEB3", ""),
    ("other anonymous memory", "#BBBBBB", "...."),
    ("mapped file pages", "#FFFFFF", "\\\\\\\\"),
)
EDGE = {"edgecolor": "#222222", "linewidth": 0.6}


def parts(row: pd.Series) -> list[float]:
    """Sizes of `PARTS` in MiB. Anonymous memory contains the allocator's, so each byte is drawn once."""
    known = row.fillna(0.0)
    active, resident = known["alloc_active_mib"], known["resident_mib"]
    bank = max(0.0, min(known["bank_mib"], active - resident))
    other = max(0.0, active - resident - bank)
    free = known["alloc_cache_mib"]
    return [resident, bank, other, free, max(0.0, known["rss_anon_mib"] - active - free), known["rss_file_mib"]]


def save_memory_figure(session: Session, table: pd.DataFrame, stem: Path) -> None:
    """Draw `table` (the columns of summary.csv) and write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("memory"):
        style.save(draw_memory(session, table), stem)


def draw_memory(session: Session, table: pd.DataFrame) -> Figure:
    """The figure itself."""
    rounds = "-".join(map(str, sorted({table["rounds"].min(), table["rounds"].max()})))
    tier, machine = session.all_runs["tier"].iloc[0], session.info.machine or "machine not named"
    about = [machine, tier, f"condition {session.condition}", f"n = {rounds} rounds", f"session {session.name}"]
    caption = style.caption_lines([*about, "medians"], session)
    places = style.places_by_k(table["k"])
    height = 1.75 + 0.27 * (places[-1] + 1) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    process, cache = figure.subplots(1, 2, sharey=True, width_ratios=(1.9, 1))
    bottom = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.2, right=0.985, top=1 - 0.98 / height, bottom=bottom, wspace=0.08)
    reached = [0.0] * len(table)
    sizes = [parts(row) for _, row in table.iterrows()]
    for number, (_, color, hatch) in enumerate(PARTS):
        widths = [size[number] for size in sizes]
        process.barh(places, widths, 0.74, left=reached, color=color, hatch=hatch, **EDGE)
        reached = [start + width for start, width in zip(reached, widths, strict=True)]
    for place, total, row in zip(places, reached, table.itertuples(), strict=True):
        _note(process, total, place, f"{total:.0f}" if row.rounds else "void")
    process.set_xlim(0, 1.1 * max(reached) or 1)
    process.set_xlabel("MiB of the process")
    cached = table["cached_after_mib"].fillna(0)
    cache.barh(places, cached, 0.74, color="#009E73", **EDGE)
    for place, value in zip(places, table["cached_after_mib"], strict=True):
        _note(cache, 0 if pd.isna(value) else value, place, "unknown" if pd.isna(value) else f"{value:.0f}")
    cache.set_xlim(0, 1.2 * cached.max() or 1)
    cache.set_xlabel("MiB of the checkpoint")
    process.set_ylim(places[-1] + 0.75, -0.75)
    process.set_yticks(places, table["arm"])
    cache.tick_params(axis="y", labelleft=False, length=0)
    process.tick_params(axis="y", length=0)
    style.name_ks(process, table["k"], places, -0.37)
    for axes, title in ((process, "In the process"), (cache, "In the page cache")):
        style.dress(axes, title)
        axes.set_title(title, loc="left", weight="bold", pad=42)
        axes.grid(visible=False, axis="y")
    handles = [Patch(facecolor=color, hatch=hatch, label=label, **EDGE) for label, color, hatch in PARTS]
    process.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.015, 1.0), ncols=3, frameon=False, fontsize=8)
    style.put_caption(figure, caption)
    return figure


def _note(axes, x: float, place: float, text: str) -> None:
    axes.annotate(text, (x, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
