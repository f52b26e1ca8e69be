"""All five benchmarks through OpenCompass, from file to row, in the quality environment where there is one.

Two runs from nothing give the same bytes; and where a model says the right answers, every benchmark's own evaluator
says so: the prompts that OpenCompass makes of the stand-ins are, word for word, the problems.
"""

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.rows import COLUMNS
from experiments.quality.standin import write_stand_ins

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-quality/bin/python"
QUESTIONS, SEED = 2, 5
pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv-quality/.installed").exists(), reason="no quality environment (make quality)"
)
# Puts the right answers, but for the first of each benchmark, where an interrupted run would have left them.
REPLAY = """
import sys
from pathlib import Path
from experiments.quality import run
from experiments.quality.arms import Answer
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.journal import Entry, Journal
from experiments.quality.standin import TASK, distinct
from experiments.resume import working

options = run.arguments().parse_args(sys.argv[3:])
found = run.Run.of(options, print).identity([options.model])
with working(options.out, found, False, print) as work:
    journal = Journal(work.folder / "answers-int4.jsonl")
    for name in BENCHMARKS:
        for number, problem in enumerate(distinct(name, int(sys.argv[1]), int(sys.argv[2]))):
            answer = Answer(problem.answer if number else "I do not know.", 1, 1, "end")
            journal.add([{"role": "user", "content": problem.prompt}], 64, Entry(answer, 0.0))
run.run(options, print)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    write_stand_ins(folder, QUESTIONS, SEED)
    return folder


def run(*arguments):
    done = subprocess.run([PYTHON, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def published(out):
    (folder,) = (path for path in out.iterdir() if path.is_dir() and not path.name.startswith("."))
    assert not list(out.glob(".*"))  # nothing unfinished
    about = json.loads((folder / "quality.json").read_text())
    return folder / "quality.parquet", about


def test_two_runs_give_the_same_bytes(root, untrained, tmp_path):
    model, kept = untrained
    parts = ("-m", "experiments.quality.run", model, "--data", root, "--fp", kept)
    # The cross-check takes no part in the rows.
    run(*parts, "--out", tmp_path / "a", "--cross-check", "aime2026")
    run(*parts, "--out", tmp_path / "b")
    (a, about), (b, _) = published(tmp_path / "a"), published(tmp_path / "b")
    assert a.read_bytes() == b.read_bytes()
    rows = pd.read_parquet(a)
    assert tuple(rows.columns) == COLUMNS
    assert rows.groupby(["benchmark", "arm"]).size().to_dict() == {
        (name, arm): QUESTIONS for name in BENCHMARKS for arm in ("fp", "int4")
    }
    assert rows["stand_in"].all() and set(rows["stop"]) <= {"end", "length"}
    assert about["cross_check"]["equal"] == QUESTIONS
    assert about["opencompass"] == "0.5.4" and set(about["data"]) == set(BENCHMARKS)


def test_right_answers_are_right_and_others_are_not(root, untrained, tmp_path):
    arguments = (untrained[0], "--data", root, "--out", tmp_path / "out")
    run("-c", REPLAY, QUESTIONS, SEED, *arguments)
    rows = pd.read_parquet(published(tmp_path / "out")[0])
    for name, here in rows.groupby("benchmark"):
        scores = here.assign(place=here["answer"] != "I do not know.")
        assert (scores["score"] == scores["place"]).all(), name
        assert (scores["score"] == 0).sum() == 1, name


def test_a_missing_file_ends_a_run_with_one_line(root, untrained, tmp_path):
    arguments = ["-m", "experiments.quality.run", untrained[0], "--data", tmp_path, "--out", tmp_path / "out"]
    done = subprocess.run([PYTHON, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert str(tmp_path / BENCHMARKS["aime2026"].file) in line
