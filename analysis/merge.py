"""The merge study: `python -m analysis.merge FILE... --sessions S... --claims CLAIMS --out DIR`, a file per checkpoint.

What a recovery LoRA loses when it is merged into int4 weights that are quantised again, by kind of projection and at
the logits, and what it costs to keep it unmerged. Writes summary.csv, cost.csv, compare.csv, table.md and the figure,
all or none, and prints table.md. Knows nothing of how weights are quantised; whether a correction is worth having at
all is the ladder's to say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.heading import heading
from analysis.merge_figure import save_merge_figure
from analysis.paper.claims import Claim, Claims, load_claims
from analysis.paper.findings import SYNTHESISED, Finding, Status, compare_rows, relation, value_text
from analysis.paper.spans import Span
from analysis.rows import (
    Session,
    load_session,
    markdown_table,
    named,
    paired,
    publishing,
    read_json,
    read_rows,
    run_command,
    write_tables,
)
from analysis.statistics import LEAST_FOR_INTERVAL, Difference, Ratio, median_spread, paired_difference, paired_ratio
from analysis.units import interval, number, require

COMMAND = "snakemake merge"
TIME_BUDGET = "about 3 minutes for each tiny tier on two cores"
KINDS = ("attention", "linear attention", "shared expert", "dense")
ATTENTION, DENSE = KINDS[:2], KINDS[2:]  # the paper's two words for what our targets are
LOGITS = "logits"
WITH, WITHOUT = "prerouter", "prerouter-bare"
LEFT = 0.5  # less than this left of a correction: most of it is lost
TRAINED = "edge0 train"  # how the source of a LoRA begins that was trained here; other synthesised ones are random
WEIGHT_COLUMNS = (
    "adapters target layer kind projection bits weights survival survival_same_grid delta_rms step_median "
    "delta_over_step requantised_rms codes_changed"
).split()
LOGIT_COLUMNS = "adapters prompt task position change error survival".split()
ABOUT = "tier k adapters prompts logits_refused prerouter session".split()
HOW_TO_READ = (
    "B: a target's weight as the checkpoint holds it, U = B + the LoRA: what is served unmerged, M: U quantised again "
    "at the same bits, in groups of 64, by the converter's own rule. Survival is 1 - |U - M| / |U - B|: 1 where the "
    "grid takes the correction up, 0 where rounding costs as much as the correction is worth, below 0 where more.",
    "Survival is a mean over units of the medians within them, with Student's interval over the units: adapter sets "
    "(seeds) where there are three or more, else layers, at the logits prompts. The range is of single targets or "
    "positions.",
    "`on the same grid`: the same, had each weight been rounded to the scales and biases that it had. `base alone` is "
    "what quantising the base again does without any correction, in steps: a converter that draws a new grid moves "
    "weights that need not move, and a correction below that drowns whatever its sign.",
    "`step` is the scale of a group, the distance of two neighbouring weights; it and delta are medians over targets.",
    "At the logits, three models are compared that differ in these weights alone, in fp32: with the LoRA, without it, "
    "and with it merged. A changed hidden state may also change routes, so that losses there need not be those of the "
    "weights.",
    "The cost of the unmerged path is a ratio of tok/s, paired by round within one session. The arm without the LoRA "
    "routes otherwise, so its loads per step stand beside it.",
)


@dataclass(frozen=True)
class Study:
    """One checkpoint: `weights` has a row per target and adapter set, `logits` one per position and set."""

    about: Mapping[str, Any]
    weights: pd.DataFrame
    logits: pd.DataFrame

    @classmethod
    def load(cls, file: Path) -> Study:
        """Raises ValueError, one line: a file that is none, a column or a fact that is missing, an unknown kind."""
        path = named(file, "merge.json")
        about = read_json(path)
        if not isinstance(about, dict):
            raise ValueError(f"{path}: expected a JSON object, found {type(about).__name__}")
        require(path, about, ABOUT, "keys")
        weights = read_rows(path.with_suffix(".parquet"), WEIGHT_COLUMNS)
        strange = sorted(set(weights["kind"]) - set(KINDS))
        if strange or weights.empty:
            found = f"kind {strange[0]!r}" if strange else "no row"
            raise ValueError(f"{path.with_suffix('.parquet')}: expected targets of {', '.join(KINDS)}, found {found}")
        return cls(about, weights, read_rows(path.with_name("logits.parquet"), LOGIT_COLUMNS))

    @property
    def tier(self) -> str:
        return str(self.about["tier"])

    @property
    def sets(self) -> int:
        return len(self.about["adapters"])

    def of(self, *kinds: str) -> pd.DataFrame:
        """Rows of targets of these kinds; of the logits for `LOGITS`. Without those that no correction touches."""
        rows = self.logits if kinds == (LOGITS,) else self.weights[self.weights["kind"].isin(kinds)]
        return rows[rows["survival"].notna()]

    def units(self, rows: pd.DataFrame, column: str) -> pd.Series:
        """The median of a column within each unit that varies on its own."""
        inner = "prompt" if "prompt" in rows.columns else "layer"
        return rows.groupby(["adapters"] if self.sets >= LEAST_FOR_INTERVAL else ["adapters", inner])[column].median()

    def unit_name(self, kind: str) -> str:
        if self.sets >= LEAST_FOR_INTERVAL:
            return "adapter sets"
        return "prompts" if kind == LOGITS else "layers"

    def survival(self, *kinds: str) -> Difference:
        """Mean over units, with its interval; NaN for no row."""
        values = self.units(self.of(*kinds), "survival")
        return paired_difference(values, np.zeros(len(values)))

    @property
    def released(self) -> bool:
        return self.tier not in SYNTHESISED

    @property
    def random(self) -> bool:
        """Whether a LoRA is of random numbers, of which no claim speaks."""
        return not self.released and not all(str(s).startswith(TRAINED) for s in self.about["adapters"].values())

    @property
    def origin(self) -> str:
        """What the correction is, in words."""
        source = " and ".join(dict.fromkeys(map(str, self.about["adapters"].values())))
        return f"{'' if self.released else 'not the released adapter: '}{self.tier}, its LoRA made by {source}"


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


def findings(study: Study, claims: Claims) -> list[Finding]:
    """A finding for each `lora.*` claim. Raises ValueError for one that nothing here answers."""
    judges = {
        "lora.survival_attention": _more_in_attention,
        "lora.survival_dense": lambda claim, study, where: _left(claim, study, DENSE, where),
        "lora.survival_logits": lambda claim, study, where: _left(claim, study, (LOGITS,), where),
        "lora.delta_rms": _below_the_step,
    }
    where = {"k": str(study.about["k"]), "arm": study.tier}
    found = []
    for claim in (claim for claim in claims.by_id.values() if claim.id.startswith("lora.")):
        if claim.id not in judges:
            raise ValueError(f"claim {claim.id}: the merge study does not answer it")
        found.append(judges[claim.id](claim, study, where))
    return found


def _more_in_attention(claim: Claim, study: Study, where: Mapping[str, str]) -> Finding:
    """More survives in attention than in dense projections, set by set or layer by layer."""
    if study.random:
        return Finding(claim, Status.NOT_TESTABLE, _told(study.survival(*ATTENTION)), study.origin, **where)
    attention, dense = (study.units(study.of(*kinds), "survival") for kinds in (ATTENTION, DENSE))
    shared = attention.index.intersection(dense.index)
    more = paired_difference(attention.loc[shared], dense.loc[shared])
    ours = f"{_told(study.survival(*ATTENTION))}, in {_names(study, DENSE)} {_told(study.survival(*DENSE))}"
    what = f"attention less {_names(study, DENSE)}, paired by {study.unit_name('')}: {_told(more)}"
    return _signed(claim, more, 0, 1, ours, f"{what}; {study.origin}", where)


def _left(claim: Claim, study: Study, kinds: tuple[str, ...], where: Mapping[str, str]) -> Finding:
    """How much is left: a size that follows from delta over step, and so belongs to the adapter that it was said of."""
    left = study.survival(*kinds)
    if left.n == 0:
        refused = study.about["logits_refused"] if kinds == (LOGITS,) else ""
        return Finding(claim, Status.NOT_TESTABLE, "", refused or "no correction of this kind", **where)
    told = f"{_told(left)} over {study.unit_name(kinds[0])}"
    if not study.released:
        ratio = study.of(*KINDS)["delta_over_step"].median()
        why = f"a size that follows from delta over step, {ratio:.2f} here: {told}; {study.origin}"
        return Finding(claim, Status.NOT_TESTABLE, _told(left), why, **where)
    found = _signed(claim, left, LEFT, -1, _told(left), f"less than {LEFT} survives: {told}; {study.origin}", where)
    if found.status is Status.HOLDS and not Span.of(claim.value).meets(Span(left.ci_low, left.ci_high)):
        return replace(found, status=Status.DIFFERS, why=f"{found.why}; the paper's {claim.value} is outside")
    return found


def _below_the_step(claim: Claim, study: Study, where: Mapping[str, str]) -> Finding:
    """The correction is smaller than the distance of two neighbouring weights."""
    rows = study.of(*KINDS)
    deltas, steps = study.units(rows, "delta_rms"), study.units(rows, "step_median")
    ratio = paired_ratio(deltas, steps) if len(rows) else Ratio(float("nan"), float("nan"), float("nan"), 0)
    told = f"{rows['delta_rms'].median():.2g}, of a step of {rows['step_median'].median():.2g}"
    why = f"delta RMS over the median step, by {study.unit_name('')}; {study.origin}"
    blocked = study.origin if study.random else ""
    return relation(claim, [ratio], told if len(rows) else "", smaller=True, why=why, blocked=blocked, **where)


def _signed(
    claim: Claim, value: Difference, limit: float, side: int, ours: str, why: str, where: Mapping[str, str]
) -> Finding:
    """Whether an interval lies above `limit` (`side` 1) or below it (-1)."""
    low, high = sorted((side * (value.ci_low - limit), side * (value.ci_high - limit)))
    status = Status.HOLDS if low > 0 else Status.FAILS if high < 0 else Status.NOT_TESTABLE
    words = "undecided: " if status is Status.NOT_TESTABLE else ""
    return Finding(claim, status, ours, f"{words}{why}", **where)


def _told(value: Difference) -> str:
    """`0.34 (0.31-0.37), n=8`."""
    if value.n == 0:
        return "none"
    ends = interval(value.ci_low, value.ci_high, ".2f") if value.n >= LEAST_FOR_INTERVAL else "no interval"
    return f"{value.mean:.2f} ({ends}), n={value.n}"


def _names(study: Study, kinds: Sequence[str]) -> str:
    return " and ".join(kind for kind in kinds if kind in set(study.weights["kind"])) or "dense projections"


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
            _told(Difference(row.survival, row.ci_low, row.ci_high, row.units)),
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
    parser = argparse.ArgumentParser(prog="python -m analysis.merge", description="What merging a LoRA leaves of it.")
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
