"""Opening an engine on a checkpoint that is not right: one line that names the file, and no engine."""

import gc
import json
import os
import shutil
import struct
import threading

import mlx.core as mx
import numpy as np
import pytest
from reference import PROMPT, engine_logits, floor_bytes, same_bits
from safetensors.numpy import save_file

from edge0 import Edge0Error, Engine, EngineOptions, ErrorKind
from edge0.checkpoint.adapters import adapter_path
from edge0.checkpoint.header import CheckpointIndex, read_header


@pytest.fixture
def private(copy_of, tier):
    return copy_of(tier.name)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """A refused engine leaves no reader thread and no descriptor."""
    threads, files = threading.active_count(), len(os.listdir("/dev/fd"))
    yield
    if len(os.listdir("/dev/fd")) > files:
        gc.collect()  # a file that a discarded array would have read
    assert threading.active_count() == threads and len(os.listdir("/dev/fd")) <= files


def opening(directory, **options):
    return lambda: Engine(directory, EngineOptions(**options)).close()


def shards(directory):
    return sorted(directory.glob("model*.safetensors"))


def edit_header(path, edit):
    """Rewrite the JSON header of a safetensors file in place; the data bytes stay as they are."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_config(directory, **fields):
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw.get("text_config", raw).update(fields)
    path.write_text(json.dumps(raw))


# --- shards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 4096, 5000, "half"])
def test_truncated_shard(private, refused, lost):
    for path in shards(private):
        whole = path.read_bytes()
        lost = len(whole) // 2 if lost == "half" else lost
        path.write_bytes(whole[:-lost])
        refused(
            ErrorKind.FILE_TRUNCATED, opening(private), path, f"expected {len(whole)}", f"found {len(whole) - lost}"
        )
        path.write_bytes(whole)
    opening(private)()


def test_shard_cut_inside_its_header(private, refused):
    path = shards(private)[0]
    path.write_bytes(path.read_bytes()[:100])
    refused(ErrorKind.HEADER_LENGTH, opening(private), path)


def test_missing_shard(private, refused):
    path = shards(private)[-1]
    path.unlink()
    missing = path if (private / "model.safetensors.index.json").exists() else private
    refused(ErrorKind.FILE_MISSING, opening(private), missing)


def test_swapped_shards(copy_of, refused):
    """Two files under each other's names: both are sound, and the index says what each should hold."""
    directory = copy_of("unit-35b")
    first, second = shards(directory)[:2]
    first.rename(directory / "aside")
    second.rename(first)
    (directory / "aside").rename(second)
    refused(ErrorKind.INDEX_MISMATCH, opening(directory), "model.safetensors.index.json", first.name, second.name)


def test_a_shard_of_another_model(copy_of, checkpoints, refused):
    directory = copy_of("unit-8b")
    (path,) = shards(directory)
    shutil.copy(shards(checkpoints["unit-35b"])[0], path)
    refused(ErrorKind.TENSOR_MISSING, opening(directory), directory, "model.layers.1.mlp.experts")


def test_unreadable_shard(private, refused):
    path = shards(private)[0]
    path.unlink()
    path.mkdir()
    refused(ErrorKind.FILE_UNREADABLE, opening(private), path)


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (lambda entry: entry.update(shape=[2 * entry["shape"][0], *entry["shape"][1:]]), ErrorKind.TENSOR_OFFSETS),
        (lambda entry: entry.update(data_offsets=[0, 1 << 50]), ErrorKind.TENSOR_OFFSETS),
        (lambda entry: entry.update(data_offsets=[-8, 8]), ErrorKind.TENSOR_OFFSETS),
        (lambda entry: entry.update(dtype="F13"), ErrorKind.TENSOR_DTYPE),
        (lambda entry: entry.update(shape=[1 << 62, 1 << 62]), ErrorKind.TENSOR_SHAPE),
        (lambda entry: entry.update(shape=[0, *entry["shape"][1:]]), ErrorKind.TENSOR_OFFSETS),
        (lambda entry: entry.update(dtype="I32"), ErrorKind.TENSOR_MISMATCH),
        (lambda entry: entry.update(shape=entry["shape"][::-1]), ErrorKind.TENSOR_MISMATCH),
    ],
)
@pytest.mark.parametrize("part", ["experts", "resident"])
def test_header_that_lies(private, tier, refused, part, edit, kind):
    path = shards(private)[0]
    inner = tier.family.experts_key if part == "experts" else "mlp.shared_expert"
    name = min(n for n in read_header(path).tensors if f".{inner}" in n and n.endswith(".up_proj.weight"))
    edit_header(path, lambda header: edit(header[name]))
    error = refused(kind, opening(private), path, name)
    assert error.tensor == name and error.path == path


def test_swapped_offsets_of_two_tensors_of_one_size_cannot_be_seen_but_overlap_can(private, refused):
    path = shards(private)[0]
    names = sorted(read_header(path).tensors)

    def overlap(header):
        twins = [n for n in names if header[n]["shape"] == header[names[0]]["shape"] and n != names[0]]
        header[twins[0]]["data_offsets"] = header[names[0]]["data_offsets"]

    edit_header(path, overlap)
    with pytest.raises(Edge0Error) as caught:
        opening(private)()
    assert caught.value.kind in (ErrorKind.TENSOR_OVERLAP, ErrorKind.TENSOR_HOLE) and str(path) in str(caught.value)


def test_a_tensor_of_the_model_is_missing(copy_of, refused):
    directory = copy_of("unit-8b")
    path = directory / "model.safetensors"
    for name in ("model.layers.2.mlp.experts.up_proj.scales", "model.layers.2.attention.A_log", "lm_head.biases"):
        whole = path.read_bytes()
        edit_header(path, lambda header, name=name: header.update({name + "x": header.pop(name)}))
        error = refused(ErrorKind.TENSOR_MISSING, opening(directory), directory, name)
        assert error.tensor == name
        path.write_bytes(whole)


def test_a_tensor_without_elements(copy_of, refused):
    """Legal in a file, and never what a config calls for."""
    directory = copy_of("unit-8b")
    path = directory / "model.safetensors"
    name = "model.norm.weight"
    arrays = mx.load(str(path)) | {name: mx.zeros((0,), mx.bfloat16)}
    mx.save_safetensors(str(directory / "other.safetensors"), arrays)
    (directory / "other.safetensors").rename(path)
    refused(ErrorKind.TENSOR_MISMATCH, opening(directory), path, name, "expected BF16 [128], found BF16 [0]")


def test_index_that_disagrees(copy_of, refused):
    directory = copy_of("unit-35b")
    path = directory / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    name = min(document["weight_map"])
    document["weight_map"][name] = next(s.name for s in shards(directory) if s.name != document["weight_map"][name])
    path.write_text(json.dumps(document))
    refused(ErrorKind.INDEX_MISMATCH, opening(directory), path, name)
    path.write_text("{")
    refused(ErrorKind.INDEX_MALFORMED, opening(directory), path)


def test_a_shard_that_the_index_does_not_name_is_not_loaded(copy_of, checkpoints):
    """A file left over from another revision: refused, or without any effect on the logits."""
    directory = copy_of("unit-35b")
    name = "language_model.model.norm.weight"
    assert name in CheckpointIndex.open(directory).tensors
    for number in range(5):  # whichever file a loader takes last
        save_file({name: np.full(128, 3, np.float16)}, directory / f"model-9{number}.safetensors")
    with Engine(checkpoints["unit-35b"], EngineOptions(k=2)) as engine:
        expected = engine_logits(engine, PROMPT, [])
    try:
        engine = Engine(directory, EngineOptions(k=2))
    except Edge0Error as error:
        assert "model-9" in str(error)
    else:
        with engine:
            assert same_bits(engine_logits(engine, PROMPT, []), expected)


def test_shards_may_have_any_name_that_the_index_gives(copy_of, checkpoints):
    """The index decides which files are shards, so the loader must not go by another pattern."""
    directory = copy_of("unit-35b")
    path = directory / "model.safetensors.index.json"
    text = path.read_text()
    for shard in shards(directory):
        shard.rename(directory / f"weights-{shard.name}")
        text = text.replace(shard.name, f"weights-{shard.name}")
    path.write_text(text)
    with Engine(checkpoints["unit-35b"], EngineOptions(k=2)) as engine:
        expected = engine_logits(engine, PROMPT, [])
    try:
        engine = Engine(directory, EngineOptions(k=2))
    except Edge0Error as error:
        assert "weights-" in str(error)
    else:
        with engine:
            assert same_bits(engine_logits(engine, PROMPT, []), expected)


# --- config --------------------------------------------------------------------------------------------------------


def test_no_checkpoint(tmp_path, refused):
    refused(ErrorKind.FILE_MISSING, opening(tmp_path), tmp_path / "config.json")


def test_config_of_another_size(private, refused):
    edit_config(private, num_experts=64)
    refused(ErrorKind.TENSOR_MISMATCH, opening(private), "gate_proj.weight", "[64, ", "[32, ")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_experts", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8", None, True])
def test_config_with_a_size_that_is_none(private, refused, field, value):
    edit_config(private, **{field: value})
    refused(ErrorKind.CONFIG_MALFORMED, opening(private), private / "config.json", field)


def test_config_with_more_layers(private, tier, refused):
    edit_config(private, num_hidden_layers=12)
    refused(ErrorKind.TENSOR_MISSING, opening(private), f"{tier.family.layer_prefix}.8.")


@pytest.mark.parametrize("value", [None, {}, {"bits": 8, "group_size": 64}, {"bits": 4, "group_size": 32}, "int4"])
def test_config_without_the_quantisation_that_the_files_have(private, checkpoint, value):
    """Refused in one line, or served with the quantisation that the files show; never with another."""
    path = private / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization"] = value
    raw.pop("quantization_config", None)
    path.write_text(json.dumps({key: v for key, v in raw.items() if v is not None}))
    try:
        engine = Engine(private, EngineOptions(k=2))
    except Edge0Error as error:
        assert error.kind is ErrorKind.CONFIG_MALFORMED and error.path == path and "quantization" in str(error)
    else:
        with engine, Engine(checkpoint, EngineOptions(k=2)) as untouched:
            assert same_bits(engine_logits(engine, PROMPT, []), engine_logits(untouched, PROMPT, []))


# --- adapters and options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "prerouter"])
def test_missing_adapter(private, tier, refused, kind):
    path = adapter_path(private, tier.family, kind, tier.family.k_served)
    path.unlink()
    refused(ErrorKind.ADAPTER_MISSING, opening(private), path)
    opening(private, **({"lora": False} if kind == "lora" else {"prerouter": "off"}))()


@pytest.mark.parametrize("kind", ["lora", "prerouter"])
def test_adapter_of_another_model(private, tier, refused, rewrite_adapter, kind):
    path = adapter_path(private, tier.family, kind, tier.family.k_served)
    rewrite_adapter(path, fields={"model": "edge0-671b"})
    refused(ErrorKind.ADAPTER_MISMATCH, opening(private), path, "model", "edge0-671b")


def test_k_without_an_adapter_and_with_one_knowingly(checkpoint, refused):
    refused(ErrorKind.ADAPTER_MISSING, opening(checkpoint, k=3), "K=3", "k3")
    with Engine(checkpoint, EngineOptions(k=3, adapter_k=4)) as engine:
        assert np.isfinite(engine_logits(engine, PROMPT, [1, 2, 3])).all()


@pytest.mark.parametrize(("name", "ceiling"), [("unit-35b", 32), ("unit-8b", 16)])
def test_k_larger_than_the_experts(checkpoints, refused, name, ceiling):
    for k in (ceiling + 1, 1000):
        refused(ErrorKind.K_INVALID, opening(checkpoints[name], k=k), f"K={k}", f"1 to {ceiling}")


def test_k_of_all_experts_is_served(tier, checkpoint):
    k = 32 if tier.family.tag == "35b" else 16
    with Engine(checkpoint, EngineOptions(k=k, prerouter="off", lora=False)) as engine:
        assert engine.store.capacity <= len(engine.layout.records())
        assert np.isfinite(engine_logits(engine, PROMPT, [1, 2])).all()


@pytest.mark.parametrize("prerouter", ["off", "route"])
@pytest.mark.parametrize("assembly", ["bank", "stack"])
def test_bank_below_its_floor(checkpoint, refused, prerouter, assembly):
    options = {"k": 4, "prerouter": prerouter, "assembly": assembly}
    floor = floor_bytes(checkpoint, **options)
    refused(ErrorKind.BANK_TOO_SMALL, opening(checkpoint, bank_bytes=floor - 1, **options), f"at least {floor} bytes")
    opening(checkpoint, bank_bytes=floor, **options)()


def test_more_launch_groups_than_predicted_layers(checkpoint, refused):
    refused(ErrorKind.OPTION_INVALID, opening(checkpoint, launch_groups=99), "launch groups", "found 99")


def test_a_closed_engine_refuses_requests(checkpoint, refused):
    with Engine(checkpoint, EngineOptions(k=4)) as engine:
        request = engine.new_request()
    refused(ErrorKind.ENGINE_CLOSED, lambda: engine.prefill(request, PROMPT), checkpoint)
    refused(ErrorKind.ENGINE_CLOSED, lambda: engine.step(request, 1), checkpoint)


def test_a_hidden_state_that_overflows_is_held_by_the_clip(copy_of, checkpoints):
    """NaN becomes 0 and values stay within the clip, so the logits are numbers; without it they are not."""
    directory = copy_of("unit-8b")
    path = directory / "model.safetensors"
    entry = read_header(path).tensors["model.layers.1.post_attention_layernorm.weight"]
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(np.full(entry.nbytes // 2, 0x7FC0, np.uint16).tobytes())  # NaN in bf16
    options = {"k": 8, "prerouter": "off", "lora": False}
    with Engine(directory, EngineOptions(**options)) as engine:
        assert np.isfinite(engine_logits(engine, PROMPT, [1])).all()
    with Engine(directory, EngineOptions(hidden_clip=None, **options)) as engine:
        request = engine.new_request()
        assert bool(mx.isnan(engine.prefill(request, PROMPT)).any())
        with pytest.raises(Edge0Error) as caught:
            list(engine.generate(PROMPT, 3))
        assert caught.value.kind is ErrorKind.NUMERIC
