"""What a row of each benchmark's file holds: a file of the right length may still be of something else.

A row that OpenCompass could not read, or would read as another question, is named before anything is run. Knows nothing
of files' formats; which of IFBench's instructions there are is the package's to say (`preflight`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from experiments.quality.benchmarks import BENCHMARKS

Row = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOP"  # MMLU-Pro's options, as OpenCompass shows them
GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
CATEGORIES = frozenset(
    "biology,business,chemistry,computer science,economics,engineering,health,history,law,math,other,philosophy,"
    "physics,psychology".split(",")
)  # MMLU-Pro's: OpenCompass asks no other
_SHOWN = 60  # characters of what was found
_ID_DIGITS = 12


@dataclass(frozen=True)
class Placed:
    """A row, and where it stands: its file, and `line 3` or `row 3` there."""

    path: Path
    place: str
    row: Row


@dataclass(frozen=True)
class Field:
    """A field of a row. `holds`: whether a value is `expected`, given the row, whose fields before it are right."""

    name: str
    expected: str
    holds: Callable[[Any, Row], bool]


def _text(name: str) -> Field:
    return Field(name, "a text", lambda value, row: isinstance(value, str) and bool(value.strip()))


def _id(name: str) -> Field:
    return Field(name, "a number or a text", lambda value, row: type(value) is int or _text("").holds(value, row))


def _texts(value: Any, least: int, most: int) -> bool:
    return isinstance(value, list) and least <= len(value) <= most and all(isinstance(one, str) for one in value)


FIELDS: Mapping[str, Sequence[Field]] = {
    "aime2026": (
        _text("problem"),
        Field(
            "answer",
            "an integer from 0 to 999",
            lambda value, row: type(value) in (int, str) and bool(re.fullmatch("[0-9]{1,3}", str(value))),
        ),
    ),
    "humaneval": (
        *map(_text, ("task_id", "prompt", "canonical_solution")),
        Field(
            "entry_point",
            "the name of a function that the prompt begins",
            lambda value, row: isinstance(value, str) and value.isidentifier() and f"def {value}(" in row["prompt"],
        ),
        Field("test", "code with `def check(`", lambda value, row: isinstance(value, str) and "def check(" in value),
    ),
    "gpqa-diamond": tuple(map(_text, GPQA_COLUMNS)),
    "mmlu-pro": (
        _id("question_id"),
        _text("question"),
        Field("options", "a list of 2 to 16 texts", lambda value, row: _texts(value, 2, len(LETTERS))),
        Field(
            "answer_index",
            "the place of an option, from 0",
            lambda value, row: type(value) is int and 0 <= value < len(row["options"]),
        ),
        Field("answer", "the letter of answer_index", lambda value, row: value == LETTERS[row["answer_index"]]),
        Field("cot_content", "a text, or an empty one", lambda value, row: isinstance(value, str)),
        Field(
            "category",
            f"one of {', '.join(sorted(CATEGORIES))}",
            lambda value, row: isinstance(value, str) and value in CATEGORIES,
        ),
    ),
    "ifbench": (
        _id("key"),
        _text("prompt"),
        Field("instruction_id_list", "a list of names, at least one", lambda value, row: _texts(value, 1, 100)),
        Field(
            "kwargs",
            "a list of objects, one for each instruction",
            lambda value, row: (
                isinstance(value, list)
                and len(value) == len(row["instruction_id_list"])
                and all(isinstance(one, dict) for one in value)
            ),
        ),
    ),
}
# What makes a question: rows that share all of it ask the same. MMLU-Pro asks some again under another number.
ASKED: Mapping[str, Sequence[str]] = {
    "aime2026": ("problem",),
    "humaneval": ("prompt",),
    "gpqa-diamond": GPQA_COLUMNS,
    "mmlu-pro": ("question_id", "category", "question", "options", "answer"),
    "ifbench": ("prompt",),
}
NAMED: Mapping[str, str] = {"humaneval": "task_id", "mmlu-pro": "question_id", "ifbench": "key"}


def question_id(benchmark: str, row: Row) -> str:
    """The file's own name of a question; where it has none, digits of what is asked, wherever the row stands."""
    if name := NAMED.get(benchmark):
        return str(row[name])
    return hashlib.sha256(_asked(benchmark, row).encode()).hexdigest()[:_ID_DIGITS]


def check_rows(benchmark: str, rows: Sequence[Placed], hint: str) -> None:
    """That each row has its fields.

    Raises:
        Edge0Error: CORPUS_INVALID naming the first that has not, and how many have not.
    """
    wrong = [(placed, field) for placed in rows if (field := _wrong(benchmark, placed.row)) is not None]
    if wrong:
        placed, field = wrong[0]
        found = _shown(placed.row[field.name]) if field.name in placed.row else "no such field"
        more = f", the first of {len(wrong)} such rows" if len(wrong) > 1 else ""
        detail = f"not a row of {BENCHMARKS[benchmark].title}{more}"
        _refuse(placed, field.name, detail, field.expected, found, hint)


def check_different(benchmark: str, rows: Sequence[Placed], hint: str) -> None:
    """That no question and no id stands there twice, for rows that have their fields.

    Raises:
        Edge0Error: CORPUS_INVALID naming both rows.
    """
    for part, of in (("question", _asked), (name := NAMED.get(benchmark, "id"), question_id)):
        first: dict[str, Placed] = {}
        for placed in rows:
            other = first.setdefault(of(benchmark, placed.row), placed)
            if other is not placed:
                found = of(benchmark, placed.row) if part == name else _heading(placed.row)
                _refuse(placed, part, f"the same as in {other.place}", "each once", _shown(found), hint)


def _asked(benchmark: str, row: Row) -> str:
    return json.dumps([row[name] for name in ASKED[benchmark]])


def _heading(row: Row) -> str:
    return next(str(row[name]) for name in ("problem", "prompt", "question", "Question") if name in row)


def _wrong(benchmark: str, row: Row) -> Field | None:
    for field in FIELDS[benchmark]:
        if field.name not in row or not field.holds(row[field.name], row):
            return field
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refuse(placed: Placed, field: str, detail: str, expected: str, found: str, hint: str) -> None:
    where = f"{placed.place}: {field}"
    raise Edge0Error(
        ErrorKind.CORPUS_INVALID, detail, path=placed.path, tensor=where, expected=expected, found=found, hint=hint
    )
