"""What a prediction says, in Markdown: errors first, then this machine's rows, the paper's, and the gains.

Makes text from finished rows and computes no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.heading import heading
from analysis.machines import Machine
from analysis.paper.claims import Claims
from analysis.paper.findings import DRIFTED
from analysis.prediction.here import Evidence
from analysis.prediction.paper import COUNTED, LENDS_COMPUTE, SHARED_LRU, compute_times, implications, unexplained
from analysis.rows import markdown_table
from analysis.tab3 import header_lines
from analysis.traces import Trace
from analysis.units import GIB, number

AIM = 0.10
TIME_BUDGET = "about 22 minutes: a session to predict and three that calibrate, after the fit; else half a minute"
HOW_TO_READ = (
    "`error` is predicted over measured (or, of the paper's machines, published), less 1; of tok/s against the median "
    "of the rounds, whose least and largest are in brackets. Nothing is fitted to the session that is predicted. `by "
    "the fit` takes a load's cost from single loads on an idle machine in place of the engine's own warm and cold "
    "session.",
    "Loads come from the session's own tokens through an LRU bank and an LRU page cache of whole records. Pages that "
    "neighbouring records share, and that own eviction takes with one of them, are left out: the session then finds "
    "fewer loads all warm, and each such load waits for the device.",
    "Readers that work beside the computation take cores and memory from it. A warm session with a small bank against "
    "one with every expert in memory says how much per load; that a cold load takes as much as a warm one is assumed. "
    "A load's own cost is the line through the warm and the cold session, at the cold shares that they measured. "
    "Own eviction costs time as well, which only the predicted session has.",
    "Waiting of an `-mmap` arm is the time in its loads, predicted and measured: its stacking belongs to the rest of "
    "the step, unlike in Table 3. The cold share is measured of a sample of the loads; ± is half of the 95% interval "
    "that so many different loads allow, and a difference within it is no error that was seen.",
    "The shared expert computes while a layer's reads run; how much of it is hidden is not modelled beyond what the "
    "calibration has seen.",
    "A machine of the paper: time of a step besides waiting is derived from its prerouter rows of Table 3, so these "
    "test what is predicted of waiting and no more; the on-demand rows are predictions of speed. The page cache is "
    "what memory leaves after a stated reserve, the same for all arms.",
)


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


def parts_line(table: pd.DataFrame) -> list[str]:
    """The errors of waiting and of cold shares, in one line, and whether they cancel; nothing without measured arms."""
    rows = table[table["rounds"].notna()]
    if rows.empty:
        return []
    told = []
    for name, column in (("waiting for loads", "wait_error"), ("cold share", "cold_share_error")):
        errors = rows[column].dropna()
        told.append(
            f"{name}: median {errors.abs().median():.1%}, largest {errors.abs().max():.1%}, within {AIM:.0%} in "
            f"{(errors.abs() <= AIM).sum()} of {len(errors)} arms"
        )
    apart = (rows["cold_share"] - rows["measured_cold_share"]).abs()
    within = (apart <= rows["cold_share_margin"]).sum()
    waits = rows["wait_ms"] - rows["measured_wait_ms"]
    rest = rows["step_ms"] - rows["measured_step_ms"] - waits
    cancels = (np.sign(waits) * np.sign(rest) < 0).sum()
    return [
        f"errors of its parts: {'; '.join(told)} ({within} within the sampling of the probes). In {cancels} of "
        f"{len(rows)} arms the error of waiting and that of the rest of the step have opposite signs, so the speed "
        "comes out nearer than its parts"
    ]


def markdown(
    here: Sequence[Evidence],
    papers: Sequence[Machine],
    traces: Sequence[Trace],
    table: pd.DataFrame,
    gain: pd.DataFrame,
    claims: Claims,
) -> str:
    blocks = ["# Predicted decode speed", headline(table, any_drifted(here)), *parts_line(table)]
    blocks += [] if here else [f"- takes: {TIME_BUDGET}"]
    for evidence in here:
        blocks += _here_blocks(evidence, table[table["session"] == evidence.target.name])
    blocks += ["## The prerouter's gain over on-demand", *_gain_blocks(gain, table, papers)]
    blocks.append("## The paper beside ours")
    if not papers:
        blocks.append("No machine of the paper was asked for.")
    for machine in papers:
        blocks += _paper_blocks(machine, traces, table[table["machine"] == machine.id], claims)
    return "\n\n".join([*blocks, "## How to read", "\n".join(f"- {line}" for line in HOW_TO_READ)]) + "\n"


def _gain_blocks(gain: pd.DataFrame, table: pd.DataFrame, papers: Sequence[Machine]) -> list[str]:
    if gain.empty:
        return ["Nothing to compare."]
    published = {machine.id for machine in papers}
    cells = [
        (
            row.machine,
            str(row.k),
            f"{row.arm} over {row.base}",
            "published" if row.machine in published else "measured",
            _range(row.gain_low, row.gain_high, ".2f", "x"),
            _gain(row.measured_gain, row.measured_low, row.measured_high),
            number(row.difference_low, "+.2f") and _range(row.difference_low, row.difference_high, "+.2f"),
        )
        for row in gain.itertuples()
    ]
    header = ("machine", "K", "arms", "beside it", "predicted", "measured or published", "difference")
    notes = [
        "measured: paired ratio with its 95% interval; published: the quotient of the paper's printed speeds, with "
        "what their rounding allows. The paper's engine reads by page faults: its gain is set beside those arms only.",
        *(
            f"{machine.id}: {_gain_of(machine, table[table['machine'] == machine.id])}"
            for machine in papers
            if machine.id in set(gain["machine"])
        ),
    ]
    return [markdown_table(header, cells, right_from=4), "\n".join(f"- {note}" for note in notes)]


def _gain_of(machine: Machine, table: pd.DataFrame) -> str:
    """What the range of a machine's predicted gain covers, and where it parts from the paper's."""
    covers = "a range covers the sizes of the page cache in the table below"
    if compute_times(machine):
        stated = table.dropna(subset=["measured_loads"]).drop_duplicates(["k", "arm"])
        ahead = stated[stated["arm"] == LENDS_COMPUTE]
        ours, theirs = (", ".join(f"{loads:.0f}" for loads in ahead[name]) for name in ("loads", "measured_loads"))
        ks = ", ".join(map(str, ahead["k"]))
        why = (
            f"; with the prerouter a step makes {ours} loads by the model at K = {ks}, and {theirs} by the paper's rows"
        )
        return f"{covers}{why if ours else ''}"
    return (
        f"{covers} and, since no compute time is known, every one from none to the whole step that the paper's speed "
        f"with the prerouter leaves; a load's cost is that of {machine.serving.get('load_machine', 'this machine')}"
    )


def _gain(gain: float, low: float, high: float) -> str:
    interval = "" if pd.isna(low) else f" ({low:.2f}-{high:.2f})"
    return "none" if pd.isna(gain) else f"{gain:.2f}x{interval}"


def _range(low: float, high: float, form: str, unit: str = "") -> str:
    ends = [f"{value:{form}}{unit}" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _here_blocks(evidence: Evidence, table: pd.DataFrame) -> list[str]:
    target, used = evidence.target, [s for s in (evidence.compute, evidence.loads, evidence.cold) if s is not None]
    lines = [
        *header_lines(target, TIME_BUDGET),
        *(f"calibrated in: {s.name} ({s.condition}), not predicted itself; drift: {s.drift().text}" for s in used),
        f"device, for the fit's line: its readers together get {evidence.parallel:.2f}x what one gets (machine file; 1 "
        "where there is none)",
    ]
    header = "K|arm|tok/s|measured (min-max)|error|error by the fit|step ms|measured|waiting ms|measured|error"
    header += "|loads|measured|cold|measured|error"
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
            number(row.wait_error, "+.0%"),
            f"{row.loads:.1f}",
            f"{row.measured_loads:.1f}",
            number(row.cold_share, ".2f"),
            number(row.measured_cold_share, ".2f")
            + (number(row.cold_share_margin, ".2f") and f" ± {row.cold_share_margin:.2f}"),
            number(row.cold_share_error, "+.0%"),
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
        "### Calibration",
        markdown_table(
            ("K", "arm", "step without loads ms", "more per load ms", "a ms", "b ms", "from", "fit"),
            calibration,
            right_from=2,
        ),
    ]


def _paper_blocks(machine: Machine, traces: Sequence[Trace], table: pd.DataFrame, claims: Claims) -> list[str]:
    serving = machine.serving
    about = traces[0].about if traces else {}
    lines = [
        f"machine: {machine.name}, {machine.values['ram_bytes'] / GIB:.0f} GiB; a load: {serving['load_a_ms']} + "
        f"{serving['load_b_ms']} x cold ms ({serving['load_source']})",
        f"routes: generated, reuse {about.get('reuse')}, zipf {about.get('zipf')} (assumed), seed {about.get('seed')}; "
        f"the last {COUNTED} tokens count",
        f"bank: {SHARED_LRU} bundles shared in the `-mmap` arms (and, prerouter, the stacks of the token before); the "
        "floor in the others",
        "page cache: memory less what is reserved leaves "
        + ", ".join(f"{mib / 1024:g}" for mib in sorted(set(table["cache_mib"])))
        + " GiB",
        *_compute_lines(machine),
    ]
    header = "K|arm|cache GiB|tok/s|paper|error|waiting ms|paper|error|loads|paper|cold|paper|error|MiB/step|paper"
    cells = [
        (
            str(row.k),
            row.arm + (" *" if row.note else ""),
            f"{row.cache_mib / 1024:g}",
            number(row.tok_s, ".2f"),
            number(row.measured_tok_s, ".1f"),
            number(row.error, "+.0%") + (" *" if row.note and not pd.isna(row.error) else ""),
            f"{row.wait_ms:.0f}",
            number(row.measured_wait_ms, ".0f"),
            number(row.wait_error, "+.0%"),
            f"{row.loads:.0f}",
            number(row.measured_loads, ".0f"),
            number(row.cold_share, ".2f"),
            number(row.measured_cold_share, ".2f"),
            number(row.cold_share_error, "+.0%"),
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
        markdown_table(header.split("|"), cells, right_from=2),
        *(f"{title}\n\n" + "\n".join(f"- {line}" for line in found) for title, found in told.items() if found),
    ]


def _compute_lines(machine: Machine) -> list[str]:
    """Where a step's time besides waiting comes from, and what was changed of it."""
    taken, derived = compute_times(machine), machine.serving.get("compute_ms", {})
    if not taken:
        return [
            "time of a step besides waiting: not stated and not derivable, so no speed is predicted; waiting of arms "
            "whose reads go beside the computation is an upper bound, with nothing to go beside"
        ]
    at = "at K = " + ", ".join(map(str, taken))
    lines = [
        "time of a step besides waiting: " + ", ".join(f"{ms:.1f}" for ms in taken.values()) + f" ms {at}; derived "
        "from the rows marked *: their error is that of the waiting that is predicted (and of levelling, where it says "
        "so below), and no test of the time besides"
    ]
    if any(abs(derived[str(k)] - ms) > 1e-6 for k, ms in taken.items()):
        were = ", ".join(f"{derived[str(k)]:.1f}" for k in taken)
        lines.append(
            f"those times are levelled: the paper's rows themselves leave {were} ms {at}, so that a step would compute "
            "for less time with more experts, and the prerouter would be predicted faster at a larger K; taken are the "
            "nearest times that do not fall with K (least squares)"
        )
    return lines


def any_drifted(here: Sequence[Evidence]) -> bool:
    """Whether a session that is predicted, or that calibrates, drifted: then errors are no verdict."""
    sessions = [s for evidence in here for s in (evidence.target, evidence.compute, evidence.loads, evidence.cold)]
    return any(session.drift().void_verdict for session in sessions if session is not None)
