"""From a benchmark session to a measure file: `python -m analysis.measures KIND SESSION OUT.json`.

KIND says which questions are put to the session's rows. Knows nothing of how the session was run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from analysis.bench import Measure, aa_ratio, dropped, memory_peak, overlap, place_of, row, to_json
from analysis.rows import MIB, Session, load_session, named, paired, read_json, run_command
from analysis.speed import kernels_measures, place_in, speed_measures, work_measures
from analysis.statistics import Ratio, paired_ratio

RESIDENT_GOAL = 0.95
READS_GOAL = 2.5
TTFT_GOAL = 3.0
SHORT_PROMPT = 27  # tokens
GROWTH_GOAL_MIB = 4.0


def overlap_measures(session: Session) -> list[Measure]:
    """Overlap at each K, the A/A pair, allocator peak, dropped experts."""
    ks = sorted(set(session.runs["k"]))
    measures = [measure for k in ks for measure in overlap(session, int(k))]
    return [*measures, *aa_ratio(session), *memory_peak(session), *dropped(session)]


def resident_measures(session: Session) -> list[Measure]:
    """tok/s of the engine with every expert in its bank over stock mlx-lm, paired; raises ValueError if not paired."""
    measures = []
    for k, arm, _, ratio in _against(session, "ondemand", "resident"):
        loads = arm["loads_per_step"].median()
        measures.append(
            row(
                place_of(session),
                f"resident.tok_s_ratio.k{k}",
                ratio.ratio,
                "ratio",
                ratio,
                goal=f">= {RESIDENT_GOAL:.2f}",
                passed=bool(ratio.ratio >= RESIDENT_GOAL),
                note=f"condition {session.condition}, n={ratio.n}; bank holds all experts, {loads:.1f} loads per step",
            )
        )
    return measures


def reads_measures(path: Path) -> list[Measure]:
    """Time of a cold expert through page faults over explicit reads, per pair; `path` is the reads.json of the rows.

    Raises ValueError, one line, when the files are not readable.
    """
    about = read_json(path)
    rows = pd.read_parquet(path.with_suffix(".parquet"))
    times = rows.pivot(index="pair", columns="way", values="ns")
    ratio = paired_ratio(times["mmap"].to_numpy(), times["pread"].to_numpy())
    per_expert = times.median() / 1e6 / about["k"]
    note = (
        f"n={ratio.n} pairs of {about['k']} experts, all cold before ({rows['cold_share'].min():.3f} at the least); "
        f"median {per_expert['mmap']:.2f} against {per_expert['pread']:.2f} ms per expert; "
        f"fault window {about['fault_window']}, {about['threads']} reader threads"
    )
    passed = bool(ratio.ratio >= READS_GOAL)
    goal = f">= {READS_GOAL:.2f}"
    return [row(place_in(about), "reads.fault_ratio", ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)]


def layout_measures(session: Session) -> list[Measure]:
    """tok/s and read calls per expert of the repacked checkpoint against the released layout, paired, per K."""
    measures, place = [], place_of(session)
    for k, records, stacked, ratio in _against(session, "ondemand-records", "ondemand"):
        name = f"records.{session.condition.partition(':')[0]}.k{k}"
        waits = [cell["wait_ms_per_step"].median() for cell in (records, stacked)]
        note = (
            f"condition {session.condition}, n={ratio.n}; waiting {waits[0]:.1f} against {waits[1]:.1f} ms per step, "
            f"{stacked['loads_per_step'].median():.1f} reads of an expert per step"
        )
        before, after = (_calls_per_load(session, cell) for cell in (stacked, records))
        unit = "read calls per expert"
        measures += [
            row(place, f"{name}.tok_s_ratio", ratio.ratio, "ratio", ratio, note=note),
            row(place, f"{name}.calls_stacked", before, unit, goal="9", passed=before == 9),
            row(place, f"{name}.calls_records", after, unit, goal="1", passed=after == 1),
        ]
    return [*measures, *aa_ratio(session)]


def hot_measures(session: Session) -> list[Measure]:
    """tok/s of computing what is in memory while the rest is read, over waiting for all of it; paired, per K."""
    measures = []
    for k, hot, _, ratio in _against(session, "ondemand-hot", "ondemand"):
        note = (
            f"condition {session.condition}, n={ratio.n}; {hot['hits_per_step'].median():.1f} hits and "
            f"{hot['loads_per_step'].median():.1f} reads per step"
        )
        measures.append(row(place_of(session), f"hot.tok_s_ratio.k{k}", ratio.ratio, "ratio", ratio, note=note))
    return [*measures, *aa_ratio(session)]


def _against(session: Session, arm: str, base: str) -> list[tuple[int, pd.DataFrame, pd.DataFrame, Ratio]]:
    """(K, rows of the arm, rows of the base, ratio of tok/s); ValueError where they share no valid round."""
    found = []
    for k in sorted(set(session.runs["k"])):
        cells = session.cell(arm, int(k)), session.cell(base, int(k))
        ratio = paired(*cells)
        if ratio.n == 0:
            raise ValueError(f"session {session.name}: {arm} and {base} share no valid round at K={k}")
        found.append((int(k), *cells, ratio))
    return found


def prefill_measures(path: Path) -> list[Measure]:
    """What a prompt costs by each way, per condition and length; `path` is the prefill.json of the rows.

    Raises ValueError, one line, when the files are not readable.
    """
    about = read_json(path)
    rows = pd.read_parquet(path.with_suffix(".parquet"))
    place = place_in(about)
    measures = []
    for (condition, tokens), here in rows.groupby(["condition", "tokens"]):
        cells = {way: part.set_index("round")["ttft_ms"] for way, part in here[here.role == "arm"].groupby("way")}
        name = f"prefill.{condition}.{tokens}"
        for way in ("ondemand", "whole-layer", "auto"):
            speed, middle = tokens / (cells[way] / 1e3), cells[way].median()
            note = f"n={len(speed)}, {speed.min():.1f} to {speed.max():.1f}; median {middle:.0f} ms to the first token"
            measures.append(row(place, f"{name}.{way}.tok_s", speed.median(), "tok/s", note=note))
        # The goal is for what is shipped, which is the choice; on demand alone is told beside it.
        for way, measure, shipped in (("auto", "ttft_ratio", True), ("ondemand", "ondemand.ttft_ratio", False)):
            first = here[here.way == way].iloc[0]
            read = first.experts_read / (first.layers * first.experts)
            note = (
                f"time to the first token, whole layers over {way}, n={here['round'].nunique()}, K={about['k']}; "
                f"{way} reads {read:.2f} of all experts: bytes alone allow {1 / read:.2f}"
            )
            ratio = paired_ratio(cells["whole-layer"].to_numpy(), cells[way].to_numpy())
            judged = shipped and condition == "cold" and tokens == SHORT_PROMPT
            goal, passed = (f">= {TTFT_GOAL:.1f}", bool(ratio.ratio >= TTFT_GOAL)) if judged else ("", None)
            measures.append(
                row(place, f"{name}.{measure}", ratio.ratio, "ratio", ratio, goal=goal, passed=passed, note=note)
            )
        twin = here[here.role == "aa"].set_index("round")["ttft_ms"]
        same = paired_ratio(twin.to_numpy(), cells["ondemand"].loc[twin.index].to_numpy())
        passed, goal = None if math.isnan(same.ci_low) else same.contains(1.0), "interval contains 1.00"
        note = f"on demand against itself, n={same.n}"
        measures.append(row(place, f"{name}.aa", same.ratio, "ratio", same, goal=goal, passed=passed, note=note))
    return measures


def endurance_measures(path: Path) -> list[Measure]:
    """What a long-lived engine gathers; `path` is the endurance.json of the rows. ValueError, one line, if unreadable.

    Growth is taken from a tenth of the way on, when everything that a process does once has been done.
    """
    about = read_json(path)
    rows, place = pd.read_parquet(path.with_suffix(".parquet")), place_in(about)
    long, short = (rows[rows.part == part] for part in ("long", "short"))
    settled = long[long.number >= long.number.max() / 10]
    anonymous = settled.rss_anon_bytes - settled.request_bytes - settled.alloc_cache_bytes
    kept = settled.alloc_cache_bytes.max() / MIB
    growth = (anonymous.iloc[-1] - anonymous.iloc[0]) / MIB
    caches = (settled.request_bytes.iloc[-1] - settled.request_bytes.iloc[0]) / MIB
    note = (
        f"K={about['k']}, tokens {settled.number.min()} to {settled.number.max()}: anonymous memory beyond the "
        f"request's own caches, which grew by {caches:.1f} MiB, and the allocator's free buffers"
    )
    passed = bool(growth <= GROWTH_GOAL_MIB)
    goal = f"<= {GROWTH_GOAL_MIB:.0f}"
    across = (short.rss_anon_bytes.iloc[-1] - short.rss_anon_bytes.iloc[len(short) // 10]) / MIB
    first = short.groupby("kind").tokens.first()
    different = int((short.tokens != short.kind.map(first)).sum())
    dropped_, pinned = int(rows.dropped.max()), int(short.pinned.max())
    return [
        row(place, "endurance.growth", growth, "MiB", goal=goal, passed=passed, note=note),
        row(place, "endurance.free_buffers", kept, "MiB", note="freed buffers that the allocator keeps, at the most"),
        row(
            place,
            "endurance.requests_growth",
            across,
            "MiB",
            goal=goal,
            passed=bool(across <= GROWTH_GOAL_MIB),
            note=f"anonymous memory from request {len(short) // 10} to {len(short)}",
        ),
        row(
            place,
            "endurance.requests_different",
            different,
            "requests",
            goal="0",
            passed=different == 0,
            note=f"of {len(short)}, those that did not give the tokens that their kind gave first",
        ),
        row(place, "endurance.pinned", pinned, "slots", goal="0", passed=pinned == 0, note="held after a request"),
        row(place, "endurance.dropped", dropped_, "experts", goal="0", passed=dropped_ == 0),
    ]


def _calls_per_load(session: Session, cell: pd.DataFrame) -> float:
    """Over the timed steps; a run's loads before them have negative step numbers. ValueError in rows of old sessions,
    which did not count calls."""
    if "calls" not in session.loads:
        raise ValueError(f"session {session.name}: its loads do not say how many read calls they took")
    loads = session.loads[session.loads["run_id"].isin(cell["run_id"]) & (session.loads["step"] >= 0)]
    return float(loads["calls"].mean())


def from_session(measures: Callable[[Session], list[Measure]]) -> Callable[[Path], list[Measure]]:
    def judged(path: Path) -> list[Measure]:
        session = load_session(path)
        mark = session.drift().mark
        by = f"kernels: {' and '.join(session.kernels)}" if session.kernels else ""
        found = [replace(one, note="; ".join(filter(None, (one.note, by, mark)))) for one in measures(session)]
        return [replace(one, passed=None) for one in found] if mark else found

    return judged


KINDS: dict[str, Callable[[Path], list[Measure]]] = {
    "overlap": from_session(overlap_measures),
    "resident": from_session(resident_measures),
    "reads": lambda path: reads_measures(named(path, "reads.json")),
    "kernels": lambda path: kernels_measures(named(path, "kernels.json")),
    "speed": from_session(speed_measures),
    "work": lambda path: work_measures(named(path, "work.json")),
    "layout": from_session(layout_measures),
    "hot": from_session(hot_measures),
    "prefill": lambda path: prefill_measures(named(path, "prefill.json")),
    "endurance": lambda path: endurance_measures(named(path, "endurance.json")),
}


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.measures", description="Measures of a session.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("session", type=Path, help="session folder, the rows' .json, or a latest.json")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)

    def write() -> str:
        text = to_json(KINDS[options.kind](options.session))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = options.out.with_name(f".{options.out.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(options.out)
        return text

    return run_command(write, options.out)


if __name__ == "__main__":
    sys.exit(main())
