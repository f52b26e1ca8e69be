"""What is loaded of a directory and what is not: left-overs, strangers, repacked experts; configs without a model."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from edge0 import models
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import RECORDS_FOLDER, has_records
from edge0.errors import ErrorKind
from edge0.families import read_config


@pytest.fixture
def private(copy_of):
    return copy_of("unit-8b")


def load(directory, streamed=True):
    return models.load(directory, read_config(directory), CheckpointIndex.open(directory), streamed=streamed)


def parameters(directory):
    return dict(tree_flatten(load(directory).parameters()))


def same(left, right):
    return left.keys() == right.keys() and all(mx.array_equal(left[name], right[name]).item() for name in left)


LEFT_OVER = ("model.layers.1.mlp.pregate.fc3.weight", "vision_tower.blocks.0.weight", "mtp.layers.0.norm.weight")


def test_known_left_overs_are_ignored(private, checkpoints):
    save_file({name: np.full(4, np.nan, np.float32) for name in LEFT_OVER}, private / "model-more.safetensors")
    assert same(parameters(private), parameters(checkpoints["unit-8b"]))


@pytest.mark.parametrize("name", ["lm_head.bias", "model.layers.8.input_layernorm.weight", "model.norm.weight2"])
def test_a_tensor_without_a_place_is_refused(private, refused, name):
    """It may be a bias that changes every output, or a layer that config.json does not count."""
    save_file({name: np.zeros(128, np.float16)}, private / "model-more.safetensors")
    error = refused(ErrorKind.TENSOR_MISMATCH, lambda: load(private), "model-more.safetensors", name, "no place")
    assert error.tensor == name


def test_experts_of_a_repacked_directory_are_not_asked_for(private, checkpoints, refused):
    index = CheckpointIndex.open(private)
    rest = {}
    for name, array in mx.load(str(private / "model.safetensors")).items():
        if ".mlp.experts." not in name:
            rest[name] = array
    assert len(rest) == len(index.tensors) - 7 * 9
    mx.save_safetensors(str(private / "rest.safetensors"), rest)
    (private / "rest.safetensors").rename(private / "model.safetensors")
    (private / RECORDS_FOLDER).mkdir()
    assert has_records(private)
    assert same(parameters(private), parameters(checkpoints["unit-8b"]))
    refused(ErrorKind.LAYOUT_MALFORMED, lambda: load(private, streamed=False), private, "stacked layout")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("unit-8b", "rope_interleave", False),
        ("unit-8b", "kda_safe_gate", False),
        ("unit-8b", "no_kda_lora", False),
        ("unit-8b", "rope_scaling", "linear"),
        ("unit-35b", "rope_parameters", [1, 2]),
        ("unit-35b", "rope_parameters", {"partial_rotary_factor": "a quarter"}),
    ],
)
def test_a_config_that_mlx_lm_cannot_build(copy_of, refused, name, field, value):
    directory = copy_of(name)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw.get("text_config", raw)[field] = value
    path.write_text(json.dumps(raw))
    refused(ErrorKind.CONFIG_MALFORMED, lambda: load(directory), path)
