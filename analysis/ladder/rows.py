"""What a ladder is made of: a ladder.json for each seed and the rows beside it. Knows nothing of what is said of them.

A run is one seed: rows per rung and problem, every rung on the same problems. Runs are joined only where they are of
one tier, K, machine and plan, and of the very same problems, since everything that is said compares problem by problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.paper.findings import SYNTHESISED
from analysis.quality.health import repetitive
from analysis.rows import named, read_json, read_rows
from analysis.units import require

DOCUMENT = "ladder.json"
KEYS = "tier machine session options recall seconds corpus".split()
PLAN = "tier k seed".split()
COLUMNS = "rung k seed task problem exact cross_entropy answer".split()
RECALL = "rung k seed layer recall".split()
FP, INT4, UNTRAINED, PHASE1, PHASE2, FINAL, DEPLOYED = RUNGS = (
    "fp",
    "int4",
    "untrained-heads",
    "phase1",
    "phase2",
    "final",
    "deployed",
)
ADVISORY, BASE_FEATURES, OWN_FEATURES, NATIVE_PATH, SFT_FIRST, JOINT, DISTIL_ALONE, FULL_K_SET = CONTROLS = (
    "advisory",
    "base-features",
    "own-features",
    "lora-native-path",
    "sft-first",
    "joint",
    "distil-alone",
    "full-k-set",
)
MEANING = {
    FP: "the teacher before it was quantised",
    INT4: "the checkpoint that is served, every layer routing for itself",
    UNTRAINED: "routes predicted by the next layer's router on this layer's input",
    PHASE1: "heads trained to imitate that router one token ahead",
    PHASE2: "recovery LoRA on the teacher's answers, on predicted routes",
    FINAL: "reverse KL to the teacher on the student's own text",
    DEPLOYED: "the set of `final` as files, answered by the streaming engine",
    ADVISORY: "phase 1's heads only say what to read, the router decides",
    BASE_FEATURES: "phase 1's heads see what the base would have chosen, not what was served",
    OWN_FEATURES: "heads trained on one-hots of their own routes instead of the base's",
    NATIVE_PATH: "phase 1's heads, with a LoRA that was trained on native routes",
    SFT_FIRST: "LoRA first, on untrained heads, heads after it",
    JOINT: "heads and LoRA together, by the answers alone",
    DISTIL_ALONE: "phase 3 straight after phase 1",
    FULL_K_SET: "heads and LoRA that were trained for the full K",
}
ORDER = {rung: place for place, rung in enumerate((*RUNGS, *CONTROLS))}


class Side(NamedTuple):
    """One rung at one K."""

    rung: str
    k: int


@dataclass(frozen=True)
class Ladder:
    """All seeds of one tier and K. `rows`: columns `COLUMNS` and repetitive; `recall`: columns `RECALL`;
    `about`: a document for each seed, in their order."""

    rows: pd.DataFrame
    recall: pd.DataFrame
    about: Sequence[Mapping[str, Any]]

    @property
    def tier(self) -> str:
        return str(self.about[0]["tier"])

    @property
    def machine(self) -> str:
        return str(self.about[0]["machine"])

    @property
    def k(self) -> int:
        return int(self.about[0]["options"]["k"])

    @property
    def full_k(self) -> int:
        """The K that the teacher was trained for."""
        return int(self.rows["k"].max())

    @property
    def seeds(self) -> list[int]:
        return [int(found["options"]["seed"]) for found in self.about]

    @property
    def session(self) -> str:
        return ", ".join(str(found["session"]) for found in self.about)

    @property
    def stands_for(self) -> str:
        """What the tier is no evidence of, "" for a released model."""
        return f"{self.tier} stands for the method, not for the released model" if self.tier in SYNTHESISED else ""

    @cached_property
    def cells(self) -> dict[tuple[Side, int], pd.DataFrame]:
        """Rows of a side and seed, by problem."""
        groups = self.rows.sort_values("problem").groupby(["rung", "k", "seed"])
        return {(Side(str(rung), int(k)), int(seed)): rows for (rung, k, seed), rows in groups}

    @cached_property
    def sides(self) -> list[Side]:
        """What was scored, main rungs first, the larger K first."""
        return sorted({side for side, _ in self.cells}, key=lambda side: (ORDER[side.rung], -side.k))

    def seeds_of(self, *sides: Side) -> list[int]:
        """The seeds that scored all of these."""
        return [seed for seed in self.seeds if all((side, seed) in self.cells for side in sides)]

    def has(self, *sides: Side) -> bool:
        return bool(self.seeds_of(*sides))

    def values(self, column: str, weights: Mapping[Side, float], seeds: Sequence[int] | None = None) -> np.ndarray:
        """The weighted sum of sides, problem by problem: `[seeds, problems]`, of seeds that have all of them."""
        chosen = self.seeds_of(*weights) if seeds is None else seeds
        return np.array(
            [
                sum(weight * self.cells[side, seed][column].to_numpy(float) for side, weight in weights.items())
                for seed in chosen
            ]
        )

    def recall_of(self, side: Side, seeds: Sequence[int] | None = None) -> np.ndarray:
        """Recall of each predicted layer, shares: `[seeds, layers]`; `[0, 0]` where there are no heads."""
        rows = self.recall[(self.recall["rung"] == side.rung) & (self.recall["k"] == side.k)]
        chosen = rows if seeds is None else rows[rows["seed"].isin(seeds)]
        return chosen.pivot(index="seed", columns="layer", values="recall").to_numpy(float)

    def differing(self, left: Side, right: Side, seed: int) -> pd.DataFrame:
        """Problems to which two sides gave different answers: columns problem, task, answer, answer_right."""
        ours, theirs = (self.cells[side, seed] for side in (left, right))
        apart = (ours["answer"].to_numpy() != theirs["answer"].to_numpy()) | (
            ours["exact"].to_numpy() != theirs["exact"].to_numpy()
        )
        rows = ours.assign(answer_right=theirs["answer"].to_numpy())[apart]
        return rows[["problem", "task", "answer", "answer_right"]]


def load_ladder(paths: Sequence[Path]) -> Ladder:
    """Read the runs, a ladder.json or the latest.json beside it each.

    Raises ValueError, one line: an unreadable file, a missing key, column or rung, a seed that is there twice, runs of
    another tier, K, machine or plan, rungs of other problems.
    """
    files = [named(path, DOCUMENT) for path in paths]
    documents = {file: _document(file) for file in files}
    files = sorted(documents, key=lambda file: documents[file]["options"]["seed"])
    _check_alike(documents)
    if len(files) < len(paths):
        raise ValueError(f"{files[0]}: given twice; expected each seed once")
    frames = [_rows(file, documents[file]) for file in files]
    first = _problems(frames[0])
    for file, frame in zip(files, frames, strict=True):
        if not _problems(frame).equals(first):
            raise ValueError(f"{file}: other problems than {files[0]}; expected runs of the same held-out problems")
    recall = pd.concat([pd.DataFrame(documents[file]["recall"], columns=RECALL) for file in files], ignore_index=True)
    rows = pd.concat(frames, ignore_index=True)
    return Ladder(rows.assign(repetitive=rows["answer"].map(repetitive)), recall, [documents[file] for file in files])


def _document(path: Path) -> dict[str, Any]:
    about = read_json(path)
    if not isinstance(about, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(about).__name__}")
    require(path, about, KEYS, "keys")
    require(path, about["options"], PLAN, "options")
    for row in about["recall"]:
        require(path, row, RECALL, "keys of recall")
    return about


def _check_alike(documents: Mapping[Path, Mapping[str, Any]]) -> None:
    """One tier, machine, K and plan; each seed once. Controls may have been run for some seeds only."""
    (first, about), *others = documents.items()
    seeds = {about["options"]["seed"]: first}
    for path, other in others:
        for name, ours, theirs in (
            *((name, other[name], about[name]) for name in ("tier", "machine")),
            *((f"option {name}", other["options"].get(name), value) for name, value in about["options"].items()),
        ):
            if name not in ("option seed", "option controls") and ours != theirs:
                raise ValueError(f"{path}: {name} {ours}, but {theirs} in {first}; expected runs that differ by seed")
        seed = other["options"]["seed"]
        if seed in seeds:
            raise ValueError(f"{path}: seed {seed} is also that of {seeds[seed]}; expected each seed once")
        seeds[seed] = path


def _rows(path: Path, about: Mapping[str, Any]) -> pd.DataFrame:
    path = path.with_suffix(".parquet")
    rows = read_rows(path, COLUMNS)
    k, seed = about["options"]["k"], about["options"]["seed"]
    strange = sorted(set(rows["rung"]) - set(ORDER))
    if strange:
        raise ValueError(f"{path}: unknown rung {strange[0]!r}; expected {', '.join(ORDER)}")
    if set(rows["seed"]) != {seed}:
        raise ValueError(f"{path}: rows of seed {', '.join(map(str, sorted(set(rows['seed']))))}, expected {seed}")
    if rows["exact"].dtype != bool:
        raise ValueError(f"{path}: column exact must be boolean without gaps, found {rows['exact'].dtype}")
    if not np.isfinite(rows.loc[rows["rung"] != DEPLOYED, "cross_entropy"]).all():
        raise ValueError(f"{path}: column cross_entropy must be finite in every rung but {DEPLOYED}")
    found = {Side(str(rung), int(k)) for rung, k in rows[["rung", "k"]].itertuples(index=False, name=None)}
    missing = [rung for rung in RUNGS if Side(rung, k) not in found]
    if missing:
        raise ValueError(f"{path}: no row of {missing[0]} at K={k}; expected all of {', '.join(RUNGS)}")
    first = _problems(rows)
    for (rung, at), cell in rows.groupby(["rung", "k"]):
        if not _problems(cell).equals(first) or len(cell) != len(first):
            raise ValueError(f"{path}: {rung} at K={at} has other problems than the rest, or one twice")
    return rows[COLUMNS]


def _problems(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["problem", "task"]].drop_duplicates().sort_values("problem").reset_index(drop=True)
