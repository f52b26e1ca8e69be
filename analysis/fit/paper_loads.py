"""The paper's six points of load cost, worked out of what it does state; it prints a line but not the points.

Table 4 gives MiB per load, cold share and MiB per step for each arm and K; Table 3, through one third-party copy, the
time per step that the main thread waits for loads. MiB per step over MiB per load are loads per step, and waiting over
loads is a time per load. A line through these six comes out close to the printed one, and their largest distances from
the printed line close to the printed residuals. So its "ms per load" should be waiting per load, of a number of loads
that was itself derived: an inference, and called one wherever it is shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd

from analysis.fit import regression
from analysis.paper.claims import Claims


@dataclass(frozen=True)
class PaperLoads:
    """The paper's line `a + b x cold` (ms), as printed, and `points`: arm, k, cold_share, loads_per_step, ms.

    `machine`: what it was measured on, in words. `residual`, `residual_prerouter`: the largest ones, as printed (ms).
    """

    a: float
    b: float
    points: pd.DataFrame
    machine: str
    residual: float
    residual_prerouter: float

    @classmethod
    def of(cls, claims: Claims) -> PaperLoads:
        """Raises KeyError when the claims lack the line."""
        rows = []
        for claim in claims.by_id.values():
            match = re.fullmatch(r"tab4\.k(\d+)\.(ondemand|prerouter)", claim.id)
            waits = claims.by_id.get(f"tab3.blocked.k{match[1]}") if match else None
            if waits is None:
                continue
            mib_per_load, cold, mib_per_step = claim.value
            loads = mib_per_step / mib_per_load
            wait_ms = waits.value[match[2] == "prerouter"]
            row = {"arm": match[2], "k": int(match[1]), "cold_share": cold, "loads_per_step": loads}
            rows.append(row | {"ms": wait_ms / loads})
        points = pd.DataFrame(rows, columns="arm k cold_share loads_per_step ms".split())
        slope = claims.by_id["fit.slope"]
        stated = [claims.by_id[f"fit.{name}"].value for name in ("residual_all", "residual_prerouter")]
        return cls(claims.by_id["fit.intercept"].value, slope.value, points, claims.machine_name(slope), *stated)

    def cold_range(self, arm: str = "") -> tuple[float, float]:
        """Smallest and largest cold share of its points (of an arm)."""
        here = self.points.loc[self.points["arm"].str.startswith(arm), "cold_share"]
        return float(here.min()), float(here.max())

    def line(self) -> tuple[float, float, float]:
        """Our least squares through the six points: (a, b, R^2)."""
        return regression.line(self.points["cold_share"], self.points["ms"])

    def worst(self, arm: str = "") -> float:
        """The largest distance, in ms, of a point (of an arm) from the printed line."""
        rows = self.points[self.points["arm"].str.startswith(arm)]
        return float((rows["ms"] - self.a - self.b * rows["cold_share"]).abs().max())
