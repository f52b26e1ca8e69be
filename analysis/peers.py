"""Other engines beside ours, in one run: `python -m analysis.peers SESSION --limited S... --limits L... --out DIR ...`.

One session in which everything fits, and one for each enforced limit on the whole process. Ratios are paired within a
session and never between two. Writes summary.csv, ratios.csv, goals.csv (what the project set itself, as the benchmark
writes it), table.md and the figure, all or none, and prints table.md. An arm that its limit killed, or that could not
be built, has no number: it is told.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.bench import BENCH_COLUMNS, Measure, place_of, row
from analysis.heading import heading
from analysis.memory_counters import COUNTERS, counter_table, counters
from analysis.paper.findings import DRIFTED
from analysis.resident import Limited, killed_runs, load_limited, outcome
from analysis.resident_figure import Panel, save_resident_figure
from analysis.rows import (
    DIRECT_ARMS,
    MIB,
    Session,
    load_session,
    markdown_table,
    paired,
    publishing,
    read_json,
    run_command,
    the_k,
)
from analysis.rows import write_tables as write_all
from analysis.statistics import Ratio, median_spread
from analysis.tab3 import header_lines
from analysis.units import number

TIME_BUDGET = "about 25 minutes with a small tier, all sessions; the library once, 15 minutes on two free cores"
OURS = ("ondemand", "prerouter")
MMAP, REPACKED = "llama-cpp", "llama-cpp-repacked"
ARMS = (*OURS, *DIRECT_ARMS, "resident", "ondemand-mmap", "prerouter-mmap", MMAP, REPACKED)
PAIRS = (
    *((arm, base) for arm in OURS for base in (REPACKED, MMAP, "resident")),
    *((arm, f"{arm}-mmap") for arm in OURS),
    *((arm, MMAP) for arm in DIRECT_ARMS),
    *zip(DIRECT_ARMS, OURS, strict=True),
    ("resident", REPACKED),
    (REPACKED, MMAP),
)
WARM = "warm"
# Session, base, arms over it and the least that their ratio should be; a session by what it leaves of the file.
GOALS = (
    (WARM, REPACKED, OURS, 1.0),
    ("50%", MMAP, OURS + DIRECT_ARMS, 2.0),
    ("25%", MMAP, OURS + DIRECT_ARMS, 5.0),
    ("50%", "ondemand-mmap", ("ondemand",), 2.0),
)
HOW_TO_READ = (
    "All arms decode the same tokens, one at a time, with as many threads as the machine has cores, each run in a "
    "fresh process. The engine's arms and stock mlx-lm (`resident`) read the checkpoint, without LoRA; the heads of "
    "`prerouter` come on top. llama.cpp reads a GGUF file of the same shape and the same bytes per weight.",
    "`llama-cpp` maps its file, so that what does not fit is read by page faults; `llama-cpp-repacked` is its default: "
    "all weights copied into memory in the order that its fastest kernels want. Files are mapped with the common "
    "read-around window of 128 KiB where that is permitted: with a larger one it reads far more and is slower under a "
    "limit. Its own text differs, since Q4_0 is "
    "another rounding; so do its routes, though not how many experts a token needs.",
    "A limit holds for the whole process: weights, bank, caches, interpreter and the page cache of what it reads. All "
    "start with nothing cached, and the engine's bank has what the limit leaves beside its other weights; the arms of "
    "stacks, which are a second copy, have the smallest that serves K. What a process that its limit killed might have "
    "done is not estimated.",
    "`-direct` reads a repacked copy of the checkpoint, one record per expert, past the page cache: under a limit "
    "every page that is kept pushes another out, and is missing from the bank.",
    "`-mmap` is the paper's way of reading, page faults and nine stacked tensors, in this engine.",
    "The engine computes by its own kernels where they run, `resident` by MLX's operations: a ratio of the two holds "
    "both.",
    "Of a Q4_1 file llama.cpp multiplies activations rounded to 8 bits; with random weights that turns a route here "
    "and there, and all that follows. The F32 line is the one that says whether it is the same model.",
    "RSS counts mapped pages too, of libraries and of a mapped file; a limit counts them for who read them first.",
)


@dataclass(frozen=True)
class Peers:
    """What the command was given: sessions by what they leave of the file, and what is known of the peers' files.

    `library`, `file`, `check`: documents of `experiments.peers`, of the library, the equal-bytes file and the check.
    """

    sessions: Mapping[str, Session]
    limits: Mapping[str, Limited]
    library: Mapping[str, Any]
    file: Mapping[str, Any]
    check: Mapping[str, Any]

    def k(self, part: str) -> int:
        """Experts per token in a session: a small limit may leave room for fewer of them, alike in all its arms."""
        return the_k(self.sessions[part])

    def cell(self, part: str, arm: str) -> pd.DataFrame:
        return self.sessions[part].cell(arm, self.k(part))

    def active_bytes(self, part: str, arm: str) -> float:
        """What one token needs of the file that an arm reads; NaN where the file was not made."""
        active = self.file.get("active", {}).get("gguf" if arm in (MMAP, REPACKED) else "checkpoint")
        return math.nan if active is None else active["fixed"] + self.k(part) * active["expert"]


def share_name(limited: Limited) -> str:
    return f"{limited.about['share']:.0%}"


def load(options: argparse.Namespace) -> Peers:
    """Raises ValueError, one line, for files that are none."""
    limits = [load_limited(*pair) for pair in zip(options.limited, options.limits, strict=True)]
    sessions = {WARM: load_session(options.session)}
    sessions |= {share_name(limited): limited.session for limited in limits if limited.session is not None}
    documents = {}
    for name, needed in (("library", "built"), ("file", "gguf"), ("check", "checks")):
        path = getattr(options, name)
        documents[name] = read_json(path)
        if not isinstance(documents[name], dict) or needed not in documents[name]:
            raise ValueError(f"{path}: does not say {needed}")
    return Peers(sessions, {share_name(limited): limited for limited in limits}, **documents)


def ratios(peers: Peers) -> dict[tuple[str, str, str], Ratio]:
    """(session, arm, base) to the ratio of their tok/s, for every pair that the session planned."""
    found = {}
    for part, session in peers.sessions.items():
        planned = set(session.all_runs["arm"])
        for arm, base in PAIRS:
            if {arm, base} <= planned:
                found[part, arm, base] = paired(peers.cell(part, arm), peers.cell(part, base))
    return found


def goals(peers: Peers) -> Iterator[Measure]:
    """A row for each goal; `passed` is None where no number judges it, and the note says why."""
    found = ratios(peers)
    for part, base, arms, least in GOALS:
        for arm in arms:
            name, goal = f"peers.{part}.{arm}_over_{base}", f">= {least:.1f}"
            session, ratio = peers.sessions.get(part), found.get((part, arm, base))
            if session is None or ratio is None or not ratio.n:
                place = place_of(session) if session is not None else ("", "")
                note = f"{arm}: {told(peers, part, arm)}; {base}: {told(peers, part, base)}"
                yield row(place, name, math.nan, "ratio", goal=goal, note=note)
                continue
            drifted = session.drift().void_verdict
            note = (
                f"{DRIFTED}; n={ratio.n}"
                if drifted
                else f"condition {session.condition}, K={peers.k(part)}, n={ratio.n}"
            )
            passed = None if drifted else ratio.ratio >= least
            yield row(place_of(session), name, ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)


def told(peers: Peers, part: str, arm: str) -> str:
    """An arm's speed in a session, or why it has none."""
    limited, session = peers.limits.get(part), peers.sessions.get(part)
    if session is None:
        return f"no limit can be enforced here: {limited.about['reason']}" if limited is not None else "not measured"
    words = outcome(session, arm, peers.k(part))
    return missing_peer(peers) if words == "not run" and arm in (MMAP, REPACKED) else words


def missing_peer(peers: Peers) -> str:
    """Why there is no arm of llama.cpp; "not run" where it could have been."""
    return peers.library["reason"] or peers.file["reason"] or "not run"


def summary(peers: Peers) -> pd.DataFrame:
    """A row per session and arm."""
    rows = []
    for part, session in peers.sessions.items():
        for arm in ARMS:
            planned, killed = killed_runs(session, arm, peers.k(part))
            if not planned:
                continue
            cell = peers.cell(part, arm)
            speed, active = median_spread(cell["tok_s"]), peers.active_bytes(part, arm)
            limit = peers.limits[part].about["limit_bytes"] / MIB if part in peers.limits else None
            values = {
                key.replace("_bytes", "_mib"): value / MIB
                for key, value in counters(session, arm, peers.k(part)).items()
            }
            rows.append(
                {
                    "memory": part,
                    "limit_mib": limit,
                    "arm": arm,
                    "k": peers.k(part),
                    "rounds": speed.n,
                    "planned": planned,
                    "killed": killed,
                    "tok_s_median": speed.median,
                    "tok_s_min": speed.low,
                    "tok_s_max": speed.high,
                    "active_mib_per_token": active / MIB,
                    "active_gb_s": speed.median * active / 1e9,
                    "device_mib_per_step": cell["device_bytes_per_step"].median() / MIB,
                    **values,
                    "session": session.name,
                }
            )
    return pd.DataFrame(rows)


def ratio_rows(peers: Peers) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"memory": part, "arm": arm, "base": base, "k": peers.k(part), "ratio": one.ratio}
            | {"ci_low": one.ci_low, "ci_high": one.ci_high, "rounds": one.n, "session": peers.sessions[part].name}
            for (part, arm, base), one in ratios(peers).items()
        ]
    )


def facts(peers: Peers) -> list[str]:
    """The head of the table: sessions, limits, the peer's library, equal bytes, and whether it is the same model."""
    lines = header_lines(peers.sessions[WARM], TIME_BUDGET)
    for part, limited in peers.limits.items():
        if limited.session is None:
            lines.append(f"{part}: no limit can be enforced on this machine ({limited.about['reason']})")
            continue
        told_once = set(lines)
        lines += [f"{part}, {line}" for line in header_lines(limited.session, TIME_BUDGET) if line not in told_once]
        lines.append(f"{part}: {limited.words}; kept by {limited.about.get('method') or 'the system'}")
    if reason := peers.library["reason"] or peers.file["reason"]:
        return [*lines, f"llama.cpp: not measured: {reason}"]
    versions = ", ".join(f"{name} {version}" for name, version in peers.library.get("versions", {}).items())
    ours, theirs = (peers.active_bytes(WARM, arm) for arm in (OURS[0], MMAP))
    return [
        *lines,
        f"llama.cpp: {versions}; {peers.library.get('system', '')}",
        f"active bytes: {ours / MIB:.1f} MiB a token of the checkpoint at K={peers.k(WARM)}, {theirs / MIB:.1f} MiB of "
        f"the GGUF file ({theirs / ours - 1:+.1%}), by arithmetic on the two files",
        *(f"same model: {check_words(check)}" for check in peers.check["checks"]),
    ]


def check_words(check: Mapping[str, Any]) -> str:
    """How closely llama.cpp answers as mlx-lm does on equal weights."""
    if check.get("tokens") is None:
        return f"not checked on {check['kind'].upper()}: {check.get('reason') or 'no file'}"
    return (
        f"on equal weights ({check['kind'].upper()}) llama.cpp's logits lie {check['median_relative_error']:.2%} "
        f"(median of {check['tokens']} tokens; largest {max(check['relative_error']):.2%}) from mlx-lm's, correlation "
        f"{check['median_correlation']:.5f}, the same greedy token in {check['same_choice']:.0%}"
    )


def markdown(peers: Peers, judged: Sequence[Measure]) -> str:
    """table.md."""
    tier = peers.sessions[WARM].all_runs["tier"].iloc[0]
    blocks = [
        f"# Other engines and ours, {tier}",
        *heading(facts(peers), *peers.sessions.values()),
        "## Speed, tok/s",
        _speed_table(peers),
        "## Ratios within each session (95%)",
        _ratio_table(peers),
        "## Goals",
        _goal_table(judged),
    ]
    for part, session in peers.sessions.items():
        blocks += [f"## Memory, {title(peers, part)}", counter_table(session, ARMS)]
    blocks.append("\n".join(f"- {name}: {meaning}" for name, (_, meaning) in COUNTERS.items()))
    blocks += ["## How to read", "\n".join(f"- {line}" for line in HOW_TO_READ)]
    return "\n\n".join(blocks) + "\n"


def title(peers: Peers, part: str) -> str:
    k = f"K={peers.k(part)}" if part in peers.sessions else "no session"
    limited = peers.limits.get(part)
    return f"{k}, all of it fits in memory" if limited is None else f"{k}, {part} of the file: {limited.title}"


def _speed_table(peers: Peers) -> str:
    parts = [WARM, *peers.limits]
    rows = summary(peers).set_index(["memory", "arm"])
    lines = []
    for arm in ARMS:
        at = (WARM, arm)
        gb_s = number(rows.loc[at, "active_gb_s"], ".2f") if at in rows.index else ""
        moved = (rows["device_mib_per_step"].get((part, arm), math.nan) for part in parts)
        device = (number(value, ".1f") or "-" for value in moved)
        lines.append([arm, *(told(peers, part, arm) for part in parts), gb_s, " / ".join(device)])
    header = ("arm", *(title(peers, part) for part in parts), "GB/s of active bytes, warm", "device MiB/step")
    return markdown_table(header, lines, right_from=1)


def _ratio_table(peers: Peers) -> str:
    found, parts = ratios(peers), [WARM, *peers.limits]
    lines = [
        [f"{arm} over {base}", *(str(found.get((part, arm, base), "")) for part in parts)]
        for arm, base in PAIRS
        if any((part, arm, base) in found for part in parts)
    ]
    return markdown_table(("pair", *parts), lines, right_from=1)


def _goal_table(judged: Sequence[Measure]) -> str:
    words = {True: "yes", False: "no", None: "-"}
    lines = [
        [one.measure, one.goal, number(one.value, ".2f"), number(one.ci_low, ".2f"), number(one.ci_high, ".2f")]
        + [words[one.passed], one.note]
        for one in judged
    ]
    return markdown_table(("goal", "at least", "value", "95% from", "to", "pass", "note"), lines)


def panels(peers: Peers) -> list[Panel]:
    """What the figure draws: a panel per session, the same arms in each."""
    run = {arm for session in peers.sessions.values() for arm in session.all_runs["arm"]}
    found = []
    for part, session in peers.sessions.items():
        bars = []
        for arm in (arm for arm in ARMS if arm in run):
            planned, killed = killed_runs(session, arm, peers.k(part))
            words = f"killed in {killed} of {planned}" if killed else "no valid run" if planned else "not run"
            bars.append((arm, list(peers.cell(part, arm)["tok_s"]), words))
        limited = peers.limits.get(part)
        what = part if limited is None else f"{part}: {limited.about['limit_bytes'] / MIB:.0f} MiB"
        found.append(Panel(f"K={peers.k(part)}, {what}", session, peers.k(part), bars))
    return found


def write(peers: Peers, out: Path) -> str:
    """Write every output, all or none; returns the text of table.md. OSError passes."""
    judged = list(goals(peers))
    text = markdown(peers, judged)
    table = pd.DataFrame([one.to_row() for one in judged], columns=BENCH_COLUMNS)
    table["pass"] = table["pass"].map({True: "true", False: "false"})
    with publishing(out) as scratch:
        write_all(scratch, text, summary=summary(peers), ratios=ratio_rows(peers), goals=table)
        save_resident_figure(panels(peers), scratch / "peers")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr; a missed goal is not an error."""
    parser = argparse.ArgumentParser(prog="python -m analysis.peers", description="Other engines beside ours.")
    parser.add_argument("session", type=Path, metavar="SESSION", help="where everything fits")
    parser.add_argument("--limited", type=Path, nargs="*", default=[], help="a session for each limit")
    parser.add_argument("--limits", type=Path, nargs="*", default=[], help="what each limit is, JSON")
    parser.add_argument("--library", type=Path, required=True, help="whether the peers' library was built, JSON")
    parser.add_argument("--file", type=Path, required=True, help="the peer's file of equal bytes, JSON")
    parser.add_argument("--check", type=Path, required=True, help="whether it is the same model, JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    return run_command(lambda: write(load(options), options.out), options.out)


if __name__ == "__main__":
    sys.exit(main())
