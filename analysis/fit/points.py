"""The arms of a session as points of load cost: what the paper fitted, six of them, one per arm and K.

Knows nothing of figures or claims. A point is what the main thread waits per load, which by our inference
(`analysis.fit.paper_loads`) is the paper's quantity, beside the cold share of the loads before which the page cache was
looked at. A line through points that all have one cold share would say nothing, so there is none then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.fit import regression
from analysis.loads import session_loads
from analysis.rows import Session

LEAST_POINTS = 3
QUANTITY = "wait_per_load_ms"
MEANING = "waiting of the main thread per load, by our inference the paper's quantity"
READINGS = {"explicit reads": ("ondemand", "prerouter"), "page faults": ("ondemand-mmap", "prerouter-mmap")}
POINT_COLUMNS = "arm k reading cold_share ms_mean ms_median wait_per_load_ms n session".split()


@dataclass(frozen=True)
class Points:
    """The arms of one session, a row each (arm, k, cold_share, ms_mean, ms_median, wait_per_load_ms, n, reading), and
    the line through the waits per load of each reading, or why there is none."""

    session: Session
    rows: pd.DataFrame
    lines: dict[str, tuple[float, float, float]]
    why_not: dict[str, str]


def session_points(session: Session) -> Points:
    """The wait per load of each arm and K against its cold share, and the line of each way of reading."""
    loads = session_loads(session)
    rows = []
    for reading, arms in READINGS.items():
        for (k, arm), here in loads[loads["arm"].isin(arms)].groupby(["k", "arm"]):
            runs = session.cell(arm, k)
            rows.append(
                {
                    "arm": arm,
                    "k": k,
                    "reading": reading,
                    "cold_share": here["cold_bytes"].sum() / here["asked_bytes"].sum(),
                    "ms_mean": here["ms"].mean(),
                    "ms_median": here["ms"].median(),
                    "wait_per_load_ms": (runs["wait_ms_per_step"] / runs["loads_per_step"]).median(),
                    "n": len(here),
                    "session": session.name,
                }
            )
    table = pd.DataFrame(rows, columns=POINT_COLUMNS)
    lines, why_not = {}, {}
    for reading in READINGS:
        here = table[table["reading"] == reading]
        if len(here) < LEAST_POINTS:
            why_not[reading] = f"the session has {len(here)} arms with probed loads, a line takes {LEAST_POINTS}"
        elif np.ptp(here["cold_share"]) < regression.LEAST_SPREAD:
            low, high = here["cold_share"].min(), here["cold_share"].max()
            why_not[reading] = f"the arms' cold shares span {low:.2f}-{high:.2f}, too little for a line"
        else:
            lines[reading] = regression.line(here["cold_share"], here[QUANTITY])
    return Points(session, table, lines, why_not)
