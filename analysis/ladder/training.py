"""What a ladder's training took: steps run, rows trained on and wall seconds of each part, from its ladder.json.

A step is one batch, so rows are steps times the batch; a row may come several times. Steps run may be fewer than those
asked for, since phase 1 ends when held-out recall no longer grows. Knows nothing of scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.ladder.rows import DEPLOYED, RUNGS

PHASE1, PHASE2, PHASE3 = "phase1", "phase2", "phase3"
# Which phase a run is of; what is below the three are controls.
RUNS = {
    **{phase: phase for phase in (PHASE1, PHASE2, PHASE3)},
    "own-features": PHASE1,
    "native-path": PHASE2,
    "sft-first": PHASE2,
    "sft-first-heads": PHASE1,
    "joint": PHASE2,
    "distil-alone": PHASE3,
    "full-k-heads": PHASE1,
    "full-k-lora": PHASE2,
}
CORPUS, SCORING, ENGINE, CONTROL_SCORING = (
    "the teacher's answers",
    "scoring the rungs",
    "the engine's answers",
    "scoring the controls",
)
ORDER = (CORPUS, PHASE1, PHASE2, PHASE3, SCORING, ENGINE, *list(RUNS)[3:], CONTROL_SCORING)


def wall_seconds(about: Mapping[str, Any]) -> dict[str, float]:
    """Every part of a run with its seconds, in the order of `ORDER`; their sum is that of ladder.json's `seconds`.

    A name that is not known there stands for itself, at the end.
    """
    found: dict[str, float] = {}
    for name, seconds in about["seconds"].items():
        part = _part(name)
        found[part] = found.get(part, 0.0) + seconds
    places = {part: place for place, part in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(ORDER))))


def _part(name: str) -> str:
    """The part to which a name of ladder.json's seconds belongs: corpus, train RUN, score RUNG K=K."""
    run, rung = name.removeprefix("train "), name.removeprefix("score ")
    if name == "corpus":
        return CORPUS
    if name != run:
        return run
    if name == rung:
        return name
    if rung == DEPLOYED:
        return ENGINE
    return SCORING if rung.partition(" K=")[0] in RUNGS else CONTROL_SCORING


def without_controls(about: Mapping[str, Any]) -> float:
    """Wall seconds of a run up to the engine's answers."""
    kept = ORDER[: ORDER.index(ENGINE) + 1]
    return sum(seconds for part, seconds in wall_seconds(about).items() if part in kept)


def steps_run(about: Mapping[str, Any], run: str) -> int | None:
    """Steps that a run took; None where they were not recorded."""
    return (about.get("steps") or {}).get(run)


def rows_trained(about: Mapping[str, Any], run: str) -> float:
    """Rows that a run was trained on, a row as often as it came; NaN where steps or batch were not recorded."""
    steps, batch = steps_run(about, run), (about.get("batches") or {}).get(RUNS[run])
    return math.nan if steps is None or batch is None else steps * batch


def told(about: Mapping[str, Any], part: str) -> str:
    """`250 of 300 steps, 15,000 rows, 121.2 s`; "" for a part that a run does not have."""
    seconds = wall_seconds(about).get(part)
    if seconds is None:
        return ""
    words = [f"{seconds:.1f} s"]
    if part == CORPUS:
        words.insert(0, f"{about['corpus']['samples']:,} rows")
    if part in RUNS:
        steps, rows, asked = steps_run(about, part), rows_trained(about, part), about["options"].get(RUNS[part])
        run = "unknown" if steps is None else str(steps)
        words.insert(0, f"{run} of {asked} steps" + ("" if math.isnan(rows) else f", {rows:,} rows"))
    return ", ".join(words)
