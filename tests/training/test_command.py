"""`edge0 train`: the whole way on a small checkpoint, and each bad input in one line."""

import hashlib
import json
import os
import shutil
import signal
from contextlib import contextmanager
from itertools import islice

import mlx.core as mx
import pandas as pd
import pytest

from edge0 import Engine, EngineOptions, find_tier
from edge0.cli import main
from edge0.errors import EXIT_CODE
from edge0.training import schedule, teacher
from edge0.training.corpus import write_corpus
from edge0.training.tasks import problems
from experiments.training import watching

LINES = 8


@pytest.fixture(scope="module", autouse=True)
def small():
    """Teachers of one step of four problems."""
    with pytest.MonkeyPatch.context() as patch:
        for tier in schedule.SCHEDULES:
            patch.setitem(schedule.SCHEDULES, tier, schedule.Schedule(steps=1, batch=4, learning_rate=1e-3))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a teacher, its checkpoint, and corpora apart from each other."""
    folder = tmp_path_factory.mktemp("train")
    kept = folder / "teacher.safetensors"
    assert main(["train", "base", "tiny-35b", str(kept), "--seed", "5"]) == 0
    assert main(["train", "quantise", str(kept), str(folder / "model")]) == 0
    for name, held in (("corpus", False), ("held", True)):
        lines = [
            {"messages": [{"role": "user", "content": p.prompt}, {"role": "assistant", "content": p.answer}]}
            for p in islice(problems("copy", 0, held), LINES)
        ]
        write_corpus(folder / f"{name}.jsonl", lines)
    return folder


def phase(place, name, *more, corpus="corpus", held="held"):
    model = place / "model"
    given = [model, place / f"{corpus}.jsonl", "--held", place / f"{held}.jsonl", "--k", 4, "--steps", 2, "--batch", 4]
    given += ["--inner", 16] if name == "heads" else []
    given += ["--teacher", place / "teacher.safetensors", "--longest", 24] if name == "on-policy" else []
    return main(["train", name, *map(str, given), *map(str, more)])


@pytest.fixture(scope="module")
def headed(place):
    """A folder with heads for the model of `place`."""
    assert phase(place, "heads", "--out", place / "headed") == 0
    return place / "headed"


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_three_phases_make_a_set_that_the_engine_serves(place, capsys):
    run = {name: place / "model" / "training" / f"k4-{name}" for name in ("heads", "lora", "on-policy")}
    said = {}
    for name in run:
        assert phase(place, name) == 0
        said[name] = capsys.readouterr().out
    with Engine(place / "model", EngineOptions(k=4)) as engine:
        request = engine.new_request()
        engine.prefill(request, [1, 2, 3])
        engine.step(request, 4)
        request.release()
    for name, folder in run.items():
        card, losses = json.loads((folder / "card.json").read_text()), pd.read_parquet(folder / "losses.parquet")
        assert card["phase"] == name and card["steps"] == len(losses) == 2 and card["trained_numbers"] > 1000
        assert len(card["corpus"]["sha256"]) == 64 and card["corpus"]["samples"] == LINES and card["seed"] == 0
        quality = card["held_quality"]
        assert quality["samples"] == LINES and f"recall {quality['recall']:.3f}" in said[name]
        assert (quality["exact_match"] is None) == (name == "heads")
        assert f"cross-entropy {quality['cross_entropy']:.4f}" in said[name] and str(folder) in said[name]
    served = place / "model" / "artifacts" / "k4"
    heads, final = (served / f"{kind}_edge0_35b.safetensors" for kind in ("prerouter", "lora"))
    second = place / "model" / "training" / "k4-phase2" / "artifacts" / "k4" / final.name
    files = json.loads((run["on-policy"] / "card.json").read_text())["files"]
    kept = place / "teacher.safetensors"
    assert files == {
        name: {"file": path.name, "sha256": digest(path)}
        for name, path in (("heads", heads), ("lora", second), ("teacher", kept))
    }
    assert json.loads((run["lora"] / "card.json").read_text())["files"] == {"heads": files["heads"]}


def test_phase_3_never_begins_with_its_own_result(place, headed, capsys, tmp_path):
    served = headed / "artifacts" / "k4" / "lora_edge0_35b.safetensors"

    def left_by(name, *more):
        assert phase(place, name, "--steps", 1, "--out", headed, *more) == 0
        return served.read_bytes()

    second = left_by("lora", "--folder", tmp_path / "second")
    third = left_by("on-policy")
    assert third != second and left_by("on-policy") == third
    kept = headed / "training" / "k4-phase2"
    kept.rename(tmp_path / "elsewhere")  # a set from before it was kept
    refusal(capsys, phase(place, "on-policy", "--out", headed), served.name, "phase 3's own result", "--lora")
    assert left_by("on-policy", "--folder", tmp_path / "anew", "--lora", tmp_path / "elsewhere") == third
    assert left_by("lora", "--folder", tmp_path / "second") == second


def test_a_signal_keeps_what_was_trained(place, headed, capsys, monkeypatch, tmp_path):
    """As an uninterrupted run, to the bit, from the step at which it came."""

    @contextmanager
    def struck(what, steps):
        yield lambda step, loss: os.kill(os.getpid(), signal.SIGTERM) if step == 1 else None

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(watching, "showing", struck)
        phase(place, "heads", "--out", tmp_path)
    assert left.value.code == 128 + signal.SIGTERM and "ended at step 1" in capsys.readouterr().err
    assert not (tmp_path / "artifacts" / "k4" / "prerouter_edge0_35b.safetensors").exists()
    assert phase(place, "heads", "--out", tmp_path) == 0
    for name in ("artifacts/k4/prerouter_edge0_35b.safetensors", "training/k4-heads/losses.jsonl"):
        assert (tmp_path / name).read_bytes() == (headed / name).read_bytes()
    assert "heads, " in capsys.readouterr().err  # what goes on is said where there is no terminal


def test_a_teacher_leaves_a_card(place):
    run = place / ".teacher.safetensors.training"
    card, losses = json.loads((run / "card.json").read_text()), pd.read_parquet(run / "losses.parquet")
    assert card["tier"] == "tiny-35b" and card["seed"] == 5 and card["steps"] == len(losses) == 1
    assert card["kept"] == {"file": "teacher.safetensors", "sha256": digest(place / "teacher.safetensors")}
    used = schedule.SCHEDULES["tiny-35b"]
    assert card["problems"] == {"drawn": 4, "sha256": teacher.data_digest(used, 5)}
    assert teacher.data_digest(used, 6) != card["problems"]["sha256"]


@pytest.mark.parametrize("original", [False, True])
def test_a_model_or_its_original_writes_a_corpus(place, capsys, original):
    made, asked = place / f"said-{original}.jsonl", place / "asked.jsonl"
    lines = [json.loads(line) for line in (place / "corpus.jsonl").read_text().splitlines()]
    unanswered = [{"messages": line["messages"][:-1]} for line in lines[:3]]
    write_corpus(asked, [*unanswered, *lines[3:], {"text": "asks nothing"}])
    more = ["--longest", "4", *(["--teacher", str(place / "teacher.safetensors")] if original else [])]
    assert main(["train", "generate", str(place / "model"), str(asked), str(made), *more]) == 0
    said, ended = capsys.readouterr().out, made.read_text().splitlines()
    assert f"{len(ended)} answers; {LINES - len(ended)} had no end in 4 tokens; 1 texts ask nothing" in said
    assert all(json.loads(line)["messages"][0]["role"] == "user" for line in ended)
    card = json.loads((place / f"{made.name}.card.json").read_text())
    assert card["asked"]["sha256"] == digest(asked) and card["corpus"]["sha256"] == digest(made)
    assert (card["asked"]["samples"], card["asked"]["texts"], card["answers"]) == (LINES, 1, len(ended))
    assert card["k"] == 8 and len(card["base_fingerprint"]) == 64 and (card["teacher"] is not None) == original


def refusal(capsys, code, *words):
    assert code == EXIT_CODE
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("edge0: ") and all(str(word) in error for word in words), error


def test_a_corpus_is_not_written_over_itself(place, capsys, tmp_path):
    corpus, link = place / "corpus.jsonl", tmp_path / "link.jsonl"
    link.hardlink_to(corpus)
    kept = corpus.read_bytes()
    for output in (corpus, link):
        refusal(
            capsys, main(["train", "generate", str(place / "model"), str(corpus), str(output)]), output, "the corpus"
        )
    assert corpus.read_bytes() == kept


def test_held_out_prompts_in_a_corpus_are_refused(place, capsys):
    refusal(capsys, phase(place, "heads", held="corpus"), "kept for evaluation", "corpus.jsonl")


def test_broken_lines_are_named_counted_and_skipped_on_demand(place, capsys):
    lines = (place / "corpus.jsonl").read_text().splitlines()
    (place / "broken.jsonl").write_text("\n".join([*lines, "{", '{"text": 3}']))
    refusal(capsys, phase(place, "heads", corpus="broken"), f"2 of {LINES + 2} lines", "line 9", "--skip-broken")
    folder = place / "skipped"
    assert phase(place, "heads", "--skip-broken", "--folder", folder, "--out", place, corpus="broken") == 0
    assert "broken.jsonl: 2 broken lines left out" in capsys.readouterr().err
    assert json.loads((folder / "card.json").read_text())["corpus"]["skipped_lines"] == 2


def test_another_k_another_base_another_run(place, headed, capsys, tmp_path):
    refusal(capsys, phase(place, "lora", "--out", headed, "--k", 2), "K=2")
    refusal(capsys, phase(place, "heads", "--out", headed, "--seed", 7), "another seed", '"seed": 7')
    arrays, said = mx.load(str(place / "teacher.safetensors"), return_metadata=True)
    other = tmp_path / "other.safetensors"
    mx.save_safetensors(str(other), {name: value * 1.5 for name, value in arrays.items()}, said)
    teacher.write(other, tmp_path / "other")
    command = ["lora", tmp_path / "other", place / "corpus.jsonl", "--held", place / "held.jsonl", "--k", 4]
    refusal(capsys, main(["train", *map(str, [*command, "--out", headed])]), "another base")


def test_a_teacher_of_another_model_or_tokenizer_is_refused(place, headed, capsys, tmp_path):
    assert phase(place, "lora", "--out", headed, "--steps", 1) == 0
    theirs = tmp_path / "8b.safetensors"
    assert main(["train", "base", "tiny-8b", str(theirs)]) == 0
    out = ("--out", headed, "--teacher")
    refusal(capsys, phase(place, "on-policy", *out, theirs), "another model", theirs.name)
    other = tmp_path / "other.safetensors"
    arrays, said = mx.load(str(place / "teacher.safetensors"), return_metadata=True)
    mx.save_safetensors(str(other), arrays, said | {"tokenizer": "0" * 64})
    refusal(capsys, phase(place, "on-policy", *out, other), "another tokenizer", "0" * 64)
    mx.save_safetensors(str(other), arrays, said | {"seed": "9"})
    refusal(capsys, phase(place, "on-policy", *out, other), "quantised from another file")
    refusal(capsys, phase(place, "on-policy", *out, tmp_path / "none"), tmp_path / "none", "`edge0 train base`")


def test_another_tokenizer_than_the_checkpoints_own_is_refused(place, capsys, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(place / "model", model, ignore=shutil.ignore_patterns("artifacts", "training"))
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"0": 15', '"0": 16').replace('"1": 16', '"1": 15'))
    given = [model, place / "corpus.jsonl", "--held", place / "held.jsonl", "--k", 4]
    refusal(capsys, main(["train", "heads", *map(str, given)]), tokenizer, "not the tokenizer", digest(tokenizer))
    generate = ["train", "generate", model, place / "corpus.jsonl", tmp_path / "said.jsonl"]
    refusal(capsys, main([*map(str, generate)]), tokenizer, "not the tokenizer")


def test_what_cannot_be_quantised_is_named(place, capsys, tmp_path):
    def quantise(path):
        return main(["train", "quantise", str(path), str(tmp_path / "model")])

    refusal(
        capsys, quantise(tmp_path / "none"), tmp_path / "none", "no such file", "name what `edge0 train base` wrote"
    )
    adapter = tmp_path / "adapter.safetensors"
    mx.save_safetensors(str(adapter), {"a": mx.zeros(3)}, {"format": "mlx"})
    refusal(
        capsys, quantise(adapter), adapter, "tier", "expected tiny-35b, tiny-8b", "found none", "`edge0 train base`"
    )
    arrays, said = mx.load(str(place / "teacher.safetensors"), return_metadata=True)
    name = min(arrays)
    mx.save_safetensors(str(adapter), arrays | {name: mx.zeros(3)}, said)
    refusal(capsys, quantise(adapter), adapter, "another model", name, "found [3]")
    mx.save_safetensors(str(adapter), {key: value for key, value in arrays.items() if key != name}, said)
    refusal(capsys, quantise(adapter), adapter, "another model", name, "found no such tensor")
    assert sorted(path.name for path in tmp_path.iterdir()) == [adapter.name]


def test_bad_input_is_one_line(place, capsys, tmp_path):
    tier = find_tier("unit-35b")
    refusal(capsys, main(["train", "base", tier.name, str(tmp_path / "x")]), "tiny-35b", tier.name)
    refusal(capsys, main(["train", "base", "tiny-35b", str(place / "teacher.safetensors")]), "is there already")
    refusal(capsys, phase(place, "heads", "--first", 5, "--out", tmp_path), "--first", "0 to 4")
    without_heads = phase(place, "lora", "--out", tmp_path)
    refusal(capsys, without_heads, "no prerouter adapter for K=4", "run `edge0 train heads` for K=4 first")
    refusal(capsys, phase(place, "heads", "--batch", LINES + 1, "--out", tmp_path), "--batch", str(LINES))
    refusal(capsys, main(["train", "base", "tiny-35b", str(tmp_path / "teacher.st")]), "ends in .safetensors")
    refusal(capsys, phase(place, "heads", corpus="absent"), "absent.jsonl")


def test_a_place_that_cannot_be_written_is_named(place, capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    base, made = file / "teacher.safetensors", file / "said.jsonl"
    refusal(capsys, main(["train", "base", "tiny-35b", str(base)]), base, "cannot be written")
    generate = ["train", "generate", str(place / "model"), str(place / "corpus.jsonl"), str(made)]
    refusal(capsys, main(generate), made, "cannot be written")
    refusal(capsys, phase(place, "heads", "--out", file), file / "artifacts", "cannot be written")
    refusal(capsys, phase(place, "heads", "--out", tmp_path, "--folder", file), file, "cannot be written")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(("--steps", value, "a number from 1 on") for value in ("x", "0", "-3", "2.5")),
        *(("--seed", value, "a number from 0 to 16777215") for value in ("-1", "nan", "16777216")),
        *(("--learning-rate", value, "a rate above 0 and below 10") for value in ("nan", "0", "inf", "x")),
        ("--first", "x", "a number from 0 on"),
    ],
)
def test_a_value_that_is_none_is_told_in_words(place, capsys, option, value, expected):
    with pytest.raises(SystemExit) as left:
        phase(place, "heads", option, value)
    error = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2 and error.endswith(f"argument {option}: expected {expected}, found '{value}'")


@pytest.mark.parametrize(("action", "about"), [("heads", schedule.PHASE1), ("on-policy", schedule.PHASE3)])
def test_help_says_what_is_done_unasked(capsys, action, about):
    with pytest.raises(SystemExit):
        main(["train", action, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in (f"STEPS default {about.steps}", f"micro-batch (default {about.batch})", "step (default 1)",
                  f"RATE default {about.learning_rate:g}", "SEED default 0"):  # fmt: skip
        assert words in said
