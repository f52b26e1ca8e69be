"""The figure of budget agreement: cold shares by stream and way beside a simulated LRU cache, and how far they differ.

Knows nothing of files other than the two that it writes; `table` is the summary of `analysis.agreement`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.rows import MIB

HATCHES = ("", "///", "...", "xxx")


def save_agreement(about: dict[str, Any], table: pd.DataFrame, stem: Path) -> None:
    """Write `stem`.png (200 dpi) and `stem`.svg. OSError passes."""
    with style.drawing("agreement"):
        style.save(draw_agreement(about, table), stem)


def draw_agreement(about: dict[str, Any], table: pd.DataFrame) -> Figure:
    measured = table[table["n"].notna()]
    caption = _caption(about, measured)
    height = 3.5 + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9, height))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    low = (0.45 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.075, right=0.985, top=1 - 0.35 / height, bottom=low, wspace=0.24)
    streams = list(dict.fromkeys(table["stream"]))
    _draw_shares(left, measured, streams)
    _draw_differences(right, measured, streams)
    style.put_caption(figure, caption)
    return figure


def _caption(about: dict[str, Any], measured: pd.DataFrame) -> list[str]:
    loads = ", ".join(str(n) for n in sorted(set(measured["n"].astype(int)))) or "no"
    return style.caption_lines(
        [
            str(about.get("machine") or "machine not named"),
            str(about.get("tier") or "tier not named"),
            f"budget of {about['budget_bytes'] / MIB:.0f} of {about['expert_bytes'] / MIB:.0f} MiB of experts",
            f"n = {loads} measured loads per bar, after a steady state by probe",
            f"session {about['session']}",
            "bars on the right: 95% intervals of the mean, from consecutive batches of loads",
        ]
    )


def _draw_shares(axes, measured: pd.DataFrame, streams: list[str]) -> None:
    ways = list(dict.fromkeys(measured["by"]))
    width = 0.8 / max(1, len(ways))
    for number, way in enumerate(ways):
        rows = measured[measured["by"] == way].set_index("stream").reindex(streams)
        at = np.arange(len(streams)) + (number - (len(ways) - 1) / 2) * width
        color, hatch = style.COLORS[number], HATCHES[number % len(HATCHES)]
        axes.bar(at, rows["cold_share"], 0.92 * width, color=color, edgecolor="white", hatch=hatch, label=way)
        tops = rows[["cold_share", "lru_cold_share"]].max(axis=1)
        for place, share, top in zip(at, rows["cold_share"], tops, strict=True):
            if pd.notna(share):
                axes.annotate(f"{share:.3f}", (place, top), (0, 5), textcoords="offset points", ha="center", size=8)
        label = "simulated LRU" if number == 0 else None
        axes.plot(at, rows["lru_cold_share"], "D", color="black", markersize=4, label=label)
    style.dress(axes, "Cold share of the bytes asked for")
    axes.set_xticks(range(len(streams)), streams)
    axes.set_ylim(0, max(0.1, 1.2 * float(np.nan_to_num(measured["cold_share"].max()))))
    axes.set_ylabel("cold share")
    if ways:
        axes.legend(frameon=False, loc="upper right")


def _draw_differences(axes, measured: pd.DataFrame, streams: list[str]) -> None:
    apart = measured[measured["difference"].notna()]
    tolerance = float(apart["tolerance"].max()) if len(apart) else 0.03
    axes.axhspan(-tolerance, tolerance, color="#E8F3EE", label=f"tolerance {tolerance:g}")
    axes.axhline(0, color="#888888", linewidth=0.8)
    for number, (way, rows) in enumerate(apart.groupby("by", sort=False)):
        at = [streams.index(stream) + 0.12 * number for stream in rows["stream"]]
        bars = [rows["difference"] - rows["difference_low"], rows["difference_high"] - rows["difference"]]
        look = {"color": style.COLORS[number + 1], "marker": style.MARKERS[number], "linestyle": "none", "capsize": 3}
        axes.errorbar(at, rows["difference"], yerr=bars, label=f"{way} minus eviction", **look)
    style.dress(axes, "How far from our eviction")
    axes.set_xticks(range(len(streams)), streams)
    axes.set_xlim(-0.5, len(streams) - 0.5)
    seen = apart[["difference_low", "difference_high"]].abs().max().max() if len(apart) else 0.0
    reach = 1.6 * max(tolerance, float(np.nan_to_num(seen)))
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("difference of cold shares")
    axes.legend(frameon=False, loc="upper right", ncols=2, fontsize=8)
