"""From a benchmark session to a measure file: `python -m analysis.measures KIND SESSION OUT.json`.

KIND says which questions are put to the session's rows. Knows nothing of how the session was run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.bench import Measure, aa_ratio, dropped, memory_peak, overlap, to_json
from analysis.rows import Session, load_session, paired, read_json, run_command
from analysis.statistics import paired_ratio

RESIDENT_GOAL = 0.95
READS_GOAL = 2.5


def overlap_measures(session: Session) -> list[Measure]:
    """Overlap at each K, the A/A pair, allocator peak, dropped experts."""
    ks = sorted(set(session.runs["k"]))
    measures = [measure for k in ks for measure in overlap(session, int(k))]
    return [*measures, *aa_ratio(session), *memory_peak(session), *dropped(session)]


def resident_measures(session: Session) -> list[Measure]:
    """tok/s of the engine with every expert in its bank over stock mlx-lm, paired; raises ValueError if not paired."""
    measures = []
    for k in sorted(set(session.runs["k"])):
        arm = session.cell("ondemand", int(k))
        ratio = paired(arm, session.cell("resident", int(k)))
        if ratio.n == 0:
            raise ValueError(f"session {session.name}: ondemand and resident share no valid round at K={k}")
        loads = arm["loads_per_step"].median()
        measures.append(
            Measure(
                f"resident.tok_s_ratio.k{k}",
                ratio.ratio,
                "ratio",
                ratio.ci_low,
                ratio.ci_high,
                f">= {RESIDENT_GOAL:.2f}",
                bool(ratio.ratio >= RESIDENT_GOAL),
                session.info.commit or "",
                session.name,
                f"condition {session.condition}, n={ratio.n}; bank holds all experts, {loads:.1f} loads per step",
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
    goal = f">= {READS_GOAL:.2f}"
    passed = bool(ratio.ratio >= READS_GOAL)
    commit, session = about.get("commit") or "", about["session"]
    return [
        Measure(
            "reads.fault_ratio", ratio.ratio, "ratio", ratio.ci_low, ratio.ci_high, goal, passed, commit, session, note
        )
    ]


def from_session(measures: Callable[[Session], list[Measure]]) -> Callable[[Path], list[Measure]]:
    return lambda path: measures(load_session(path))


KINDS: dict[str, Callable[[Path], list[Measure]]] = {
    "overlap": from_session(overlap_measures),
    "resident": from_session(resident_measures),
    "reads": reads_measures,
}


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.measures", description="Measures of a session.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("session", type=Path, help="session folder, or its latest.json")
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
