"""Table 4 from a session of Table 3: `python -m analysis.tab4 SESSION --claims CLAIMS --out DIR`.

How much each arm reads, how large and how cold its loads are. Writes summary.csv, compare.csv, table.md and the figure,
all or none, and prints table.md. Nothing is measured for it: the rows are those of Table 3. Bytes and loads per step
are of all timed steps, made as Table 3 makes them; cold shares before a load and times per load are of the loads that
were probed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pandas as pd

from analysis.heading import heading
from analysis.loads import session_loads
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, Status, compare_rows
from analysis.rows import ARMS, MIB, Session, load_session, markdown_table, publishing, run_command, write_tables
from analysis.statistics import bootstrap_share
from analysis.tab3 import header_lines, per_step
from analysis.tab4_claims import ADVISED, findings
from analysis.tab4_figure import save_tab4_figure
from analysis.units import DEVICE_TOLERANCE, device_agrees, interval, number

SUMMARY_COLUMNS = (
    "arm k rounds asked_mib_per_load device_mib_per_load cold_share cold_share_probed "
    "cold_share_probed_low cold_share_probed_high loads_all_cold loads_all_warm "
    "loads_partial asked_mib_per_step device_mib_per_step loads_per_step hits_per_step ms_per_load ms_low ms_high "
    "wait_ms_per_step device_over_cold n condition tier machine session"
).split()
PER_STEP = "asked_mib_per_step device_mib_per_step loads_per_step hits_per_step wait_ms_per_step".split()
TIME_BUDGET = "seconds, after the session of Table 3"
HOW_TO_READ = (
    "`asked` is what an expert holds, `device` what the storage delivered for it: less where the page cache had some, "
    "more where the kernel read ahead. The paper's MiB per load is the second.",
    "`device/asked` is the cold share of all timed loads, by the device's own counter, where the kernel is told of a "
    "load before it reads; page faults read around what they need, so theirs is not a cold share.",
    "`cold share, probed` is cold over asked bytes of the loads before which the page cache was looked at. They are a "
    "sample, in every round of the same places of the run, so its 95% interval comes of drawing the places again, each "
    "with all its rounds: few places leave it wide, and `device/asked` of all loads may well lie elsewhere in it. Then "
    "stands how many of these were all cold, all warm or partly. Stacked, an expert shares the pages at the edges of "
    "its nine ranges with its neighbours, so most partly cold loads are nearly warm or nearly cold.",
    "`ms/load` is the median of the loads themselves, on the thread that reads; with several reader threads they wait "
    "for one another there, and a step waits for less than their sum.",
    "In every arm here a load is one expert, with the prerouter and without: a prediction changes when an expert is "
    "read, not how much a load holds. So loads do not become fewer and larger as in the paper, whose count of loads "
    "follows from MiB per step over MiB per load.",
    "Every round replays the same tokens, so an interval knows how rounds differ, not how other tokens would. The "
    "paper's waiting times reach us through a third party.",
    "The paper's rows are another machine's and the released checkpoint's: compare shares and signs, not MiB.",
)


def summary(session: Session) -> pd.DataFrame:
    """One row per arm and K, sorted by K then arm, columns `SUMMARY_COLUMNS`.

    An arm whose runs were never probed has no cold share (NaN); an arm all of whose runs are void has no row.
    """
    loads = session_loads(session)
    rows = []
    for (k, arm), runs in session.runs[session.runs["role"] == "arm"].groupby(["k", "arm"]):
        if arm not in ARMS:
            continue
        here = loads[(loads["arm"] == arm) & (loads["k"] == k)]
        step = per_step(runs)
        by_load = {
            name: (runs[f"{name}_bytes_per_step"] / runs["loads_per_step"]).median() for name in ("asked", "device")
        }
        low_share, high_share = probed_interval(here)
        over_asked = (runs["device_bytes_per_step"] / runs["asked_bytes_per_step"]).median()
        low, middle, high = here["ms"].quantile([0.25, 0.5, 0.75]) if len(here) else [math.nan] * 3
        rows.append(
            {
                "arm": arm,
                "k": k,
                "rounds": len(runs),
                "asked_mib_per_load": by_load["asked"] / MIB,
                "device_mib_per_load": by_load["device"] / MIB,
                "cold_share": over_asked if arm in ADVISED else math.nan,
                "cold_share_probed": here["cold_bytes"].sum() / here["asked_bytes"].sum() if len(here) else math.nan,
                "cold_share_probed_low": low_share,
                "cold_share_probed_high": high_share,
                "loads_all_cold": (here["cold"] == 1).mean(),
                "loads_all_warm": (here["cold"] == 0).mean(),
                "loads_partial": ((here["cold"] > 0) & (here["cold"] < 1)).mean(),
                **{name: step[name] for name in PER_STEP},
                "ms_per_load": middle,
                "ms_low": low,
                "ms_high": high,
                "device_over_cold": device_over_cold(here),
                "n": len(here),
                "condition": session.condition,
                "tier": runs["tier"].iloc[0],
                "machine": session.info.machine or "",
                "session": session.name,
            }
        )
    if not rows:
        raise ValueError(f"session {session.name}: none of the arms {', '.join(ARMS)} has a valid run")
    rows.sort(key=lambda row: (row["k"], ARMS.index(row["arm"])))
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def probed_interval(loads: pd.DataFrame) -> tuple[float, float]:
    """95% interval of the cold share of probed loads, whose places are drawn again; NaN for fewer than three places.

    A place is a step, layer and expert: every round replays it, so that its rounds are one draw and not several.
    """
    places = loads.groupby(["step", "layer", "expert"])[["cold_bytes", "asked_bytes"]].sum()
    return bootstrap_share(places["cold_bytes"], places["asked_bytes"])


def device_over_cold(loads: pd.DataFrame) -> float:
    """Device bytes over cold bytes of probed loads, both in whole pages where the rows know them (`cold_page_bytes`).

    Bytes that were in flight, asked for by another read at the moment of the probe, are neither. NaN where nothing was
    cold or the device is not counted.
    """
    counted = loads[loads["device_bytes"] >= 0]
    cold = counted["cold_page_bytes" if "cold_page_bytes" in loads.columns else "cold_bytes"].sum()
    return counted["device_bytes"].sum() / cold if cold > 0 else math.nan


def device_verdicts(session: Session, table: pd.DataFrame) -> list[str]:
    """One line per way of reading: do the bytes of the device match the cold bytes?"""
    loads = session_loads(session)
    in_pages = "cold_page_bytes" in loads.columns
    lines = []
    for arm in (arm for arm in ARMS if arm in set(table["arm"])):
        here = loads[loads["arm"] == arm]
        ratio, flying = device_over_cold(here), here["inflight_bytes"].clip(lower=0).sum() / MIB
        told = (
            f"{arm}: {ratio:.3f}x the cold bytes (n={len(here)} probed loads, {flying:.1f} MiB in flight when probed)"
        )
        if arm not in ADVISED:
            verdict = "no verdict: page faults read around what they need"
        elif math.isnan(ratio):
            verdict = "not measured"
        elif in_pages:
            verdict = "pass" if device_agrees(ratio) else "FAIL"
            verdict += f" (tolerance {DEVICE_TOLERANCE:.0%})"
        else:
            verdict = (
                "no verdict: these rows count cold bytes inside the ranges, while a device reads the whole pages at "
                "their edges; `snakemake fit` compares in pages"
            )
        lines.append(f"{told}: {verdict}")
    return lines


def markdown(session: Session, table: pd.DataFrame, claims: Claims) -> str:
    """table.md: loads and bytes of each arm, and the paper's rows beside them."""
    blocks = [
        f"# Table 4: what is read, {table['tier'].iloc[0]}",
        *heading(_header(session, table), session),
        "## Per load",
        _load_table(table),
        "## Per step",
        _step_table(table),
        "## Bytes of the device against cold bytes",
        "\n".join(f"- {line}" for line in device_verdicts(session, table)),
        "## The paper beside ours",
        _paper_table(table, claims),
        _verdicts(findings(session, table, claims)),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _header(session: Session, table: pd.DataFrame) -> list[str]:
    share = len(session_loads(session)) / max(1, _timed_loads(session))
    return [
        *header_lines(session, TIME_BUDGET),
        f"probed: the page cache was looked at before {share:.0%} of the timed loads, so probed shares and times per "
        f"load are of {table['n'].min()} to {table['n'].max()} loads per arm and K",
    ]


def _timed_loads(session: Session) -> int:
    runs = set(session.runs.loc[session.runs["role"] == "arm", "run_id"])
    loads = session.loads
    return int(((loads["step"] >= 0) & (loads["expert"] >= 0) & loads["run_id"].isin(runs)).sum())


def _load_table(table: pd.DataFrame) -> str:
    header = (
        "K|arm|asked MiB|device MiB|device/asked|cold share, probed (95%)|all cold / all warm / partly|"
        "ms/load median (quartiles)|n probed"
    )
    rows = [
        (
            str(row.k),
            row.arm,
            f"{row.asked_mib_per_load:.3f}",
            f"{row.device_mib_per_load:.3f}",
            number(row.cold_share, ".3f"),
            _probed(row),
            f"{row.loads_all_cold:.2f} / {row.loads_all_warm:.2f} / {row.loads_partial:.2f}" if row.n else "",
            f"{row.ms_per_load:.2f} ({interval(row.ms_low, row.ms_high, '.2f')})" if row.n else "",
            str(row.n),
        )
        for row in table.itertuples()
    ]
    return markdown_table(header.split("|"), rows, right_from=2)


def _probed(row) -> str:
    if not row.n:
        return ""
    known = not math.isnan(row.cold_share_probed_low)
    told = interval(row.cold_share_probed_low, row.cold_share_probed_high, ".2f") if known else "no interval"
    return f"{row.cold_share_probed:.3f} ({told})"


def _step_table(table: pd.DataFrame) -> str:
    header = "K|arm|loads|hits|asked MiB|device MiB|waiting ms".split("|")
    rows = [
        (
            str(row.k),
            row.arm,
            f"{row.loads_per_step:.1f}",
            f"{row.hits_per_step:.1f}",
            f"{row.asked_mib_per_step:.1f}",
            f"{row.device_mib_per_step:.1f}",
            f"{row.wait_ms_per_step:.1f}",
        )
        for row in table.itertuples()
    ]
    return markdown_table(header, rows, right_from=2)


def _paper_table(table: pd.DataFrame, claims: Claims) -> str:
    """Each K and arm of the paper, and below it ours with explicit reads and with page faults."""
    rows = []
    for k in sorted(set(table["k"])):
        for index, route in enumerate(ARMS[:2]):
            stated, waits = claims.by_id.get(f"tab4.k{k}.{route}"), claims.by_id.get(f"tab3.blocked.k{k}")
            if stated is None or waits is None:
                continue
            values = (*map(str, stated.value), str(waits.value[index]))
            rows.append((str(k), f"paper: {route}", *values))
            for row in table[(table["k"] == k) & table["arm"].isin([route, f"{route}-mmap"])].itertuples():
                ours = (
                    f"{row.device_mib_per_load:.2f}",
                    _cold(row),
                    f"{row.device_mib_per_step:.1f}",
                )
                rows.append((str(k), f"ours: {row.arm}", *ours, f"{row.wait_ms_per_step:.1f}"))
    header = ("K", "arm", "device MiB/load", "cold share", "device MiB/step", "waiting ms/step")
    return markdown_table(header, rows, right_from=2)


def _cold(row) -> str:
    """Of all timed loads where the device tells, else of the probed ones with their number."""
    if row.arm in ADVISED:
        return number(row.cold_share, ".2f")
    return f"{row.cold_share_probed:.2f} (n={row.n} probed)" if row.n else ""


def _verdicts(found: list[Finding]) -> str:
    """What is judged; the paper's absolute values stand above and are not."""
    rows = [
        (finding.claim.id, finding.k, finding.arm, finding.ours, finding.status, finding.why)
        for finding in found
        if finding.claim.kind == "relation" or finding.status is Status.CONTRADICTED
    ]
    return markdown_table(("claim", "K", "arms", "ours", "status", "why"), rows)


def write(session: Session, claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    table = summary(session)
    text = markdown(session, table, claims)
    compared = compare_rows(findings(session, table, claims), claims, session.name, "snakemake tab4")
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, compare=compared)
        save_tab4_figure(session, table, scratch / "tab4")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.tab4", description="Table 4 from a session of Table 3.")
    parser.add_argument("session", type=Path, metavar="SESSION", help="session folder, or the latest.json beside them")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(load_session(options.session), load_claims(options.claims), options.out), options.out
    )


if __name__ == "__main__":
    sys.exit(main())
