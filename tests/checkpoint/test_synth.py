"""Synthesis: equal bytes for equal seeds, readable by everybody, complete or not there at all, in little memory."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import bailing_moe_v3
from mlx_lm.utils import load_model
from reference import same_bits
from safetensors import deserialize

from edge0 import TIERS, find_tier, synthesise
from edge0.checkpoint import synth
from edge0.checkpoint.adapters import adapter_path, open_adapter
from edge0.checkpoint.header import CheckpointIndex, read_header
from edge0.checkpoint.schema import checkpoint_tensors
from edge0.checkpoint.synth import bf16, checkpoint_bytes, from_bf16, released_config, router_values
from edge0.cli import main
from edge0.errors import ErrorKind
from edge0.families import parse_config, read_config
from edge0.models import load
from edge0.tokens import load_tokenizer


def digests(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_bytes_and_other_seeds_others(tier, checkpoint, tmp_path):
    first = digests(checkpoint)
    assert digests(synthesise(tier, tmp_path / "again")) == first
    other = digests(synthesise(tier, tmp_path / "other", seed=1))
    assert other.keys() == first.keys()
    different = {name for name in first if other[name] != first[name]}
    assert different == {name for name in first if name.endswith(".safetensors")}


def test_a_tensor_depends_on_its_name_and_nothing_before_it(tier, checkpoint):
    config, index = read_config(checkpoint), CheckpointIndex.open(checkpoint)
    for tensor in list(checkpoint_tensors(config))[::-17]:
        entry = index.tensors[tensor.name]
        raw = np.fromfile(entry.path, np.uint8, entry.nbytes, offset=entry.offset)
        assert raw.tobytes() == b"".join(checkpoint_bytes(0, tensor)), tensor.name


def test_large_tensors_are_drawn_in_pieces_with_the_same_bytes(monkeypatch):
    config = parse_config(released_config(find_tier("unit-35b")), Path("config.json"))
    tensor = next(t for t in checkpoint_tensors(config) if t.name.endswith("lm_head.weight"))
    whole = list(checkpoint_bytes(3, tensor))
    monkeypatch.setattr(synth, "PIECE_BYTES", 1000)
    pieces = list(checkpoint_bytes(3, tensor))
    assert len(whole) == 1 and len(pieces) == -(-len(whole[0]) // 1000) and b"".join(pieces) == whole[0]


def test_adapters_of_each_k_are_their_own(tier, checkpoint):
    for kind in ("lora", "prerouter"):
        contents = {adapter_path(checkpoint, tier.family, kind, k).read_bytes() for k in (2, 4, 8)}
        assert len(contents) == 3


# --- readable ------------------------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_every_file_and_agrees(checkpoint):
    paths = sorted(checkpoint.rglob("*.safetensors"))
    assert len(paths) >= 7
    for path in paths:
        header = read_header(path)
        contents = dict(deserialize(path.read_bytes()))
        assert set(contents) == set(header.tensors)
        for name, entry in header.tensors.items():
            assert (contents[name]["dtype"], tuple(contents[name]["shape"])) == (entry.dtype, entry.shape)
            raw = np.fromfile(path, np.uint8, entry.nbytes, offset=entry.offset)
            assert raw.tobytes() == contents[name]["data"]


def test_the_index_is_that_of_the_shards(checkpoints):
    directory = checkpoints["unit-35b"]
    document = json.loads((directory / "model.safetensors.index.json").read_text())
    index = CheckpointIndex.open(directory)
    assert len(index.shards) == 4
    assert document["weight_map"] == {name: entry.path.name for name, entry in index.tensors.items()}
    assert document["metadata"]["total_size"] == sum(entry.nbytes for entry in index.tensors.values())
    assert not (checkpoints["unit-8b"] / "model.safetensors.index.json").exists()
    sizes = [shard.file_bytes for shard in index.shards]
    assert max(sizes) < 2 * min(sizes)


def test_the_schema_is_what_the_files_hold(checkpoint):
    index = CheckpointIndex.open(checkpoint)
    listed = {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint_tensors(read_config(checkpoint))}
    assert {name: (entry.dtype, entry.shape) for name, entry in index.tensors.items()} == listed


def test_stock_mlx_lm_loads_35b_from_its_config_alone(checkpoints):
    directory = checkpoints["unit-35b"]
    model, _ = load_model(directory)
    config = read_config(directory)
    ours = load(directory, config, CheckpointIndex.open(directory), streamed=False)
    assert type(model).__module__ == "mlx_lm.models.qwen3_5_moe"
    model.set_dtype(mx.float32)
    assert same_bits(*(m(mx.array([[1, 2, 3]])) for m in (model, ours)))


def test_mlx_lm_reads_the_8b_config(checkpoints):
    raw = json.loads((checkpoints["unit-8b"] / "config.json").read_text())
    arguments = bailing_moe_v3.ModelArgs.from_dict(raw)
    text = find_tier("unit-8b").text
    known = {field.name for field in dataclasses.fields(arguments)} & text.keys()
    assert len(known) > 20 and all(getattr(arguments, name) == text[name] for name in known)
    assert "model_type" not in raw
    assert len(bailing_moe_v3.Model(arguments).layers) == text["num_hidden_layers"]


def test_config_has_the_released_quantisation(checkpoints):
    raw = json.loads((checkpoints["unit-35b"] / "config.json").read_text())
    overrides = {key for key, value in raw["quantization"].items() if isinstance(value, dict)}
    assert len(overrides) == 2 * raw["text_config"]["num_hidden_layers"]
    assert all(raw["quantization"][key] == {"group_size": 64, "bits": 8} for key in overrides)
    raw = json.loads((checkpoints["unit-8b"] / "config.json").read_text())
    assert raw["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}


def test_the_tokenizer_is_one_token_a_byte(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    text = "naïve 日本 \n\t!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert max(chat) < read_config(checkpoint).vocab and len(set(chat) - set(range(256))) == 2


# --- values --------------------------------------------------------------------------------------------------------


def test_expert_bias_is_not_zero(checkpoints):
    header = read_header(checkpoints["unit-8b"] / "model.safetensors")
    entries = [entry for name, entry in header.tensors.items() if name.endswith("expert_bias")]
    assert len(entries) == 7
    for entry in entries:
        raw = np.fromfile(entry.path, np.uint16, entry.nbytes // 2, offset=entry.offset)
        assert np.count_nonzero(from_bf16(raw)) == raw.size and from_bf16(raw).std() > 0.05


def test_router_values_are_what_the_model_sees(tier, checkpoint):
    config = read_config(checkpoint)
    model = load(checkpoint, config, CheckpointIndex.open(checkpoint), streamed=True)
    for layer in config.moe_layers[:2]:
        gate = model.decoder_layers[layer].mlp.gate
        expected = router_values(config, 0, layer)
        if "scales" in gate:
            found = mx.dequantize(gate.weight, gate.scales, gate.biases, group_size=64, bits=8)
        else:
            found = gate.weight
        np.testing.assert_allclose(np.array(found), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1 / 3, -65504.0, 1e-40, 3.3895e38])
def test_bf16_rounds_to_nearest_even_as_mlx_does(value):
    values = np.float32([value, np.nextafter(np.float32(value), np.float32(1e9))])
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(bf16(values), expected)
    assert np.array_equal(from_bf16(expected).view(np.uint32), expected.astype(np.uint32) << 16)


# --- complete or not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_is_there_is_never_overwritten(tmp_path, refused, kind):
    target = tmp_path / "there"
    if kind == "directory":
        target.mkdir()
    else:
        target.write_text("mine")
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: synthesise(find_tier("unit-35b"), target), target)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert kind == "directory" or target.read_text() == "mine"


class Stop(BaseException):
    """Neither an OSError nor an Exception, as an interrupt from the keyboard."""


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_an_interrupted_synthesis_leaves_nothing(tier, tmp_path, share):
    def progress(done, total):
        if done >= share * total:
            raise Stop

    with pytest.raises(Stop):
        synthesise(tier, tmp_path / "model", progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_one_line(tier, tmp_path, monkeypatch, refused):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: synthesise(tier, tmp_path / "model"), tmp_path / "model", "No space")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path, refused):
    """The full 35b shape in a directory that nothing has to be written to for the refusal."""
    free = 1 << 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        error = refused(
            ErrorKind.OUTPUT_UNWRITABLE,
            lambda: synthesise(find_tier("shape-35b"), tmp_path / "model"),
            "too full",
            free,
            "free some space",
        )
        assert int(str(error.expected).split()[0]) > 19_500_000_000
        synthesise(find_tier("shape-35b"), tmp_path / "sparse", sparse=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]


def test_of_two_processes_at_one_target_the_later_says_so_and_leaves_nothing(tmp_path, checkpoints):
    script = """
        import sys
        from edge0 import Edge0Error, find_tier, synthesise
        waited = []

        def wait_once(done, total):
            if not waited:
                waited.append(print("at work", flush=True))
                sys.stdin.readline()

        try:
            synthesise(find_tier("unit-8b"), sys.argv[1], progress=wait_once)
        except Edge0Error as error:
            print(error.kind.name, error)
    """
    target = tmp_path / "model"
    command = [sys.executable, "-c", textwrap.dedent(script), str(target)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "at work\n"
    synthesise(find_tier("unit-8b"), target)
    assert process.communicate("\n")[0] == (
        f"OUTPUT_BUSY {target}: another process made it meanwhile; use that one, or name another directory\n"
    )
    assert os.listdir(tmp_path) == ["model"] and digests(target) == digests(checkpoints["unit-8b"])


# --- headers only --------------------------------------------------------------------------------------------------


def test_a_sparse_checkpoint_has_the_files_of_a_full_one(tier, checkpoint, tmp_path):
    progress = []
    directory = synthesise(tier, tmp_path / "model", progress=lambda *counts: progress.append(counts), sparse=True)
    full = {path.relative_to(checkpoint): path for path in checkpoint.rglob("*") if path.is_file()}
    assert {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()} == full.keys()
    assert progress[-1][0] == progress[-1][1]
    for name, path in full.items():
        if path.suffix != ".safetensors":
            assert (directory / name).read_bytes() == path.read_bytes()
            continue
        header, written = read_header(directory / name), read_header(path)
        assert {n: (e.dtype, e.shape) for n, e in header.tensors.items()} == {
            n: (e.dtype, e.shape) for n, e in written.tensors.items()
        }
        assert "holes" in json.dumps(dict(header.metadata)) and "holes" not in json.dumps(dict(written.metadata))
        start = min(entry.offset for entry in header.tensors.values())
        assert not np.fromfile(directory / name, np.uint8, offset=start).any()


@pytest.mark.parametrize(("name", "file_bytes"), [("shape-35b", 19_508_787_456), ("shape-8b", 4_508_556_096)])
def test_the_published_shapes_take_no_room_as_headers(tmp_path, name, file_bytes):
    directory = synthesise(find_tier(name), tmp_path / name, sparse=True)
    paths = list(directory.rglob("*"))
    shards = [path for path in directory.glob("model*.safetensors")]
    assert 0 < sum(path.stat().st_size for path in shards) - file_bytes < 400_000
    assert sum(path.stat().st_blocks * 512 for path in paths) < 4 << 20
    index = CheckpointIndex.open(directory)
    assert sum(entry.nbytes for entry in index.tensors.values()) == file_bytes
    for kind in ("lora", "prerouter"):
        open_adapter(directory, find_tier(name).family, kind, find_tier(name).ks[0])


def test_fewer_layers_by_command(tmp_path, capsys):
    target = tmp_path / "model"
    assert main(["synth", "unit-35b", str(target), "--layers", "6"]) == 0
    assert read_config(target).layers == 6 and "unit-35b-6-layers (seed 0)" in capsys.readouterr().out
    assert main(["synth", "shape-8b", str(tmp_path / "sparse"), "--sparse"]) == 0
    assert "holes" in capsys.readouterr().out
    assert main(["synth", "unit-35b", str(tmp_path / "none"), "--layers", "5"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "none").exists()


def test_progress_counts_every_byte_once(tier, tmp_path):
    seen = []
    directory = synthesise(tier, tmp_path / "model", progress=lambda done, total: seen.append((done, total)))
    counts, totals = zip(*seen, strict=True)
    payload = sum(
        entry.nbytes for path in directory.rglob("*.safetensors") for entry in read_header(path).tensors.values()
    )
    assert set(totals) == {payload} and counts[-1] == payload and list(counts) == sorted(set(counts))


def test_memory_stays_below_one_layer(tmp_path):
    """Measured on a tier whose layers are 7 MiB, so that the imports and lists around them do not count."""
    unit = find_tier("unit-35b")
    text = unit.text | {"hidden_size": 256, "num_experts": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    tier = dataclasses.replace(unit, text=text, owners=(0,), ks=(4,))
    synthesise(unit, tmp_path / "warm-up")
    tracemalloc.start()
    try:
        directory = synthesise(tier, tmp_path / "wide")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    config = read_config(directory)
    experts = sum(t.nbytes for t in CheckpointIndex.open(directory).tensors.values() if ".switch_mlp." in t.name)
    assert experts / config.layers > 5 << 20
    assert peak < experts / config.layers


@pytest.mark.parametrize("name", sorted(TIERS))
def test_largest_piece_is_smaller_than_a_layer(name):
    """What is held at once, for every tier, without making it: one expert's matrix or one unstacked tensor."""
    config = parse_config(released_config(TIERS[name]), Path("config.json"))
    item = {"U32": 4, "BF16": 2}
    pieces, layers = [], {}
    for tensor in checkpoint_tensors(config):
        stacked = tensor.linear is not None and tensor.linear.experts
        pieces.append(np.prod(tensor.shape[-2:] if stacked else tensor.shape) * item[tensor.dtype])
        if stacked:
            layer = tensor.name.split(".layers.")[1].split(".")[0]
            layers[layer] = layers.get(layer, 0) + np.prod(tensor.shape) * item[tensor.dtype]
    assert max(pieces) < min(layers.values())
    if name.startswith(("unit", "tiny")):
        assert max(layers.values()) < 1 << 20
    else:
        assert sum(layers.values()) > 0 and config.layers >= 12 and config.experts >= 64


def test_every_adapter_of_a_tier_opens(tier, checkpoint):
    for k in tier.ks:
        for kind in ("lora", "prerouter"):
            adapter = open_adapter(checkpoint, tier.family, kind, k)
            assert adapter.k == k and adapter.owners == (tier.owners if kind == "prerouter" else ())
