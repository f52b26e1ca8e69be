"""Arms: all of them take the same tokens and say the same of an answer; the server says what the engine says."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from edge0.checkpoint.adapters import adapter_path
from edge0.errors import ErrorKind
from edge0.tiers import find_tier
from experiments.quality.arms import LENGTH, Served, open_arm
from experiments.quality.configuration import plan_arms

ASKED = [{"role": "user", "content": "copy abc"}]


def say(plan, limit=5, messages=ASKED):
    arm = open_arm(plan.settings)
    try:
        return arm.answer(messages, limit)
    finally:
        arm.close()


def test_the_server_answers_as_the_engine_does(checkpoints):
    arms = plan_arms(checkpoints["unit-35b"], None, 8, None, False, server=True)
    assert arms["int4"].settings["heads"] and arms["int4"].settings["lora"]
    here = say(arms["int4"])
    assert say(arms["server"]) == here
    assert (here.answer_tokens, here.stop) == (5, LENGTH)


def test_both_arms_are_asked_the_same_tokens(untrained):
    model, kept = untrained
    arms = plan_arms(model, kept, None, None, False, server=False)
    assert list(arms) == ["fp", "int4"]
    assert (arms["fp"].k, arms["int4"].k) == (8, 4)
    fp, int4 = (say(arm) for arm in arms.values())
    assert fp.prompt_tokens == int4.prompt_tokens
    assert fp.answer_tokens == 5 or fp.stop == "end"


def test_mlx_lm_runs_a_directory(checkpoints):
    model = checkpoints["unit-35b"]
    arms = plan_arms(model, model, 8, None, False, server=False)
    assert arms["fp"].settings["kind"] == "mlx-lm"
    plain = dataclasses.replace(arms["int4"], settings={**arms["int4"].settings, "heads": False, "lora": False})
    assert say(arms["fp"], 3) == say(plain, 3)


@pytest.mark.parametrize(
    ("broken", "kind", "says"),
    [("original", ErrorKind.FILE_UNREADABLE, "mlx-lm"), ("checkpoint", ErrorKind.CONFIG_MALFORMED, "vocab_size")],
)
def test_an_original_of_another_model_is_refused(refused, checkpoints, copy_of, broken, kind, says):
    whole, other = checkpoints["unit-35b"], copy_of("unit-35b")
    config = other / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size": 513'))
    model, original = (whole, other) if broken == "original" else (other, whole)
    plan = plan_arms(model, original, 8, None, False, server=False)["fp"]
    refused(kind, lambda: open_arm(plan.settings), original, says)


def test_absent_adapters_are_gone_without_and_said(copy_of):
    model = copy_of("unit-35b")
    adapter_path(model, find_tier("unit-35b").family, "lora", 4).unlink()
    served = Served.of(model, 4, False)
    assert (served.heads, served.lora) == (True, False)
    assert "no LoRA" in served.words and "heads" in served.words


def test_a_damaged_adapter_is_refused(refused, copy_of):
    model = copy_of("unit-35b")
    adapter_path(model, find_tier("unit-35b").family, "lora", 4).write_bytes(b"")
    refused(ErrorKind.HEADER_TOO_SHORT, lambda: Served.of(model, 4, False))


def test_a_checkpoint_without_a_chat_template_is_refused(refused, copy_of):
    model = copy_of("unit-35b")
    (model / "chat_template.jinja").unlink()
    plan = plan_arms(model, None, 8, None, False, server=False)["int4"]
    refused(ErrorKind.TEMPLATE_INVALID, lambda: say(plan), model)


def test_an_absent_original_is_refused(refused, checkpoints):
    asked = (checkpoints["unit-35b"], Path("nowhere"), None, None, False, False)
    refused(ErrorKind.FILE_MISSING, lambda: plan_arms(*asked), "nowhere")


def test_mlx_lm_has_its_own_k(refused, checkpoints):
    model = checkpoints["unit-35b"]
    refused(ErrorKind.OPTION_INVALID, lambda: plan_arms(model, model, None, 4, False, False), "fp-k")


@pytest.mark.parametrize("server", [False, True])
def test_a_server_that_does_not_start_is_told(refused, tmp_path, checkpoints, server):
    model = shutil.copytree(checkpoints["unit-35b"], tmp_path / "model")
    plan = plan_arms(model, None, 8, None, False, server=True)["server" if server else "int4"]
    next(model.glob("model*.safetensors")).unlink()
    kind = ErrorKind.SESSION_VOID if server else ErrorKind.FILE_MISSING
    refused(kind, lambda: open_arm(plan.settings), "safetensors")
