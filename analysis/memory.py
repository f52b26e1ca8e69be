"""Memory by named counters, from the session of Table 3: `python -m analysis.memory SESSION --claims C --out DIR`.

Writes summary.csv, price.csv, compare.csv, table.md and the figure, all or none, and prints table.md. Measures nothing:
the rows are those of Table 3, whose arms share their rounds, so what one arm holds more than another is a paired
difference. Bytes of other machines and models stand beside ours and are not judged.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pandas as pd

from analysis.heading import heading
from analysis.memory_counters import COUNTERS, counter_table, counters
from analysis.memory_figure import save_memory_figure
from analysis.paper.claims import Claim, Claims, load_claims
from analysis.paper.findings import Finding, Status, absolute, compare_rows
from analysis.paper.source_checks import EXPERT_BYTES
from analysis.paper.source_paper import Paper
from analysis.rows import (
    ARMS,
    DIRECT_ARMS,
    GAIN_PAIRS,
    MIB,
    Session,
    load_session,
    markdown_table,
    publishing,
    run_command,
    write_tables,
)
from analysis.statistics import Difference, Spread, median_spread, paired_difference
from analysis.tab3 import header_lines
from analysis.units import GIB, interval

COMMAND = "snakemake memory"
TIME_BUDGET = "seconds; its rows are Table 3's (about 10 minutes with a small tier)"
PRICE_K = 8
PAPER_KS = (2, 4, 8)  # in the order of the paper's lists
# What the price is made of: name to the columns that are summed.
PRICES = {
    "allocator": ("alloc_active_bytes", "alloc_cache_bytes"),
    "allocator peak": ("alloc_peak_bytes",),
    "RssAnon": ("rss_anon_bytes",),
    "page cache": ("cached_after_bytes",),
}
CLAIMED = {"mlx": "alloc_active_bytes", "rss": "rss_peak_bytes"}
HOW_TO_READ = (
    "No two of these counters may be added without looking: resident part and bank are inside alloc active, which is "
    "inside RssAnon on a CPU device; pages of the checkpoint that are mapped are in RssFile and in the page cache too.",
    "The price of the prerouter is a paired difference within rounds, with a 95% interval: what it holds more in "
    "anonymous memory, and what page cache the checkpoint then has less. The paper states no interval.",
    "Under a budget the page cache is held to the same bytes in every arm, as near as a run may be (10%, or 16 MiB), "
    "so that the second half of the price cannot show itself here; on the paper's machine the system gave the cache "
    "what the process left.",
    "Held twice: the measured column is everything that MLX's allocator held at its peak and no more at the end. The "
    "peak counts from the process's start and is never reset, so a prompt's and a step's activations are in it. The "
    "column by design is arithmetic: layers x K x slot. A layer's stack lives until the launch that reads it has "
    "landed, which without the prerouter is the whole step.",
    "The engine's arms have one bank of the same size each, so more residency is heads and predicted states, not a "
    "second copy. In the -mmap arms `bank` is the ceiling of the cache of bundles.",
)


def prices(session: Session) -> pd.DataFrame:
    """A row per K, pair of arms and part of the price: bytes that the first arm holds more, with its interval."""
    planned = session.all_runs[session.all_runs["role"] == "arm"]
    rows = []
    for k in sorted(set(planned["k"])):
        for arm, base in GAIN_PAIRS:
            for name, columns in PRICES.items():
                gap = _difference(session, arm, base, int(k), columns)
                rows.append(
                    {
                        "k": int(k),
                        "arm": arm,
                        "base": base,
                        "part": name,
                        **{key: value / MIB for key, value in vars(gap).items() if key != "n"},
                        "n": gap.n,
                        "session": session.name,
                    }
                )
    table = pd.DataFrame(rows).rename(columns={key: f"{key}_mib" for key in ("mean", "ci_low", "ci_high")})
    return table[table["n"] > 0].reset_index(drop=True)


def _difference(session: Session, arm: str, base: str, k: int, columns: tuple[str, ...]) -> Difference:
    cells = session.cell(arm, k), session.cell(base, k)
    known = [column for column in columns if all(column in cell for cell in cells)]
    sums = [cell[known].astype(float).sum(axis=1, min_count=len(columns)).dropna() for cell in cells]
    rounds = sums[0].index.intersection(sums[1].index)
    return paired_difference(sums[0].loc[rounds].to_numpy(), sums[1].loc[rounds].to_numpy())


def summary(session: Session) -> pd.DataFrame:
    """A row per K and arm: every counter in MiB."""
    planned = session.all_runs[session.all_runs["role"] == "arm"]
    rows = []
    for k, arm in sorted(set(planned[["k", "arm"]].itertuples(index=False, name=None)), key=_place):
        values = {column.replace("_bytes", "_mib"): value / MIB for column, value in counters(session, arm, k).items()}
        rounds = len(session.cell(arm, k))
        rows.append({"arm": arm, "k": k, "rounds": rounds, **values, "session": session.name})
    return pd.DataFrame(rows)


def _place(key: tuple[int, str]) -> tuple[int, int, str]:
    k, arm = key
    return k, ARMS.index(arm) if arm in ARMS else len(ARMS), arm


def stack_bytes(session: Session, arm: str, k: int) -> int | None:
    """By design: the most that an arm's stacks hold of experts that its bundles hold too. Arithmetic, no measurement.

    Zero where slots are computed on in place. Where stacks are built of bundles, a layer's lives until the launch that
    reads it has landed: in a step of one launch those of all layers side by side, in several launches no more. None
    (unknown) when no run is valid.
    """
    cell = session.cell(arm, k)
    if cell.empty:
        return None
    if not arm.endswith("-mmap"):
        return 0
    run = cell.iloc[0]
    return session.loads["layer"].nunique() * k * int(run["bank_bytes"]) // int(run["bank_slots"])


def above_end_bytes(session: Session, arm: str, k: int) -> Spread:
    """Measured: the allocator's peak less what is live at the end, by round. Stacks, and all else that comes and goes:
    a step's or a prompt's activations, too; nothing resets the peak from the process's start on."""
    cell = session.cell(arm, k)
    return median_spread(cell["alloc_peak_bytes"] - cell["alloc_active_bytes"])


def findings(session: Session, claims: Claims) -> list[Finding]:
    """A finding for each `mem.*` claim and place. Raises ValueError for one that nothing here answers."""
    found: list[Finding] = []
    for claim in claims.by_id.values():
        if not claim.id.startswith("mem."):
            continue
        _, name, *rest = claim.id.split(".")
        if name == "price_k8":
            found += _price_findings(claim, session, Paper(claims))
        elif name == "double_hold":
            found.append(_double_hold(claim, session, Paper(claims)))
        elif name in CLAIMED and rest:
            found += _counter_findings(claim, session, CLAIMED[name], rest[0])
        else:
            raise ValueError(f"claim {claim.id}: no counter answers it")
    return found


def _where(session: Session) -> str:
    return f"{_tier(session)} on {session.info.machine or 'this machine'}, condition {session.condition}"


def _tier(session: Session) -> str:
    return str(session.all_runs["tier"].iloc[0])


def _counter_findings(claim: Claim, session: Session, column: str, route: str) -> list[Finding]:
    """The paper's list over K beside each of our arms of that route."""
    found = []
    for k, paper in zip(PAPER_KS, claim.value, strict=True):
        for arm in (route, f"{route}-mmap"):
            values = counters(session, arm, k)
            value = values[column]
            place = {"k": str(k), "arm": arm, "paper": paper}
            if math.isnan(value):
                found.append(Finding(claim, Status.NOT_TESTABLE, "", "no valid run of it", **place))
            else:
                ours = f"{value / GIB:.3g}"
                if column == "alloc_active_bytes":
                    ours += f" (peak {values['alloc_peak_bytes'] / GIB:.3g})"
                spread = median_spread(session.cell(arm, k)[column] / GIB)
                here = {"machine": session.info.machine, "tier": _tier(session), "spreads": [spread]}
                found.append(absolute(claim, ours, f"{column} of {_where(session)}", **here, **place))
    return found


def _price_findings(claim: Claim, session: Session, paper: Paper) -> list[Finding]:
    table = prices(session)
    found = []
    for arm, base in GAIN_PAIRS:
        here = table[(table["k"] == PRICE_K) & (table["arm"] == arm)].set_index("part")
        place = {"k": str(PRICE_K), "arm": f"{arm}/{base}"}
        if not {"allocator", "page cache"} <= set(here.index):
            why = f"the session has no valid round of both arms at K={PRICE_K}"
            found.append(Finding(claim, Status.NOT_TESTABLE, "", why, **place))
            continue
        ours = ", ".join(f"{_gap_words(here.loc[part])} {part}" for part in ("allocator", "page cache"))
        words = f"{_where(session)}; {_share_words(claim, session, here, paper)}"
        found.append(absolute(claim, ours, words, machine=session.info.machine, tier=_tier(session), **place))
    return found


def _share_words(claim: Claim, session: Session, here: pd.DataFrame, paper: Paper) -> str:
    """Both prices as shares of the bytes of all routed experts: models of two sizes side by side."""
    whole = paper.count("arch.35b.layers") * paper.count("arch.35b.experts") * EXPERT_BYTES / GIB
    shares = ", ".join(f"{value / whole:+.1%}" for value in claim.value)
    words = f"as shares of all routed experts the paper's are {shares}"
    if session.info.expert_bytes:
        ours = [here.loc[part, "mean_mib"] * MIB / session.info.expert_bytes for part in ("allocator", "page cache")]
        words += f", ours {ours[0]:+.1%}, {ours[1]:+.1%}"
    return words


def _gap_words(row: pd.Series) -> str:
    told = "no interval" if pd.isna(row["ci_low_mib"]) else interval(row["ci_low_mib"], row["ci_high_mib"], "+.1f")
    return f"{row['mean_mib']:+.1f} MiB ({told})"


def _double_hold(claim: Claim, session: Session, paper: Paper) -> Finding:
    """What comes and goes beside what stays, measured and by design; and what the paper's value may be made of."""
    parts = []
    for arm in ARMS:
        seen, most = above_end_bytes(session, arm, PRICE_K), stack_bytes(session, arm, PRICE_K)
        if most is not None:
            parts.append(f"{arm} {seen.median / MIB:.1f} MiB (stacks by design: {_at_most(most)})")
    ours = f"measured, allocator peak less active: {'; '.join(parts)}" if parts else ""
    predicted, layers = paper.count("arch.35b.predicted_layers"), paper.count("arch.35b.layers")
    stacks, every = (count * PRICE_K * EXPERT_BYTES for count in (predicted, layers))
    why = (
        f"a value of {claim.machine}; an expert of the released model has {EXPERT_BYTES / MIB:.4f} MiB, so the stacks "
        f"of its {predicted} predicted layers at K={PRICE_K} are {stacks / GIB:.2f} GiB and those of all {layers} "
        f"layers {every / GIB:.2f} GiB, neither of which is {claim.value}; but {stacks / 1e9:.3f} GB of 1e9 bytes are, "
        "so the unit may be decimal. Ours measured is everything that came and went since the process began, a "
        "prompt's and a step's activations included; of that the arithmetic is what may be held twice: nothing where "
        "the bank is computed on in place"
    )
    return Finding(claim, Status.NOT_TESTABLE, ours, why, k=str(PRICE_K))


def _at_most(most: int) -> str:
    return f"at most {most / MIB:.1f} MiB" if most else "none"


def _twice_table(session: Session) -> str:
    """What is held twice: measured and by design, K by K."""
    planned = session.all_runs[session.all_runs["role"] == "arm"]
    rows = []
    for k, arm in sorted(set(planned[["k", "arm"]].itertuples(index=False, name=None)), key=_place):
        seen, most = above_end_bytes(session, arm, k), stack_bytes(session, arm, k)
        if most is not None:
            measured = f"{seen.median / MIB:.1f} ({interval(seen.low / MIB, seen.high / MIB, '.1f')})"
            rows.append((str(k), arm, str(seen.n), measured, _at_most(most)))
    header = (
        "K",
        "arm",
        "rounds",
        "measured: peak less active, MiB (min-max)",
        "by design: stacks beside their bundles",
    )
    return markdown_table(header, rows, right_from=2)


def markdown(session: Session, found: list[Finding], claims: Claims) -> str:
    """table.md."""
    blocks = [
        f"# Memory by named counters, {session.all_runs['tier'].iloc[0]}",
        *heading(header_lines(session, TIME_BUDGET), session),
        counter_table(session, (*ARMS, *DIRECT_ARMS)),
        "\n".join(f"- {name}: {meaning}" for name, (_, meaning) in COUNTERS.items()),
        "## The price of the prerouter",
        _price_table(session),
        "## Held twice",
        _twice_table(session),
        "## The paper beside ours",
        _paper_table(found, claims),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _price_table(session: Session) -> str:
    table = prices(session)
    rows = [
        (str(k), f"{arm} over {base}", *(_part_words(here, part) for part in PRICES), str(int(here["n"].max())))
        for (k, arm, base), here in table.groupby(["k", "arm", "base"], sort=False)
    ]
    header = ("K", "pair", *(f"{part} (MiB more, 95%)" for part in PRICES), "n")
    return markdown_table(header, rows, right_from=2)


def _part_words(here: pd.DataFrame, part: str) -> str:
    rows = here[here["part"] == part]
    return "" if rows.empty else _gap_words(rows.iloc[0]).replace(" MiB", "")


def _paper_table(found: list[Finding], claims: Claims) -> str:
    rows = []
    for finding in found:
        paper = compare_rows([finding], claims, "", "").iloc[0]["paper"]
        rows.append((finding.claim.id, finding.k, finding.arm, paper, finding.ours, finding.claim.unit))
    return markdown_table(("claim", "K", "arm", "paper", "ours", "unit of the paper"), rows)


def write(session: Session, claims: Claims, out: Path) -> str:
    """Write every output, all or none; returns the text of table.md. OSError passes."""
    found, table = findings(session, claims), summary(session)
    text = markdown(session, found, claims)
    compared = compare_rows(found, claims, session.name, COMMAND)
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, price=prices(session), compare=compared)
        save_memory_figure(session, table, scratch / "memory")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.memory", description="Memory by named counters.")
    parser.add_argument("session", type=Path, metavar="SESSION")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(load_session(options.session), load_claims(options.claims), options.out), options.out
    )


if __name__ == "__main__":
    sys.exit(main())
