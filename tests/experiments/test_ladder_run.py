"""The ladder from the kept teacher, at the smallest size: every rung stands, and the engine says what was scored."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from analysis.schema import FILES
from edge0.training import teacher
from edge0.training.tasks import TASKS, held_out
from experiments.training import ladder

KEPT = Path(__file__).parents[2] / "experiments" / "teachers" / "tiny-35b" / "original.safetensors"
RUNGS = ["fp", "fp", "int4", "int4", "untrained-heads", "phase1", "phase2", "final", "deployed"]


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    place = tmp_path_factory.mktemp("ladder")
    teacher.write(KEPT, place / "model")
    sizes = {"k": 4, "seed": 3, "held": 1, "prompts": 2, "phase1": 2, "phase2": 2, "phase3": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [place / "model", "--original", KEPT, "--root", place / "rows", "--work", place / "work"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "STOPPING", 2)
        for name in ("PHASE1", "PHASE2", "PHASE3"):
            patch.setattr(ladder, name, dataclasses.replace(getattr(ladder, name), batch=4))
        assert ladder.main([*map(str, command), "--tier", "tiny-35b", *options]) == 0
    folder = place / "rows" / json.loads((place / "rows" / "latest.json").read_text())["session"]
    return place, pd.read_parquet(folder / "ladder.parquet"), json.loads((folder / "ladder.json").read_text())


def test_every_rung_answers_every_held_out_problem(climbed):
    _, rows, about = climbed
    assert list(rows.groupby(["rung", "k"], sort=False).ngroup().drop_duplicates()) == list(range(len(RUNGS)))
    assert list(rows.drop_duplicates(["rung", "k"])["rung"]) == RUNGS
    assert all(len(cell) == len(TASKS) for _, cell in rows.groupby(["rung", "k"]))
    assert FILES["ladder"].problems(rows) == []
    assert {row["rung"] for row in about["recall"]} == {"untrained-heads", "phase1", "phase2", "final"}


def test_the_engine_says_what_training_scored(climbed):
    _, rows, _ = climbed
    said = {rung: list(rows[rows["rung"] == rung]["answer"]) for rung in ("final", "deployed")}
    assert said["deployed"] == said["final"] and any(said["final"])


def test_the_corpus_is_the_teachers_own_and_holds_nothing_that_is_held_out(climbed):
    place, _, about = climbed
    (path,) = (place / "work").glob("corpus-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == about["corpus"]["samples"] > len(TASKS)
    assert not any(held_out(line["messages"][0]["content"]) for line in lines)
    problems = ladder.held_problems(5)
    assert all(held_out(problem.prompt) for problem in problems)
    assert len({problem.prompt for problem in problems}) == len(problems)


def test_every_training_leaves_a_card_and_its_losses(climbed):
    place, _, _ = climbed
    for name, steps in (("phase1", 2), ("phase2", 2), ("phase3", 1)):
        card = json.loads((place / "work" / "runs" / name / "card.json").read_text())
        assert card["run"] == name and card["seed"] == 3 and card["k"] == 4
        built_on = {"phase1": [], "phase2": ["heads"], "phase3": ["heads", "lora", "teacher"]}
        assert list(card["built_on"]) == built_on[name]
        assert len(pd.read_parquet(place / "work" / "runs" / name / "losses.parquet")) == steps


@pytest.mark.parametrize("option", ["--held", "--phase1", "--prompts", "--k", "--seed"])
def test_a_size_that_is_none_is_one_line(tmp_path, capsys, option):
    command = [tmp_path, "--original", KEPT, "--root", tmp_path, "--work", tmp_path, "--tier", "tiny-35b"]
    value, least = ("-1", 0) if option == "--seed" else ("0", 1)
    with pytest.raises(SystemExit) as left:
        ladder.main([*map(str, command), "--k", "4", "--seed", "0", option, value])
    error = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2 and f"argument {option}: expected a number from {least}" in error
    assert error.endswith(f"found '{value}'")
