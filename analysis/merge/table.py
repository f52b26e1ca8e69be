"""The merge study: `python -m analysis.merge.table FILE... --sessions S... --claims CLAIMS --out DIR`.

A file per checkpoint. What a recovery LoRA loses when it is merged into int4 weights that are quantised again, by kind
of projection and at the logits, and what it costs to keep it unmerged. Writes summary.csv, cost.csv, compare.csv,
table.md and the figure, all or none, and prints table.md. Knows nothing of how weights are quantised; whether a
correction is worth having at all is the ladder's to say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.heading import heading
from analysis.merge.claims import findings, told
from analysis.merge.figure import save_merge_figure
from analysis.merge.rows import KINDS, LOGITS, Study
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, compare_rows, value_text
from analysis.rows import Session, load_session, markdown_table, paired, publishing, run_command, write_tables
from analysis.statistics import LEAST_FOR_INTERVAL, Difference, Ratio, median_spread
from analysis.units import interval, number

COMMAND = "snakemake merge"
TIME_BUDGET = "about 3 minutes for each tiny tier on two cores"
WITH, WITHOUT = "prerouter", "prerouter-bare"
POOLED = (
    "Pooled: the median over all projections of a kind within a unit (at the logits: over all positions), then the "
    "mean over units; a unit is an adapter set (a seed) with all its layers or prompts where there are "
    f"{LEAST_FOR_INTERVAL} sets or more, else one layer or prompt of one set. All other columns are medians over all "
    "targets of all sets."
)
HOW_TO_READ = (
    "B: a target's weight as the checkpoint holds it, U = B + the LoRA: what is served unmerged, M: U quantised again "
    "at the same bits, in groups of 64, by the converter's own rule. Survival is 1 - |U - M| / |U - B|: 1 where the "
    "grid takes the correction up, 0 where rounding costs as much as the correction is worth, below 0 where more.",
    "Survival's interval is Student's over the units; its range is of single targets or positions.",
    "`on the same grid`: the same, had each weight been rounded to the scales and biases that it had. `base alone` is "
    "what quantising the base again does without any correction, in steps: a converter that draws a new grid moves "
    "weights that need not move, and a correction below that drowns whatever its sign.",
    "`step` is the scale of a group, the distance of two neighbouring weights.",
    "At the logits, three models are compared that differ in these weights alone, in fp32: with the LoRA, without it, "
    "and with it merged. A changed hidden state may also change routes, so that losses there need not be those of the "
    "weights.",
    "The cost of the unmerged path is a ratio of tok/s, paired by round within one session. The arm without the LoRA "
    "routes otherwise, so its loads per step stand beside it.",
)


def summary(studies: Sequence[Study]) -> pd.DataFrame:
    """A row per checkpoint and kind that it has targets of, then one for its logits."""
    rows = []
    for study in studies:
        for kind in (*KINDS, LOGITS):
            here = study.of(kind)
            untouched = int((study.weights["kind"] == kind).sum()) - len(here) if kind != LOGITS else 0
            if here.empty and not untouched:
                continue
            survival, spread = study.survival(kind), median_spread(here["survival"])
            row = {
                "tier": study.tier,
                "k": study.about["k"],
                "kind": kind,
                "survival": survival.mean,
                "ci_low": survival.ci_low,
                "ci_high": survival.ci_high,
                "units": survival.n,
                "unit": study.unit_name(kind),
                "survival_min": spread.low,
                "survival_max": spread.high,
                "n": spread.n,
                "untouched": untouched,
            }
            if kind != LOGITS:
                row |= {
                    "bits": "+".join(map(str, sorted(set(here["bits"])))),
                    "survival_same_grid": here["survival_same_grid"].median(),
                    "delta_rms": here["delta_rms"].median(),
                    "step": here["step_median"].median(),
                    "delta_over_step": here["delta_over_step"].median(),
                    "base_alone_over_step": (here["requantised_rms"] / here["step_median"]).median(),
                    "codes_changed": here["codes_changed"].median(),
                }
            rows.append(row | {"adapter_sets": study.sets, "session": study.about["session"]})
    return pd.DataFrame(rows)


def cost(session: Session) -> dict[str, Any]:
    """What the unmerged LoRA costs at decode: speed with it over speed without, paired by round.

    Raises ValueError for a session without the two arms.
    """
    planned = session.all_runs
    k, arms = int(planned["k"].iloc[0]), set(planned["arm"])
    if not {WITH, WITHOUT} <= arms:
        raise ValueError(f"session {session.name}: expected arms {WITH} and {WITHOUT}, found {', '.join(sorted(arms))}")
    runs, bare, twin = session.cell(WITH, k), session.cell(WITHOUT, k), session.cell(WITH, k, "aa")
    ratios = {"": paired(runs, bare), "aa_": paired(twin, runs)}
    row = {"tier": planned["tier"].iloc[0], "k": k, "condition": session.condition}
    for name, cell in (("lora", runs), ("bare", bare)):
        speed = median_spread(cell["tok_s"])
        row |= {f"{name}_tok_s": speed.median, f"{name}_tok_s_min": speed.low, f"{name}_tok_s_max": speed.high}
        row[f"{name}_loads_per_step"] = cell["loads_per_step"].median()
    for name, ratio in ratios.items():
        row |= {f"{name}{field}": value for field, value in vars(ratio).items()}
    return row | {"void_runs": len(session.void), "drift": session.drift().text, "session": session.name}


def markdown(
    studies: Sequence[Study],
    table: pd.DataFrame,
    sessions: Sequence[Session],
    costs: pd.DataFrame,
    found: Sequence[Finding],
) -> str:
    """table.md."""
    heads = [
        f"machine: {', '.join(dict.fromkeys(str(study.about.get('machine')) for study in studies))}",
        f"tier: {', '.join(study.tier for study in studies)}",
        "condition: none for the arithmetic; of the decode cost in its table",
        *(
            f"n: {study.tier}, K={study.about['k']}: {study.sets} adapter set{'s' * (study.sets > 1)}, "
            f"{study.weights['target'].nunique()} targets, {study.logits['prompt'].nunique()} prompts with "
            f"{len(study.logits) // study.sets} positions ({study.about['prompts']}; prerouter "
            f"{'on' if study.about['prerouter'] else 'off'})"
            for study in studies
        ),
        *(f"adapter: {study.origin}" for study in studies),
        *(
            f"session: {study.about['session']}, commit {study.about.get('commit') or 'unknown'}, of {study.tier}"
            for study in studies
        ),
        *(f"logits of {one.tier}: not computed, {why}" for one in studies if (why := one.about["logits_refused"])),
        f"takes: {TIME_BUDGET}",
        *(f"drift: session {session.name}: {session.drift().text}" for session in sessions),
        *(f"void: {reason}" for session in sessions for reason in session.void_reasons),
    ]
    paper = [(one.claim.id, value_text(one.claim.value), one.arm, one.ours, str(one.status), one.why) for one in found]
    blocks = [
        f"# Merging the recovery LoRA into int4: {' and '.join(study.tier for study in studies)}",
        *heading(heads, *sessions),
        _survival_table(table),
        POOLED,
        *(["## What the unmerged path costs at decode", _cost_table(costs)] if len(costs) else []),
        "## The paper beside ours",
        markdown_table(("claim", "paper", "tier", "ours", "status", "why"), paper),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _survival_table(table: pd.DataFrame) -> str:
    rows = [
        (
            row.tier,
            str(row.k),
            row.kind,
            told(Difference(row.survival, row.ci_low, row.ci_high, row.units)),
            row.unit,
            interval(row.survival_min, row.survival_max, ".2f") if row.n else "",
            f"{row.n}" + (f" ({row.untouched} more without a correction)" if row.untouched else ""),
            number(row.survival_same_grid, ".2f"),
            number(row.delta_rms, ".2g"),
            number(row.step, ".2g"),
            number(row.delta_over_step, ".2f"),
            number(row.base_alone_over_step, ".2f"),
            number(row.codes_changed, ".0%"),
        )
        for row in table.itertuples()
    ]
    header = ("tier", "K", "where", "survival (95%)", "over", "min-max", "n", "on the same grid", "delta RMS", "step")
    return markdown_table((*header, "delta/step", "base alone/step", "codes changed"), rows, right_from=3)


def _cost_table(costs: pd.DataFrame) -> str:
    rows = []
    for row in costs.itertuples():
        own, twin = (Ratio(*values) for values in ((row.ratio, row.ci_low, row.ci_high, row.n),
                     (row.aa_ratio, row.aa_ci_low, row.aa_ci_high, row.aa_n)))  # fmt: skip
        speeds = (_speed(row, name) for name in ("lora", "bare"))
        loads = f"{row.lora_loads_per_step:.1f} and {row.bare_loads_per_step:.1f}"
        rows.append((row.tier, str(row.k), row.condition, *speeds, own.bare, str(own.n), twin.bare, loads, row.session))
    header = ("tier", "K", "condition", "with LoRA, tok/s", "without, tok/s", "with over without", "n")
    return markdown_table((*header, "A/A", "loads/step, with and without", "session"), rows, right_from=3)


def _speed(row, arm: str) -> str:
    median, low, high = (getattr(row, f"{arm}_tok_s{end}") for end in ("", "_min", "_max"))
    return "void" if pd.isna(median) else f"{median:.1f} ({interval(low, high, '.1f')})"


def write(files: Sequence[Path], sessions: Sequence[Path], claims: Claims, out: Path) -> str:
    """Write every output, all or none; returns the text of table.md. OSError passes."""
    studies, measured = [Study.load(file) for file in files], [load_session(session) for session in sessions]
    table, costs = summary(studies), pd.DataFrame([cost(session) for session in measured])
    found = [(findings(study, claims), str(study.about["session"])) for study in studies]
    text = markdown(studies, table, measured, costs, [one for here, _ in found for one in here])
    compared = pd.concat([compare_rows(here, claims, session, COMMAND) for here, session in found])
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, compare=compared, **({"cost": costs} if len(costs) else {}))
        save_merge_figure(studies, claims, scratch / "merge")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    about = "What merging a LoRA leaves of it."
    parser = argparse.ArgumentParser(prog="python -m analysis.merge.table", description=about)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a merge.json or latest.json each")
    parser.add_argument("--sessions", type=Path, nargs="*", default=[], help="of the decode cost, one for each tier")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(options.files, options.sessions, load_claims(options.claims), options.out), options.out
    )


if __name__ == "__main__":
    sys.exit(main())
