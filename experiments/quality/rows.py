"""From what OpenCompass wrote to one row for each question and arm; whatever is not as it must be voids the run.

A task that failed leaves no result, one with the word `error`, or too few details; here each of them is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.configuration import ArmPlan, abbreviations
from experiments.quality.data import Data, Question
from experiments.quality.journal import Entry, Journal
from experiments.quality.messages import messages_of

COLUMNS = (
    *("benchmark", "arm", "k", "question", "category", "score", "answer"),
    *("prompt_tokens", "answer_tokens", "stop", "stand_in"),
)


def asked(name: str, data: Data) -> list[tuple[str, list[Question]]]:
    """OpenCompass's data sets of a benchmark, each with its questions in order."""
    if name != "mmlu-pro":
        return [(abbreviations(name, data)[0], list(data.questions))]
    return [
        (abbr, [question for question in data.questions if question.category == category])
        for abbr, category in zip(abbreviations(name, data), data.categories, strict=True)
    ]


def answered(folder: Path, model: str, journal: Journal, name: str, data: Data) -> Iterator[tuple[Question, Entry]]:
    """Each question of a benchmark and its answer. `folder`: OpenCompass's work folder; `model`: abbr of the arm.

    Raises:
        Edge0Error: SESSION_VOID.
    """
    for abbr, questions in asked(name, data):
        predictions = _read(folder / "predictions" / model / f"{abbr}.json")
        _same(folder, abbr, len(questions), len(predictions))
        for number, question in enumerate(questions):
            prompt = messages_of(predictions[str(number)]["origin_prompt"])
            entry = journal.find(prompt, data.limit)
            if entry is None or entry.answer.text != predictions[str(number)]["prediction"]:
                detail = "an answer is not the one that the model gave"
                raise Edge0Error(ErrorKind.SESSION_VOID, detail, path=journal.path, tensor=question.id)
            yield question, entry


def verdicts(folder: Path, model: str, name: str, data: Data) -> tuple[dict[str, bool], dict[str, Any]]:
    """Right or wrong by question, and what OpenCompass says of its data sets as a whole.

    Raises:
        Edge0Error: SESSION_VOID.
    """
    right: dict[str, bool] = {}
    whole: dict[str, Any] = {}
    for abbr, questions in asked(name, data):
        path = folder / "results" / model / f"{abbr}.json"
        result = _read(path)
        if "error" in result:
            raise Edge0Error(ErrorKind.SESSION_VOID, f"the evaluation failed: {result['error']}", path=path)
        details = _details(result.pop("details", None), BENCHMARKS[name].verdict)
        _same(folder, abbr, len(questions), len(details))
        right |= {question.id: verdict for question, verdict in zip(questions, details, strict=True)}
        whole[abbr] = {key: value for key, value in result.items() if isinstance(value, int | float)}
    return right, whole


def rows_of(
    name: str, arm: ArmPlan, said: Sequence[tuple[Question, Entry]], right: Mapping[str, bool], stand_in: bool
) -> Iterator[dict[str, Any]]:
    """The rows of one benchmark and arm, in the order of its questions."""
    for question, entry in said:
        answer = entry.answer
        values = (
            *(name, arm.name, arm.k, question.id, question.category, float(right[question.id]), answer.text),
            *(answer.prompt_tokens, answer.answer_tokens, answer.stop, stand_in),
        )
        yield dict(zip(COLUMNS, values, strict=True))


def _details(details: Any, verdict: str) -> list[bool]:
    """Verdicts in the order of the questions; the two shapes in which OpenCompass gives details."""
    if isinstance(details, dict):  # of an evaluator without details of its own: what was said beside what is right
        numbered = [details[str(number)] for number in range(len(details) - ("type" in details))]
        return [one["predictions"] == one["references"] for one in numbered]
    return [bool(one[verdict][0]) for one in details or ()]


def _same(folder: Path, abbr: str, expected: int, found: int) -> None:
    if expected != found:
        detail = "OpenCompass left out questions"
        raise Edge0Error(ErrorKind.SESSION_VOID, detail, path=folder, tensor=abbr, expected=expected, found=found)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Edge0Error(ErrorKind.SESSION_VOID, f"a task left no result ({error})", path=path) from error
