"""The merge study: its formula on corrections of a known size, and its three models beside independent ones."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pandas as pd
import pytest

from edge0.checkpoint.adapters import adapter_path
from edge0.checkpoint.quantise import quantised
from edge0.checkpoint.schema import Linear, lora_targets
from edge0.errors import ErrorKind
from edge0.families import GROUP_SIZE, QWEN, read_config
from edge0.tiers import find_tier
from edge0.training.student import Student
from edge0.training.tasks import held_out
from experiments import merge as module
from experiments.merge import AdapterSet, kind_of, logit_rows, measure, merge, merged_targets, samples_for, unpacked

ROWS, WIDTH = 96, 256


def matrix(bits=4):
    """A random matrix as the converter would have written it, and its parts; widths as those of trained weights."""
    linear = Linear("a", ROWS, WIDTH, bits)
    values = np.random.default_rng(0).normal(0, 0.03, (ROWS, WIDTH)).astype(np.float32)
    return linear, tuple(quantised(linear, mx.array(values)).values())


def spread(parts, share):
    """A correction of rank 16 whose RMS is this share of the median step."""
    rng = np.random.default_rng(1)
    delta = rng.normal(size=(ROWS, 16)) @ rng.normal(size=(16, WIDTH))
    step = np.median(np.abs(np.array(parts[1].astype(mx.float32))))
    return mx.array((delta / np.sqrt(np.mean(delta**2)) * share * step).astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_correction_far_below_the_step_drowns_in_what_requantising_alone_costs(bits):
    linear, parts = matrix(bits)
    row = merge(linear, parts, spread(parts, 0.01)).row
    assert row["delta_over_step"] == pytest.approx(0.01, rel=1e-4)
    # On the grid that was, no weight is moved far enough to be rounded to another code: nothing is left.
    assert row["survival_same_grid"] == pytest.approx(0, abs=1e-3)
    # A new grid moves weights whatever the correction: that, over the correction, is lost.
    assert row["requantised_rms"] > 5 * row["delta_rms"]
    assert row["survival"] == pytest.approx(1 - row["requantised_rms"] / row["delta_rms"], rel=0.1)


def test_a_correction_far_above_the_step_loses_what_rounding_costs_and_one_that_moves_the_grid_nothing():
    linear, parts = matrix()
    delta = spread(parts, 30)
    merged = merge(linear, parts, delta)
    # Rounding to a grid of that correction's own step is off by its step over the square root of 12.
    step = np.abs(np.array(quantised(linear, unpacked(linear, parts) + delta)["a.scales"].astype(mx.float32)))
    rounding = np.sqrt(np.mean(step**2) / 12)
    assert merged.row["survival"] == pytest.approx(1 - rounding / merged.row["delta_rms"], abs=0.01)
    assert merged.row["survival"] > 0.85 > 0.5 > merged.row["survival_same_grid"]
    shift = merge(linear, parts, mx.full((ROWS, WIDTH), 8.0)).row  # every group moves as a whole
    assert shift["survival"] > 0.99


def test_the_row_is_what_its_definition_says_computed_by_numpy():
    linear, parts = matrix()
    delta = spread(parts, 0.5)
    merged = merge(linear, parts, delta)
    steps, floors = (np.repeat(np.array(part.astype(mx.float32)), GROUP_SIZE, axis=1) for part in parts[1:])
    codes = np.array(parts[0])[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    base = codes.reshape(ROWS, WIDTH) * steps + floors
    unmerged, found = base + np.array(delta), np.array(merged.weight)
    expected = 1 - np.linalg.norm(unmerged - found) / np.linalg.norm(unmerged - base)
    assert merged.row["survival"] == pytest.approx(expected, abs=1e-5) and 0.3 < expected < 0.5
    same = np.clip(np.round((unmerged - floors) / steps), 0, 15) * steps + floors
    expected = 1 - np.linalg.norm(unmerged - same) / np.linalg.norm(unmerged - base)
    assert merged.row["survival_same_grid"] == pytest.approx(expected, abs=1e-4)
    again = np.array(quantised(linear, mx.array(unmerged))["a.weight"])[..., None]
    again = again >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    assert merged.row["codes_changed"] == pytest.approx((again != codes).mean(), abs=1e-4)


def test_nothing_survives_of_nothing(copy_of, refused):
    linear, parts = matrix()
    row = merge(linear, parts, mx.zeros((ROWS, WIDTH))).row
    assert np.isnan(row["survival"]) and row["delta_rms"] == 0 and row["requantised_rms"] > 0
    model = copy_of("unit-35b")
    path = adapter_path(model, QWEN, "lora", 4)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    blank = {name: mx.zeros_like(value) if name.endswith("lora_B") else value for name, value in arrays.items()}
    mx.save_safetensors(str(path), blank, metadata)
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: measure(model, 4, [model], 1, 0), path, "corrects nothing")


def test_every_target_has_a_row_of_its_kind(checkpoint):
    config = read_config(checkpoint)
    adapters = AdapterSet.open(checkpoint, checkpoint, config, 4)
    rows = pd.DataFrame(target.row for target in merged_targets(checkpoint, config, adapters))
    assert rows["target"].tolist() == [linear.name for linear in lora_targets(config)]
    kinds = {"attention", "linear attention"} | {"shared expert" if config.family is QWEN else "dense"}
    assert set(rows["kind"]) == kinds
    full = rows[rows["kind"] == "attention"]
    assert set(full["layer"]) == {3, 7} and (rows.loc[rows["kind"] == "dense", "layer"] == 0).all()
    assert kind_of(config, 0, "mlp.gate_proj") == "dense"
    assert rows["survival"].between(0.4, 0.9).all() and (rows["bits"] == 4).all()


def test_logits_are_those_of_the_three_models(checkpoint):
    config = read_config(checkpoint)
    adapters = AdapterSet.open(checkpoint, checkpoint, config, 4)
    weights = {target.row["target"]: target.weight for target in merged_targets(checkpoint, config, adapters)}
    samples, _ = samples_for(checkpoint, config, 2, seed=3)
    rows = pd.DataFrame(logit_rows(Student(checkpoint, 4, adapters.owners), adapters, weights, samples))
    assert len(rows) == 2 * (module.TOKENS - module.PROMPT_TOKENS) and rows["position"].min() == 15

    def last(lora, replaced=None):
        """The last compared position of the second sample; `replaced`: weights in place of the model's own."""
        student = Student(checkpoint, 4, adapters.owners)
        if replaced is not None:
            named = {f"{name}.weight": value for name, value in replaced.items()}
            student.model.load_weights(list(student.model.sanitize(named).items()), strict=False)
        if lora is not None:
            student.use_lora()
        tokens = mx.array([samples[1][1].tokens])
        logits = student.forward(tokens, mx.array([[module.PROMPT_TOKENS]]), adapters.heads, lora)
        return np.array(logits[0, -2])

    base, unmerged, merged = last(None), last(adapters.lora), last(None, weights)
    change, error = np.linalg.norm(unmerged - base), np.linalg.norm(unmerged - merged)
    assert rows["change"].iloc[-1] == pytest.approx(change, rel=1e-3)
    assert rows["error"].iloc[-1] == pytest.approx(error, rel=1e-3)
    assert rows["survival"].iloc[-1] == pytest.approx(1 - error / change, abs=1e-3) and error > 0.1 * change


def test_a_tier_that_is_taught_is_asked_what_was_held_out(tmp_path, checkpoints):
    from edge0 import synthesise

    model = synthesise(find_tier("tiny-35b"), tmp_path / "model")
    samples, what = samples_for(model, read_config(model), 9, seed=0)
    assert len({task for task, _ in samples}) == len(samples) == 9 and what.startswith("held-out problems")
    assert all(held_out(sample.messages[0]["content"]) for _, sample in samples)
    other = checkpoints["unit-35b"]
    assert samples_for(other, read_config(other), 2, seed=0)[1].startswith("seeded token ids")


def test_a_model_too_large_for_memory_has_weights_and_a_reason(checkpoints, monkeypatch):
    model = checkpoints["unit-35b"]
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 20}))
    weights, positions, about = measure(model, 4, [model], 1, 0)
    assert len(weights) and positions.empty and "MiB of memory, 1 are free" in about["logits_refused"]


def test_the_command_writes_rows_of_several_sets(copy_of, checkpoints, tmp_path):
    other = copy_of("unit-35b")
    model = checkpoints["unit-35b"]
    named = other.rename(other.with_name("seed-1"))
    command = [sys.executable, "-m", "experiments.merge", str(model), str(tmp_path / "out"), "--k", "4"]
    command += ["--prompts", "1", "--adapters", str(model), str(named)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").glob("2*")
    about = json.loads((folder / "merge.json").read_text())
    assert about["adapters"] == dict.fromkeys(("unit-35b", "seed-1"), "edge0 synth unit-35b") and about["prerouter"]
    for name in ("merge", "logits"):
        rows = pd.read_parquet(folder / f"{name}.parquet")
        one, two = (rows[rows["adapters"] == label].drop(columns="adapters") for label in about["adapters"])
        pd.testing.assert_frame_equal(one, two.set_axis(one.index))


def test_sets_of_one_name_are_refused(copy_of, checkpoints, refused):
    model, same = checkpoints["unit-35b"], copy_of("unit-35b")
    refused(ErrorKind.OPTION_INVALID, lambda: measure(model, 4, [model, same], 1, 0), "told apart")
