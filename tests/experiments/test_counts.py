"""What is counted of the two models, against the published totals and against real files."""

import json
import subprocess
import sys

import pytest

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.checkpoint.repack import repack
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.tiers import find_tier
from experiments import architecture
from experiments.budgets import memory_limit

PUBLISHED = {  # parameters, bytes of tensors, heads, predicted layers, bytes of one expert
    "shape-35b": (34_660_610_688, 19_508_787_456, 33, 32, 1_769_472),
    "shape-8b": (7_923_998_112, None, 16, 16, 1_327_104),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shapes_give_the_published_totals(name):
    counts = architecture.of_shapes(find_tier(name))
    parameters, payload, heads, predicted, expert = PUBLISHED[name]
    assert counts["parameters"] == parameters and payload in (None, counts["base_bytes"])
    assert (counts["heads"], counts["predicted_layers"], counts["expert_bytes"]) == (heads, predicted, expert)
    assert counts["stack_tensors"] == 9 and counts["k_native"] == 8


def test_the_parts_of_a_token_make_up_the_whole_model():
    """Shared parts, the embedding and all experts (of which a token takes K of E) are every parameter of 35b."""
    counts = architecture.of_shapes(find_tier("shape-35b"))
    parts = counts["active"]
    every = parts["embedding"] + parts["lm_head"] + parts["always"] + parts["routed_native"] * 256 // 8
    assert every == counts["parameters"] and parts["routed_served"] * 2 == parts["routed_native"]
    assert parts["embedding"] == parts["lm_head"] == 248_320 * 2048


def test_files_are_counted_as_their_shapes_but_for_headers(tier, checkpoint):
    shapes, files = architecture.of_shapes(tier), architecture.of_directory(checkpoint)
    sizes = ("base_bytes", "lora_bytes", "heads_bytes", "source")
    assert {key: files[key] for key in files if key not in sizes} == {k: shapes[k] for k in shapes if k not in sizes}
    assert all(0 < files[key] - shapes[key] < 200_000 for key in sizes[:3])
    assert files["base_bytes"] == sum(path.stat().st_size for path in checkpoint.glob("model*.safetensors"))


def test_records_are_counted_with_the_files_that_hold_them(checkpoint, tmp_path):
    stacked = architecture.of_directory(checkpoint)
    records = architecture.of_directory(repack(checkpoint, tmp_path / "records").directory)
    assert records["active"] == stacked["active"] and records["base_bytes"] >= stacked["base_bytes"]


def test_the_floor_is_the_same_from_a_tier_and_from_its_files(tier, checkpoint):
    share = architecture.floor_share(tier)
    assert share == architecture.floor_share(checkpoint)
    layers, predicted = (8, 6) if tier.family.tag == "35b" else (7, 5)
    assert share == tier.family.k_served * (layers + predicted) / (layers * 32)


def test_the_command_takes_a_checkpoint_of_another_shape_beside_the_released_ones(checkpoints, tmp_path):
    out = tmp_path / "folder" / "counts.json"
    command = [sys.executable, "-m", "experiments.architecture", str(out), str(checkpoints["unit-35b"])]
    subprocess.run(command, check=True, capture_output=True)
    document = json.loads(out.read_text())
    assert list(document["checkpoints"]) == ["unit-35b"]
    assert document["released"]["35b"]["source"] == "shapes of shape-35b"


def test_files_of_the_released_shape_take_the_place_of_its_arithmetic(checkpoints, monkeypatch):
    monkeypatch.setattr(architecture, "RELEASED", ("unit-35b", "unit-8b"))
    document = architecture.count([checkpoints["unit-8b"]])
    assert document["released"]["8b"]["source"] == "files of unit-8b"
    assert document["released"]["35b"]["source"] == "shapes of unit-35b"


def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path):
    command = [sys.executable, "-m", "experiments.architecture", str(tmp_path / "out.json"), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("edge0: ") and "config.json" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out.json").exists()


def test_a_memory_limit_is_a_share_of_the_files_and_the_interpreter(checkpoint):
    about = memory_limit.memory_limit(checkpoint, 0.5)
    files = sum(path.stat().st_size for path in checkpoint.glob("model*.safetensors"))
    assert about["limit_bytes"] == files // 2 + (128 << 20) and about["checkpoint_bytes"] == files
    assert about["enforced"] == (about["reason"] == "")


def test_a_limit_that_cannot_be_enforced_says_why(checkpoint, monkeypatch):
    def refuse(limit):
        raise memory_limit.Edge0Error(ErrorKind.PROBE_UNAVAILABLE, "no group can be made")

    monkeypatch.setattr(memory_limit, "limited_command", refuse)
    about = memory_limit.memory_limit(checkpoint, 0.5)
    assert about["enforced"] is False and "no group can be made" in about["reason"]


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1])
def test_a_share_that_is_none_is_refused(checkpoint, refused, share):
    refused(ErrorKind.OPTION_INVALID, lambda: memory_limit.memory_limit(checkpoint, share), "share of the checkpoint")


def test_a_limited_bank_has_what_other_weights_leave(checkpoint):
    layout = ExpertLayout.of(CheckpointIndex.open(checkpoint), read_config(checkpoint))
    experts, files = layout.total_bytes, architecture.of_directory(checkpoint)["base_bytes"]
    floor = architecture.floor_share(checkpoint, 4)
    assert architecture.room_share(checkpoint, 0.01, 4) == floor
    share = (files - 0.5 * experts + architecture.SPARE_BYTES) / files
    found = [architecture.room_share(checkpoint, part, 4) for part in (share, share + 0.1 * experts / files)]
    assert 0.5 <= found[0] < 0.65  # what is in the files and not loaded is left as well
    assert found[1] - found[0] == pytest.approx(0.1)
    assert architecture.room_share(checkpoint, 10, 4) == 1
