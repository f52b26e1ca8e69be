"""All five benchmarks through OpenCompass, from file to row, in the quality environment where there is one.

Two runs give the same bytes; and where a model says the right answers, every benchmark's own evaluator says so: the
prompts that OpenCompass makes of the stand-ins are, word for word, the problems.
"""

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.rows import COLUMNS
from experiments.quality.standin import TASK, distinct, write_stand_ins

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-quality/bin/python"
QUESTIONS, SEED, LIMIT = 3, 5, 8
WRONG = "I do not know."
pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv-quality/.installed").exists(), reason="no quality environment (make quality)"
)
# A run that finds answers of its original where an interrupted one would have left them: to the first question of each
# benchmark a wrong one, to the second the right one. All others it asks for.
RUN = f"""
import sys
from experiments.quality import run
from experiments.quality.arms import Answer
from experiments.quality.journal import Entry, Journal
from experiments.quality.standin import distinct
from experiments.resume import working

options = run.arguments().parse_args(sys.argv[1:])
asked = run.Run.of(options, print)
with working(options.out, asked.identity([options.model, options.fp]), False, print) as work:
    journal = Journal(work.folder / "answers-fp.jsonl")
    for name in asked.data:
        wrong, right, _ = distinct(name, {QUESTIONS}, {SEED})
        for problem, said in ((wrong, {WRONG!r}), (right, right.answer)):
            entry = Entry(Answer(said, 1, 1, "end"), 0.0)
            journal.add([{{"role": "user", "content": problem.prompt}}], {LIMIT}, entry)
run.run(options, print)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    write_stand_ins(folder, QUESTIONS, SEED)
    return folder


def begun(*arguments):
    command = [PYTHON, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def published(out):
    (folder,) = (path for path in out.iterdir() if path.is_dir() and not path.name.startswith("."))
    assert not list(out.glob(".*"))  # nothing unfinished
    about = json.loads((folder / "quality.json").read_text())
    return folder / "quality.parquet", about


@pytest.fixture(scope="module")
def finished(root, untrained, tmp_path_factory):
    """Two runs of the same, as published; the first compares the server's answers, too."""
    model, kept = untrained
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    parts = ("-c", RUN, model, "--data", root, "--fp", kept, "--limit", LIMIT)
    more = (("--cross-check", "aime2026"), ())
    runs = [begun(*parts, "--out", out, *check) for out, check in zip(folders, more, strict=True)]
    told = [run.communicate()[1][-3000:] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    assert not (ROOT / "icl_inference_output").exists()  # OpenCompass would leave it where it is started
    return [published(out) for out in folders]


def test_two_runs_give_the_same_bytes(finished):
    (a, about), (b, _) = finished
    assert a.read_bytes() == b.read_bytes()  # the cross-check takes no part in the rows
    rows = pd.read_parquet(a)
    assert tuple(rows.columns) == COLUMNS
    assert rows.groupby(["benchmark", "arm"]).size().to_dict() == {
        (name, arm): QUESTIONS for name in BENCHMARKS for arm in ("fp", "int4")
    }
    assert rows["stand_in"].all() and set(rows["stop"]) <= {"end", "length"}
    assert about["cross_check"]["equal"] == QUESTIONS
    assert about["opencompass"] == "0.5.4" and set(about["data"]) == set(BENCHMARKS)
    assert set(about["limits"].values()) == {LIMIT}


@pytest.mark.parametrize("name", TASK)
def test_a_right_answer_is_right_and_another_is_not(finished, name):
    rows = pd.read_parquet(finished[0][0]).query("benchmark == @name and arm == 'fp'")
    score = dict(zip(rows["answer"], rows["score"], strict=True))
    assert len(score) == QUESTIONS
    assert (score[WRONG], score[distinct(name, QUESTIONS, SEED)[1].answer]) == (0, 1)


def test_a_missing_file_ends_a_run_with_one_line(root, untrained, tmp_path):
    arguments = ("-m", "experiments.quality.run", untrained[0], "--data", tmp_path, "--out", tmp_path / "out")
    run = begun(*arguments)
    _, told = run.communicate()
    assert run.returncode == 2
    (line,) = told.strip().splitlines()
    assert str(tmp_path / BENCHMARKS["aime2026"].file) in line
