"""The prediction as a table, from what `edge0 predict` was asked for (`command` reads its command line).

Writes summary.csv, gain.csv, compare.csv, table.md and the figure, all or none, where a folder is named; returns
table.md's text, which is made in `text`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.machines import Machine, load_machine
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import compare_rows
from analysis.prediction.figure import save_predict_figure
from analysis.prediction.gains import COLUMNS as GAIN_COLUMNS
from analysis.prediction.gains import gains_here, gains_paper
from analysis.prediction.here import COLUMNS, Evidence, read_evidence, rows_here
from analysis.prediction.paper import cache_bytes, rows_paper
from analysis.prediction.text import any_drifted, headline, markdown, parts_line
from analysis.rows import publishing, write_tables
from analysis.traces import Trace, load_trace
from analysis.units import GIB, MIB

PAPER_TIER, PAPER_KS = "shape-35b", (2, 4, 8)
TOKENS, REUSE = 512, 0.25  # of a generated trace


def execute(options: argparse.Namespace) -> str:
    claims, reserves = load_claims(options.claims), [parse_size(text) for text in options.reserve]
    here, papers = [], []
    for name in options.machine:
        machine = _paper_machine(name, options.machines, options.results)
        if machine is not None:
            papers.append(machine)
        else:
            here.append(read_evidence(_folder(options.results, name, options.tier)))
    for machine in papers:
        for reserve in reserves:
            cache_bytes(machine, reserve)  # a wrong one is refused before anything takes time
    if papers and options.trace is None:
        with tempfile.TemporaryDirectory() as scratch:
            traces = [load_trace(path) for path in generate_traces(Path(scratch), options.zipf)]
    else:
        traces = [load_trace(path) for path in options.trace or ()] if papers else []
    rows = [row for evidence in here for row in rows_here(evidence)]
    rows += [row for machine in papers for row in rows_paper(machine, traces, reserves, claims)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    gains = [row for one in here for row in gains_here(one, table[table["session"] == one.target.name])]
    for machine in papers:
        gains += gains_paper(machine, traces, reserves, table[table["machine"] == machine.id], claims)
    gain = pd.DataFrame(gains, columns=list(GAIN_COLUMNS))
    text = markdown(here, papers, traces, table, gain, claims)
    if options.out is not None:
        write(here, papers, traces, table, gain, text, claims, options.out)
    return text


def parse_size(text: str) -> int:
    """`6GiB` or `512MiB` in bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|MiB)", text)
    if not match:
        raise ValueError(f"--reserve: expected a size such as 6GiB or 512MiB, found {text!r}")
    return int(float(match[1]) * {"GiB": GIB, "MiB": MIB}[match[2]])


def generate_traces(folder: Path, zipf: float) -> list[Path]:
    """One trace per K of the paper's model, made by `edge0 trace generate`. Raises ValueError with its message."""
    paths = []
    for k in PAPER_KS:
        paths.append(folder / f"generated-k{k}.safetensors")
        command = [sys.executable, "-m", "edge0.cli", "trace", "generate", str(paths[-1]), "--tier", PAPER_TIER]
        command += ["--k", str(k), "--tokens", str(TOKENS), "--reuse", str(REUSE), "--zipf", str(zipf)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"edge0 trace generate: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return paths


def _paper_machine(name: str, machines: Path, results: Path) -> Machine | None:
    """The machine file of an id if only the paper measured there; None for one with results of its own."""
    if not (machines / f"{name}.yaml").is_file() and (results / name).is_dir():
        return None
    machine = load_machine(name, machines)
    return machine if machine.serving else None


def _folder(results: Path, machine: str, tier: str | None) -> Path:
    """results/<machine>/<tier>: the tier named, or the only one with sessions that calibrate a prediction."""
    if tier is not None:
        return results / machine / tier
    found = sorted((results / machine).glob("*/predict/sessions"))
    if len(found) != 1:
        tiers = ", ".join(path.parents[1].name for path in found) or "none"
        raise ValueError(f"{results / machine}: expected one tier with a prediction, found {tiers}; name it by --tier")
    return found[0].parents[1]


def write(
    here: Sequence[Evidence],
    papers: Sequence[Machine],
    traces: Sequence[Trace],
    table: pd.DataFrame,
    gain: pd.DataFrame,
    text: str,
    claims: Claims,
    out: Path,
) -> None:
    """Write every output into `out`, all or none. OSError passes."""
    session = here[0].target.name if here else traces[0].name if traces else ""
    with publishing(out) as scratch:
        compared = compare_rows([], claims, session, "snakemake predict")
        write_tables(scratch, text, summary=table, gain=gain, compare=compared)
        lines = [headline(table, any_drifted(here)), *parts_line(table)]
        save_predict_figure(table, gain, lines, [machine.id for machine in papers], scratch / "predict")
