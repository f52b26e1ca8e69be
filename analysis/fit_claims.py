"""The paper's `fit.*` claims beside the lines of our loads.

Its intercept and slope are its machine's and are never judged. How well a line describes loads is judged: the largest
residual as a share of a fully cold load, so that a slow machine and a fast one, a large expert and a small one compare.
"""

from __future__ import annotations

from analysis.claims import Claim, Claims
from analysis.findings import Finding, Status, absolute
from analysis.fit_points import READINGS, Points
from analysis.loads import LoadCost
from analysis.regression import Fit

BUFFERED = ("mmap", "pread", "willneed")  # ways through the page cache; only their loads depend on it
COLD_BINS = 0.8  # bins from this share on stand where the paper's prerouter points do (0.84 to 0.98)


def findings(
    loads: LoadCost, found: dict[tuple[str, str], Fit], points: Points | None, claims: Claims
) -> list[Finding]:
    """The paper's `fit.*` beside ours: its line is its machine's; how well a line fits is judged."""
    result = []
    claim_of, size = claims.by_id, f"{loads.mib_per_load:.2f} MiB per load"
    stated = claim_of["fit.intercept"].value + claim_of["fit.slope"].value
    for (way, layout), line in found.items():
        if way not in BUFFERED:
            continue
        where = {"arm": f"{way}, {layout}"}
        building = loads.cell(way, layout)["build_ns"].median() / 1e6
        ours = f"{line.a:.3f} ({line.a_low:.3f}-{line.a_high:.3f}); {building:.3f} more to build nine arrays"
        result.append(absolute(claim_of["fit.intercept"], ours, f"{loads.place}, {size}", **where))
        ours = f"{line.b:.3f} ({line.b_low:.3f}-{line.b_high:.3f})"
        result.append(absolute(claim_of["fit.slope"], ours, f"{loads.place}, {size}", **where))
        for name, start, what in (
            ("fit.residual_all", 0.0, "all bins"),
            ("fit.residual_prerouter", COLD_BINS, f"bins from cold share {COLD_BINS} on"),
        ):
            if any(part.cold >= start for part in line.bins):
                result.append(_judged(claim_of[name], line, start, stated, where, what))
    result += _point_findings(points, claims, stated)
    return sorted(result, key=lambda finding: list(claim_of).index(finding.claim.id))


def _judged(claim: Claim, line: Fit, start: float, stated: float, where: dict, what: str) -> Finding:
    """Whether our largest residual, as a share of a fully cold load, is no larger than the paper's; by its interval."""
    share, low, high = line.worst_share(start)
    limit = float(claim.value) / stated
    ours = f"{share * (line.a + line.b):.3f} ms, {share:.1%} of a cold load ({low:.1%}-{high:.1%})"
    judged = f"{what}, {line.n} loads; judged as a share of a + b, paper {limit:.1%}"
    if low <= limit <= high:
        return Finding(
            claim, Status.NOT_TESTABLE, ours, f"undecided: the interval spans the paper's; {judged}", **where
        )
    return Finding(claim, Status.HOLDS if high < limit else Status.FAILS, ours, judged, **where)


def _point_findings(points: Points | None, claims: Claims, stated: float) -> list[Finding]:
    """The same claims over a session's arms, which is what the paper fitted: six points, on-demand and prerouter."""
    result = []
    for name, only in (("fit.residual_all", ""), ("fit.residual_prerouter", "prerouter")):
        claim = claims.by_id[name]
        for reading in READINGS:
            where = {"arm": f"arms of a session, {reading}"}
            if points is None or reading in points.why_not:
                why = "no session of Table 3 was given" if points is None else points.why_not[reading]
                result.append(Finding(claim, Status.NOT_TESTABLE, "", why, **where))
                continue
            a, b, _ = points.lines[reading]
            rows = points.rows[points.rows["reading"] == reading]
            rows = rows[rows["arm"].str.startswith(only)]
            worst = float((rows["ms_mean"] - a - b * rows["cold_share"]).abs().max())
            limit = float(claim.value) / stated
            status = Status.HOLDS if worst / (a + b) <= limit else Status.FAILS
            why = f"{len(rows)} points, one per arm and K, no interval; judged as a share of a + b, paper {limit:.1%}"
            result.append(Finding(claim, status, f"{worst:.3f} ms, {worst / (a + b):.1%} of a cold load", why, **where))
    return result
