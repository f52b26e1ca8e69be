"""What this machine's noise hides: `python -m analysis.noise SESSION --sessions ROOT... --claims CLAIMS --out DIR`.

From a session of one arm against itself, whose pairs can only differ by noise. Writes summary.csv, compare.csv,
table.md and the figure, all or none, and prints table.md. Other sessions, where there are some, are only used to say
how far apart whole sessions lie; no ratio between arms is ever formed across them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.heading import heading
from analysis.noise_figure import save_noise_figure
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, Status, absolute, compare_rows
from analysis.rows import Session, load_session, markdown_table, publishing, run_command, write_tables
from analysis.statistics import (
    Ratio,
    Slope,
    cv,
    false_positive_range,
    false_positive_share,
    linear_slope,
    paired_ratio,
    rounds_needed,
    smallest_visible_effect,
)
from analysis.tab3 import header_lines
from analysis.units import interval

COMMAND = "snakemake noise"
TIME_BUDGET = "about 5 minutes for 12 rounds of mini-35b; 10 seconds for each run"
SUMMARY_COLUMNS = "measure value ci_low ci_high unit n verdict session note".split()
FALSE_ROUNDS = (3, 5)
EFFECTS = (1.01, 1.05)
LIKE = ("arm", "k", "condition", "bank_slots", "timed_steps")  # what runs of two sessions must share to be set together
PASS, FAIL = "pass", "FAIL"
VISIBLE = "smallest visible effect"
TOO_FEW = "one or two pairs have no interval"
HOW_TO_READ = (
    "Both runs of a pair are the same arm, one right after the other in the same round, first in turn: whatever their "
    "ratio shows is noise. It passes when its interval contains 1.00, as it would in 19 of 20 such sessions.",
    "The smallest visible effect is the true ratio that this many rounds would have shown, four times out of five, as "
    "an interval above 1. Rounds needed are the other way round: how many it takes for an effect of a stated size.",
    "False positives: of 10,000 experiments resampled from these pairs, each with so many of them and with a lot for "
    "which half is called the arm, the share whose interval excludes 1. The interval means 5%, but so few pairs show "
    "it only roughly: it fails where normal noise would hardly ever show so much.",
    "Drift is the change of speed over the session, from the pairs' means. Pairs are neighbours, so it hardly enters "
    "their ratio, but it does enter a comparison of two runs that lie far apart.",
    "A one-shot run is a run taken alone. Its spread is what two such runs may differ by without any reason; so is "
    "the spread between sessions, in which the machine, and sometimes the code, was another.",
)


@dataclass(frozen=True)
class Cell:
    """The arm that was run against itself: one row per round valid in both, columns arm, aa, order; by round."""

    arm: str
    k: int
    pairs: pd.DataFrame

    @classmethod
    def of(cls, session: Session) -> Cell:
        """Raises ValueError when the session has no A/A pair, or none whose runs are both valid."""
        repeated = session.all_runs.loc[session.all_runs["role"] == "aa", ["arm", "k"]].drop_duplicates()
        if len(repeated) != 1:
            raise ValueError(f"session {session.name}: expected A/A runs of one arm at one K, found {len(repeated)}")
        arm, k = str(repeated["arm"].iloc[0]), int(repeated["k"].iloc[0])
        run, twin = session.cell(arm, k), session.cell(arm, k, "aa")
        shared = run.index.intersection(twin.index)
        if shared.empty:
            raise ValueError(f"session {session.name}: no A/A pair is valid in both halves")
        run, twin = run.loc[shared], twin.loc[shared]
        order = np.minimum(run["order"], twin["order"])
        return cls(arm, k, pd.DataFrame({"arm": run["tok_s"], "aa": twin["tok_s"], "order": order}))

    @property
    def ratio(self) -> Ratio:
        """Twin over run."""
        return paired_ratio(self.pairs["aa"], self.pairs["arm"])

    @property
    def logs(self) -> np.ndarray:
        return np.log(self.pairs["aa"] / self.pairs["arm"]).to_numpy()

    @property
    def speeds(self) -> np.ndarray:
        """Every run as if it had been taken alone."""
        return self.pairs[["arm", "aa"]].to_numpy().ravel()

    @property
    def drift(self) -> Slope:
        """Change of the log of a pair's mean speed per round."""
        means = np.log(self.pairs[["arm", "aa"]]).mean(axis=1)
        return linear_slope(self.pairs.index.to_numpy(float), means.to_numpy())


@dataclass(frozen=True)
class Across:
    """Medians of the same cell in several sessions, by session name, and how many commits made them."""

    medians: dict[str, float]
    commits: int

    @property
    def ratio(self) -> float:
        """Fastest session over slowest; NaN for fewer than two."""
        return max(self.medians.values()) / min(self.medians.values()) if len(self.medians) > 1 else math.nan

    def __str__(self) -> str:
        n = len(self.medians)
        if n < 2:
            return "fewer than two sessions of this machine and tier ran this arm in this way"
        return f"{self.ratio:.2f}x between {n} sessions of {self.commits} commit{'s' * (self.commits > 1)}"


def across_sessions(session: Session, roots: Iterable[Path]) -> Across:
    """The session's own cell in every finished session under `roots`. Folders that are none are passed over."""
    cell = Cell.of(session)
    own = session.cell(cell.arm, cell.k).iloc[0]
    like = {"arm": cell.arm, "k": cell.k} | {name: own[name] for name in LIKE if name not in ("arm", "k")}
    medians, commits = {}, set()
    for folder in sorted({path.parent for root in roots for path in root.glob("[!.]*/session.json")}):
        try:
            other = load_session(folder)
        except ValueError:  # of an older layout of rows, or damaged: it cannot be set beside this one
            continue
        runs = other.runs[other.runs["role"] == "arm"]
        for name, value in like.items():
            runs = runs[runs[name] == value]
        if (other.info.machine, other.info.tier) == (session.info.machine, session.info.tier) and len(runs):
            medians[other.name] = float(runs["tok_s"].median())
            commits.add(other.info.commit)
    return Across(medians, len(commits))


def summary(session: Session, cell: Cell, across: Across) -> pd.DataFrame:
    """One row per measure, columns `SUMMARY_COLUMNS`; `verdict` is empty where there is nothing to pass."""
    ratio, n, drift = cell.ratio, len(cell.pairs), cell.drift
    rows: list[dict] = []

    def put(measure: str, value: float, unit: str, n: int = n, verdict: str = "", note: str = "", interval=()) -> None:
        low, high = interval or (math.nan, math.nan)
        rows.append(
            dict(zip(SUMMARY_COLUMNS, (measure, value, low, high, unit, n, verdict, session.name, note), strict=True))
        )

    verdict = f"{PASS}: contains 1.00" if ratio.contains(1) else f"{FAIL}: does not contain 1.00"
    put(
        "A/A ratio",
        ratio.ratio,
        "x",
        verdict="" if math.isnan(ratio.ci_low) else verdict,
        note=TOO_FEW if math.isnan(ratio.ci_low) else "passes when the interval contains 1.00",
        interval=(ratio.ci_low, ratio.ci_high),
    )
    put("spread of a pair's ratio", ratio.sd_log, "sd of log")
    alone = f"runs and their repeats; of the {n} runs without repeats {cv(cell.pairs['arm']):.1%}" if n > 1 else ""
    put("CV of single runs", cv(cell.speeds), "share", 2 * n, note=alone)
    put("range of single runs", _range(cell.speeds), "share", 2 * n, note="largest less smallest, over the median")
    put(VISIBLE, smallest_visible_effect(n, ratio.sd_log), "x", note="80% power, two-sided 95%")
    for effect in EFFECTS:
        needed = rounds_needed(effect, ratio.sd_log)
        put(f"rounds needed for {effect - 1:.0%}", math.nan if needed is None else needed, "rounds")
    for rounds in FALSE_ROUNDS:
        share, (low, high) = false_positive_share(cell.logs, rounds), false_positive_range(n, rounds)
        verdict = "" if math.isnan(share) else PASS if share <= high else FAIL
        note = "" if math.isnan(share) else f"5% is meant; {n} pairs of normal noise show {low:.0%} to {high:.0%}"
        put(f"false positives of {rounds} rounds", share, "share", verdict=verdict, note=note)
    interval = (math.expm1(drift.ci_low), math.expm1(drift.ci_high))
    seen = "" if math.isnan(drift.ci_low) else "none seen" if drift.ci_low <= 0 <= drift.ci_high else "drifts"
    put("drift per round", math.expm1(drift.slope), "share of speed", drift.n, seen, interval=interval)
    put("range between sessions", across.ratio, "x", len(across.medians), note=str(across))
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def _range(speeds: Sequence[float]) -> float:
    return float((np.max(speeds) - np.min(speeds)) / np.median(speeds))


def findings(session: Session, cell: Cell, across: Across, claims: Claims) -> list[Finding]:
    """The paper's two statements on its own noise, ours beside them."""
    place = f"{session.info.tier or 'a synthesised checkpoint'} on {session.info.machine or 'this machine'}"
    where = {"k": str(cell.k), "arm": cell.arm}
    here = {"machine": session.info.machine, "tier": session.info.tier}
    single, sessions = claims.by_id["noise.run_to_run"], claims.by_id["noise.cross_session"]
    spread = f"{_range(cell.speeds):.2f} ({cell.speeds.size} runs, largest less smallest over the median)"
    if len(across.medians) < 2:
        other = Finding(sessions, Status.NOT_TESTABLE, "", str(across), **where)
    else:
        other = absolute(sessions, str(across), place, **here, **where)
    return [absolute(single, spread, place, **here, **where), other]


def markdown(session: Session, cell: Cell, table: pd.DataFrame, compared: pd.DataFrame) -> str:
    """table.md: the measures, the paper beside ours, and what is needed to read them."""
    measures = [
        (row.measure, _value(row), _interval(row), str(row.n), row.verdict, row.note) for row in table.itertuples()
    ]
    beside = [
        (row.id, f"{row.paper} {row.unit}", row.ours or "-", row.status, row.why) for row in compared.itertuples()
    ]
    blocks = [
        f"# Noise: {cell.arm} at K={cell.k} against itself, {session.info.tier or 'tier not named'}",
        *heading(header_lines(session, TIME_BUDGET), session),
        markdown_table(("measure", "value", "95%", "n", "verdict", "note"), measures),
        "## The paper beside ours",
        markdown_table(("claim", "paper", "ours", "status", "why"), beside),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _value(row) -> str:
    if math.isnan(row.value):
        return f"not estimable with n={row.n}" if row.measure == VISIBLE else "not known"
    if row.unit == "rounds":
        return f"{row.value:.0f}"
    if row.unit.startswith("share"):
        return f"{row.value:+.2%}" if row.measure.startswith("drift") else f"{row.value:.1%}"
    return f"{row.value:.3f}" + ("x" if row.unit == "x" else "")


def _interval(row) -> str:
    if math.isnan(row.ci_low):
        return ""
    if row.unit.startswith("share"):
        return interval(row.ci_low, row.ci_high, "+.2%")
    return interval(row.ci_low, row.ci_high, ".3f")


def write(session: Session, roots: Sequence[Path], claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    cell, across = Cell.of(session), across_sessions(session, roots)
    table = summary(session, cell, across)
    compared = compare_rows(findings(session, cell, across, claims), claims, session.name, COMMAND)
    text = markdown(session, cell, table, compared)
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, compare=compared)
        save_noise_figure(session, cell, scratch / "noise")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.noise", description="What an arm against itself shows.")
    parser.add_argument("session", type=Path, metavar="SESSION")
    parser.add_argument(
        "--sessions", type=Path, nargs="*", default=[], help="folders that keep sessions, if they exist"
    )
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(load_session(options.session), options.sessions, load_claims(options.claims), options.out),
        options.out,
    )


if __name__ == "__main__":
    sys.exit(main())
