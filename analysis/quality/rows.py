"""What Table 2 is made of: a quality.json of each tier and the rows beside it. Knows nothing of scores or of the paper.

One document is one tier, all five benchmarks, two arms on the same questions; anything less is refused, because a
difference is of questions that both arms answered, and a mean of benchmarks that are all there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.paper.findings import SYNTHESISED
from analysis.rows import named, read_json, read_rows
from analysis.units import require

DOCUMENT = "quality.json"
KEYS = ("tier", "machine", "session")
COLUMNS = ("benchmark arm k question category score answer prompt_tokens answer_tokens stop stand_in").split()
ARMS = ("fp", "int4")
STOPS = ("end", "length")
STAND_IN = "synthetic stand-in"
TAG = re.compile(r"(?<!\d)(35b|8b)\b")  # how claims name the two models


@dataclass(frozen=True)
class Benchmark:
    """One of the five: its id in rows, its name, its name in claims, and how many questions it has when it is real."""

    id: str
    name: str
    claim: str
    questions: int


BENCHMARKS = (
    Benchmark("aime2026", "AIME 2026", "aime2026", 30),
    Benchmark("humaneval", "HumanEval", "humaneval", 164),
    Benchmark("gpqa-diamond", "GPQA-Diamond", "gpqa_diamond", 198),
    Benchmark("mmlu-pro", "MMLU-Pro", "mmlu_pro", 12032),
    Benchmark("ifbench", "IFBench", "ifbench", 300),
)
LONG_REASONING = BENCHMARKS[0]


@dataclass(frozen=True)
class Quality:
    """One tier. `pairs`: a row per question, columns benchmark, question, category, stand_in, and of each arm X k_X,
    score_X, answer_X, prompt_tokens_X, answer_tokens_X, stop_X; in the order of `BENCHMARKS`, then of the question."""

    about: Mapping[str, Any]
    pairs: pd.DataFrame

    @property
    def tier(self) -> str:
        return str(self.about["tier"])

    @property
    def machine(self) -> str:
        return str(self.about["machine"])

    @property
    def session(self) -> str:
        return str(self.about["session"])

    @property
    def tag(self) -> str:
        """`35b` or `8b`, the paper's model that the tier is of; "" where neither tier nor model names one."""
        places = (self.tier, str(self.about.get("model", "")))
        return next((match[1] for place in places if (match := TAG.search(place))), "")

    @property
    def released(self) -> bool:
        """Whether the tier is a released model, not one that was synthesised or trained here."""
        return self.tier not in SYNTHESISED

    @property
    def k(self) -> str:
        """Experts per token: `4`, or `fp 8, int4 4` where the arms differ."""
        ks = {arm: int(self.pairs[f"k_{arm}"].iloc[0]) for arm in ARMS}
        return str(ks[ARMS[0]]) if len(set(ks.values())) == 1 else ", ".join(f"{arm} {k}" for arm, k in ks.items())

    def of(self, benchmark: Benchmark) -> pd.DataFrame:
        """The pairs of one benchmark."""
        return self.pairs[self.pairs["benchmark"] == benchmark.id]

    def stands_in(self, benchmark: Benchmark) -> bool:
        """Whether its questions are seeded ones in the benchmark's format."""
        return bool(self.of(benchmark)["stand_in"].iloc[0])

    def label(self, benchmark: Benchmark) -> str:
        """The benchmark's name, never alone where its questions stand in."""
        return f"{benchmark.name} ({STAND_IN})" if self.stands_in(benchmark) else benchmark.name

    @property
    def any_stand_in(self) -> bool:
        return bool(self.pairs["stand_in"].any())


def load_qualities(paths: Sequence[Path]) -> list[Quality]:
    """Read quality.json files, or the ones that a latest.json names, and the rows beside each.

    Raises ValueError, one line: unreadable file, missing key or column, a tier twice, several machines, an unknown or a
    missing arm or benchmark, a question twice or in one arm only, arms that saw different prompts, a score outside 0
    to 1, an unknown stop reason, several K in one arm.
    """
    found: list[Quality] = []
    for path in paths:
        quality = _load(named(path, DOCUMENT))
        for other in found:
            if other.tier == quality.tier:
                raise ValueError(f"{path}: a second document of {quality.tier}; each tier stands in the table once")
            if other.machine != quality.machine:
                raise ValueError(f"{path}: machine {quality.machine}, but {other.machine} before it; expected one")
        found.append(quality)
    return found


def _load(path: Path) -> Quality:
    about = read_json(path)
    if not isinstance(about, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(about).__name__}")
    require(path, about, KEYS, "keys")
    path = path.with_suffix(".parquet")
    rows = read_rows(path, COLUMNS)
    _check(path, rows)
    return Quality(about, _pairs(path, rows))


def _check(path: Path, rows: pd.DataFrame) -> None:
    if rows["stand_in"].dtype != bool:
        raise ValueError(f"{path}: column stand_in must be boolean without gaps, found {rows['stand_in'].dtype}")
    known = {"benchmark": [benchmark.id for benchmark in BENCHMARKS], "arm": ARMS, "stop": STOPS}
    for column, names in known.items():
        strange = sorted(set(rows[column]) - set(names), key=str)
        if strange:
            raise ValueError(f"{path}: {column} {strange[0]!r} is not one of {', '.join(names)}")
    cells = set(rows[["benchmark", "arm"]].itertuples(index=False, name=None))
    for benchmark in known["benchmark"]:
        for arm in ARMS:
            if (benchmark, arm) not in cells:
                raise ValueError(f"{path}: no answer of arm {arm} to benchmark {benchmark}; both arms need all five")
    if not rows["score"].between(0, 1).all():
        row = rows[~rows["score"].between(0, 1)].iloc[0]
        raise ValueError(f"{path}: {_place(row)} has score {row['score']}, expected 0 to 1")
    twice = rows[rows.duplicated(["benchmark", "arm", "question"])]
    if not twice.empty:
        raise ValueError(f"{path}: {_place(twice.iloc[0])} is there twice")
    for arm, here in rows.groupby("arm"):
        if here["k"].nunique(dropna=False) > 1:
            raise ValueError(f"{path}: arm {arm} has rows of K {', '.join(map(str, sorted(set(here['k']))))}, not one")
    for benchmark, here in rows.groupby("benchmark"):
        if here["stand_in"].nunique() > 1:
            raise ValueError(f"{path}: benchmark {benchmark} mixes real and stand-in questions")


def _pairs(path: Path, rows: pd.DataFrame) -> pd.DataFrame:
    key, shared = ["benchmark", "question"], ["category", "stand_in"]
    parts = [column for column in COLUMNS if column not in {"arm", *key, *shared}]
    sides = {arm: rows[rows["arm"] == arm].set_index(key)[shared + parts] for arm in ARMS}
    alone = sides[ARMS[0]].index.symmetric_difference(sides[ARMS[1]].index)
    if len(alone):
        arm = next(arm for arm in ARMS if alone[0] in sides[arm].index)
        raise ValueError(f"{path}: question {alone[0][1]} of {alone[0][0]} is answered by arm {arm} alone")
    pairs = (
        sides[ARMS[0]][shared].join([side[parts].add_suffix(f"_{arm}") for arm, side in sides.items()]).reset_index()
    )
    apart = np.flatnonzero(pairs["prompt_tokens_fp"] != pairs["prompt_tokens_int4"])
    if len(apart):
        row = pairs.iloc[apart[0]]
        lengths = f"{row['prompt_tokens_fp']} and {row['prompt_tokens_int4']} tokens"
        raise ValueError(
            f"{path}: question {row['question']} of {row['benchmark']} has prompts of {lengths} in the arms"
        )
    for column in ("answer_fp", "answer_int4", "category"):
        pairs[column] = pairs[column].fillna("")
    order = {benchmark.id: place for place, benchmark in enumerate(BENCHMARKS)}
    places = pairs["benchmark"].map(order)
    return pairs.assign(place=places).sort_values(["place", "question"], ignore_index=True).drop(columns="place")


def _place(row: pd.Series) -> str:
    return f"question {row['question']} of {row['benchmark']}, arm {row['arm']},"
