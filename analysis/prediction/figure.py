"""The figure of the prediction: predicted beside measured, here above, on the paper's machine and as gains below.

A row for each K and arm: what was measured or published, 10% either way of it in grey, and what is predicted; beside
it the errors of what the speed is made of. Arms differ by colour and marker as well as by their row's name, so the
figure reads in grey. Knows nothing of files other than the two that it writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.figures import ARM_STYLES

BAND = 0.10
BAND_COLOR = "#D9D9D9"
DARK = "#444444"
ROW_INCHES = 0.25
BETWEEN_INCHES = 0.95  # from one row of panels to the next
K_POINTS = 128  # from a panel's axis to the left of the names of its groups
WORDS = {"m2-16gb": "M2, 16 GB", "m4pro-24gb": "M4 Pro, 24 GB"}
# Column of the summary, label, marker, colour.
PARTS = (
    ("wait_error", "error of waiting", "D", "#009E73"),
    ("cold_share_error", "error of cold share", "^", "#CC79A7"),
)


def save_predict_figure(
    table: pd.DataFrame, gain: pd.DataFrame, lines: Sequence[str], papers: Sequence[str], stem: Path
) -> None:
    """Draw the summary and the gains and write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("predict"):
        style.save(draw_predict(table, gain, lines, papers), stem)


def draw_predict(table: pd.DataFrame, gain: pd.DataFrame, lines: Sequence[str], papers: Sequence[str]) -> Figure:
    """The figure, not saved, under `lines`. Of the paper's machines only the middle page cache is drawn."""
    of_paper = table["machine"].isin(papers)
    here, paper = _rows(table[~of_paper]), _rows(_middle_cache(table[of_paper]))
    gains = gain.dropna(subset=["measured_gain"]).reset_index(drop=True)
    top = [line for text in lines for line in textwrap.wrap(text, style.CAPTION_COLUMNS)]
    caption = style.caption_lines(_caption(here, paper, gains, papers))
    inches = [
        ROW_INCHES * (max(1.0, *((_places(rows) or [0])[-1] for rows in pair)) + 1.6)
        for pair in ((here, here), (paper, gains))
    ]
    above, below = 0.5 + style.LINE_INCHES * len(top), 1.2 + style.LINE_INCHES * len(caption)
    height = above + sum(inches) + BETWEEN_INCHES + below
    figure = Figure(figsize=(9.8, height))
    panels = figure.subplots(2, 2, height_ratios=inches)
    _speeds(panels[0][0], here, "This machine: decode speed")
    _errors(panels[0][1], here, "This machine: errors of the parts")
    names = " and ".join(WORDS.get(name, name) for name in paper["machine"].unique())
    _speeds(panels[1][0], paper, f"The paper's {names}: decode speed" if names else "The paper's machines")
    _gains(panels[1][1], gains, papers)
    figure.text(0.02, 1 - 0.08 / height, "\n".join(top), ha="left", va="top", fontsize=9)
    _legend(figure, (below - 1.02) / height)
    style.put_caption(figure, caption)
    figure.subplots_adjust(
        left=0.19,
        right=0.985,
        top=1 - above / height,
        bottom=below / height,
        wspace=0.72,
        hspace=BETWEEN_INCHES / (sum(inches) / 2),
    )
    return figure


def _middle_cache(table: pd.DataFrame) -> pd.DataFrame:
    """Of each machine the rows of one page cache: the middle one of those predicted, the smaller of two."""
    kept = []
    for _, rows in table.groupby("machine", sort=False):
        sizes = sorted(set(rows["cache_mib"]))
        kept.append(rows[rows["cache_mib"] == sizes[(len(sizes) - 1) // 2]])
    return pd.concat(kept) if kept else table


def _rows(table: pd.DataFrame) -> pd.DataFrame:
    known = table.dropna(subset=["tok_s", "measured_tok_s"])
    order = known["arm"].map({name: place for place, name in enumerate(ARM_STYLES)})
    return known.assign(order=order).sort_values(["machine", "k", "order"], ignore_index=True)


def _places(rows: pd.DataFrame) -> list[float]:
    return style.places_by_k(_group(rows))


def _group(rows: pd.DataFrame) -> pd.Series:
    """What rows stand together: a K, and of gains a machine."""
    return rows["machine"] if "measured_gain" in rows else rows["k"]


def _legend(figure: Figure, bottom: float) -> None:
    grey = {"color": DARK, "linewidth": 0}
    arms = [
        Line2D(
            [], [], marker=ARM_STYLES[arm].marker, color=ARM_STYLES[arm].color, linewidth=0, label=f"{arm}, predicted"
        )
        for arm in ("ondemand", "prerouter")
    ]
    handles = [
        Line2D([], [], marker="|", markersize=11, markeredgewidth=2, label="measured here, or published", **grey),
        Line2D([], [], color=DARK, label="its range: see below"),
        Patch(facecolor=BAND_COLOR, label="10% either way"),
        *arms,
        Line2D([], [], marker="o", markersize=6, markerfacecolor="white", label="open: reads by page faults", **grey),
        *(
            Line2D([], [], marker=marker, color=color, markeredgecolor="white", markersize=7, linewidth=0, label=label)
            for _, label, marker, color in PARTS
        ),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=8, bbox_to_anchor=(0.5, bottom))


def _errors(axes, table: pd.DataFrame, title: str) -> None:
    """What the speed is made of, against what was measured of it; the cold share with its sampling."""
    if not _prepare(axes, table, title, "error, %"):
        return
    axes.axvspan(-100 * BAND, 100 * BAND, color=BAND_COLOR, linewidth=0)
    axes.axvline(0, color=DARK, linewidth=1)
    for place, row in zip(_places(table), table.itertuples(), strict=True):
        for (column, _, marker, color), shift in zip(PARTS, (-0.17, 0.17), strict=True):
            value = 100 * getattr(row, column)
            axes.plot(value, place + shift, marker, color=color, markeredgecolor="white", markersize=6.5, zorder=3)
        margin = 100 * row.cold_share_margin / row.measured_cold_share if row.measured_cold_share else 0
        axes.hlines(place + 0.17, value - margin, value + margin, color=color, linewidth=1, zorder=2)


def _gains(axes, gains: pd.DataFrame, papers: Sequence[str]) -> None:
    """Predicted gains, a line where they are a range, beside measured or published ones."""
    if not _prepare(axes, gains, "Gain of the prerouter", "tok/s with it over tok/s on demand"):
        return
    axes.axvline(1, color=DARK, linewidth=0.6, linestyle=":")
    for place, row in zip(_places(gains), gains.itertuples(), strict=True):
        _measured(axes, place, row.measured_gain, row.measured_low, row.measured_high)
        color = ARM_STYLES[row.arm].color
        axes.hlines(place, row.gain_low, row.gain_high, color=color, linewidth=2, zorder=3)
        _predicted(axes, place, (row.gain_low + row.gain_high) / 2, row.arm)
    ends = gains[["gain_low", "gain_high", "measured_low", "measured_high", "measured_gain"]]
    axes.set_xlim(min(0.9, ends.min().min() - 0.05), ends.max().max() + 0.12)


def _measured(axes, place: float, middle: float, low: float, high: float) -> None:
    axes.barh(place, 2 * BAND * middle, 0.74, left=(1 - BAND) * middle, color=BAND_COLOR, linewidth=0)
    if not pd.isna(low):
        axes.hlines(place, low, high, color=DARK, linewidth=1)
    axes.vlines(middle, place - 0.37, place + 0.37, color=DARK, linewidth=2)


def _predicted(axes, place: float, value: float, arm: str) -> None:
    face = {"markerfacecolor": "white"} if arm.endswith("-mmap") else {"markeredgecolor": "white"}
    axes.plot(value, place, ARM_STYLES[arm].marker, color=ARM_STYLES[arm].color, markersize=6.5, zorder=4, **face)


def _speeds(axes, table: pd.DataFrame, title: str) -> None:
    if not _prepare(axes, table, title, "tok/s"):
        return
    for place, row in zip(_places(table), table.itertuples(), strict=True):
        _measured(axes, place, row.measured_tok_s, row.measured_low, row.measured_high)
        _predicted(axes, place, row.tok_s, row.arm)
    axes.set_xlim(0, (1.05 + BAND) * table[["tok_s", "measured_tok_s", "measured_high"]].max().max())


def _prepare(axes, table: pd.DataFrame, title: str, unit: str) -> bool:
    """Title, axes and the names of the rows, by group, then in the order of `ARM_STYLES`; False where there is none."""
    style.dress(axes, title)
    axes.set_xlabel(unit)
    axes.tick_params(axis="y", length=0)
    if table.empty:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing to compare", ha="center", va="center", transform=axes.transAxes)
        return False
    places, of_gains = _places(table), "measured_gain" in table
    axes.set_ylim(places[-1] + 0.8, -0.8)
    axes.grid(visible=False, axis="y")
    if of_gains:
        names = "K = " + table["k"].astype(str) + table["arm"].str.endswith("-mmap").map({True: " -mmap", False: ""})
    else:
        names = table["arm"] + table["note"].ne("").map({True: " *", False: ""})
    axes.set_yticks(places, names)
    group = _group(table)
    for value in group.unique():
        middle = [place for place, one in zip(places, group, strict=True) if one == value]
        label = (WORDS.get(value, "here")).split(",")[0] if of_gains else f"K = {value}"
        place = {"xycoords": axes.get_yaxis_transform(), "xytext": (-K_POINTS, 0), "textcoords": "offset points"}
        axes.annotate(label, (0, sum(middle) / len(middle)), weight="bold", va="center", **place)
    return True


def _caption(here: pd.DataFrame, paper: pd.DataFrame, gains: pd.DataFrame, papers: Sequence[str]) -> list[str]:
    parts = []
    if len(here):
        row = here.iloc[0]
        parts += [f"here: {row['machine']}, {row['tier']}", f"page cache of {row['cache_mib']:.0f} MiB"]
        parts += [f"n = {here['rounds'].max():.0f} rounds, median and least to largest; gains: 95% interval"]
        parts += ["cold share: 95% interval of the loads probed", f"session {row['session']}"]
    if len(paper):
        caches = ", ".join(
            f"{WORDS.get(name, name)}: {rows['cache_mib'].iloc[0] / 1024:g} GiB"
            for name, rows in paper.groupby("machine")
        )
        parts.append(f"the paper's machine: one published value, generated routes, page cache of {caches}")
        if paper["note"].ne("").any():
            parts.append("* time besides waiting comes from these rows: only waiting is predicted")
    unknown = set(gains.loc[gains["machine"].isin(papers), "machine"]) - set(paper["machine"])
    for name in sorted(unknown):
        parts.append(f"{WORDS.get(name, name)}: no compute time known, so no speed and a range of gains")
    return parts
