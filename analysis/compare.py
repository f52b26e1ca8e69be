"""Table 3 on several machines: `python -m analysis.compare MACHINE... --claims CLAIMS --out DIR`.

A line is one machine's session: its tier and condition stand in it, its speeds beside those of other machines, and its
gain is a paired ratio within that session. Nothing of one machine is ever divided by anything of another: disks,
checkpoints and moods of machines would pass for an effect. The paper's machines are lines like any other.

Writes table.md, rows.csv and the figure, all or none, and prints table.md. Reads finished tables, measures nothing.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.compare_figure import save_figure
from analysis.heading import guest_cold
from analysis.machines import MACHINES, RESULTS, Machine, experiment_folders, known_machines, load_machine, read_table
from analysis.machines import only as only_value
from analysis.paper.claims import Claims, load_claims
from analysis.rows import GAIN_PAIRS, markdown_table, publishing, run_command, write_tables
from analysis.statistics import Ratio
from analysis.units import GIB, interval

SUMMARY = "arm k rounds tok_s_median tok_s_min tok_s_max condition tier machine session".split()
PAIRS = "k arm base ratio ci_low ci_high n session note".split()
FIT = "way layout a_ms b_ms r2 n tier machine session".split()
WAYS = {"prerouter": "explicit reads", "prerouter-mmap": "page faults"}
PAPER_TIER = "35b as released"
TIME_BUDGET = "seconds: it reads finished tables and measures nothing"
HOW_TO_READ = (
    "A line is one session of one machine. Its gain is the geometric mean of per-round ratios within that session, "
    "with a 95% interval; an interval that spans 1 decides nothing. The paper states no interval: its gain is the "
    "quotient of the two speeds that it states.",
    "Speeds of two lines differ by machine, checkpoint, condition and day. They stand beside each other, and no "
    "quotient of two machines is given anywhere: it would name no cause.",
    "Lines of different tiers or conditions are different experiments: compare the signs of gains, not their sizes.",
    "A load costs a + b x its cold share (`snakemake fit`): a is a load from memory, b what the device adds to it.",
)


@dataclass(frozen=True)
class Line:
    """One machine's session at one K with one way of reading. `gain` has n = 0 where the session could not say."""

    k: int
    machine: str
    tier: str
    condition: str
    reads: str
    ondemand_tok_s: float
    ondemand_low: float
    ondemand_high: float
    prerouter_tok_s: float
    prerouter_low: float
    prerouter_high: float
    gain: float
    gain_low: float
    gain_high: float
    rounds: int
    session: str
    note: str = ""

    @property
    def series(self) -> str:
        """What the line shares with the lines of other K: one session and one way of reading."""
        return f"{self.machine} · {self.tier} · {self.condition} · {self.reads}"


@dataclass(frozen=True)
class Comparison:
    """What was found of the machines asked for; `machines`: id to its file, None where there is none."""

    machines: dict[str, Machine | None]
    lines: list[Line]
    costs: list[tuple[str, ...]]
    missing: list[str]


def collect(
    ids: Sequence[str], claims: Claims, results: Path = RESULTS, folder: Path = MACHINES, here: str | None = None
) -> Comparison:
    """Read everything there is of the machines, in the order given. `here`: this machine, which may have nothing yet.

    Raises ValueError, one line: an id without machine file, results and claims; a machine named twice; malformed files.
    """
    twice = [one for one in ids if ids.count(one) > 1]
    if twice:
        raise ValueError(f"machines: {twice[0]} is named twice")
    machines, lines, costs, missing = {}, [], [], []
    for one in ids:
        known = sorted({*known_machines(folder), *_with_results(results)})
        if one not in known and one != here:
            raise ValueError(f"machines: {one}: neither a machine file nor results; known: {', '.join(known)}")
        machines[one] = machine = load_machine(one, folder) if (folder / f"{one}.yaml").exists() else None
        paper = machine is not None and machine.source == "paper"
        mine = paper_lines(claims, machine) if paper else result_lines(one, results)
        lines += mine
        if not mine:
            missing.append(_missing(machine, claims) if paper else f"{one}: no Table 3 yet; run `snakemake tab3` there")
        costs += _paper_cost(machine) if paper else _costs(one, results, machine)
    lines.sort(key=lambda line: (line.k, line.reads, line.tier, line.condition))  # stable: machines as they were named
    return Comparison(machines, lines, costs, missing)


def result_lines(machine: str, results: Path = RESULTS) -> list[Line]:
    """Lines of every tier whose Table 3 a machine has. Raises ValueError where one table joins what is never joined."""
    found = []
    for place in experiment_folders(machine, "tab3", results):
        path = place / "summary.csv"
        summary = read_table(path, SUMMARY)
        only_value(summary, "machine", path, machine)
        tier = only_value(summary, "tier", path, place.parent.name)
        session, condition = only_value(summary, "session", path), only_value(summary, "condition", path)
        pairs = read_table(place / "pairs.csv", PAIRS)
        only_value(pairs, "session", place / "pairs.csv", session)
        speeds = {(row.k, row.arm): row for row in summary.itertuples()}
        for pair in pairs.itertuples():
            if (pair.arm, pair.base) not in GAIN_PAIRS:
                continue
            off, on = (_speed(speeds, pair.k, arm, path) for arm in (pair.base, pair.arm))
            found.append(
                Line(
                    int(pair.k),
                    machine,
                    tier,
                    condition,
                    WAYS[pair.arm],
                    *off,
                    *on,
                    *(pair.ratio, pair.ci_low, pair.ci_high),
                    int(pair.n),
                    session,
                    "" if pd.isna(pair.note) else pair.note,
                )
            )
    return found


def paper_lines(claims: Claims, machine: Machine) -> list[Line]:
    """The paper's Table 3 on its machine: claims `tab3.kN`, on-demand and prerouter; read by page faults."""
    found = []
    for claim in claims.by_id.values():
        match = re.fullmatch(r"tab3\.k(\d+)", claim.id)
        if match is None or claim.machine != machine.id:
            continue
        off, on = map(float, claim.value)
        nothing = (math.nan, math.nan)
        condition = f"its {machine.values['ram_bytes'] / GIB:.0f} GiB of memory"
        note = f"no interval stated{f'; {claim.source} source' if claim.source else ''}"
        speeds = (off, *nothing, on, *nothing)
        found.append(
            Line(
                int(match[1]),
                machine.id,
                PAPER_TIER,
                condition,
                "page faults",
                *speeds,
                on / off,
                *nothing,
                0,
                "paper",
                note,
            )
        )
    return found


def _speed(speeds: dict[tuple[int, str], Any], k: int, arm: str, path: Path) -> tuple[float, float, float]:
    row = speeds.get((k, arm))
    if row is None:
        raise ValueError(f"{path}: no row of arm {arm} at K={k}, which pairs.csv has")
    return row.tok_s_median, row.tok_s_min, row.tok_s_max


def _costs(machine: str, results: Path, about: Machine | None) -> list[tuple[str, ...]]:
    """Load costs of a machine, one line per way of reading and layout; `about`: its file, which says how cold b is."""
    found, storage = [], about.values.get("storage", {}) if about else {}
    cold = " (guest-cold)" if guest_cold(storage.get("lower_cache")) else ""
    for place in experiment_folders(machine, "fit", results):
        path = place / "summary.csv"
        rows = read_table(path, FIT)
        only_value(rows, "machine", path, machine)
        tier, session = only_value(rows, "tier", path, place.parent.name), only_value(rows, "session", path)
        for row in rows.itertuples():
            numbers = (f"{row.a_ms:.3f}", f"{row.b_ms:.3f}{cold}", f"{row.r2:.3f}", str(row.n))
            found.append((machine, tier, row.way, row.layout, *numbers, session))
    return found


def _paper_cost(machine: Machine) -> list[tuple[str, ...]]:
    serving = machine.serving
    if not serving or serving.get("load_machine", machine.id) != machine.id:  # borrowed: not this machine's own
        return []
    numbers = (str(serving["load_a_ms"]), str(serving["load_b_ms"]), "", "")
    return [(machine.id, PAPER_TIER, "mmap", "stacked", *numbers, "paper")]


def _missing(machine: Machine, claims: Claims) -> str:
    """What there is of a paper machine without a Table 3: its other speeds, named as the other experiment they are."""
    stated = [
        f"{claim.id} {claim.value} {claim.unit}"
        for claim in claims.by_id.values()
        if claim.machine == machine.id and claim.unit.startswith("tok/s") and ".decode" in claim.id
    ]
    told = f"; what it states is another experiment (`snakemake tab1`): {'; '.join(stated)}" if stated else ""
    return f"{machine.id}: the paper states no Table 3 of this machine{told}"


def _with_results(results: Path) -> set[str]:
    return {path.relative_to(results).parts[0] for path in results.glob("*/*/*/summary.csv")}


def markdown(comparison: Comparison) -> str:
    """table.md."""
    names = ", ".join(comparison.machines)
    sessions = sorted({f"{line.session} ({line.machine})" for line in comparison.lines if line.session != "paper"})
    head = [
        f"machine: {names}",
        "tier: in each line",
        "condition: in each line; noise and drift stand in each session's own table",
        "n: in each line, rounds of its session",
        f"session: {', '.join(sessions) or 'none'}; commits stand in their own tables",
        f"takes: {TIME_BUDGET}",
        *(
            f"{one}: {label}"
            for one, machine in comparison.machines.items()
            if machine
            for label in guest_cold(machine.values.get("storage", {}).get("lower_cache"))
        ),
    ]
    blocks = [
        "# Table 3 on several machines",
        _bullets(head),
        _lines_table(comparison.lines) if comparison.lines else "No machine of these has a Table 3.",
        *(["Not in the table:", _bullets(comparison.missing)] if comparison.missing else []),
        "## What a load costs",
        _cost_table(comparison.costs),
        "## The machines",
        _bullets(
            f"{one}: {machine.facts()}" if machine else f"{one}: no machine file; run `edge0 doctor` there"
            for one, machine in comparison.machines.items()
        ),
        "## How to read",
        _bullets(HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def _lines_table(lines: Sequence[Line]) -> str:
    header = (
        "K",
        "machine",
        "tier",
        "condition",
        "reads",
        "on-demand tok/s",
        "prerouter tok/s",
        "gain (95%)",
        "n",
        "note",
    )
    rows = [
        (
            str(line.k),
            line.machine,
            line.tier,
            line.condition,
            line.reads,
            _span(line.ondemand_tok_s, line.ondemand_low, line.ondemand_high),
            _span(line.prerouter_tok_s, line.prerouter_low, line.prerouter_high),
            gain_text(line),
            str(line.rounds or ""),
            line.note,
        )
        for line in lines
    ]
    return markdown_table(header, rows, right_from=5)


def _cost_table(costs: Sequence[tuple[str, ...]]) -> str:
    if not costs:
        return "None of these machines has one; run `snakemake fit` there."
    header = ("machine", "tier", "way", "layout", "a ms", "b ms", "R^2", "loads", "session")
    return markdown_table(header, costs, right_from=4)


def gain_text(line: Line) -> str:
    """The gain as the table says it; "void" where no round was valid in both arms."""
    if math.isnan(line.gain):
        return "void"
    if math.isnan(line.gain_low):  # the paper's has no n either
        return f"{line.gain:.2f}x (no interval)"
    return Ratio(line.gain, line.gain_low, line.gain_high, line.rounds).bare


def _span(median: float, low: float, high: float) -> str:
    if math.isnan(median):
        return "void"
    return f"{median:.2f} ({interval(low, high, '.2f')})" if not math.isnan(low) else f"{median:.1f}"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def write(comparison: Comparison, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes.

    Raises ValueError when not one machine has a line: there is nothing to draw or to compare.
    """
    if not comparison.lines:
        raise ValueError(f"nothing to compare: {'; '.join(comparison.missing)}")
    text = markdown(comparison)
    with publishing(out) as scratch:
        rows = pd.DataFrame([asdict(line) for line in comparison.lines])
        write_tables(scratch, text, rows=rows)
        save_figure(comparison.lines, comparison.missing, scratch / "compare")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description="Table 3 on several machines.")
    parser.add_argument("machines", nargs="+", metavar="MACHINE", help="id of a machine file or of a folder of results")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--here", metavar="MACHINE", help="this machine, which may have no results yet")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the machines' results")
    parser.add_argument("--machine-files", type=Path, default=MACHINES, help="folder of machine files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the figure")
    options = parser.parse_args(argv)

    def action() -> str:
        claims = load_claims(options.claims)
        places = (options.results, options.machine_files, options.here)
        return write(collect(options.machines, claims, *places), options.out)

    return run_command(action, options.out)


if __name__ == "__main__":
    sys.exit(main())
