"""Whether the ways of keeping a page-cache budget agree: `python -m analysis.agreement INPUT --claims C --out DIR`.

INPUT is the agreement.json that `experiments.budgets.agreement` wrote, its rows beside it, or the latest.json. Writes
summary.csv (a line per stream and way), compare.csv (no rows: the paper says nothing of this), table.md and the figure,
all or none, and prints table.md. Every way is set against our own eviction, load by load, and against a simulated LRU
cache.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.agreement_figure import save_agreement
from analysis.lru import simulate
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import compare_rows
from analysis.rows import MIB, markdown_table, named, publishing, read_json, read_rows, run_command, write_tables
from analysis.statistics import Difference, batch_mean
from analysis.units import DEVICE_TOLERANCE, device_agrees, interval, number, require

BASE = "eviction"  # what the other ways are set against
COLUMNS = "by exponent phase record asked_bytes cold_bytes inflight_bytes cold_page_bytes device_bytes".split()
DOCUMENT_KEYS = "session budget_bytes expert_bytes exponents unavailable runs".split()
RUN_KEYS = "by exponent steady warm_up_loads cached_low_bytes cached_mean_bytes cached_high_bytes record_bytes".split()
TOLERANCE, LARGE_BYTES = 0.03, 300 * MIB  # of the cold share; the size of the experts from which the bound was meant
SUMMARY_COLUMNS = (
    "stream by status n cold_share cold_loads all_cold all_warm partial lru_cold_share difference difference_low "
    "difference_high tolerance agrees device_over_cold device_agrees device_mib cached_mib cached_low_mib "
    "cached_high_mib charged_mib budget_mib warm_up_loads tier machine session"
).split()
HOW_TO_READ = (
    "The same loads, from the same contents: `eviction` drops the record that was loaded longest ago, `cgroup` leaves "
    "it to the kernel within a limit that leaves the budget to the page cache, whatever else the process holds.",
    "`cold` is the share of the bytes asked for that were not in the page cache right before the load, `cold loads` "
    "the share of loads more than half of whose bytes were not. Neighbours share pages, so a load can be partly warm.",
    "`difference` is the mean over loads of a way's cold share minus eviction's. Loads that follow each other meet the "
    "same cache, so its 95% interval is that of the means of consecutive batches (20, or of 10 loads each). The whole "
    "interval must lie within the tolerance: where only the mean does, it is undecided.",
    "`LRU` is a simulated cache of whole records that keeps the last used, as many as the budget has pages for: set "
    "it beside `cold loads`. The kernel ages pages in two lists instead, which favours records that came twice.",
    "`device/cold` is what the device delivered over the bytes of the pages that were cold; ranges are advised and "
    "then read, so it must be 1 within 2%: more is read-ahead, less a read that another thread or process paid for.",
)


@dataclass(frozen=True)
class Agreement:
    """One measurement: `rows` of loads, `about` its document, `runs` what is known of each (way, exponent)."""

    rows: pd.DataFrame
    about: dict[str, Any]
    runs: dict[tuple[str, float], dict[str, Any]]

    def phase(self, way: str, exponent: float, phase: str) -> pd.DataFrame:
        """Rows of one run in one phase, in order."""
        rows = self.rows
        chosen = (rows["by"] == way) & (rows["exponent"] == exponent) & (rows["phase"] == phase)
        return rows[chosen].reset_index(drop=True)


def read_agreement(path: Path) -> Agreement:
    """Raises ValueError, one line naming the file: unreadable, a missing key or column, a run without loads."""
    path = named(path, "agreement.json")
    about = read_json(path)
    require(path, about if isinstance(about, dict) else {}, DOCUMENT_KEYS, "keys")
    table = path.with_suffix(".parquet")
    rows = read_rows(table, COLUMNS)
    runs = {}
    for run in about["runs"]:
        require(path, run, RUN_KEYS, "keys of a run")
        runs[run["by"], run["exponent"]] = run
    found = Agreement(rows, about, runs)
    for way, exponent in runs:
        if found.phase(way, exponent, "measured").empty:
            raise ValueError(f"{table}: no measured loads of {way} with exponent {exponent}")
    return found


def stream_name(exponent: float) -> str:
    return f"Zipf {exponent:g}" if exponent else "uniform"


def summary(agreement: Agreement) -> pd.DataFrame:
    """One row per stream and way, columns `SUMMARY_COLUMNS`; a way that does not work here has its reason as status."""
    about, rows = agreement.about, []
    common = {"tier": about.get("tier", ""), "machine": about.get("machine", ""), "session": about["session"]}
    ways = dict.fromkeys([BASE, *(way for way, _ in agreement.runs), *about["unavailable"]])
    for exponent in about["exponents"]:
        for way in ways:
            row: dict[str, Any] = {"stream": stream_name(exponent), "by": way} | common
            if (way, exponent) in agreement.runs:
                row |= _measured(agreement, way, exponent)
            else:
                row["status"] = f"unavailable ({about['unavailable'].get(way, 'not measured')})"
            rows.append(row)
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def _measured(agreement: Agreement, way: str, exponent: float) -> dict[str, Any]:
    run, loads = agreement.runs[way, exponent], agreement.phase(way, exponent, "measured")
    cold = loads["cold_bytes"] / loads["asked_bytes"]
    cold_pages = int(loads["cold_page_bytes"].sum())
    device = loads["device_bytes"].sum() / cold_pages if cold_pages else math.nan
    charged = run.get("charged_bytes")
    row = {
        "status": "measured" if run["steady"] else "no steady state",
        "n": len(loads),
        "cold_share": loads["cold_bytes"].sum() / loads["asked_bytes"].sum(),
        "cold_loads": (cold > 0.5).mean(),
        "all_cold": (cold == 1).mean(),
        "all_warm": (cold == 0).mean(),
        "partial": ((cold > 0) & (cold < 1)).mean(),
        "lru_cold_share": lru_cold_share(agreement, way, exponent),
        "tolerance": TOLERANCE,
        "device_over_cold": device,
        "device_agrees": _verdict(run["steady"], "pass" if device_agrees(device) else "FAIL"),
        "device_mib": loads["device_bytes"].sum() / MIB,
        "cached_mib": run["cached_mean_bytes"] / MIB,
        "cached_low_mib": run["cached_low_bytes"] / MIB,
        "cached_high_mib": run["cached_high_bytes"] / MIB,
        "charged_mib": math.nan if charged is None else charged / MIB,
        "budget_mib": agreement.about["budget_bytes"] / MIB,
        "warm_up_loads": run["warm_up_loads"],
    }
    if way == BASE or (BASE, exponent) not in agreement.runs:
        return row
    base = agreement.phase(BASE, exponent, "measured")
    if not np.array_equal(base["record"], loads["record"]):
        raise ValueError(f"{way} and {BASE} did not load the same experts with exponent {exponent}")
    apart = cold - base["cold_bytes"] / base["asked_bytes"]
    mean = batch_mean(apart)
    steady = run["steady"] and agreement.runs[BASE, exponent]["steady"]
    row |= {"difference": mean.mean, "difference_low": mean.ci_low, "difference_high": mean.ci_high}
    return row | {"agrees": _verdict(steady, within(mean))}


def within(difference: Difference) -> str:
    """Whether a difference of cold shares is shown to lie within `TOLERANCE`: by all of its interval."""
    if abs(difference.mean) > TOLERANCE:
        return "FAIL"
    return "pass" if max(abs(difference.ci_low), abs(difference.ci_high)) <= TOLERANCE else "undecided"


def _verdict(steady: bool, verdict: str) -> str:
    return verdict if steady else "no steady state"


def lru_cold_share(agreement: Agreement, way: str, exponent: float) -> float:
    """Cold share of the measured loads in a simulated cache of as many records as the budget had pages for."""
    start, before, loads = (agreement.phase(way, exponent, phase) for phase in ("start", "warm-up", "measured"))
    order = [*before["record"], *loads["record"]]
    sizes = dict.fromkeys([*start["record"], *order], 1)
    hits = simulate(order, sizes, len(start), start["record"].tolist())
    return float(1 - hits[len(before) :].mean())


def markdown(agreement: Agreement, table: pd.DataFrame) -> str:
    """The text of table.md."""
    blocks = [
        f"# Page-cache budgets: own eviction and the kernel's limit, {agreement.about.get('tier', '')}",
        "\n".join(f"- {line}" for line in _header(agreement, table)),
        _share_table(table),
        "## Bytes from the device, and what was cached",
        _byte_table(table),
        "## The paper beside ours",
        "The paper measured on machines that had that much memory; it makes no claim on how a budget is kept.",
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _header(agreement: Agreement, table: pd.DataFrame) -> list[str]:
    about, host = agreement.about, agreement.about.get("host", {})
    facts = [host.get("cpu_model"), host.get("filesystem"), "behind a hypervisor" if host.get("hypervisor") else None]
    words = [f"kernel {host['kernel']}" if host.get("kernel") else None]
    budget, experts = about["budget_bytes"] / MIB, about["expert_bytes"] / MIB
    loads = sorted(set(table["n"].dropna().astype(int)))
    small = (
        f" (the bound was meant for {LARGE_BYTES / MIB:.0f} MiB of experts and more; in fewer, single pages weigh "
        "more, and yet the same bound judges)"
        if about["expert_bytes"] < LARGE_BYTES
        else ""
    )
    verdicts = [f"{table[column].eq('pass').sum()} of {table[column].notna().sum()}" for column in VERDICTS]
    return [
        f"machine: {about.get('machine') or 'not named'} ({'; '.join(str(f) for f in [*facts, *words] if f)})",
        f"tier: {about.get('tier') or 'not named'}, {experts:.0f} MiB of experts, layout {about.get('layout')}",
        f"condition: budget of {budget:.0f} MiB of page cache, filled, then loaded until steady by probe",
        f"n: {', '.join(map(str, loads)) or 'no'} measured loads per run, one run per stream and way, a process each",
        f"session: {about['session']}, commit {about.get('commit') or 'unknown'}",
        f"cold shares agree within {TOLERANCE}, interval and all: {verdicts[0]}{small}; device bytes match cold bytes "
        f"within {DEVICE_TOLERANCE:.0%}: {verdicts[1]}",
        "takes: about 3 minutes for a mini checkpoint",
    ]


VERDICTS = ("agrees", "device_agrees")


def _share_table(table: pd.DataFrame) -> str:
    rows = []
    for row in table.itertuples():
        if pd.isna(row.n):
            rows.append([row.stream, row.by, row.status, *[""] * 7])
            continue
        apart = ""
        if pd.notna(row.difference):
            apart = f"{row.difference:+.3f} ({interval(row.difference_low, row.difference_high, '+.3f')})"
        shares = [f"{value:.3f}" for value in (row.cold_share, row.lru_cold_share, row.cold_loads)]
        split = f"{row.all_cold:.3f} / {row.all_warm:.3f} / {row.partial:.3f}"
        verdict = "" if pd.isna(row.agrees) else row.agrees
        rows.append([row.stream, row.by, row.status, str(int(row.n)), *shares, split, apart, verdict])
    header = ("stream", "budget by", "status", "loads", "cold", "LRU", "cold loads", "all cold / all warm / partial")
    return markdown_table((*header, "difference (95%)", f"agrees within {TOLERANCE:g}"), rows, right_from=3)


def _byte_table(table: pd.DataFrame) -> str:
    rows = [
        (
            row.stream,
            row.by,
            f"{row.device_mib:.1f}",
            number(row.device_over_cold, ".4f"),
            row.device_agrees,
            f"{row.cached_mib:.1f} ({interval(row.cached_low_mib, row.cached_high_mib, '.1f')})",
            number(row.charged_mib, ".1f"),
            f"{row.budget_mib:.1f}",
            str(int(row.warm_up_loads)),
        )
        for row in table[table["n"].notna()].itertuples()
    ]
    header = ("stream", "budget by", "device MiB", "device/cold", f"within {DEVICE_TOLERANCE:.0%}")
    header += ("cached MiB mean (min-max)", "charged to the group MiB", "budget MiB", "warm-up loads")
    return markdown_table(header, rows, right_from=2)


def write(agreement: Agreement, claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    table = summary(agreement)
    text = markdown(agreement, table)
    compared = compare_rows([], claims, agreement.about["session"], "snakemake budgets")
    with publishing(out) as scratch:
        write_tables(scratch, text, summary=table, compare=compared)
        save_agreement(agreement.about, table, scratch / "agreement")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.agreement", description="Agreement of budget methods.")
    parser.add_argument("input", type=Path, metavar="INPUT", help="agreement.json, its rows beside it")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(
        lambda: write(read_agreement(options.input), load_claims(options.claims), options.out), options.out
    )


if __name__ == "__main__":
    sys.exit(main())
