"""Table 3 from one session: `python -m analysis.tab3 SESSION_DIR --claims CLAIMS --out DIR`.

Writes summary.csv, pairs.csv, compare.csv, table.md and the figure, all or none, and prints table.md. Knows nothing of
how the rows came about. Speed is compared only as paired ratios within the session; the paper's absolute values come
from another machine and model, so they stand beside ours and are never judged.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures import save_tab3_figure
from analysis.heading import guest_cold, heading
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import compare_rows
from analysis.paper.spans import Span
from analysis.rows import (
    ARMS,
    DIRECT_ARMS,
    DIRECT_PAIRS,
    GAIN_BASES,
    GAIN_PAIRS,
    MIB,
    PAIRS,
    PairRatios,
    Session,
    load_session,
    markdown_table,
    pair_ratios,
    planned,
    publishing,
    run_command,
    write_tables,
)
from analysis.statistics import Ratio, cv, median_spread, smallest_visible_effect
from analysis.tab3_findings import find_other, findings
from analysis.units import GIB, interval, number

SUMMARY_COLUMNS = (
    "arm k rounds tok_s_median tok_s_min tok_s_max wait_ms_per_step loads_per_step device_mib_per_step dropped "
    "condition tier machine session wait_predicted_ms_per_step cold_share asked_mib_per_step "
    "hits_per_step alloc_peak_mib rss_anon_mib compute_ms_per_step void_runs wait_gate_ms_per_step host_ms_per_step"
).split()
PAIR_COLUMNS = "k arm base ratio ci_low ci_high n session note".split()
# Keys of the host description that the table names, in words.
HOST_WORDS = {
    "hw_model": "{}",
    "cpu_model": "{}",
    "cores_logical": "{} cores",
    "hypervisor": "hypervisor: {}",
    "filesystem": "checkpoint on {}",
    "mlx_version": "mlx {}",
    "mlx_device": "mlx device {}",
    "python_version": "Python {}",
}
COMMAND = "snakemake tab3"
KNOWN_ARMS, KNOWN_PAIRS = (*ARMS, *DIRECT_ARMS), (*PAIRS, *DIRECT_PAIRS)
TIME_BUDGET = "about 10 minutes with the default configuration on two cores; a larger tier or more rounds cost in step"
STOLEN_SHARE = 0.02  # of the processors' time, from which a table says it
MARK = " \u2020"
HOW_TO_READ = (
    "`ondemand` routes by the model's own routers and reads an expert when it is needed. `prerouter` predicts the "
    "route one token ahead, so its reads start a token early. `-mmap` reads as the paper does: by page faults.",
    "Only ratios are verdicts: the geometric mean of per-round ratios within this session, with a 95% interval. An "
    "interval that spans 1 decides nothing. Medians of the table, and numbers of two sessions, are not to be divided.",
    "`waiting` is the time that the main thread stood still for expert reads; reads behind computation are not in it. "
    "In the `-mmap` arms the main thread itself copies and stacks what it faults in, and that is in it.",
    "`device` is what the storage delivered and `loads` the expert reads issued: a shorter wait with equal bytes is "
    "overlap, a shorter wait with fewer bytes is caching.",
    "`dropped` counts routed experts that were left out, in void runs too; above 0 a speed is not comparable.",
    "The paper's numbers are from its own machine and the full model: compare signs and ratios, never tok/s.",
)
DIRECT_MEANING = "`-direct` reads a repacked copy of the checkpoint past the page cache: all comes from the device."


def summary(session: Session) -> pd.DataFrame:
    """One row per arm and K, sorted by K then arm, columns `SUMMARY_COLUMNS`.

    Step columns are the mean over a run's timed steps, then the median over valid rounds; `alloc_peak_mib` is the
    worst round. `dropped` also counts void runs. An arm all of whose runs are void keeps a row with 0 rounds.
    Raises ValueError for an arm that Table 3 does not have.
    """
    rows = []
    for (k, arm), runs in planned(session, KNOWN_ARMS).groupby(["k", "arm"]):
        valid = runs[~runs["void"]]
        speed = median_spread(valid["tok_s"])
        row = {
            "arm": arm,
            "k": k,
            "rounds": len(valid),
            "tok_s_median": speed.median,
            "tok_s_min": speed.low,
            "tok_s_max": speed.high,
            "dropped": int(runs["dropped"].sum()),
            "condition": session.condition,
            "tier": runs["tier"].iloc[0],
            "machine": session.info.machine or "",
            "session": session.name,
            "cold_share": valid["cold_share"].median(),
            "alloc_peak_mib": valid["alloc_peak_bytes"].max() / MIB,
            "rss_anon_mib": valid["rss_anon_bytes"].median() / MIB,
            "void_runs": len(runs) - len(valid),
        }
        # What is neither: building graphs, bringing the token to the host.
        spent = valid["step_ms_per_step"] - valid["wait_ms_per_step"] - valid["compute_ms_per_step"]
        rows.append(row | per_step(valid) | {"host_ms_per_step": spent.median()})
    rows.sort(key=lambda row: (row["k"], KNOWN_ARMS.index(row["arm"])))
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def per_step(runs: pd.DataFrame) -> dict[str, float]:
    """What a step takes: of each quantity the mean over a run's timed steps, then the median over the runs."""
    names = ("wait_ms", "wait_predicted_ms", "wait_gate_ms", "compute_ms", "loads", "hits")
    found = {f"{name}_per_step": runs[f"{name}_per_step"].median() for name in names}
    return found | {
        f"{name}_mib_per_step": runs[f"{name}_bytes_per_step"].median() / MIB for name in ("asked", "device")
    }


def visible_effect(ratios: PairRatios) -> float:
    """The smallest effect that this session could have shown, by its A/A pairs; NaN where it has none."""
    effects = [
        smallest_visible_effect(ratio.n, ratio.sd_log) for (_, arm, base), ratio in ratios.items() if arm == base
    ]
    return max((effect for effect in effects if not math.isnan(effect)), default=math.nan)


def marked(ratio: Ratio, effect: float) -> str:
    """A ratio of two arms as it stands in tables, with `MARK` where it is below the smallest visible effect."""
    return f"{ratio}{MARK}" if ratio.n and max(ratio.ratio, 1 / ratio.ratio) < effect else str(ratio)


def pairs(session: Session, ratios: PairRatios) -> pd.DataFrame:
    """The ratios as rows, columns `PAIR_COLUMNS`. A pair that was run but shares no valid round has n = 0."""
    rows = [
        {
            "k": k,
            "arm": arm,
            "base": base,
            **vars(ratio),
            "session": session.name,
            "note": "; ".join(filter(None, (session.drift().mark, "A/A" if arm == base else ""))),
        }
        for (k, arm, base), ratio in ratios.items()
    ]
    return pd.DataFrame(rows, columns=PAIR_COLUMNS)


def noise(session: Session, ratios: PairRatios) -> list[str]:
    """What this session could have seen: the A/A ratio, the run-to-run spread, the smallest visible effect."""
    lines = []
    for (k, arm, base), ratio in ratios.items():
        if arm != base:
            continue
        effect = smallest_visible_effect(ratio.n, ratio.sd_log)
        verdict = "" if math.isnan(ratio.ci_low) else (", holds 1" if ratio.contains(1) else ", DOES NOT HOLD 1")
        seen = f" in {ratio.n} rounds: {effect:.2f}x"
        if math.isnan(effect):
            seen = f": not estimable with n={ratio.n}"
        lines.append(f"A/A ({arm} at K={k} against itself): {ratio}{verdict}; smallest effect visible{seen}")
    arms = session.runs[session.runs["role"] == "arm"]
    spreads = [cv(runs["tok_s"]) for _, runs in arms.groupby(["arm", "k"]) if len(runs) > 1]
    if spreads:
        spread = median_spread(spreads)
        told = f"median {spread.median:.1%}, largest {spread.high:.1%}"
        lines.append(f"spread of tok/s between rounds (CV of each arm's runs, A/A repeats left out): {told}")
    return lines or ["not measured in this session"]


def markdown(session: Session, table: pd.DataFrame, ratios: PairRatios, claims: Claims) -> str:
    """table.md: the session's table, the paper's row beside ours, and what is needed to read them."""
    direct = [DIRECT_MEANING] if set(table["arm"]) & set(DIRECT_ARMS) else []
    blocks = [
        f"# Table 3: decoding with and without the prerouter, {table['tier'].iloc[0]}",
        *heading(header_lines(session, TIME_BUDGET), session),
        _main_table(table, ratios),
        "## Every pair",
        _pair_table(table, ratios),
        *_mark_note(ratios),
        "## The paper beside ours",
        _paper_table(table, ratios, claims, session.info.machine or "this machine"),
        "## How to read",
        "\n".join(f"- {line}" for line in (*HOW_TO_READ, *direct)),
    ]
    return "\n\n".join(blocks) + "\n"


def _mark_note(ratios: PairRatios) -> list[str]:
    effect = visible_effect(ratios)
    if math.isnan(effect):
        return []
    return [
        f"{MARK.strip()} smaller than the smallest effect ({effect:.2f}x) that this session's A/A pairs could show."
    ]


def header_lines(session: Session, time_budget: str) -> list[str]:
    """What stands above every table that is made from a session: where, when and how it was measured, and its noise.

    `time_budget` says in words what the target takes; the void runs come last, as `Session.void_reasons`.
    """
    info = session.info
    planned = session.all_runs[session.all_runs["role"] == "arm"]
    facts = "; ".join(
        words.format({True: "yes", False: "no"}.get(info.host[key], info.host[key]))
        for key, words in HOST_WORDS.items()
        if info.host.get(key) is not None
    )
    ram = info.host.get("ram_bytes")
    host = "; ".join(filter(None, (facts, f"{ram / GIB:.0f} GiB of memory" if ram else "")))
    rounds = sorted(set((~planned["void"]).groupby([planned["arm"], planned["k"]]).sum()))
    experts = f", {info.expert_bytes / MIB:.0f} MiB of experts" if info.expert_bytes else ""
    lines = [
        f"machine: {info.machine or 'not named'}" + (f" ({host})" if host else ""),
        f"tier: {planned['tier'].iloc[0]}{experts}",
        f"condition: {condition_words(session)}",
        *([f"routes: every arm replays those of {Path(info.trace).name}, not its own"] if info.trace else []),
        f"rounds: {rounds[0] if len(rounds) == 1 else f'{rounds[0]} to {rounds[-1]}'} valid per arm and K",
        f"session: {session.name}, commit {info.commit or 'unknown'}"
        + (" + uncommitted changes" if info.host.get("git_dirty") else "")
        + f", made {info.created or 'at an unknown time'}"
        + (", killed and taken up again" if info.resumed else ""),
        f"takes: {time_budget}",
        *busy_lines(info.host),
        *stolen_lines(session.runs),
        *(f"noise: {line}" for line in noise(session, pair_ratios(session))),
        f"drift: {session.drift().text}",
        f"void runs: {len(session.void) or 'none'}",
    ]
    return lines + [f"void: {reason}" for reason in session.void_reasons]


def busy_lines(host: Mapping[str, Any]) -> list[str]:
    """A line where something else ran when the session began: a load average above 1 for each two cores."""
    load, cores = host.get("load_1min"), host.get("cores_logical")
    if load is None or not cores or load <= cores / 2:
        return []
    return [f"busy: the machine was busy when the session began (load average {load:.2f} on {cores} cores)"]


def stolen_lines(runs: pd.DataFrame) -> list[str]:
    """A line where a hypervisor gave 2% or more of the processors' time to others while some arm's steps were timed."""
    if "stolen_share" not in runs:  # a session from before it was looked at
        return []
    shares = runs["stolen_share"].dropna().astype(float)
    by_arm = shares.groupby(runs["arm"]).median()
    if by_arm.empty or by_arm.max() < STOLEN_SHARE:
        return []
    told = f"median of the runs; largest {shares.max():.0%}; most of {by_arm.idxmax()}'s, {by_arm.max():.0%}"
    taken = f"the hypervisor gave {shares.median():.0%} of the processors' time to others while steps were timed"
    return [f"stolen: {taken} ({told})"]


def condition_words(session: Session) -> str:
    """The page-cache condition in words, with what was verified before and after the valid runs."""
    info, runs = session.info, session.runs
    name = session.condition
    budget = info.budget_bytes if info.budget_bytes is not None else runs["budget_bytes"].median()
    words = {
        "cold": "no expert page in the page cache when a run starts",
        "warm": "every expert page in the page cache when a run starts",
        "limit": "nothing in the page cache when a run starts, then what the limit on its whole process leaves",
        "budget": "the page cache may keep "
        + (f"{budget / MIB:.0f} MiB of expert pages" if pd.notna(budget) else "a limited share of the expert pages")
        + ", what a smaller machine would leave",
    }.get(name.partition(":")[0], "")
    seen = [
        f"{runs[column].min() / MIB:.0f} to {runs[column].max() / MIB:.0f} MiB cached {when}"
        for column, when in (("cached_before_bytes", "before"), ("cached_after_bytes", "after"))
        if runs[column].notna().any()
    ]
    verified = f"verified per run: {', '.join(seen) or 'nothing, no probe on this machine'}"
    return f"{name}: {'; '.join([words, verified, *guest_cold(info.lower_cache)])}"


def _main_table(table: pd.DataFrame, ratios: PairRatios) -> str:
    effect = visible_effect(ratios)
    rows = [
        (
            str(row.k),
            row.arm,
            str(row.rounds),
            _speed(row),
            marked(ratios[key], effect) if (key := (row.k, row.arm, GAIN_BASES.get(row.arm))) in ratios else "",
            number(row.wait_ms_per_step, ".1f"),
            number(row.device_mib_per_step, ".1f"),
            number(row.loads_per_step, ".1f"),
            str(row.dropped),
        )
        for row in table.itertuples()
    ]
    speed = ("K", "arm", "rounds", "tok/s median (min-max)", "gain over on-demand (95%)")
    header = (*speed, "waiting ms/step", "device MiB/step", "loads/step", "dropped")
    return markdown_table(header, rows, right_from=2)


def _pair_table(table: pd.DataFrame, ratios: PairRatios) -> str:
    ks, effect = sorted(set(table["k"])), visible_effect(ratios)
    rows = []
    for arm, base in (*KNOWN_PAIRS, *((arm, arm) for arm in KNOWN_ARMS)):
        here = {k: ratios[k, arm, base] for k in ks if (k, arm, base) in ratios}
        texts = {k: str(ratio) if arm == base else marked(ratio, effect) for k, ratio in here.items()}
        if texts:
            rows.append([f"{arm} over {base}", *(texts.get(k, "") for k in ks)])
    return markdown_table(["tok/s pair", *(f"K={k}" for k in ks)], rows, right_from=1)


def _paper_table(table: pd.DataFrame, ratios: PairRatios, claims: Claims, machine: str) -> str:
    """Each K: the paper's on-demand and prerouter speeds with their quotient, then ours for both ways of reading."""
    effect = visible_effect(ratios)
    medians = {(row.k, row.arm): number(row.tok_s_median, ".2f") for row in table.itertuples()}
    stated = {k: claims.by_id[f"tab3.k{k}"] for k in sorted(set(table["k"])) if f"tab3.k{k}" in claims.by_id}
    rows = []
    for k, claim in stated.items():
        off, on = claim.value
        source = f" ({claim.source} source)" if claim.source else ""
        gain = Span.of(on) / Span.of(off)
        allowed = f"{gain.low:.2f}-{gain.high:.2f}x by the digits"
        rows.append((str(k), f"paper: {claims.machine_name(claim)}{source}", f"{off}", f"{on}", allowed))
        for arm, base in GAIN_PAIRS:
            if (k, arm, base) in ratios:
                way = "page faults" if arm.endswith("-mmap") else "explicit reads"
                speeds = (medians[k, base], medians[k, arm], marked(ratios[k, arm, base], effect))
                rows.append((str(k), f"ours: {machine}, {way}", *speeds))
    return markdown_table(("K", "machine", "on-demand tok/s", "prerouter tok/s", "gain (95%)"), rows, right_from=2)


def _speed(row) -> str:
    if row.rounds == 0:
        return "void"
    return f"{row.tok_s_median:.2f} ({interval(row.tok_s_min, row.tok_s_max, '.2f')})"


def write(session: Session, claims: Claims, out: Path, other: Session | None = None) -> str:
    """Write every output of the table into `out`, all or none; returns the text of table.md. OSError passes.

    `other`: a session under the other condition, see `analysis.tab3_findings`.
    """
    table, ratios = summary(session), pair_ratios(session, KNOWN_PAIRS)
    text = markdown(session, table, ratios, claims)
    found = findings(session, table, ratios, claims, other)
    with publishing(out) as scratch:
        compared = compare_rows(found, claims, session.name, COMMAND)
        write_tables(scratch, text, summary=table, pairs=pairs(session, ratios), compare=compared)
        save_tab3_figure(session, table, ratios, scratch / "tab3")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.tab3", description="Table 3 from one session.")
    parser.add_argument("session", type=Path, metavar="SESSION_DIR")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)

    def command() -> str:
        session = load_session(options.session)
        other = find_other(options.session.parent, session)
        return write(session, load_claims(options.claims), options.out, other)

    return run_command(command, options.out)


if __name__ == "__main__":
    sys.exit(main())
