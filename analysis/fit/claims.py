"""The paper's `fit.*` claims beside the lines of our loads.

Its intercept and slope are its machine's. How well a line describes loads is judged: the largest residual as a share of
a fully cold load, so that a slow machine and a fast one, a large expert and a small one compare. Only what compares
with the paper is judged: page faults on stacked tensors, at the cold shares that its points span. Other ways of reading
stand beside it.
"""

from __future__ import annotations

from analysis.fit.paper_loads import PaperLoads
from analysis.fit.points import MEANING, QUANTITY, READINGS, Points
from analysis.fit.regression import Fit
from analysis.loads import LoadCost
from analysis.paper.claims import Claim, Claims
from analysis.paper.findings import Finding, Status, absolute, relation
from analysis.statistics import Ratio, Spread
from analysis.units import interval

BUFFERED = ("mmap", "pread", "willneed")  # ways through the page cache; only their loads depend on it
PAPERS_WAY = ("mmap", "stacked")
LEAST_BINS = 3  # a line through two leaves nothing over
RESIDUALS = {"fit.residual_all": "", "fit.residual_prerouter": "prerouter"}  # to the arms whose points they are of


def findings(
    loads: LoadCost, found: dict[tuple[str, str], Fit], points: Points | None, claims: Claims
) -> list[Finding]:
    """The paper's `fit.*` beside ours, in the order of the claims."""
    result = []
    claim_of, paper = claims.by_id, PaperLoads.of(claims)
    own = {"machine": loads.about.get("machine"), "tier": loads.about.get("tier")}
    own["place"] = f"{loads.place}, {loads.mib_per_load:.2f} MiB per load"
    for (way, layout), line in found.items():
        if way not in BUFFERED:
            continue
        where = {"arm": f"{way}, {layout}"}
        building = loads.cell(way, layout)["build_ns"].median() / 1e6
        ours = f"{line.a:.3f} ({interval(line.a_low, line.a_high, '.3f')}); {building:.3f} more to build nine arrays"
        spreads = [Spread(line.a, line.a_low, line.a_high, line.n)]
        result.append(absolute(claim_of["fit.intercept"], ours, spreads=spreads, **own, **where))
        ours = f"{line.b:.3f} ({interval(line.b_low, line.b_high, '.3f')})"
        spreads = [Spread(line.b, line.b_low, line.b_high, line.n)]
        result.append(absolute(claim_of["fit.slope"], ours, spreads=spreads, **own, **where))
        for name, arm in RESIDUALS.items():
            result.append(_residual(claim_of[name], line, paper, arm, (way, layout)))
    result += _point_findings(points, claims, paper)
    return sorted(result, key=lambda finding: list(claim_of).index(finding.claim.id))


def _residual(claim: Claim, line: Fit, paper: PaperLoads, arm: str, cell: tuple[str, str]) -> Finding:
    """Whether our largest residual, as a share of a fully cold load, is no larger than the paper's; by its interval."""
    where, line_from, start = {"arm": ", ".join(cell)}, paper.cold_range()[0], paper.cold_range(arm)[0]
    worst, limit = line.residual_share(line_from, start), claim.value / (paper.a + paper.b)
    if worst.n == 0 or worst.bins < LEAST_BINS:
        why = f"{worst.bins} bins of cold share {line_from}-1 for the line, {worst.n} loads from {start} on: too few"
        return Finding(claim, Status.NOT_TESTABLE, "", why, **where)
    ours = f"{worst.ms:.3f} ms, {worst.share:.1%} of a cold load ({interval(worst.low, worst.high, '.1%')})"
    judged = (
        f"line through cold shares {line_from}-1, residuals from {start} on, {worst.n} loads; judged as a share of "
        f"a + b over the paper's {limit:.1%}"
    )
    blocked = "" if cell == PAPERS_WAY else f"for information: the paper's loads are {', '.join(PAPERS_WAY)}; {judged}"
    ratio = Ratio(worst.share / limit, worst.low / limit, worst.high / limit, worst.n)
    return relation(claim, [ratio], ours, smaller=True, why=judged, blocked=blocked, **where)


def _point_findings(points: Points | None, claims: Claims, paper: PaperLoads) -> list[Finding]:
    """The same over a session's arms, which is what the paper fitted: told, but six points have no interval."""
    result = []
    for name, only in RESIDUALS.items():
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
            worst = float((rows[QUANTITY] - a - b * rows["cold_share"]).abs().max())
            limit = claim.value / (paper.a + paper.b)
            ours = f"{worst:.3f} ms, {worst / (a + b):.1%} of a cold load"
            why = (
                f"undecided: {len(rows)} points, one per arm and K, have no interval; {MEANING}; as a share of a + b, "
                f"where the paper has {limit:.1%}"
            )
            result.append(Finding(claim, Status.NOT_TESTABLE, ours, why, **where))
    return result
