"""What a load costs by its cold share: `python -m analysis.fit.table ROWS --claims CLAIMS --out DIR`.

ROWS are those of `experiments.load_cost`. Writes summary.csv (a line per way of reading and layout), residuals.csv,
layouts.csv, compare.csv, table.md and the figure `fig3`, all or none, and prints table.md; with a session of Table 3
also points.csv, the mean load of each of its arms. Knows nothing of how the rows came about.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from analysis.fit import regression
from analysis.fit.claims import findings
from analysis.fit.figure import save_fig3
from analysis.fit.lines import WAYS, device_verdict, fits, layout_ratios, residual_table, summary, why_ends_differ
from analysis.fit.paper_loads import PaperLoads
from analysis.fit.points import MEANING, Points, session_points
from analysis.fit.regression import Fit
from analysis.heading import guest_cold
from analysis.loads import LoadCost, read_load_cost
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, compare_rows, value_text
from analysis.rows import load_session, markdown_table, publishing, run_command, write_tables
from analysis.units import interval, number

HOW_TO_READ = (
    "`a` is where the line meets a load that is all in the page cache, `a + b` one that comes from the device; what "
    "such loads took by themselves are the measured ends. The line goes through the medians of bins of equal cold "
    "share; brackets are 95% intervals of drawing each bin's loads again.",
    "`mmap` is the paper's way, page faults on a mapping; `pread` reads explicitly; `willneed` tells the kernel of all "
    "ranges first, then reads; `direct` goes past the page cache, so its b is near 0 by design.",
    "`building` is what the paper's engine does in addition for each load: nine arrays made of the bytes. The slot "
    "bank of this engine reads into arrays that are already there, so it is 0 here and stands beside the line, not in "
    "it. The paper's intercept has to hold it.",
    "`device/cold` is what the device delivered over the bytes of the pages that were cold: above 1 is read-ahead.",
    "Milliseconds are this machine's, and of one thread with nothing beside it; behind a hypervisor a cold read may "
    "come from the host's memory. Ways and layouts took turns and compare; milliseconds of two sessions do not.",
)


def markdown(
    loads: LoadCost,
    found: dict[tuple[str, str], Fit],
    table: pd.DataFrame,
    points: Points | None,
    paper: PaperLoads,
    judged: list[Finding],
) -> str:
    """table.md: the lines of `table`, their residuals, the layouts in pairs, and the paper's line beside them."""
    pairs = layout_ratios(loads)
    ends = [f"- {way}, {layout}: {why_ends_differ(loads, way, layout, line)}" for (way, layout), line in found.items()]
    blocks = [
        f"# Load cost against cold share, {loads.about.get('tier') or 'unnamed checkpoint'}",
        "\n".join(f"- {line}" for line in _header(loads, found, table)),
        _line_table(table),
        "## Measured ends against the line",
        "\n".join(ends),
        "## Residuals",
        _residual_table(found),
        *(["## Repacked records over stacked tensors", _layout_table(pairs)] if pairs["n"].any() else []),
        "## The paper beside ours",
        _paper_lines(paper, points),
        _verdicts(judged),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _header(loads: LoadCost, found: dict[tuple[str, str], Fit], table: pd.DataFrame) -> list[str]:
    about, host = loads.about, loads.about.get("host", {})
    facts = [host.get("cpu_model"), host.get("filesystem"), "behind a hypervisor" if host.get("hypervisor") else None]
    sizes = sorted({part.n for line in found.values() for part in line.bins})
    per_bin = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return [
        f"machine: {about.get('machine') or 'not named'} ({'; '.join(str(fact) for fact in facts if fact)})",
        f"tier: {about.get('tier') or 'not named'}, {loads.mib_per_load:.3f} MiB per load",
        "condition: set for each load and looked up before it: one run of its pages at a random place cold, the rest "
        + "; ".join(
            [f"cached; fault window {about.get('fault_window', 'unknown')}", *guest_cold(about.get("lower_cache"))]
        ),
        f"n: {per_bin} loads per bin, {len(loads.rows)} in all, one thread; units in random order (seed "
        f"{about.get('seed', 'unknown')})",
        f"session: {loads.session}, commit {about.get('commit') or 'unknown'}",
        f"drift: {loads.drift()[1]}",
        f"device bytes: {device_verdict(table)}",
        "takes: about 20 seconds for a mini checkpoint, longer as experts are larger",
    ]


def _line_table(table: pd.DataFrame) -> str:
    header = "way|layout|a ms (95%)|b ms (95%)|R^2|largest residual ms|bins|n|warm ms|cold ms|building ms".split("|")
    header += ["GiB/s warm", "GiB/s cold", "device/cold"]
    rows = [
        (
            row.way,
            row.layout,
            f"{row.a_ms:.3f} ({interval(row.a_low, row.a_high, '.3f')})",
            f"{row.b_ms:.3f} ({interval(row.b_low, row.b_high, '.3f')})",
            number(row.r2, ".3f"),
            f"{row.max_residual_ms:.3f} ({row.residual_share:.1%} of a + b)",
            str(row.bins),
            str(row.n),
            number(row.cold0_ms, ".3f"),
            number(row.cold1_ms, ".3f"),
            f"{row.build_ms:.3f}",
            number(row.gib_s_warm, ".2f"),
            number(row.gib_s_cold, ".2f"),
            number(row.device_over_cold, ".3f"),
        )
        for row in table.itertuples()
    ]
    return markdown_table(header, rows, right_from=2)


def _residual_table(found: dict[tuple[str, str], Fit]) -> str:
    """Median ms and, in brackets, how far it lies above the line, bin by bin."""
    columns = sorted({_level(part.cold) for line in found.values() for part in line.bins})
    rows = []
    for (way, layout), line in found.items():
        cells = {}
        for part, residual in zip(line.bins, line.residuals, strict=True):
            cells[_level(part.cold)] = f"{part.ms:.3f} ({residual:+.3f})"
        rows.append([way, layout, *(cells.get(column, "") for column in columns)])
    return markdown_table(["way", "layout", *(f"cold {column:g}" for column in columns)], rows, right_from=2)


def _level(cold: float) -> float:
    """A found share as the column it stands in: what was aimed at is made of whole pages, and so missed a little."""
    return round(20 * cold) / 20


def _layout_table(ratios: pd.DataFrame) -> str:
    levels = sorted(set(ratios["target_cold"]))
    rows = []
    for way in WAYS:
        here = ratios[ratios["way"] == way].set_index("target_cold")
        texts = [f"{row.ratio:.2f}x ({row.ci_low:.2f}-{row.ci_high:.2f})" for row in here.loc[levels].itertuples()]
        rows.append([way, *texts])
    pairs = f"time of a record over the same expert stacked, pairs, 95%; n={ratios['n'].min()} per cell"
    return markdown_table([pairs, *(f"cold {level:g}" for level in levels)], rows, right_from=1)


def _paper_lines(paper: PaperLoads, points: Points | None) -> str:
    lines = [f"- the paper's line ({paper.machine}): {paper.a} + {paper.b} x cold, in ms"]
    if len(paper.points) > 1:
        (a, b, r2), (low, high) = paper.line(), paper.cold_range()
        lines.append(
            "- its six points, worked out of its Tables 3 and 4 as waiting per step over loads per step, these being "
            f"MiB per step over MiB per load: our line through them, at cold shares {low:.2f}-{high:.2f}, is {a:.2f} + "
            f"{b:.2f} x cold, R^2 {r2:.3f}; they lie at most {paper.worst():.2f} ms from the printed line (stated: "
            f"{paper.residual}), the prerouter's at most {paper.worst('prerouter'):.2f} (stated: "
            f"{paper.residual_prerouter}). So, by inference, its time per load is the main thread's "
            "waiting per load, of a number of loads that was itself derived"
        )
    if points is None:
        lines.append("- arms of a session: none given, see `snakemake tab3`")
        return "\n".join(lines)
    for reading, (a, b, r2) in points.lines.items():
        told = f"{a:.2f} + {b:.2f} x cold, R^2 {r2:.3f} ({MEANING})"
        lines.append(f"- arms of session {points.session.name}, {reading}: {told}")
    lines += [f"- arms of session {points.session.name}, {reading}: {why}" for reading, why in points.why_not.items()]
    return "\n".join(lines)


def _verdicts(judged: list[Finding]) -> str:
    """What is judged; the paper's intercept and slope are its machine's, and ours stand in the first table."""
    rows = [
        (finding.claim.id, finding.arm, value_text(finding.claim.value), finding.ours, finding.status, finding.why)
        for finding in judged
        if finding.claim.kind == "relation"
    ]
    return markdown_table(("claim", "where", "paper ms", "ours", "status", "why"), rows)


def write(loads: LoadCost, points: Points | None, claims: Claims, out: Path, least: int = regression.LEAST) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    found, paper = fits(loads, least), PaperLoads.of(claims)
    table, judged = summary(loads, found), findings(loads, found, points, claims)
    text = markdown(loads, found, table, points, paper, judged)
    tables = {
        "summary": table,
        "residuals": residual_table(found),
        "layouts": layout_ratios(loads),
        "compare": compare_rows(judged, claims, loads.session, "snakemake fit"),
    }
    if points is not None:
        tables["points"] = points.rows
    with publishing(out) as scratch:
        write_tables(scratch, text, **tables)
        save_fig3(loads, found, points, paper, scratch / "fig3")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.fit.table", description="Load cost against cold share.")
    parser.add_argument("rows", type=Path, metavar="ROWS", help="what load_cost wrote: its folder or one of its files")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--session", type=Path, help="a session of Table 3, for its arms as points")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    parser.add_argument("--least", type=int, default=regression.LEAST, help="loads that make a bin (default 30)")
    options = parser.parse_args(argv)

    def action() -> str:
        points = session_points(load_session(options.session)) if options.session else None
        return write(read_load_cost(options.rows), points, load_claims(options.claims), options.out, options.least)

    return run_command(action, options.out)


if __name__ == "__main__":
    sys.exit(main())
