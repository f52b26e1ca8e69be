"""The ladder of quality: `python -m analysis.ladder.table LADDER.json... --claims CLAIMS --out DIR`.

One tier, K and machine; a file for each seed, which may be the latest.json beside it. Writes summary.csv (a row per
rung, K and seed), pairs.csv (a rung against another, problem by problem), compare.csv, table.md and the figure, all or
none, and prints table.md. Knows nothing of how a rung was trained.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.ladder import training
from analysis.ladder.claims import RULES, findings, must_show
from analysis.ladder.figure import save_ladder_figure
from analysis.ladder.orders import orders, with_heads
from analysis.ladder.pairs import ALL, SEEDS, Measured, loss, pairs, points, recalled, seeds_text, share
from analysis.ladder.rows import (
    ADVISORY,
    CONTROLS,
    DEPLOYED,
    FINAL,
    INT4,
    MEANING,
    RUNGS,
    Ladder,
    Side,
    load_ladder,
)
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, compare_rows, value_text
from analysis.quality.health import LEAST_REPEATED, REPEATS
from analysis.rows import markdown_table, publishing, run_command, write_tables
from analysis.statistics import Estimate, wilson
from analysis.units import interval, number

COMMAND = "snakemake ladder"
SUMMARY = "rung k seed exact_match ci_low ci_high ce recall repetition n".split()
NAMED = 3  # problems named where answers differ
MOST_OF_AN_ANSWER = 40  # characters of it that are shown
HOW_TO_READ = (
    "Exact match: the whole answer, decoded by the likeliest token, equals the one that counts; in points of 100. "
    "Cross-entropy: nats per token of the answer that counts. The problems are held out by a hash of their prompt, and "
    "are the same in every rung and seed.",
    "An interval is over problems (Wilson's for a share, Student's for a difference and, on the logarithm of the mean "
    "so that it does not reach below 0, for a cross-entropy; each problem its mean over seeds) or, with three seeds or "
    "more, Student's over the seeds' means: the wider of the two, and the table says which. "
    "Rungs that are not trained (fp, int4, untrained-heads) are the same in every seed, so theirs is over problems. "
    "With one seed nothing is known of how another training would have come out.",
    "A difference is paired: both rungs answered the same problems. Where only a handful of answers changed its "
    "interval is too short; McNemar's exact p, of one seed each, is not. Gained and lost are counted over all seeds. "
    "Controls may have been run for some seeds only: a difference is of the seeds that ran both rungs, and names them.",
    "Within one task an interval reaches some 13 points to either side at 60 problems: the columns by task only show "
    "where a rung loses.",
    "Recall: of the experts that a predicted layer's own router would choose, the share that was predicted, at served "
    "positions. On predicted routes the router sees what those routes made of the hidden state; `advisory` is the same "
    "heads on the router's own path. Its interval is over predicted layers or seeds, the wider; `by layer` has the "
    "least and the best layer of a seed.",
    "What a recall level is worth: as advice, the read of an expert that was predicted is over before it is needed, "
    "any other is waited for, so recall is the share of the predicted layers' reads whose wait is saved (each expert "
    "counted as one read, nothing kept from the step before, and a layer that lacks one of its experts still waits "
    "for that one). As the route, what was predicted is what is used: no read is waited for if the reads are quick "
    "enough, and the price is in points. Layers with a router of their own are in neither.",
    f"Repetitive: some piece stands {REPEATS} times or more in a row, at least {LEAST_REPEATED} characters in all, and "
    "fills half of the answer.",
    *RULES,
    "The `deployed` answers are the streaming engine's own, from the files of the trained set; it says nothing of "
    "cross-entropy.",
    "What the training took: steps run, of those asked for (phase 1 ends early when held-out recall no longer grows), "
    "rows trained on (steps times the batch, a row as often as it came) and wall seconds. A run that went on after an "
    "interruption counts the seconds of its last part alone, and all of its steps.",
)


def summary(ladder: Ladder) -> pd.DataFrame:
    """A row per rung, K and seed, columns `SUMMARY`, shares from 0 to 1; `ce` and `recall` NaN where there is none."""
    rows = []
    for side in ladder.sides:
        for seed in ladder.seeds_of(side):
            cell = ladder.cells[side, seed]
            score = wilson(float(cell["exact"].mean()), len(cell))
            ends = score.low / 100, score.high / 100
            ce, recall = cell["cross_entropy"].mean(), recalled(ladder, side, [seed]).value / 100
            repetition = cell["repetitive"].mean()
            rows.append((*side, seed, score.value / 100, *ends, ce, recall, repetition, len(cell)))
    return pd.DataFrame(rows, columns=SUMMARY)


def markdown(ladder: Ladder, paired: pd.DataFrame, found: Sequence[Finding]) -> str:
    """table.md."""
    facts = "\n".join(f"- {fact}" for fact in _facts(ladder))
    main, controls = ([side for side in ladder.sides if side.rung in names] for names in (RUNGS, CONTROLS))
    blocks = [
        f"# The ladder of quality: {ladder.tier}, K={ladder.k}",
        facts,
        "## Rungs",
        _rung_table(ladder, main),
        *(["## Controls", _rung_table(ladder, controls)] if controls else []),
        "## What the ladder was to show",
        _shown_table(ladder),
        "## The paper's ordering claims, as found",
        _order_table(ladder, found),
        "## Answers that must be equal",
        "\n".join(f"- {line}" for line in _equal(ladder)),
        "## Rung against rung",
        _pair_table(paired),
        "## Exact match by task",
        _task_table(ladder, main),
        "## What a recall level is worth",
        _recall_table(ladder),
        "## What the training took",
        _training_table(ladder),
        "## The paper beside ours",
        _claim_table(found),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _facts(ladder: Ladder) -> list[str]:
    cell = next(iter(ladder.cells.values()))
    controlled = [about["options"]["seed"] for about in ladder.about if about["options"].get("controls")]
    facts = [
        f"machine: {ladder.machine}",
        f"tier: {ladder.tier}",
        *filter(None, [ladder.stands_for]),
        "condition: none, quality does not depend on the page cache",
        f"n: {len(cell)} held-out problems of {cell['task'].nunique()} tasks; rungs of {seeds_text(ladder.seeds)}, "
        f"controls of {seeds_text(controlled) if controlled else 'no seed'}",
    ]
    for about in ladder.about:
        commit = about.get("commit") or "unknown"
        commit += " + uncommitted changes" if (about.get("host") or {}).get("git_dirty") else ""
        facts.append(f"seed {about['options']['seed']}: session {about['session']}, commit {commit}")
    minutes = [training.without_controls(about) / 60 for about in ladder.about]
    return [*facts, f"takes: {_range(minutes)} minutes for each seed without controls; {_measured_on(ladder)}"]


def _range(values: Sequence[float]) -> str:
    return "-".join(dict.fromkeys(f"{end:.0f}" for end in (min(values), max(values))))


def _measured_on(ladder: Ladder) -> str:
    """What the wall seconds are of."""
    hosts = [about.get("host") or {} for about in ladder.about]
    cores = ", ".join(dict.fromkeys(str(host.get("cores_logical", "unknown")) for host in hosts))
    blas = ", ".join(dict.fromkeys(str(about.get("blas") or "unknown") for about in ladder.about))
    loads = ", ".join(number(host.get("load_1min", math.nan), ".1f") or "unknown" for host in hosts)
    return f"wall time, {cores} cores, BLAS {blas}, load average at the end {loads}"


def _rung_table(ladder: Ladder, sides: Sequence[Side]) -> str:
    rows = []
    for side in sides:
        seeds = ladder.seeds_of(side)
        exact, repeated = (share(ladder.values(column, {side: 1.0}), seeds) for column in ("exact", "repetitive"))
        entropy = loss(ladder.values("cross_entropy", {side: 1.0}), seeds)
        ce = "" if side.rung == DEPLOYED else f"{entropy.text('.4f')}{_over(entropy)}"
        about = (side.rung, str(side.k), MEANING[side.rung])
        values = (f"{exact.text('.1f')}{_over(exact)}", ce, _recall(ladder, side), f"{repeated.value:.1f}%")
        rows.append((*about, *values, f"{exact.n:,}", ", ".join(map(str, seeds))))
    header = "rung|K|what it is|exact match (95%)|cross-entropy, nats (95%)|recall, % (95%)|repetitive|n|seeds"
    return markdown_table(header.split("|"), rows, right_from=3)


def _over(value: Measured) -> str:
    return " over seeds" if value.over == SEEDS else ""


def _recall(ladder: Ladder, side: Side) -> str:
    value = recalled(ladder, side)
    return f"{value.text('.0f')}{_over(value)}" if value.n else ""


def _shown_table(ladder: Ladder) -> str:
    rows = [(shown.what, shown.figures, shown.value.of, shown.verdict) for shown in must_show(ladder)]
    return markdown_table(("relation, at one K", "points (95%)", "of", "verdict"), rows)


def _order_table(ladder: Ladder, found: Sequence[Finding]) -> str:
    """The ledger's verdict where it has the claim, else what the comparison says by itself."""
    stated = {one.claim.id: value_text(one.claim.value) for one in found}
    verdicts = {(one.claim.id, one.arm): f"{one.status}: {one.why.split('; ')[0]}" for one in found}
    rows = [
        (stated.get(one.paper, one.paper), one.what, one.measured, one.of, verdicts.get((one.paper, one.arm), one.said))
        for one in orders(ladder)
    ]
    return markdown_table(("the paper", "compared", "as found (95%)", "of", "which says"), rows)


def _training_table(ladder: Ladder) -> str:
    """Steps, rows and wall seconds of each part, a column for each seed."""
    seconds = [training.wall_seconds(about) for about in ladder.about]
    parts = dict.fromkeys((*training.ORDER, *(part for one in seconds for part in one)))
    rows = [(part, *(training.told(about, part) for about in ladder.about)) for part in parts]
    total = ("total", *(f"{sum(one.values()):.1f} s" for one in seconds))
    header = ("part", *(f"seed {seed}" for seed in ladder.seeds))
    return markdown_table(header, [*(row for row in rows if any(row[1:])), total], right_from=1)


def _equal(ladder: Ladder) -> list[str]:
    """For each seed, in how many problems the engine says what `final` says; and that advice changes nothing."""
    lines = []
    for left, right in ((DEPLOYED, FINAL), (ADVISORY, INT4)):
        sides = Side(left, ladder.k), Side(right, ladder.k)
        for seed in ladder.seeds_of(*sides):
            apart, n = ladder.differing(*sides, seed), len(ladder.cells[sides[0], seed])
            line = f"seed {seed}: {n - len(apart):,} of {n:,} answers of `{left}` are those of `{right}`, item by item"
            if len(apart):
                named = [
                    f"problem {row.problem} ({row.task}): {_quoted(row.answer)} against {_quoted(row.answer_right)}"
                    for row in apart.head(NAMED).itertuples()
                ]
                line += f"; **{len(apart)} {'differs' if len(apart) == 1 else 'differ'}**, first {'; '.join(named)}"
            lines.append(line)
    return lines


def _quoted(answer: str) -> str:
    """An answer in one line of Markdown, cut where it is long."""
    text = answer.encode("unicode_escape").decode("ascii").replace("`", "'")
    return f"`{text[:MOST_OF_AN_ANSWER]}{'...' if len(text) > MOST_OF_AN_ANSWER else ''}`"


def _pair_table(paired: pd.DataFrame) -> str:
    rows, by_sides = [], paired.groupby(["rung", "k", "base", "base_k"])
    for row in paired[paired["seed"] == ALL].itertuples():
        tests = by_sides.get_group((row.rung, row.k, row.base, row.base_k))["mcnemar_p"].dropna()
        exact = Measured(row.points, row.ci_low, row.ci_high, row.n, (), row.over)
        entropy = Measured(row.ce, row.ce_low, row.ce_high, row.n, (), row.ce_over)
        ks = f"K={row.k}" if row.k == row.base_k else f"K={row.k}, K={row.base_k}"
        rows.append(
            (
                f"{row.rung} - {row.base}",
                ks,
                row.what,
                f"{exact.text('+.1f')}{_over(exact)}",
                "" if math.isnan(row.ce) else f"{entropy.text('+.4f')}{_over(entropy)}",
                f"{row.gained}, {row.lost}",
                ", ".join(number(p, ".2g") for p in tests),
                f"{row.n:,}",
                row.seeds,
            )
        )
    header = "rungs|at|what the difference says|points (95%)|nats (95%)|gained, lost|McNemar p by seed|n|seeds"
    return markdown_table(header.split("|"), rows, right_from=3)


def _task_table(ladder: Ladder, sides: Sequence[Side]) -> str:
    """Exact match of each task, mean over seeds."""
    tasks = next(iter(ladder.cells.values()))["task"]
    columns = {
        side: ladder.rows[(ladder.rows["rung"] == side.rung) & (ladder.rows["k"] == side.k)].groupby("task")["exact"]
        for side in sides
    }
    means = {side: column.mean() for side, column in columns.items()}
    rows = [
        (task, str(int((tasks == task).sum())), *(f"{100 * means[side][task]:.0f}" for side in sides))
        for task in dict.fromkeys(tasks)
    ]
    return markdown_table(("task", "n", *(f"{side.rung} K={side.k}" for side in sides)), rows, right_from=1)


def _recall_table(ladder: Ladder) -> str:
    """For each rung with heads at this K: what advice of this recall saves, and what following it costs."""
    rows, base = [], Side(INT4, ladder.k)
    for side in with_heads(ladder):
        recall = recalled(ladder, side)
        cost = "not followed" if side.rung == ADVISORY else points(ladder, {side: 1.0, base: -1.0}).text("+.1f")
        route = "" if side.rung == ADVISORY else "100%"
        wasted = Estimate(100 - recall.value, 100 - recall.high, 100 - recall.low).text(".0f")
        layers = 100 * ladder.recall_of(side)
        ends = interval(layers.min(), layers.max(), ".0f")
        seeds = ", ".join(map(str, recall.seeds))
        rows.append((side.rung, _recall(ladder, side), ends, wasted, route, cost, seeds))
    header = "heads of|recall = as advice: wait of predicted layers' reads saved, % (95%)|by layer"
    header += "|as advice: reads for nothing besides, % (95%)|as the route: saved"
    header += f"|as the route: points against {INT4} (95%)|seeds"
    return markdown_table(header.split("|"), rows, right_from=1)


def _claim_table(found: Sequence[Finding]) -> str:
    rows = [
        (one.claim.id, one.arm, value_text(one.claim.value), one.ours, str(one.status), one.why) for one in found
    ]  # fmt: skip
    return markdown_table("claim|rungs|paper|ours|status|why".split("|"), rows)


def write(paths: Sequence[Path], claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    ladder = load_ladder(paths)
    paired, found = pairs(ladder), findings(ladder, claims)
    text = markdown(ladder, paired, found)
    compared = compare_rows(found, claims, ladder.session, COMMAND)
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=summary(ladder), pairs=paired, compare=compared)
        save_ladder_figure(ladder, scratch / "ladder")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.ladder.table", description=f"`{COMMAND}` makes it.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="LADDER.json", help="one for each seed, or latest.json")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(lambda: write(options.runs, load_claims(options.claims), options.out), options.out)


if __name__ == "__main__":
    sys.exit(main())
