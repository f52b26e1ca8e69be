"""Stand-ins: the very files of the five benchmarks, made of held-out problems, each once."""

import json

import pytest

from edge0.errors import ErrorKind
from edge0.training.tasks import BOXED, held_out
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.humaneval import passes
from experiments.quality.schema import GPQA_COLUMNS
from experiments.quality.standin import CATEGORIES, TASK, distinct, write_stand_ins

# How OpenCompass shows the four options of a GPQA row, by its number modulo four (its own shuffle patterns).
SHOWN = ("ABCD", "BCDA", "CDAB", "DABC")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_problem_is_held_out_and_stands_there_once(name):
    found = distinct(name, 60, seed=1)
    assert len({problem.prompt for problem in found}) == 60
    assert all(held_out(problem.prompt) and problem.task == TASK[name] for problem in found)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_file_has_a_row_for_each_question(stand_ins, name):
    data = stand_ins.benchmark(name)
    assert len(data.rows) == len(data.questions) == stand_ins.questions


def test_a_seed_is_one_set_of_files(tmp_path):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_stand_ins(tmp_path / folder, 4, seed)
    for benchmark in BENCHMARKS.values():
        a, b, c = ((tmp_path / folder / benchmark.file).read_bytes() for folder in "abc")
        assert a == b != c, benchmark.name


def test_more_than_there_are_is_refused(refused, tmp_path):
    refused(ErrorKind.OPTION_INVALID, lambda: write_stand_ins(tmp_path / "new", 5000, 0), "questions", "700 at most")
    assert not (tmp_path / "new").exists()


def test_gpqa_shows_each_problem_word_for_word(stand_ins):
    problems = distinct("gpqa-diamond", stand_ins.questions, seed=3)
    for number, (row, problem) in enumerate(zip(stand_ins.benchmark("gpqa-diamond").rows, problems, strict=True), 1):
        options = [row[column] for column in GPQA_COLUMNS[1:]]
        shown = [options["ABCD".index(letter)] for letter in SHOWN[number % 4]]
        listed = "".join(f"\n{letter}) {option}" for letter, option in zip("ABCD", shown, strict=True))
        assert problem.prompt.endswith(f"{row['Question']}\n{listed}")
        assert problem.answer.endswith(f"ANSWER: {'ABCD'[shown.index(options[0])]}")


def test_aime_has_the_boxed_answer(stand_ins):
    problems = distinct("aime2026", stand_ins.questions, seed=3)
    for row, problem in zip(stand_ins.benchmark("aime2026").rows, problems, strict=True):
        assert row["problem"] + BOXED == problem.prompt
        assert problem.answer.endswith(f"\\boxed{{{row['answer']}}}")


def test_reference_solutions_pass_their_own_tests_and_no_others(stand_ins):
    first, second = stand_ins.benchmark("humaneval").rows[:2]
    assert passes(first, first["canonical_solution"])
    assert not passes(first, second["canonical_solution"])


def test_mmlu_pro_has_its_categories_and_both_splits(stand_ins):
    data = stand_ins.benchmark("mmlu-pro")
    assert data.categories == tuple(sorted(CATEGORIES))
    assert [path.name for path in data.files] == ["test.jsonl", "validation.jsonl"]
    assert all(row["options"][row["answer_index"]] for row in data.rows)


def test_ifbench_names_instructions(stand_ins):
    rows = [json.loads(line) for line in stand_ins.benchmark("ifbench").files[0].read_text().splitlines()]
    assert {name for row in rows for name in row["instruction_id_list"]} <= {
        *("count:numbers", "repeat:repeat_span", "format:newline", "format:no_whitespace")
    }
