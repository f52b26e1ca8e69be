"""The engine beside stock mlx-lm: `python -m analysis.resident SESSION --limited S --limit L --claims C --out DIR`.

Two sessions of the same arms: one where every expert fits, one in which each arm's whole process has a memory limit
below the checkpoint. Writes summary.csv, compare.csv, table.md and the figure, all or none, and prints table.md. An arm
that its limit killed has void rows with that reason: it is told, not counted as a speed. Sessions are never divided.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.heading import heading
from analysis.memory_counters import COUNTERS, counter_table, counters
from analysis.paper.claims import Claim, Claims, load_claims
from analysis.paper.findings import DRIFTED, Finding, Status, absolute, compare_rows, relation, value_text
from analysis.resident_figure import Panel, save_resident_figure
from analysis.rows import (
    MIB,
    Session,
    load_session,
    markdown_table,
    paired,
    publishing,
    read_json,
    run_command,
    the_k,
    write_tables,
)
from analysis.statistics import Ratio, median_spread
from analysis.tab3 import header_lines
from analysis.units import GIB, interval

COMMAND = "snakemake resident"
TIME_BUDGET = "about 5 minutes with a small tier, both sessions"
ARMS = ("ondemand", "prerouter", "resident")
ENGINE, STOCK = ("prerouter", "ondemand"), "resident"
KILLED = "killed by its limit"  # in a run's reason to be void
HOW_TO_READ = (
    "`resident` is mlx-lm's own class on the same checkpoint, all experts in memory, no adapters; `ondemand` and "
    "`prerouter` are the engine without LoRA, so that all of them run the same arithmetic.",
    "Without a limit the engine's bank holds all experts too: what differs is the price of streaming when nothing has "
    "to be streamed. This is not the regime of the paper's claim.",
    "With a limit the process may hold less than the checkpoint: weights, bank, caches, interpreter and the page cache "
    "of what it reads count together. The engine has its usual bank there and finds no page of an expert in the cache, "
    "which is the least that a machine would leave it.",
    "A process that asks for more than its limit is ended by the system. It has no speed then and no ratio is made: "
    "the limit is below the checkpoint, which stock mlx-lm holds whole, so that it cannot be otherwise.",
)


@dataclass(frozen=True)
class Limited:
    """What came of the limit: the session under it, or the reason why there is none."""

    about: Mapping[str, Any]
    session: Session | None

    @property
    def title(self) -> str:
        return f"{self.about['limit_bytes'] / MIB:.0f} MiB for the process"

    @property
    def words(self) -> str:
        """How the limit is made up, in one line."""
        about = self.about
        return (
            f"{about['limit_bytes'] / MIB:.0f} MiB for the whole process: {about['share']:.0%} of the checkpoint's "
            f"{about['checkpoint_bytes'] / MIB:.0f} MiB and {about['base_bytes'] / MIB:.0f} MiB for the interpreter"
        )


def load_limited(session: Path, limit: Path) -> Limited:
    """The limited session and its limit. Raises ValueError, one line, for files that are none, or do not agree."""
    about = read_json(limit)
    needed = ("limit_bytes", "share", "checkpoint_bytes", "base_bytes", "enforced", "reason")
    missing = [key for key in needed if not isinstance(about, dict) or key not in about]
    if missing:
        raise ValueError(f"{limit}: does not say {missing[0]}")
    if not about["enforced"]:
        return Limited(about, None)
    return Limited(about, load_session(session))


def outcome(session: Session, arm: str, k: int) -> str:
    """An arm's speed, or why it has none, in words."""
    speed = median_spread(session.cell(arm, k)["tok_s"])
    if speed.n:
        return f"{speed.median:.3g} tok/s ({interval(speed.low, speed.high, '.3g')}), n={speed.n}"
    planned, killed = killed_runs(session, arm, k)
    if planned == 0:
        return "not run"
    if killed:
        return f"killed by the limit in {killed} of {planned} rounds"
    return f"void: {_reasons(session, arm, k)[0]}"


def killed_runs(session: Session, arm: str, k: int) -> tuple[int, int]:
    """(runs of an arm, those of them that its limit ended)."""
    reasons = _reasons(session, arm, k)
    planned = session.all_runs
    count = int(((planned["role"] == "arm") & (planned["arm"] == arm) & (planned["k"] == k)).sum())
    return count, sum(KILLED in reason for reason in reasons)


def _reasons(session: Session, arm: str, k: int) -> list[str]:
    void = session.void
    return list(void.loc[(void["role"] == "arm") & (void["arm"] == arm) & (void["k"] == k), "void_reason"])


def over_stock(session: Session, arm: str) -> Ratio:
    """tok/s of an arm of the engine over stock mlx-lm, paired within the session."""
    return paired(session.cell(arm, the_k(session)), session.cell(STOCK, the_k(session)))


def findings(free: Session, limited: Limited, claims: Claims) -> list[tuple[Finding, str]]:
    """Findings for the `resident.*` claims with the session that each rests on.

    Raises ValueError for one that nothing here answers.
    """
    found: list[tuple[Finding, str]] = []
    for claim in claims.by_id.values():
        if not claim.id.startswith("resident."):
            continue
        if claim.id == "resident.ratio":
            found += [(_free_ratio(claim, free, arm), free.name) for arm in ENGINE]
            found += [_limited_ratio(claim, limited, arm) for arm in ENGINE]
        elif claim.id in ("resident.decode", "resident.memory"):
            found.append((_stock(claim, free), free.name))
        else:
            raise ValueError(f"claim {claim.id}: no row of stock mlx-lm answers it")
    return found


def _stock(claim: Claim, free: Session) -> Finding:
    k = the_k(free)
    cell, values = free.cell(STOCK, k), counters(free, STOCK, k)
    if cell.empty:
        return Finding(claim, Status.NOT_TESTABLE, "", f"stock mlx-lm: {outcome(free, STOCK, k)}", k=str(k), arm=STOCK)
    if claim.id == "resident.decode":
        ours, spread = f"{cell['tok_s'].median():.3g}", median_spread(cell["tok_s"])
    else:
        ours = f"{values['alloc_peak_bytes'] / GIB:.3g} allocator peak, {values['rss_peak_bytes'] / GIB:.3g} peak RSS"
        spread = median_spread(cell["alloc_peak_bytes"] / GIB)
    tier = str(free.all_runs["tier"].iloc[0])
    place = f"{tier} on {free.info.machine}, where all of it fits in memory"
    here = {"machine": free.info.machine, "tier": tier, "spreads": [spread], "k": str(k), "arm": STOCK}
    return absolute(claim, ours, place, **here)


def _free_ratio(claim: Claim, free: Session, arm: str) -> Finding:
    ratio = over_stock(free, arm)
    why = "outside the claim's regime: here the checkpoint fits in memory and the bank holds all experts"
    ours = str(ratio) if ratio.n else outcome(free, arm, the_k(free))
    return Finding(claim, Status.NOT_TESTABLE, ours, why, k=str(the_k(free)), arm=f"{arm}/{STOCK}")


def _limited_ratio(claim: Claim, limited: Limited, arm: str) -> tuple[Finding, str]:
    """Whether the engine is faster where the checkpoint does not fit: by its ratio, and only where both ran.

    A limit below the checkpoint ends stock mlx-lm by construction, so that it ended says nothing of how fast it is.
    """
    session = limited.session
    place: dict[str, Any] = {"arm": f"{arm}/{STOCK}, limited"}
    if session is None:
        why = f"no memory limit can be enforced on this machine: {limited.about['reason']}"
        return Finding(claim, Status.NOT_TESTABLE, "", why, **place), ""
    k = the_k(session)
    place["k"] = str(k)
    ratio = over_stock(session, arm)
    planned, killed = killed_runs(session, STOCK, k)
    ours = f"{arm} {outcome(session, arm, k)}; {STOCK} {outcome(session, STOCK, k)}"
    blocked = ""
    if session.drift().void_verdict:
        blocked = DRIFTED
    elif limited.about["checkpoint_bytes"] <= limited.about["limit_bytes"]:
        blocked = f"outside the claim's regime: the whole checkpoint is no larger than the limit of {limited.words}"
    elif killed and not ratio.n:
        blocked = (
            f"stock mlx-lm holds the whole checkpoint and the limit is below it ({limited.words}), so it is killed "
            f"by construction ({killed} of {planned} rounds); a machine that pages instead of ending it has the ratio"
        )
    elif not ratio.n:
        blocked = "no round in which both arms ran"
    shown = str(ratio) if ratio.n else ours
    about = {"size": (claim.value,), "places": len(ENGINE), "why": f"limit of {limited.words}"}
    return relation(claim, [ratio], shown, blocked=blocked, **about, **place), session.name


def summary(free: Session, limited: Limited) -> pd.DataFrame:
    """A row per session and arm."""
    rows = []
    for name, session in (("free", free), ("limited", limited.session)):
        if session is None:
            continue
        k = the_k(session)
        for arm in ARMS:
            planned, killed = killed_runs(session, arm, k)
            if planned == 0:
                continue
            speed = median_spread(session.cell(arm, k)["tok_s"])
            values = {key.replace("_bytes", "_mib"): value / MIB for key, value in counters(session, arm, k).items()}
            rows.append(
                {
                    "memory": name,
                    "limit_mib": limited.about["limit_bytes"] / MIB if name == "limited" else None,
                    "arm": arm,
                    "k": k,
                    "rounds": speed.n,
                    "tok_s_median": speed.median,
                    "tok_s_min": speed.low,
                    "tok_s_max": speed.high,
                    "killed": killed,
                    "planned": planned,
                    **values,
                    "session": session.name,
                }
            )
    return pd.DataFrame(rows)


def markdown(free: Session, limited: Limited, found: Sequence[Finding]) -> str:
    """table.md."""
    heads = header_lines(free, TIME_BUDGET)
    if limited.session is not None:
        shared = set(heads)
        heads += [f"limited, {line}" for line in header_lines(limited.session, TIME_BUDGET) if line not in shared]
        heads.append(f"limit: {limited.words}; kept by {limited.about.get('method') or 'the system'}")
    else:
        heads.append(f"limit: cannot be enforced on this machine ({limited.about['reason']})")
    blocks = [
        f"# Stock mlx-lm and the engine, {free.all_runs['tier'].iloc[0]}",
        *heading(heads, *filter(None, (free, limited.session))),
        "## Speed",
        _speed_table(free, limited),
        "## Memory without a limit",
        counter_table(free, ARMS),
    ]
    if limited.session is not None:
        blocks += ["## Memory with the limit", counter_table(limited.session, ARMS)]
    blocks += [
        "\n".join(f"- {name}: {meaning}" for name, (_, meaning) in COUNTERS.items()),
        "## The paper beside ours",
        markdown_table(
            ("claim", "arm", "paper", "ours", "status", "why"),
            [
                (
                    one.claim.id,
                    one.arm,
                    f"{value_text(one.claim.value)} {one.claim.unit}",
                    one.ours,
                    str(one.status),
                    one.why,
                )
                for one in found
            ],
        ),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _speed_table(free: Session, limited: Limited) -> str:
    rows = []
    for arm in ARMS:
        cells = [outcome(free, arm, the_k(free)), "" if arm == STOCK else str(over_stock(free, arm))]
        session = limited.session
        if session is None:
            cells += ["limit cannot be enforced", ""]
        else:
            cells += [outcome(session, arm, the_k(session)), "" if arm == STOCK else str(over_stock(session, arm))]
        rows.append([arm, *cells])
    sides = ("without a limit", "over stock (95%)", "with the limit", "over stock (95%)")
    return markdown_table(("arm", *sides), rows, right_from=1)


def panels(free: Session, limited: Limited) -> list[Panel]:
    """What the figure draws: a panel per session."""
    found = []
    for title, session in (("all of it fits in memory", free), (f"limit: {limited.title}", limited.session)):
        if session is not None:
            k = the_k(session)
            bars = []
            for arm in ARMS:
                planned, killed = killed_runs(session, arm, k)
                told = f"killed by the limit\nin {killed} of {planned} rounds" if killed else "no valid run"
                if planned:
                    bars.append((arm, list(session.cell(arm, k)["tok_s"]), told))
            found.append(Panel(title, session, k, bars))
    return found


def write(free: Session, limited: Limited, claims: Claims, out: Path) -> str:
    """Write every output, all or none; returns the text of table.md. OSError passes."""
    found = findings(free, limited, claims)
    text = markdown(free, limited, [finding for finding, _ in found])
    compare = pd.concat([compare_rows([finding], claims, session, COMMAND) for finding, session in found])
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=summary(free, limited), compare=compare)
        save_resident_figure(panels(free, limited), scratch / "resident")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.resident", description="The engine beside stock mlx-lm.")
    parser.add_argument("session", type=Path, metavar="SESSION", help="without a limit")
    parser.add_argument("--limited", type=Path, required=True, help="session with the limit")
    parser.add_argument("--limit", type=Path, required=True, help="what the limit is, JSON")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)

    def command() -> str:
        limited = load_limited(options.limited, options.limit)
        return write(load_session(options.session), limited, load_claims(options.claims), options.out)

    return run_command(command, options.out)


if __name__ == "__main__":
    sys.exit(main())
