"""Stand-ins for the five benchmarks: seeded problems that a tiny model can solve, in the very files of the real ones.

Each question becomes, by the shipped prompt, word for word a problem of `edge0.training.tasks` that is held out from
training. They test the way from file to table and show what quantisation and replaced routing cost a tiny model; they
say nothing of a benchmark's own scores. The manifest beside them is what marks a data root as one of stand-ins.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.training import tasks
from edge0.training.tasks import OPTIONS, Problem, problems
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.schema import GPQA_COLUMNS

MANIFEST = "stand-in.json"
LIMIT = 64  # tokens of an answer; the longest right one has about half
PATIENCE = 5_000  # draws in a row that bring nothing new, before there are held to be no more
TASK = {
    "aime2026": "chain",
    "humaneval": "function",
    "gpqa-diamond": "choice-of-4",
    "mmlu-pro": "choice-of-10",
    "ifbench": "instruction",
}
CATEGORIES = ("math", "other")  # MMLU-Pro's, in turn: two, so that cutting into categories is exercised
# The letter under which OpenCompass shows the right option of row 1, 2, 3, ... : it rotates them by the row's number.
ROTATED = "DCBA"
MOST = 700  # of each; some benchmark has no more distinct ones
GPQA_FIRST = 7  # column of the question; those before it are not read
INPUTS = (-7, 0, 1, 12, 100)  # of the functions that are asked for
ARGUMENTS = ("N", "prompt_to_repeat", "n_start", "n_end")


def write_stand_ins(root: Path, questions: int, seed: int) -> None:
    """Write the five benchmarks' files and the manifest below `root`.

    Raises:
        Edge0Error: OPTION_INVALID when there are not so many distinct problems; OUTPUT_UNWRITABLE.
    """
    if questions > MOST:
        detail, expected = "option questions: not so many stand-ins can be made", f"{MOST} at most"
        raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=expected, found=questions)
    chosen = {name: distinct(name, questions, seed) for name in BENCHMARKS}
    with writing(root):
        for name, found in chosen.items():
            for file, text in WRITERS[name](found).items():
                path = root / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        # Last: a root is one of stand-ins once all of them are there.
        (root / MANIFEST).write_text(json.dumps({"questions": questions, "seed": seed}) + "\n", encoding="utf-8")


def distinct(name: str, questions: int, seed: int) -> list[Problem]:
    """Held-out problems for one benchmark, no prompt twice, in the order of its file's rows.

    Raises:
        Edge0Error: OPTION_INVALID.
    """
    rotated = name == "gpqa-diamond"
    waiting: dict[str, list[Problem]] = {letter: [] for letter in ROTATED}
    found, seen, idle = [], set(), 0
    for problem in problems(TASK[name], seed, held=True):
        if len(found) == questions:
            return found
        idle += 1
        if idle > PATIENCE:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                f"option questions: {BENCHMARKS[name].title} has no more distinct stand-ins",
                expected=f"about {len(seen)} at most",
                found=questions,
            )
        if problem.prompt in seen:
            continue
        seen.add(problem.prompt)
        idle = 0
        if not rotated:
            found.append(problem)
            continue
        waiting[OPTIONS[dict(problem.about)["right"]]].append(problem)
        while len(found) < questions and waiting[ROTATED[len(found) % 4]]:
            found.append(waiting[ROTATED[len(found) % 4]].pop(0))
    return found  # never: problems are endless


def _aime(found: Sequence[Problem]) -> Mapping[str, str]:
    rows = (
        {"problem": problem.prompt.removesuffix(tasks.BOXED), "answer": problem.answer.partition("\\boxed{")[2][:-1]}
        for problem in found
    )
    return {BENCHMARKS["aime2026"].file: _lines(rows)}


def _humaneval(found: Sequence[Problem]) -> Mapping[str, str]:
    def rows() -> Iterator[Mapping[str, object]]:
        for number, problem in enumerate(found):
            body = problem.answer.removeprefix(tasks.CODE).removesuffix(tasks.CODE_END)
            yield {
                "task_id": f"StandIn/{number}",
                "prompt": dict(problem.about)["signature"],
                "entry_point": "f",
                "canonical_solution": f"    return {body}\n",
                "test": f"def check(candidate):\n    for x in {INPUTS}:\n        assert candidate(x) == {body}\n",
            }

    return {BENCHMARKS["humaneval"].file: _lines(rows())}


def _gpqa(found: Sequence[Problem]) -> Mapping[str, str]:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    unread = [f"unread {number}" for number in range(GPQA_FIRST)]
    writer.writerow([*unread, *GPQA_COLUMNS])
    for problem in found:
        about = dict(problem.about)
        shown, right = about["options"], about["right"]
        writer.writerow([*[""] * GPQA_FIRST, about["question"], *(shown[(right + n) % 4] for n in range(4))])
    return {BENCHMARKS["gpqa-diamond"].file: out.getvalue()}


def _mmlu_pro(found: Sequence[Problem]) -> Mapping[str, str]:
    def row(number: int, problem: Problem) -> dict[str, object]:
        about = dict(problem.about)
        return {
            "question_id": number,
            "question": about["question"],
            "options": [str(option) for option in about["options"]],
            "answer": OPTIONS[about["right"]],
            "answer_index": about["right"],
            "cot_content": "",
            "category": CATEGORIES[number % len(CATEGORIES)],
            "src": "stand-in",
        }

    rows = [row(number, problem) for number, problem in enumerate(found)]
    file = BENCHMARKS["mmlu-pro"].file
    # The zero-shot form asks nothing of these, but the split must be there.
    return {file: _lines(rows), file.replace("test.jsonl", "validation.jsonl"): _lines(rows[: len(CATEGORIES)])}


def _ifbench(found: Sequence[Problem]) -> Mapping[str, str]:
    def row(number: int, problem: Problem) -> dict[str, object]:
        about = dict(problem.about)
        told = dict(about["arguments"])
        return {
            "key": str(number),
            "prompt": problem.prompt,
            "instruction_id_list": [about["instruction"]],
            "kwargs": [{name: told.get(name) for name in ARGUMENTS}],
        }

    return {BENCHMARKS["ifbench"].file: _lines(row(number, problem) for number, problem in enumerate(found))}


def _lines(rows: Iterator[Mapping[str, object]] | Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


WRITERS: Mapping[str, Callable[[Sequence[Problem]], Mapping[str, str]]] = {
    "aime2026": _aime,
    "humaneval": _humaneval,
    "gpqa-diamond": _gpqa,
    "mmlu-pro": _mmlu_pro,
    "ifbench": _ifbench,
}
