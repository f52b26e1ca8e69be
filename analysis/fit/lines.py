"""The lines of load cost and all that is said of them: one per way of reading and layout, and the layouts in pairs.

Knows nothing of files, text or the paper. Loads of different ways took turns in one run, so their lines compare; the
two layouts were read in pairs, the same expert one right after the other, and are compared as such.
"""

from __future__ import annotations

import math

import pandas as pd

from analysis.fit import regression
from analysis.fit.claims import BUFFERED
from analysis.fit.regression import Fit
from analysis.loads import LoadCost
from analysis.statistics import NO_RATIO, paired_ratio
from analysis.units import DEVICE_TOLERANCE, GIB, MIB, device_agrees

WAYS, LAYOUTS, ADVISED = (*BUFFERED, "direct"), ("stacked", "records"), "willneed"
SUMMARY_COLUMNS = (
    "way layout a_ms a_low a_high b_ms b_low b_high r2 max_residual_ms bins n cold0_ms cold1_ms mib_per_load "
    "residual_share residual_share_low residual_share_high build_ms gib_s_warm gib_s_cold device_over_cold left_out "
    "tier machine session"
).split()
# What a cause must show before it is named.
STEP_SHARE, CHANCE = 0.1, 0.01


def fits(loads: LoadCost, least: int = regression.LEAST) -> dict[tuple[str, str], Fit]:
    """(way, layout) -> the line. Raises ValueError, one line, that names the way and layout without one."""
    found = {}
    for way in WAYS:
        for layout in LAYOUTS:
            rows = loads.cell(way, layout)
            if rows.empty:
                continue
            labels = regression.level_labels(rows["target_cold"], least)
            try:
                found[way, layout] = regression.fit(rows["cold"], rows["ms"], labels)
            except ValueError as error:
                raise ValueError(f"session {loads.session}, {way}, {layout}: {error}; a bin takes {least}") from error
    return found


def summary(loads: LoadCost, found: dict[tuple[str, str], Fit]) -> pd.DataFrame:
    """One row per way and layout, columns `SUMMARY_COLUMNS`."""
    rows = []
    for (way, layout), line in found.items():
        here = loads.cell(way, layout)
        cold_pages = here["cold_page_bytes"].sum()
        gib, worst = loads.mib_per_load * MIB / GIB, line.residual_share()
        rows.append(
            {
                "way": way,
                "layout": layout,
                **line.columns(),
                "mib_per_load": loads.mib_per_load,
                "residual_share": worst.share,
                "residual_share_low": worst.low,
                "residual_share_high": worst.high,
                "build_ms": here["build_ns"].median() / 1e6,
                "gib_s_warm": gib / line.warm.measured * 1e3,
                "gib_s_cold": gib / line.cold.measured * 1e3,
                "device_over_cold": here["device_bytes"].sum() / cold_pages if way in BUFFERED else math.nan,
                "tier": loads.about.get("tier", ""),
                "machine": loads.about.get("machine", ""),
                "session": loads.session,
            }
        )
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def residual_table(found: dict[tuple[str, str], Fit]) -> pd.DataFrame:
    """One row per bin: what was measured, what the line says, and the difference in ms."""
    rows = [{"way": way, "layout": layout} | row for (way, layout), line in found.items() for row in line.bin_rows()]
    return pd.DataFrame(rows)


def layout_ratios(loads: LoadCost) -> pd.DataFrame:
    """Records over stacked at the same way and share: pairs of one expert, read right after each other, by time."""
    rows = []
    for way in WAYS:
        for level in sorted(set(loads.rows["target_cold"])):
            here = loads.rows[(loads.rows["way"] == way) & (loads.rows["target_cold"] == level)]
            sides = [here[here["layout"] == name].set_index("repetition")["ms"] for name in ("records", "stacked")]
            shared = sides[0].index.intersection(sides[1].index)
            ratio = paired_ratio(*(side.loc[shared] for side in sides)) if len(shared) else NO_RATIO
            rows.append({"way": way, "target_cold": level, **vars(ratio)})
    return pd.DataFrame(rows)


def why_ends_differ(loads: LoadCost, way: str, layout: str, line: Fit) -> str:
    """Whether the measured ends agree with the line's, and what the rows say of the reason where they do not."""
    ends = {"warm": line.warm, "cold": line.cold}
    if any(end.n == 0 for end in ends.values()):
        return "an end was not measured"
    apart = {name: end for name, end in ends.items() if not end.agrees}
    if not apart:
        return f"agree within {regression.END_AGREEMENT:.0%}"
    told = "; ".join(
        f"{name} end {end.measured:.3f} ms, line {end.fitted:.3f} ({end.error:+.0%})" for name, end in apart.items()
    )
    return f"differ: {told}; {'; '.join(_reasons(loads.cell(way, layout), line))}"


def _reasons(rows: pd.DataFrame, line: Fit) -> list[str]:
    reasons = []
    step, low, high = regression.first_page_cost(line)
    if (low > 0 or high < 0) and abs(step) > STEP_SHARE * abs(line.a):
        how = "more" if step > 0 else "less"
        reasons.append(f"not one line: a load with anything cold costs {abs(step):.2f} ms {how}, whatever the share")
    partly = rows[(rows["cold"] > 0) & (rows["cold"] < 1)]
    strength, chance = regression.place_effect(
        partly["ms"], partly["cold_pieces"], regression.level_labels(partly["target_cold"], 2)
    )
    if chance < CHANCE:
        reasons.append(
            f"the place matters: time goes with the number of ranges that the cold run touches (r={strength:.2f})"
        )
    return reasons or ["the bins scatter about the line; no reason shows in the rows"]


def device_verdict(table: pd.DataFrame) -> str:
    """Whether the device delivered what was cold, and no more, where the kernel was told beforehand."""
    shares = table.loc[table["way"] == ADVISED, "device_over_cold"].dropna()
    if shares.empty:
        return "not measured: no advised loads"
    low, high = shares.min() - 1, shares.max() - 1
    passed = device_agrees(shares.min()) and device_agrees(shares.max())
    told = f"{low:+.2%} to {high:+.2%} over the layouts, tolerance {DEVICE_TOLERANCE:.0%}"
    return f"{'pass' if passed else 'FAIL'}: device bytes of `{ADVISED}` loads against the cold pages: {told}"
