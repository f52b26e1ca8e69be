"""Table 1: `python -m analysis.tab1 COUNTS.json --sessions S... --prefills P... --claims C --out DIR`.

One tier of each model, or of one alone: a session and a set of prompts of each, and the counts of both models. Writes
summary.csv, prefill.csv, sizes.csv, compare.csv, table.md and the figure, all or none, and prints table.md. Absolute
values of other machines stand beside ours; only ratios within a tier's own session are compared and only counts judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.heading import guest_cold, heading
from analysis.memory_counters import COUNTERS, counter_table
from analysis.paper import architecture
from analysis.paper.claims import Claim, Claims, load_claims
from analysis.paper.findings import Finding, Status, absolute, compare_rows, value_text
from analysis.rows import MIB, markdown_table, paired, publishing, run_command, write_tables
from analysis.statistics import Spread
from analysis.tab1_figure import save_tab1_figure
from analysis.tab1_rows import TierRows, load_tiers
from analysis.tab3 import header_lines
from analysis.units import GIB, interval

COMMAND = "snakemake tab1"
TIME_BUDGET = "about 50 minutes with two small tiers, most of it prompts of 3,100 tokens on two CPU cores"
SMALL_BUNDLES, LARGE_BUNDLES = 64, 1024  # of the paper's 8b
ARMS = ("ondemand", "prerouter", "ondemand-large", "prerouter-large")
PAIRS = (
    ("prerouter", "ondemand"),
    ("prerouter-large", "ondemand-large"),
    ("ondemand-large", "ondemand"),
    ("prerouter-large", "prerouter"),
)
# Last part of a claim's id to the arm that answers it.
DECODE = {"decode": "prerouter", "decode_no_prerouter": "ondemand", "decode_lru1024": "prerouter-large"}
PREFILL = {"prefill_cold": "cold", "prefill_warm": "warm"}
WORDS = {
    "decode": "decode, prerouter, small bank (tok/s)",
    "decode_no_prerouter": "decode, on demand, small bank (tok/s)",
    "decode_lru1024": "decode, prerouter, large bank (tok/s)",
    "prefill_cold": "prefill, cold (tok/s)",
    "prefill_warm": "prefill, warm (tok/s)",
    "peak": "MLX allocator peak (GiB)",
}
HOW_TO_READ = (
    "The paper's columns are the released models on a Mac mini M4 Pro with 24 GB; ours are the tiers that the "
    "columns name, on this machine. Set them side by side, do not divide one by the other.",
    "The small bank is the least that one step and its prefetch need. The paper's 64 bundles for the 8B model are 2.2% "
    "of its 2,944 experts, beside which it holds a second copy in stacks; such a bank is below the engine's floor. The "
    "large bank is its 1,024 bundles, 35% of all experts, in every tier.",
    "Small and large bank, with and without the prerouter, are arms of one session, so their ratios are paired.",
    "A prompt is measured in a process of its own with an empty bank; cold and warm are states of the page cache that "
    "were verified before it began. Both stand in every round, so that their ratio is paired, too.",
    "Counted numbers come from tensor shapes, so they must agree with the paper; what was rounded may differ by half a "
    "unit of its last digit.",
)


def summary(tiers: Mapping[str, TierRows]) -> pd.DataFrame:
    """A row per tier and arm: speed, bank, waiting, bytes."""
    rows = []
    for tag, tier in tiers.items():
        planned = tier.session.all_runs
        for arm in dict.fromkeys(planned.loc[planned["role"] == "arm", "arm"]):
            cell, speed = tier.session.cell(arm, tier.k), tier.speed(arm)
            rows.append(
                {
                    "model": tag,
                    "tier": tier.tier,
                    "arm": arm,
                    "k": tier.k,
                    "rounds": speed.n,
                    "tok_s_median": speed.median,
                    "tok_s_min": speed.low,
                    "tok_s_max": speed.high,
                    "bank_slots": cell["bank_slots"].max(),
                    "bank_mib": cell["bank_bytes"].max() / MIB,
                    "wait_ms_per_step": cell["wait_ms_per_step"].median(),
                    "loads_per_step": cell["loads_per_step"].median(),
                    "device_mib_per_step": cell["device_bytes_per_step"].median() / MIB,
                    "alloc_peak_mib": cell["alloc_peak_bytes"].max() / MIB,
                    "dropped": int(planned.loc[planned["arm"] == arm, "dropped"].sum()),
                    "session": tier.session.name,
                }
            )
    return pd.DataFrame(rows)


def prefill_summary(tiers: Mapping[str, TierRows]) -> pd.DataFrame:
    """A row per tier and condition."""
    rows = []
    for tag, tier in tiers.items():
        for condition, here in tier.prefill[tier.prefill["role"] == "arm"].groupby("condition"):
            speed = tier.prefill_speed(str(condition))
            rows.append(
                {
                    "model": tag,
                    "tier": tier.tier,
                    "condition": condition,
                    "tokens": int(here["tokens"].iloc[0]),
                    "rounds": speed.n,
                    "tok_s_median": speed.median,
                    "tok_s_min": speed.low,
                    "tok_s_max": speed.high,
                    "device_mib": here["device_bytes"].median() / MIB,
                    "session": tier.about["session"],
                }
            )
    return pd.DataFrame(rows)


def sizes(document: Mapping[str, Any]) -> pd.DataFrame:
    """Bytes of base, LoRA and heads: both released models, and the checkpoints that were measured."""
    named = {f"released {tag}": counts for tag, counts in document["released"].items()} | document["checkpoints"]
    columns = ("source", "base_bytes", "lora_bytes", "heads_bytes", "expert_bytes", "parameters")
    return pd.DataFrame(
        [{"checkpoint": name} | {key: counts[key] for key in columns} for name, counts in named.items()]
    )


def findings(document: Mapping[str, Any], tiers: Mapping[str, TierRows], claims: Claims) -> list[tuple[Finding, str]]:
    """A finding for each claim of Table 1, with the session that it rests on."""
    found = [(finding, str(document["session"])) for finding in architecture.findings(document, claims)]
    for claim in claims.by_id.values():
        if claim.id.startswith("tab1."):
            found.append(_measured(claim, document, tiers))
    return found


def _measured(claim: Claim, document: Mapping[str, Any], tiers: Mapping[str, TierRows]) -> tuple[Finding, str]:
    _, tag, name = claim.id.split(".")
    tier = tiers.get(tag)
    if tier is None:
        return Finding(claim, Status.NOT_TESTABLE, "", f"no tier of the {tag} family was measured"), ""
    session = tier.session.name
    if name == "peak":
        spread = tier.peak_gib
        ours = f"{spread.high:.3g}" if spread.n else ""
    elif name in DECODE:
        spread = tier.speed(DECODE[name])
        ours = spread_words(spread)
    elif name in PREFILL:
        spread, session = tier.prefill_speed(PREFILL[name]), str(tier.about["session"])
        ours = spread_words(spread)
    else:
        raise ValueError(f"claim {claim.id}: no row of Table 1 answers it")
    if not ours:
        return Finding(claim, Status.NOT_TESTABLE, "", "no valid run of it", k=str(tier.k)), session
    place = f"{tier.tier} at K={tier.k} on {tier.session.info.machine}, condition {tier.session.condition}"
    if name in PREFILL:
        place = f"{tier.tier} at K={tier.about['k']} on {tier.session.info.machine}, {_tokens(tier)} tokens"
    here = {"machine": tier.session.info.machine, "tier": tier.tier, "k": str(tier.k), "arm": DECODE.get(name, "")}
    finding = absolute(claim, ours, place, spreads=[spread], **here)
    if name == "decode_lru1024":
        more = (LARGE_BUNDLES - SMALL_BUNDLES) * document["released"][tag]["expert_bytes"] / GIB
        note = (
            f"by the released shapes its {LARGE_BUNDLES - SMALL_BUNDLES} further bundles are {more:.2f} GiB when full"
        )
        finding = replace(finding, why=f"{finding.why}; {note}")
    return finding, session


def _tokens(tier: TierRows) -> int:
    return int(tier.prefill["tokens"].iloc[0])


def spread_words(spread: Spread) -> str:
    """Median and range, "" where there is no value."""
    return f"{spread.median:.4g} ({interval(spread.low, spread.high, '.4g')})" if spread.n else ""


def markdown(document: Mapping[str, Any], tiers: Mapping[str, TierRows], found: Sequence[Finding]) -> str:
    """table.md."""
    heads: list[str] = []
    for tier in tiers.values():
        prompts = (
            f"prompts of {tier.tier}: session {tier.about['session']}, {_tokens(tier)} tokens, K={tier.about['k']}, "
            f"n={tier.prefill_speed('cold').n} cold and {tier.prefill_speed('warm').n} warm"
        )
        prompts = "; ".join([prompts, *guest_cold(tier.about.get("lower_cache"))])
        once = [line for line in heads if line.startswith(("machine: ", "takes: "))]
        heads += [line for line in (*header_lines(tier.session, TIME_BUDGET), prompts) if line not in once]
    blocks = [
        f"# Table 1: {' and '.join(tier.tier for tier in tiers.values())}, beside the paper's",
        *heading(heads, *(tier.session for tier in tiers.values())),
        "## The paper beside ours: measured",
        _measured_table(tiers, found),
        "## The paper beside ours: counted",
        _counted_table(document, found),
        "## What bank, prerouter and page cache change, within each session",
        _ratio_table(tiers),
        "## Memory",
        *(f"{tier.tier}, K={tier.k}\n\n{counter_table(tier.session, ARMS)}" for tier in tiers.values()),
        "\n".join(f"- {name}: {meaning}" for name, (_, meaning) in COUNTERS.items()),
        "## Sizes",
        _size_table(sizes(document)),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _measured_table(tiers: Mapping[str, TierRows], found: Sequence[Finding]) -> str:
    """Rows are quantities; columns are the paper's and our value of each tier."""
    cells: dict[str, dict[str, tuple[str, str]]] = {}
    for finding in found:
        if finding.claim.id.startswith("tab1."):
            _, tag, name = finding.claim.id.split(".")
            cells.setdefault(name, {})[tag] = (value_text(finding.claim.value), finding.ours or "not measured")
    for tag, tier in tiers.items():  # ours where the paper states nothing
        for name, arm in DECODE.items():
            cells.setdefault(name, {}).setdefault(tag, ("", spread_words(tier.speed(arm))))
    rows = []
    for name, words in WORDS.items():
        here = cells.get(name, {})
        rows.append([words, *(text for tag in architecture.TAGS for text in here.get(tag, ("", "")))])
    names = [
        (f"paper, {tag}", f"ours, {tiers[tag].tier if tag in tiers else 'not measured'}") for tag in architecture.TAGS
    ]
    return markdown_table(["quantity", *names[0], *names[1]], rows, right_from=1)


def _counted_table(document: Mapping[str, Any], found: Sequence[Finding]) -> str:
    rows = []
    for finding in found:
        if finding.claim.kind == "exact":
            claim = finding.claim
            rows.append((claim.id, claim.unit, value_text(claim.value), finding.ours, str(finding.status), finding.why))
    return markdown_table(("claim", "unit", "paper", "counted", "status", "how"), rows)


def _ratio_table(tiers: Mapping[str, TierRows]) -> str:
    rows = []
    for arm, base in PAIRS:
        ratios = [paired(tier.session.cell(arm, tier.k), tier.session.cell(base, tier.k)) for tier in tiers.values()]
        rows.append([f"{arm} over {base}", *map(str, ratios)])
    rows.append(["prompts, warm over cold", *(str(tier.prefill_ratio) for tier in tiers.values())])
    return markdown_table(["tok/s pair", *(f"{tier.tier}, K={tier.k}" for tier in tiers.values())], rows, right_from=1)


def _size_table(table: pd.DataFrame) -> str:
    rows = [
        (
            row.checkpoint,
            f"{row.base_bytes:,}",
            f"{row.lora_bytes:,}",
            f"{row.heads_bytes:,}",
            f"{row.expert_bytes:,}",
            f"{row.parameters:,}",
            row.source,
        )
        for row in table.itertuples()
    ]
    header = ("checkpoint", "base (bytes)", "LoRA", "heads", "one expert", "parameters", "counted from")
    return markdown_table(header, rows, right_from=1)


def write(document: Mapping[str, Any], tiers: Mapping[str, TierRows], claims: Claims, out: Path) -> str:
    """Write every output, all or none; returns the text of table.md. OSError passes."""
    found = findings(document, tiers, claims)
    compare = pd.concat([compare_rows([finding], claims, session, COMMAND) for finding, session in found])
    text = markdown(document, tiers, [finding for finding, _ in found])
    with publishing(out) as scratch:
        write_tables(
            scratch,
            text,
            summary=summary(tiers),
            prefill=prefill_summary(tiers),
            sizes=sizes(document),
            compare=compare,
        )
        save_tab1_figure(tiers, scratch / "tab1")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.tab1", description="Table 1, a tier of each model.")
    parser.add_argument("architecture", type=Path, metavar="COUNTS.json")
    parser.add_argument("--sessions", type=Path, nargs="+", required=True, help="a session folder or latest.json each")
    parser.add_argument("--prefills", type=Path, nargs="+", required=True, help="a prefill.json or latest.json each")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)

    def command() -> str:
        document = architecture.load_counts(options.architecture)
        return write(document, load_tiers(options.sessions, options.prefills), load_claims(options.claims), options.out)

    return run_command(command, options.out)


if __name__ == "__main__":
    sys.exit(main())
