"""Table 2, quality of int4 against fp: `python -m analysis.quality.table QUALITY.json... --claims CLAIMS --out DIR`.

One document of each tier (its rows in the Parquet file beside it), or the latest.json beside them. Writes summary.csv
(a row per tier and benchmark, and their mean), questions.csv (a row per question, both arms), compare.csv, table.md and
the figure fig2, all or none, and prints table.md. Every difference is of the same questions in both arms. Knows nothing
of how answers were made or scored.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.paper.claims import Claims, load_claims
from analysis.quality.claims import COMMAND, PaperRow, compare, paper_mean, paper_rows
from analysis.quality.figure import save_tab2_figure
from analysis.quality.health import LEAST_REPEATED, LEAST_WORDS, REPEATS, distinct, repetitive
from analysis.quality.rows import ARMS, STAND_IN, Quality, load_qualities
from analysis.quality.scores import DRAWS, Row, Scores, score
from analysis.rows import markdown_table, publishing, run_command, write_tables
from analysis.statistics import Estimate
from analysis.units import number

MEAN = "mean of benchmarks"
HASH_DIGITS = 12
HOW_TO_READ = (
    "A score is the mean over questions, in points of 100; its interval is Wilson's where every answer is right or "
    "wrong, else of questions drawn again. MMLU-Pro, too, is a mean over questions, not over categories.",
    f"`int4 - fp` is paired: both arms answered the same questions, and its 95% interval is of {DRAWS:,} draws of "
    "those questions with a fixed seed, each benchmark by itself. Below about 30 questions, or where few answers "
    "changed, such an interval is too short; where no score differs there is none, and in the mean such a benchmark "
    "counts as certain.",
    "McNemar's exact p is of right and wrong answers only, so a benchmark with parts of a point has none. It asks "
    "whether as many questions were lost as gained, and knows nothing of the other benchmarks.",
    "An interval knows how other questions would differ, not how another checkpoint, prompt or limit would.",
    "The paper prints scores alone. Each is taken as right answers out of the benchmark's questions, and the "
    "difference as unpaired: on the same questions its interval would be narrower, by how much nobody can tell from "
    "the scores. AIME 2026 has 30 questions; where a score is no whole number of them it is a mean over repeats, whose "
    "interval over questions is at most as wide as the one here. The paper does not say which of IFBench's "
    "accuracies it prints (OpenCompass's `score` is a mean of four): taken here as a share of 300 prompts. MMLU-Pro is "
    "taken as a share of 12,032 questions.",
    f"Repetitive: some piece stands {REPEATS} times or more in a row, at least {LEAST_REPEATED} characters in all, and "
    "fills half of the answer. Distinct-1 and distinct-2: different words or pairs of words over all of an answer's, "
    f"mean over answers; of characters where the median answer has fewer than {LEAST_WORDS} words. Longer answers have "
    "lower values, so compare arms of like lengths.",
)
STANDS_IN = (
    f"**{STAND_IN.capitalize()}**: where a benchmark's name carries this, its questions are seeded ones in the "
    "benchmark's format, at a small model's level. Their scores say nothing of the benchmark, and the paper's row "
    "stands beside them only to show how wide its intervals are."
)


def summary(tiers: Sequence[Scores], claims: Claims) -> pd.DataFrame:
    """A row per tier and benchmark, and one of their mean: scores, difference, flips, text health and the paper's."""
    rows = []
    for scores in tiers:
        quality = scores.quality
        stated = {row.benchmark.id: row for row in paper_rows(claims, quality.tag)}
        named = {"tier": quality.tier, "k": quality.k, "machine": quality.machine, "session": quality.session}
        for row in scores.rows:
            about = {"benchmark": row.benchmark.id, "stand_in": row.stands_in, "n": row.n}
            paper = stated.get(row.benchmark.id)
            theirs = _paper_columns(paper.score, paper.difference, row.benchmark.questions) if paper else {}
            rows.append(about | _values(row.score, row.difference) | _flips(row) | _health(row) | theirs | named)
        about = {"benchmark": "mean", "stand_in": quality.any_stand_in, "n": scores.n}
        theirs = _paper_columns(*paper_mean(list(stated.values())), math.nan) if stated else {}
        rows.append(about | _values(scores.mean, scores.difference) | theirs | named)
    return pd.DataFrame(rows)


def _values(score: Mapping[str, Estimate], difference: Estimate, prefix: str = "") -> dict[str, float]:
    parts = {**score, "difference": difference}
    return {
        f"{prefix}{name}{end}": value
        for name, part in parts.items()
        for end, value in (("", part.value), ("_low", part.low), ("_high", part.high))
    }


def _paper_columns(score: Mapping[str, Estimate], difference: Estimate, n: float) -> dict[str, float]:
    return _values(score, difference, "paper_") | {"paper_n": n}


def _flips(row: Row) -> dict[str, float]:
    flips = row.flips
    return {"gained": flips.gained, "lost": flips.lost, "mcnemar_p": flips.p} if flips else {"mcnemar_p": math.nan}


def _health(row: Row) -> dict[str, Any]:
    names = "cut empty repetitive distinct_1 distinct_2 median_tokens".split()
    parts = {f"{name}_{arm}": getattr(row.health[arm], name) for name in names for arm in ARMS}
    return parts | {"distinct_unit": row.health[ARMS[0]].unit}


def questions(tiers: Sequence[Scores]) -> pd.DataFrame:
    """A row per tier and question: both arms' scores, lengths, stop reasons and text health, without the answers."""
    parts = []
    for scores in tiers:
        pairs = scores.quality.pairs
        units = pairs["benchmark"].map({row.benchmark.id: row.health[ARMS[0]].unit for row in scores.rows})
        table = pairs[["benchmark", "question", "category", "stand_in"]].assign(tier=scores.quality.tier)
        for arm in ARMS:
            answers = pairs[f"answer_{arm}"]
            for name in ("score", "prompt_tokens", "answer_tokens", "stop"):
                table[f"{name}_{arm}"] = pairs[f"{name}_{arm}"]
            table[f"repetitive_{arm}"] = answers.map(repetitive)
            for size in (1, 2):
                values = [distinct(text, size, unit) for text, unit in zip(answers, units, strict=True)]
                table[f"distinct_{size}_{arm}"] = values
        parts.append(table.assign(difference=100 * (table["score_int4"] - table["score_fp"])))
    return pd.concat(parts, ignore_index=True)


def markdown(tiers: Sequence[Scores], compared: pd.DataFrame, claims: Claims) -> str:
    """table.md: each tier's scores, the paper's beside them, text health, then what is judged."""
    mark = f" ({STAND_IN})" if any(scores.quality.any_stand_in for scores in tiers) else ""
    names = ", ".join(scores.quality.tier for scores in tiers)
    facts = [f"- machine: {tiers[0].quality.machine}"]
    for scores in tiers:
        facts += [f"- {fact}" for fact in _facts(scores.quality)]
    blocks = [f"# Table 2: quality of int4 against fp, {names}{mark}", "\n".join(facts), *([STANDS_IN] if mark else [])]
    for scores in tiers:
        stated = paper_rows(claims, scores.quality.tag)
        blocks += [f"## Scores: {scores.quality.tier}", _score_table(scores)]
        if stated:
            blocks += [
                f"## The paper beside ours: {scores.quality.tag}, and {scores.quality.tier}{mark}",
                _paper_table(scores, stated),
                "\n".join(f"- {row.words()}" for row in stated),
            ]
        blocks += [f"## Text health: {scores.quality.tier}", _health_table(scores)]
    judged = compared[compared["ours"] != ""]
    cells = judged[["id", "arm", "k", "paper", "ours", "status", "why"]].itertuples(index=False, name=None)
    blocks += ["## What is judged", markdown_table("claim|arms|K|paper|ours|status|why".split("|"), cells)]
    blocks += ["## How to read", "\n".join(f"- {line}" for line in HOW_TO_READ)]
    return "\n\n".join(blocks) + "\n"


def _facts(quality: Quality) -> list[str]:
    about = quality.about
    dirty = " + uncommitted changes" if (about.get("host") or {}).get("git_dirty") else ""
    lines = [
        f"tier: {quality.tier}, K={quality.k}"
        + (f", standing where the paper has {quality.tag}" if quality.tag else ""),
        f"session: {quality.session}, commit {about.get('commit') or 'unknown'}{dirty}, "
        f"OpenCompass {about.get('opencompass') or 'unknown'}",
    ]
    for arm, told in (about.get("arms") or {}).items():
        lines.append(f"arm {arm}: {told['what'] if isinstance(told, dict) and 'what' in told else _told(told)}")
    optional = {"limits": "answers are cut at (tokens)", "metrics": "scored", "data": "data"}
    lines += [f"{words}: {_told(about[key])}" for key, words in optional.items() if about.get(key)]
    if check := about.get("cross_check"):
        lines.append(
            f"cross-check: {check['equal']} answers to {check['benchmark']} are the same from {check['route']}"
        )
    return lines


def _told(value: Any) -> str:
    """A value of quality.json in words: names with their values, hashes cut to `HASH_DIGITS`."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_told(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_told, value))
    text = str(value)
    return text[:HASH_DIGITS] if len(text) == 64 and " " not in text else text


def _score_table(scores: Scores) -> str:
    header = "benchmark|n|fp|int4|int4 - fp|gained / lost|McNemar p|cut, fp / int4|repetitive, fp / int4".split("|")
    rows = []
    for row in scores.rows:
        flips = row.flips
        rows.append(
            (
                row.label,
                f"{row.n:,}",
                *(row.score[arm].text() for arm in ARMS),
                row.difference.text("+.1f"),
                f"{flips.gained} / {flips.lost}" if flips else "",
                f"{flips.p:.2g}" if flips else "not 0/1",
                _both(row, "cut"),
                _both(row, "repetitive"),
            )
        )
    means = [
        " / ".join(
            f"{sum(getattr(row.health[arm], name) for row in scores.rows) / len(scores.rows):.1%}" for arm in ARMS
        )
        for name in ("cut", "repetitive")
    ]
    values = (*(scores.mean[arm].text() for arm in ARMS), scores.difference.text("+.1f"))
    mark = f" ({STAND_IN})" if scores.quality.any_stand_in else ""
    rows.append((MEAN + mark, f"{scores.n:,}", *values, "", "", *means))
    return markdown_table(header, rows, right_from=1)


def _both(row: Row, name: str) -> str:
    return " / ".join(f"{getattr(row.health[arm], name):.1%}" for arm in ARMS)


def _paper_table(scores: Scores, stated: Sequence[PaperRow]) -> str:
    header = "benchmark|n|paper: fp|paper: int4|paper: int4 - fp, unpaired|in questions|ours: int4 - fp, paired".split(
        "|"
    )
    ours = {row.benchmark: row for row in scores.rows}
    rows = [
        (
            row.benchmark.name,
            f"{row.benchmark.questions:,}",
            *(row.score[arm].text() for arm in ARMS),
            row.difference.text("+.1f"),
            f"{row.questions:+.1f}",
            f"{ours[row.benchmark].difference.text('+.1f')}, n={ours[row.benchmark].n}",
        )
        for row in stated
    ]
    score, difference = paper_mean(stated)
    values = (*(score[arm].text() for arm in ARMS), difference.text("+.1f"))
    rows.append((MEAN, "", *values, "", scores.difference.text("+.1f")))
    return markdown_table(header, rows, right_from=1)


def _health_table(scores: Scores) -> str:
    header = (
        "benchmark|arm|answers|median tokens|cut at the limit|empty|repetitive|distinct-1|distinct-2|n-grams of".split(
            "|"
        )
    )
    rows = []
    for row in scores.rows:
        for arm, health in row.health.items():
            shares = (
                f"{share:.1%} ({round(share * health.n)})" for share in (health.cut, health.empty, health.repetitive)
            )
            varied = (number(health.distinct_1, ".3f"), number(health.distinct_2, ".3f"), health.unit)
            rows.append((row.label, arm, f"{health.n:,}", f"{health.median_tokens:.0f}", *shares, *varied))
    return markdown_table(header, rows, right_from=2)


def write(qualities: Sequence[Quality], claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    tiers = [score(quality) for quality in qualities]
    compared = compare(tiers, claims)
    text = markdown(tiers, compared, claims)
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=summary(tiers, claims), questions=questions(tiers), compare=compared)
        save_tab2_figure(tiers, claims, scratch / "fig2")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    about = f"Table 2; `{COMMAND}` makes it."
    parser = argparse.ArgumentParser(prog="python -m analysis.quality.table", description=about)
    parser.add_argument(
        "qualities", type=Path, nargs="+", metavar="QUALITY.json", help="one of each tier, or latest.json"
    )
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(load_qualities(options.qualities), load_claims(options.claims), options.out), options.out
    )


if __name__ == "__main__":
    sys.exit(main())
