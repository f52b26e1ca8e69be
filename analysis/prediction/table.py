"""The prediction as a table, from what `edge0 predict` was asked for (`command` reads its command line).

Writes summary.csv, compare.csv, table.md and the figure, all or none, where a folder is named; returns table.md's text.
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

from analysis.heading import heading
from analysis.machines import Machine, load_machine
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import DRIFTED, compare_rows
from analysis.prediction.figure import save_predict_figure
from analysis.prediction.here import COLUMNS, Evidence, read_evidence, rows_here
from analysis.prediction.paper import COUNTED, SHARED_LRU, implications, rows_paper, unexplained
from analysis.rows import markdown_table, publishing, write_tables
from analysis.tab3 import header_lines
from analysis.traces import Trace, load_trace
from analysis.units import GIB, MIB, number

AIM = 0.10
PAPER_TIER, PAPER_KS = "shape-35b", (2, 4, 8)
TOKENS, REUSE = 512, 0.25  # of a generated trace
TIME_BUDGET = "about 22 minutes: a session to predict and three that calibrate, after the fit; else half a minute"
HOW_TO_READ = (
    "`error` is predicted over measured tok/s, less 1, against the median of the rounds; the interval is their least "
    "and largest. Nothing is fitted to the session that is predicted. `by the fit` takes a load's cost from single "
    "loads on an idle machine in place of the engine's own warm and cold session.",
    "Loads come from the session's own tokens through an LRU bank and an LRU page cache of whole records. Pages that "
    "neighbouring records share, and that own eviction takes with one of them, are left out: the session then finds "
    "fewer loads all warm, and each such load waits for the device.",
    "Readers that work beside the computation take cores and memory from it. A warm session with a small bank against "
    "one with every expert in memory says how much per load; that a cold load takes as much as a warm one is assumed. "
    "A load's own cost is the line through the warm and the cold session, at the cold shares that they measured. "
    "Own eviction costs time as well, which only the predicted session has.",
    "The shared expert computes while a layer's reads run; how much of it is hidden is not modelled beyond what the "
    "calibration has seen.",
    "A machine of the paper: time of a step besides waiting is derived from its prerouter rows of Table 3, so these "
    "are no predictions of speed; the on-demand rows are. The page cache is what memory leaves after a stated reserve, "
    "the same for all arms.",
)


def execute(options: argparse.Namespace) -> str:
    claims, reserves = load_claims(options.claims), [parse_size(text) for text in options.reserve]
    here, papers = [], []
    for name in options.machine:
        machine = _paper_machine(name, options.machines, options.results)
        if machine is not None:
            papers.append(machine)
        else:
            here.append(read_evidence(_folder(options.results, name, options.tier)))
    if papers and options.trace is None:
        with tempfile.TemporaryDirectory() as scratch:
            traces = [load_trace(path) for path in generate_traces(Path(scratch), options.zipf)]
    else:
        traces = [load_trace(path) for path in options.trace or ()] if papers else []
    rows = [row for evidence in here for row in rows_here(evidence)]
    rows += [row for machine in papers for row in rows_paper(machine, traces, reserves, claims)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    text = markdown(here, papers, traces, reserves, table, claims)
    if options.out is not None:
        write(here, papers, traces, table, text, claims, options.out)
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


def headline(table: pd.DataFrame, drifted: bool = False) -> str:
    """The error of a machine's own arms, in one line; its median and its largest are each held to the aim."""
    measured = table[table["rounds"].notna()]
    errors, fit_errors = measured["error"].abs(), measured["fit_error"].abs()
    if errors.empty:
        return "prediction error: no machine here has measured arms"
    median, largest = ("met" if value <= AIM else "missed" for value in (errors.median(), errors.max()))
    verdict = DRIFTED if drifted else f"{median} by the median, {largest} by the largest"
    return (
        f"prediction error on this machine: median {errors.median():.1%}, largest {errors.max():.1%} over "
        f"{len(errors)} arms; aim {AIM:.0%}: {verdict} (by the fit's line of single loads: median "
        f"{fit_errors.median():.1%}, largest {fit_errors.max():.1%})"
    )


def markdown(
    here: Sequence[Evidence],
    papers: Sequence[Machine],
    traces: Sequence[Trace],
    reserves: Sequence[int],
    table: pd.DataFrame,
    claims: Claims,
) -> str:
    blocks = ["# Predicted decode speed", headline(table, _drifted(here))]
    blocks += [] if here else [f"- takes: {TIME_BUDGET}"]
    for evidence in here:
        blocks += _here_blocks(evidence, table[table["session"] == evidence.target.name])
    blocks.append("## The paper beside ours")
    if not papers:
        blocks.append("No machine of the paper was asked for.")
    for machine in papers:
        blocks += _paper_blocks(machine, traces, reserves, table[table["machine"] == machine.id], claims)
    return "\n\n".join([*blocks, "## How to read", "\n".join(f"- {line}" for line in HOW_TO_READ)]) + "\n"


def _here_blocks(evidence: Evidence, table: pd.DataFrame) -> list[str]:
    target, used = evidence.target, [s for s in (evidence.compute, evidence.loads, evidence.cold) if s is not None]
    lines = [
        *header_lines(target, TIME_BUDGET),
        *(f"calibrated in: {s.name} ({s.condition}), not predicted itself; drift: {s.drift().text}" for s in used),
        f"device, for the fit's line: its readers together get {evidence.parallel:.2f}x what one gets (machine file; 1 "
        "where there is none)",
    ]
    header = "K|arm|tok/s|measured (min-max)|error|error by the fit|step ms|measured|waiting ms|measured"
    header += "|loads|measured|cold|measured"
    cells = [
        (
            str(row.k),
            row.arm,
            f"{row.tok_s:.2f}",
            f"{row.measured_tok_s:.2f} ({row.measured_low:.2f}-{row.measured_high:.2f})",
            f"{row.error:+.1%}",
            f"{row.fit_error:+.1%}",
            f"{row.step_ms:.1f}",
            f"{row.measured_step_ms:.1f}",
            f"{row.wait_ms:.1f}",
            f"{row.measured_wait_ms:.1f}",
            f"{row.loads:.1f}",
            f"{row.measured_loads:.1f}",
            number(row.cold_share, ".2f"),
            number(row.measured_cold_share, ".2f"),
        )
        for row in table.itertuples()
    ]
    calibration = [
        (
            str(row.k),
            row.arm,
            f"{row.compute_ms:.1f}",
            f"{row.load_host_ms:.3f}",
            f"{row.load_a_ms:.3f}",
            f"{row.load_b_ms:.3f}",
            row.source,
            f"{row.fit_a_ms:.3f} + {row.fit_b_ms:.3f} x cold",
        )
        for row in table.itertuples()
    ]
    return [
        f"## {target.info.machine}, {target.info.tier}: predicted and measured",
        *heading(lines, target, *used),
        markdown_table(header.split("|"), cells, right_from=2),
        "Waiting of an `-mmap` arm is predicted without its stacking, which is measured as waiting too.",
        "### Calibration",
        markdown_table(
            ("K", "arm", "step without loads ms", "more per load ms", "a ms", "b ms", "from", "fit"),
            calibration,
            right_from=2,
        ),
    ]


def _paper_blocks(
    machine: Machine, traces: Sequence[Trace], reserves: Sequence[int], table: pd.DataFrame, claims: Claims
) -> list[str]:
    serving = machine.serving
    about = traces[0].about if traces else {}
    lines = [
        f"machine: {machine.name}, {machine.values['ram_bytes'] / GIB:.0f} GiB; a load: {serving['load_a_ms']} + "
        f"{serving['load_b_ms']} x cold ms ({serving['load_source']})",
        f"routes: generated, reuse {about.get('reuse')}, zipf {about.get('zipf')} (assumed), seed {about.get('seed')}; "
        f"the last {COUNTED} tokens count",
        f"bank: {SHARED_LRU} bundles shared in the `-mmap` arms (and, prerouter, the stacks of the token before); the "
        "floor in the others",
        "page cache: memory less " + ", ".join(f"{reserve / GIB:g}" for reserve in reserves) + " GiB",
    ]
    if "compute_ms" not in serving:
        lines.append(
            "time of a step besides waiting: not stated and not derivable, so no speed is predicted; waiting of arms "
            "whose reads go beside the computation is an upper bound, with nothing to go beside"
        )
    else:
        lines.append("time of a step besides waiting: derived from the rows marked *, which are no predictions")
    header = "K|arm|cache GiB|tok/s|paper|error|waiting ms|paper|loads|paper|cold|paper|MiB/step|paper".split("|")
    cells = [
        (
            str(row.k),
            row.arm + (" *" if row.note else ""),
            f"{row.cache_mib / 1024:g}",
            number(row.tok_s, ".2f"),
            number(row.measured_tok_s, ".1f"),
            number(row.error, "+.0%"),
            f"{row.wait_ms:.0f}",
            number(row.measured_wait_ms, ".0f"),
            f"{row.loads:.0f}",
            number(row.measured_loads, ".0f"),
            number(row.cold_share, ".2f"),
            number(row.measured_cold_share, ".2f"),
            f"{row.mib:.0f}",
            number(row.measured_mib, ".0f"),
        )
        for row in table.itertuples()
    ]
    told = {
        "What no page cache explains, whatever rounding the digits allow:": unexplained(machine, claims),
        "What these rows ask of a bank:": implications(machine, claims),
    }
    return [
        f"### {machine.name} ({machine.id})",
        "\n".join(f"- {line}" for line in lines),
        markdown_table(header, cells, right_from=2),
        *(f"{title}\n\n" + "\n".join(f"- {line}" for line in found) for title, found in told.items() if found),
    ]


def _drifted(here: Sequence[Evidence]) -> bool:
    """Whether a session that is predicted, or that calibrates, drifted: then errors are no verdict."""
    sessions = [s for evidence in here for s in (evidence.target, evidence.compute, evidence.loads, evidence.cold)]
    return any(session.drift().void_verdict for session in sessions if session is not None)


def write(
    here: Sequence[Evidence],
    papers: Sequence[Machine],
    traces: Sequence[Trace],
    table: pd.DataFrame,
    text: str,
    claims: Claims,
    out: Path,
) -> None:
    """Write every output into `out`, all or none. OSError passes."""
    session = here[0].target.name if here else traces[0].name if traces else ""
    with publishing(out) as scratch:
        compared = compare_rows([], claims, session, "snakemake predict")
        write_tables(scratch, text, summary=table, compare=compared)
        save_predict_figure(
            table, headline(table, _drifted(here)), [machine.id for machine in papers], scratch / "predict"
        )
