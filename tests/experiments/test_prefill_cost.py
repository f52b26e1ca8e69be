"""The order of prompts, one real sample of each way, and a long-lived engine in small."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import pandas as pd
import pytest

from analysis.schema import FILES
from edge0.errors import Edge0Error, ErrorKind
from experiments import endurance, prefill_cost
from experiments.prefill_cost import UNFINISHED, WAYS, Sample, Unfinished, measure, plan


def test_every_way_is_as_often_before_as_after_another():
    order = plan(4, [27, 128], ["cold", "warm"])
    assert Counter(entry[0] for entry in order) == {"arm": 4 * 2 * 2 * 3, "aa": 4 * 2 * 2}
    for condition in ("cold", "warm"):
        for tokens in (27, 128):
            places = {
                (r, way): n
                for n, (role, r, c, t, way) in enumerate(order)
                if (role, c, t) == ("arm", condition, tokens)
            }
            for one in WAYS:
                for other in WAYS:
                    if one < other:
                        assert sum(places[r, one] < places[r, other] for r in range(4)) == 2


def test_one_way_alone_is_not_repeated_as_its_own_twin():
    order = plan(2, [9], ["cold", "warm"], ["auto"])
    assert [entry[:3] for entry in order] == [
        ("arm", 0, "cold"),
        ("arm", 0, "warm"),
        ("arm", 1, "warm"),
        ("arm", 1, "cold"),
    ]


def interrupted(monkeypatch, samples):
    """A made-up sample process: the sample's row, until so many have been run; then the process fails."""
    ran = []

    def run_python(arguments, what, timeout_s):
        if len(ran) == samples:
            raise Edge0Error(ErrorKind.SESSION_VOID, f"{what} was killed")
        ran.append(timeout_s)
        return json.dumps(json.loads(arguments[-1]) | {"first_token": 7, "ttft_ms": len(ran)})

    monkeypatch.setattr(prefill_cost, "run_python", run_python)
    return ran


def call(monkeypatch, model, out, *more):
    arguments = [str(model), str(out), "--lengths", "5", "9", "--rounds", "2", "--k", "2", "--ways", "auto", *more]
    monkeypatch.setattr(sys, "argv", ["prefill_cost", *arguments])
    return prefill_cost.main()


def test_the_rows_say_which_tier_and_family_they_are_of(checkpoints, tmp_path, monkeypatch):
    model = checkpoints["unit-8b"]
    assert call(monkeypatch, model, tmp_path, "--lengths", "5", "--rounds", "1", "--conditions", "warm") == 0
    (path,) = tmp_path.rglob("prefill.json")
    about = json.loads(path.read_text())
    assert (about["tier"], about["family"], about["k"]) == ("unit-8b", "8b", 2)
    rows = pd.read_parquet(path.with_suffix(".parquet"))
    assert len(rows) == 1 and FILES["prefill"].problems(rows) == []


def test_the_same_command_goes_on_after_an_interruption(checkpoints, tmp_path, monkeypatch):
    model = checkpoints["unit-8b"]
    first = interrupted(monkeypatch, 3)
    assert call(monkeypatch, model, tmp_path) == 2
    assert len(first) == 3 and [path.name for path in tmp_path.iterdir()] == [UNFINISHED]
    rest = interrupted(monkeypatch, 99)
    assert call(monkeypatch, model, tmp_path, "--timeout", "60") == 0
    assert rest == [60] * 5 and not (tmp_path / UNFINISHED).exists()
    (path,) = tmp_path.rglob("prefill.parquet")
    rows = pd.read_parquet(path)
    asked = [entry[:4] for entry in plan(2, [5, 9], ["cold", "warm"], ["auto"])]
    assert list(rows[["role", "round", "condition", "tokens"]].itertuples(index=False, name=None)) == asked
    assert rows.ttft_ms.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


def test_another_command_begins_anew(checkpoints, tmp_path, monkeypatch):
    interrupted(monkeypatch, 3)
    assert call(monkeypatch, checkpoints["unit-8b"], tmp_path) == 2
    again = interrupted(monkeypatch, 99)
    assert call(monkeypatch, checkpoints["unit-8b"], tmp_path, "--conditions", "warm") == 0
    assert len(again) == 4 and not (tmp_path / UNFINISHED).exists()


def test_ways_that_chose_different_tokens_leave_nothing_to_go_on_with(checkpoints, tmp_path, monkeypatch, capsys):
    numbers = iter(range(99))
    monkeypatch.setattr(
        prefill_cost,
        "run_python",
        lambda arguments, *more: json.dumps(json.loads(arguments[-1]) | {"first_token": next(numbers)}),
    )
    assert call(monkeypatch, checkpoints["unit-8b"], tmp_path) == 2
    assert "different tokens" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"k": 2}\n{"ttft_ms"'])
def test_a_file_that_this_did_not_write_holds_no_row(tmp_path, text):
    (tmp_path / UNFINISHED).write_text(text)
    assert Unfinished(tmp_path / UNFINISHED, {"k": 2}).rows == []


@pytest.fixture(scope="module")
def samples(checkpoints):
    """(way, condition) -> row, all from one process of which only the first is fresh."""
    every = [
        Sample(str(checkpoints["unit-35b"]), 2, way, condition, 9) for way in WAYS for condition in ("cold", "warm")
    ]
    program = "import json, sys; from experiments.prefill_cost import Sample, measure\n"
    program += "for sample in json.loads(sys.argv[1]): print(json.dumps(measure(Sample(**sample))))"
    command = [sys.executable, "-c", program, json.dumps([asdict(sample) for sample in every])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(sample.way, sample.condition): row for sample, row in zip(every, rows, strict=True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("condition", ["cold", "warm"])
def test_a_sample_says_what_was_read(samples, way, condition):
    row = samples[way, condition]
    every = row["layers"] * row["experts"]
    assert row["experts_read"] == every if way == "whole-layer" else 0 < row["experts_read"] < every
    assert row["read_calls"] == (9 * row["layers"] if way == "whole-layer" else 9 * row["experts_read"])
    assert row["ttft_ms"] > 0 and (condition == "cold") == (row["cached_before_bytes"] < row["asked_bytes"] / 2)


def test_a_sample_that_was_not_read_as_it_is_labelled_is_void(checkpoints, refused):
    """A prompt of one token is never read by whole layers, whatever is asked for."""
    sample = Sample(str(checkpoints["unit-35b"]), 2, "whole-layer", "warm", 1)
    refused(ErrorKind.SESSION_VOID, lambda: measure(sample), "not read by whole layers", "256 experts in 72 calls")


def test_a_sample_that_fails_ends_the_run_in_one_line(checkpoints, tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, checkpoints["unit-35b"], tmp_path / "out", "--k", "99", "--rounds", "1") == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("edge0: ")
    assert not (tmp_path / "out").exists()


def test_a_long_lived_engine_in_small(checkpoints, tmp_path, monkeypatch):
    command = ["endurance", str(checkpoints["unit-8b"]), str(tmp_path), "--tokens", "20", "--requests", "6", "--k", "2"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(endurance, "EVERY_TOKENS", 10)
    assert endurance.main() == 0
    (path,) = tmp_path.rglob("endurance.parquet")
    rows = pd.read_parquet(path)
    assert FILES["endurance"].problems(rows) == []
    long, short = rows[rows.part == "long"], rows[rows.part == "short"]
    assert long.number.tolist() == [10, 20] and len(short) == 6
    assert short.groupby("kind").tokens.nunique().tolist() == [1, 1] and short.tokens.nunique() == 2
    assert (rows.dropped == 0).all() and (short.pinned == 0).all()
