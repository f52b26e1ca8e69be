"""Rows: OpenCompass's two shapes of details, and every way in which a task can have failed."""

import json

import pytest

from edge0.errors import ErrorKind
from experiments.quality.arms import Answer
from experiments.quality.configuration import ArmPlan
from experiments.quality.journal import Entry, Journal
from experiments.quality.rows import COLUMNS, answered, asked, rows_of, verdicts

ARM = ArmPlan("int4", 4, "", {})


@pytest.fixture
def finished(tmp_path, stand_ins):
    """A folder as OpenCompass leaves it: every second question of GPQA and MMLU-Pro is right."""
    journal = Journal(tmp_path / "answers.jsonl")
    for name in ("gpqa-diamond", "mmlu-pro"):
        for abbr, questions in asked(name, stand_ins.benchmark(name)):
            predictions, verdict = {}, {"type": "GEN"} if name == "mmlu-pro" else []
            for number, question in enumerate(questions):
                prompt = [{"role": "HUMAN", "prompt": f"{abbr} {question.id}"}]
                text = f"said of {question.id}"
                predictions[str(number)] = {"origin_prompt": prompt, "prediction": text}
                journal.add([{"role": "user", "content": prompt[0]["prompt"]}], 64, Entry(Answer(text, 3, 4, "end"), 1))
                if name == "mmlu-pro":
                    verdict[str(number)] = {"predictions": "A", "references": "AB"[number % 2]}
                else:
                    verdict.append({"correct": [number % 2 == 0]})
            write(tmp_path, "predictions", abbr, predictions)
            write(tmp_path, "results", abbr, {"accuracy": 50.0, "details": verdict})
    return tmp_path, journal


def write(folder, kind, abbr, document):
    path = folder / kind / "model" / f"{abbr}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("name", ["gpqa-diamond", "mmlu-pro"])
def test_each_question_has_its_row(finished, stand_ins, name):
    folder, journal = finished
    data = stand_ins.benchmark(name)
    said = list(answered(folder, "model", journal, name, data))
    right, whole = verdicts(folder, "model", name, data)
    rows = list(rows_of(name, ARM, said, right, True))
    assert {row["question"] for row in rows} == {question.id for question in data.questions}
    assert sum(row["score"] for row in rows) == len(rows) / 2
    assert all(tuple(row) == COLUMNS and row["answer"] == f"said of {row['question']}" for row in rows)
    assert all(value == {"accuracy": 50.0} for value in whole.values())


def test_a_result_that_is_not_there_voids_the_run(refused, finished, stand_ins):
    folder, _ = finished
    (folder / "results/model/GPQA_diamond.json").unlink()
    data = stand_ins.benchmark("gpqa-diamond")
    refused(ErrorKind.SESSION_VOID, lambda: verdicts(folder, "model", "gpqa-diamond", data), "GPQA_diamond.json")


@pytest.mark.parametrize(
    ("result", "says"),
    [({"error": "preds differ"}, "preds differ"), ({"accuracy": 1.0}, "left out"), ({"details": []}, "left out")],
)
def test_a_failed_evaluation_voids_the_run(refused, finished, stand_ins, result, says):
    folder, _ = finished
    write(folder, "results", "GPQA_diamond", result)
    data = stand_ins.benchmark("gpqa-diamond")
    refused(ErrorKind.SESSION_VOID, lambda: verdicts(folder, "model", "gpqa-diamond", data), says)


def test_predictions_of_something_else_void_the_run(refused, finished, stand_ins):
    folder, journal = finished
    data = stand_ins.benchmark("gpqa-diamond")
    path = folder / "predictions/model/GPQA_diamond.json"
    first = data.questions[0].id
    path.write_text(path.read_text().replace(f"said of {first}", "said of 9", 1))
    refused(
        ErrorKind.SESSION_VOID, lambda: list(answered(folder, "model", journal, "gpqa-diamond", data)), "not the one"
    )
    path.write_text("{}")
    refused(ErrorKind.SESSION_VOID, lambda: list(answered(folder, "model", journal, "gpqa-diamond", data)), "left out")
