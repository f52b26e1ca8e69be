"""`edge0 train`: the whole way on a small checkpoint, and each bad input in one line."""

import json
import shutil
from itertools import islice

import mlx.core as mx
import pandas as pd
import pytest

from edge0 import Engine, EngineOptions, find_tier
from edge0.cli import main
from edge0.errors import EXIT_CODE
from edge0.training import teacher
from edge0.training.corpus import write_corpus
from edge0.training.tasks import problems


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a teacher of four steps, its checkpoint, and corpora apart from each other."""
    folder = tmp_path_factory.mktemp("train")
    kept = folder / "teacher.safetensors"
    assert main(["train", "base", "tiny-35b", str(kept), "--steps", "2"]) == 0
    assert main(["train", "quantise", str(kept), str(folder / "model")]) == 0
    for name, held in (("corpus", False), ("held", True)):
        lines = [
            {"messages": [{"role": "user", "content": p.prompt}, {"role": "assistant", "content": p.answer}]}
            for p in islice(problems("copy", 0, held), 24)
        ]
        write_corpus(folder / f"{name}.jsonl", lines)
    return folder


def phase(place, name, *more, corpus="corpus", held="held"):
    model = place / "model"
    given = [model, place / f"{corpus}.jsonl", "--held", place / f"{held}.jsonl", "--k", 4, "--steps", 2, "--batch", 4]
    return main(["train", name, *map(str, given), *map(str, more)])


def test_three_phases_make_a_set_that_the_engine_serves(place):
    assert phase(place, "heads", "--inner", 16) == 0 and phase(place, "lora", "--accumulate", 2) == 0
    assert phase(place, "on-policy", "--teacher", place / "teacher.safetensors", "--longest", 24) == 0
    with Engine(place / "model", EngineOptions(k=4)) as engine:
        request = engine.new_request()
        engine.prefill(request, [1, 2, 3])
        engine.step(request, 4)
        request.release()
    for name in ("heads", "lora", "on-policy"):
        run = place / "model" / "training" / f"k4-{name}"
        card, losses = json.loads((run / "card.json").read_text()), pd.read_parquet(run / "losses.parquet")
        assert card["phase"] == name and card["steps"] == len(losses) == 2 and card["trained_numbers"] > 1000
        assert len(card["corpus"]["sha256"]) == 64 and card["corpus"]["samples"] == 24 and card["seed"] == 0


def test_a_model_writes_a_corpus(place, capsys):
    made = place / "said.jsonl"
    assert (
        main(["train", "generate", str(place / "model"), str(place / "corpus.jsonl"), str(made), "--longest", "4"]) == 0
    )
    said, ended = capsys.readouterr().out, made.read_text().splitlines()
    assert f"{len(ended)} answers; {24 - len(ended)} had no end in 4 tokens" in said
    assert all(json.loads(line)["messages"][0]["role"] == "user" for line in ended)


def refusal(capsys, code, *words):
    assert code == EXIT_CODE
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("edge0: ") and all(word in error for word in words), error


def test_held_out_prompts_in_a_corpus_are_refused(place, capsys):
    refusal(capsys, phase(place, "heads", held="corpus"), "kept for evaluation", "corpus.jsonl")


def test_broken_lines_are_named_counted_and_skipped_on_demand(place, capsys):
    lines = (place / "corpus.jsonl").read_text().splitlines()
    (place / "broken.jsonl").write_text("\n".join([*lines, "{", '{"text": 3}']))
    refusal(capsys, phase(place, "heads", corpus="broken"), "2 of 26 lines", "line 25", "line 26", "--skip-broken")
    folder = place / "skipped"
    assert (
        phase(place, "heads", "--skip-broken", "--inner", 16, "--folder", folder, "--out", place, corpus="broken") == 0
    )
    assert json.loads((folder / "card.json").read_text())["corpus"]["skipped_lines"] == 2


def test_another_k_another_base_another_run(place, capsys, tmp_path):
    assert phase(place, "heads", "--inner", 16, "--out", tmp_path) == 0
    refusal(capsys, phase(place, "lora", "--out", tmp_path, "--k", 2), "K=2")
    refusal(capsys, phase(place, "heads", "--inner", 16, "--out", tmp_path, "--seed", 7), "another seed", '"seed": 7')
    teacher.write(_other(place, tmp_path), tmp_path / "other")
    command = ["lora", tmp_path / "other", place / "corpus.jsonl", "--held", place / "held.jsonl", "--k", 4]
    refusal(capsys, main(["train", *map(str, [*command, "--out", tmp_path])]), "another base")


def _other(place, tmp_path):
    """A teacher of one step more."""
    kept = tmp_path / "other.safetensors"
    assert main(["train", "base", "tiny-35b", str(kept), "--steps", "1"]) == 0
    return kept


def test_a_teacher_of_another_model_or_tokenizer_is_refused(place, capsys, tmp_path):
    assert phase(place, "heads", "--inner", 16, "--out", tmp_path) == 0
    assert phase(place, "lora", "--out", tmp_path) == 0
    theirs = tmp_path / "8b.safetensors"
    assert main(["train", "base", "tiny-8b", str(theirs), "--steps", "1"]) == 0
    refusal(capsys, phase(place, "on-policy", "--out", tmp_path, "--teacher", theirs), "another model", theirs.name)
    other = tmp_path / "other.safetensors"
    arrays, said = mx.load(str(place / "teacher.safetensors"), return_metadata=True)
    mx.save_safetensors(str(other), arrays, said | {"tokenizer": "0" * 64})
    refusal(capsys, phase(place, "on-policy", "--out", tmp_path, "--teacher", other), "another tokenizer", "0" * 64)
    mx.save_safetensors(str(other), arrays, said | {"seed": "9"})
    refusal(capsys, phase(place, "on-policy", "--out", tmp_path, "--teacher", other), "quantised from another file")


def test_bad_input_is_one_line(place, capsys, tmp_path):
    tier = find_tier("unit-35b")
    refusal(capsys, main(["train", "base", tier.name, str(tmp_path / "x")]), "tiny-35b", tier.name)
    refusal(capsys, main(["train", "base", "tiny-35b", str(place / "teacher.safetensors")]), "is there already")
    refusal(capsys, main(["train", "quantise", str(place / "none"), str(tmp_path / "x")]), "none")
    refusal(capsys, phase(place, "heads", "--first", 5, "--out", tmp_path), "--first", "0 to 4")
    refusal(capsys, phase(place, "lora", "--out", tmp_path), "no prerouter adapter for K=4")
    refusal(capsys, phase(place, "heads", corpus="absent"), "absent.jsonl")


def test_the_state_of_an_unfinished_teacher_is_kept_beside_it(place):
    assert (place / ".teacher.safetensors.training" / "state.safetensors").is_file()
    shutil.rmtree(place / ".teacher.safetensors.training")
