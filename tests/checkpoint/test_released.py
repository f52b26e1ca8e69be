"""The published directories: replicas at unit size load to the same bits, full-shape headers are right to the byte."""

import json
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import released
from mlx.utils import tree_flatten
from reference import PROMPT, TOKENS, engine_logits, same_bits

from edge0 import Engine, EngineOptions, find_tier, models
from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.header import CheckpointIndex, read_header
from edge0.checkpoint.layout import ExpertLayout
from edge0.checkpoint.schema import checkpoint_tensors, find_tensor, head_tensors, lora_tensors, unplaced_tensors
from edge0.errors import ErrorKind
from edge0.families import parse_config, read_config

CONFIGS = {"35b": released.config_35b, "8b": released.config_8b}
TABLES = {"35b": released.table_35b, "8b": released.table_8b}
# Published file sizes in bytes; a header that another program wrote may differ by a few, or be filled up.
SHARD_SIZES = {
    "35b": (4_395_019_264, 5_368_472_749, 5_368_324_139, 4_377_211_365),
    "8b": (4_508_697_328,),
}
ADAPTER_SIZES = {
    ("35b", "lora"): 42_413_928,
    ("35b", "prerouter"): 138_422_000,
    ("8b", "lora"): 16_413_656,
    ("8b", "prerouter"): 38_802_304,
}
OWNERS = {"35b": tuple(range(6, 39)), "8b": tuple(range(7, 23))}
K_SERVED = {"35b": 4, "8b": 8}


def full_config(tag):
    return parse_config(CONFIGS[tag](), Path("config.json"))


def adapter_table(tag, kind):
    raw = CONFIGS[tag]()
    if kind == "lora":
        return released.lora_table(TABLES[tag](raw))
    hidden, experts = (2048, 256) if tag == "35b" else (1536, 128)
    return released.head_table(hidden, experts, OWNERS[tag], 512)


def listed(tensors):
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}


# --- the schema against the published tables -----------------------------------------------------------------------


@pytest.mark.parametrize(("tag", "count"), [("35b", 1757), ("8b", 1196)])
def test_the_schema_lists_the_published_tensors(tag, count):
    table = TABLES[tag](CONFIGS[tag]())
    assert len(table) == count
    assert listed(checkpoint_tensors(full_config(tag))) == table
    assert listed(lora_tensors(full_config(tag))) == adapter_table(tag, "lora")
    assert listed(head_tensors(full_config(tag), OWNERS[tag], 512)) == adapter_table(tag, "prerouter")


def test_the_schema_lists_the_tables_at_unit_size_in_scaled_counts(tier):
    raw, tag = released.unit_config(tier), tier.family.tag
    table = TABLES[tag](raw)
    assert listed(checkpoint_tensors(parse_config(raw, Path("config.json")))) == table
    layers, full = tier.text["num_hidden_layers"], tier.text["num_hidden_layers"] // 4
    linear = layers - full
    if tag == "35b":
        quantised, experts, plain = (
            2 + 5 * linear + 4 * full + 5 * layers,
            layers,
            2 * layers + 1 + 4 * linear + 2 * full,
        )
        left_over = 0
    else:
        quantised, experts = 2 + 7 * linear + 6 * full + 3 + 3 * (layers - 1), layers - 1
        plain = 2 * layers + 1 + 6 * linear + 2 * full + 2 * (layers - 1)
        left_over = 3 * (layers - 2)
    assert len(table) == 3 * quantised + 9 * experts + plain + left_over
    assert sum(".pregate." in key for key in table) == left_over


# --- replicas ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """A factory of replicas, one per tier and set of variants."""
    root, made = tmp_path_factory.mktemp("replicas"), {}

    def replica(tier, name="as published", **variants):
        if (tier.name, name) not in made:
            made[tier.name, name] = released.write_replica(root / f"{tier.name} {name}", tier, **variants)
        return made[tier.name, name]

    return replica


@pytest.fixture(scope="module")
def plain_logits(checkpoints):
    """Tier name -> logits of the synthesised directory, with heads and LoRA, at the K that the family serves."""
    logits = {}
    for name, directory in checkpoints.items():
        with Engine(directory) as engine:
            logits[name] = engine_logits(engine, PROMPT, TOKENS[:6])
    return logits


def logits_of(directory):
    with Engine(directory) as engine:
        assert engine.options == EngineOptions() and engine.k == K_SERVED[engine.config.family.tag]
        return engine_logits(engine, PROMPT, TOKENS[:6])


def test_a_replica_loads_unchanged_and_gives_the_same_bits(tier, replicas, plain_logits):
    assert same_bits(logits_of(replicas(tier)), plain_logits[tier.name])


def test_a_replica_has_what_is_peculiar_to_the_published_directory(tier, replicas):
    directory = replicas(tier)
    raw, index = json.loads((directory / "config.json").read_text()), CheckpointIndex.open(directory)
    names = {path.name for path in directory.iterdir()}
    assert {f"lora_edge0_{tier.family.tag}.safetensors", f"prerouter_edge0_{tier.family.tag}.safetensors"} <= names
    assert "artifacts" not in names
    if tier.family.tag == "35b":
        document = json.loads((directory / "model.safetensors.index.json").read_text())
        held = sum(entry.nbytes for entry in index.tensors.values())
        assert document["metadata"]["total_size"] > held + 800_000_000
        assert len(index.shards) == 4 and len(set(document["weight_map"].values())) == 4
        split = [layer for layer in range(8) if len({e.path for e in expert_entries(index, layer)}) > 1]
        assert split  # the nine tensors of some layer lie in two files
        text = raw["text_config"]
        assert "norm_topk_prob" not in text and text["num_experts_per_tok"] == 8 and text["mtp_num_hidden_layers"] == 1
        assert not any("mtp" in name or "vision" in name for name in index.tensors) and "vision_config" in raw
        assert sum(isinstance(value, dict) for value in raw["quantization"].values()) == 2 * 8
        assert tier.owners[-1] == read_config(directory).layers - 2  # its head's prediction is never consumed
    else:
        assert [path.name for path in directory.glob("model*")] == ["model.safetensors"]
        assert "model_type" not in raw and "auto_map" in raw and raw["pregate_hidden_size"]
        widths = {
            name.split(".")[2]: entry.shape[0] for name, entry in index.tensors.items() if name.endswith("fc1.weight")
        }
        assert list(widths) == list("123456") and list(widths.values()) == [84] * 4 + [42] * 2


def expert_entries(index, layer):
    return [entry for name, entry in index.tensors.items() if f".layers.{layer}.mlp.switch_mlp." in name]


def test_a_head_that_nothing_consumes_has_no_effect_but_must_be_there(tmp_path, rewrite_adapter, refused, plain_logits):
    """35b ships a head for the layer before the last; the last layer routes by its own router all the same."""
    tier = find_tier("unit-35b")
    directory = released.write_replica(tmp_path / "replica", tier)
    path = directory / "prerouter_edge0_35b.safetensors"
    poisoned = {
        f"layers.{tier.owners[-1]}.{part}.weight": np.full(shape, np.nan, np.float16)
        for part, shape in (("fc1", (64, 192)), ("fc2", (32, 64)), ("linear_init", (32, 192)))
    }
    rewrite_adapter(path, arrays=poisoned)
    assert same_bits(logits_of(directory), plain_logits[tier.name])
    rewrite_adapter(path, arrays={next(iter(poisoned)): None})
    refused(ErrorKind.TENSOR_MISSING, lambda: Engine(directory), path, next(iter(poisoned)))


@pytest.mark.parametrize("shape", [lambda c, k: (c, k), lambda c, k: (c, 1, k), lambda c, k: (c, k, 1)], ids=range(3))
@pytest.mark.parametrize("key", ["conv1d.weight", "conv1d.conv.weight"])
def test_every_form_of_the_8b_convolutions_loads_to_the_same_bits(tmp_path, checkpoints, key, shape):
    tier = find_tier("unit-8b")
    directory = released.write_replica(tmp_path / "replica", tier, conv_key=key, conv_shape=shape)
    found, expected = (parameters(path) for path in (directory, checkpoints[tier.name]))
    assert found.keys() == expected.keys() and sum("conv1d" in name for name in found) == 18
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and mx.array_equal(found[name], value).item(), name


def parameters(directory):
    config, index = read_config(directory), CheckpointIndex.open(directory)
    return dict(tree_flatten(models.load(directory, config, index, streamed=True).parameters()))


def test_both_forms_of_a_convolution_at_once_are_refused(tmp_path, refused):
    directory = released.write_replica(tmp_path / "replica", find_tier("unit-8b"))
    name = "model.layers.0.attention.q_conv1d.conv.weight"
    table = {name: ("BF16", (128, 4, 1))}
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    released.write_file(directory / "model-2.safetensors", table, {}, lambda key: bytes(1024))
    refused(ErrorKind.TENSOR_DUPLICATE, lambda: Engine(directory), "model-2.safetensors", name)


def test_unquantised_tensors_may_be_fp32(tier, replicas, plain_logits):
    assert same_bits(logits_of(replicas(tier, "fp32", unquantised="F32")), plain_logits[tier.name])


def test_unquantised_tensors_may_be_fp16(tier, replicas, checkpoints):
    """Values are those of the file, each rounded to fp16; all that is quantised stays as it is."""
    directory = replicas(tier, "fp16", unquantised="F16")
    found, expected = (parameters(path) for path in (directory, checkpoints[tier.name]))
    rounded = 0
    for name, value in expected.items():
        if value.dtype == mx.float32 and not name.endswith(
            ("scales", "biases", "embed_q.weight", "unembed_out.weight")
        ):
            value, rounded = value.astype(mx.float16).astype(mx.float32), rounded + 1
        assert mx.array_equal(found[name], value).item(), name
    assert rounded == (45 if tier.family.tag == "35b" else 71)
    assert np.isfinite(logits_of(directory)).all()


RENAMES = {
    ("35b", "lora without the wrapper"): lambda key: key.removeprefix("language_model."),
    ("35b", "bare lora"): lambda key: key.removeprefix("language_model.model."),
    ("8b", "bare lora"): lambda key: key.removeprefix("model."),
    ("35b", "nested heads"): lambda key: nested(key),
    ("8b", "nested heads"): lambda key: nested(key),
}


def nested(key):
    """`layers.N.mlp.prerouter.*` for a head's `layers.N.*`."""
    first, number, rest = key.split(".", 2)
    return f"layers.{number}.mlp.prerouter.{rest}" if first == "layers" else key


@pytest.mark.parametrize(("tag", "name"), RENAMES, ids=[" ".join(key) for key in RENAMES])
def test_other_accepted_adapter_keys(replicas, plain_logits, tag, name):
    tier = find_tier(f"unit-{tag}")
    directory = replicas(tier, name, rename=RENAMES[tag, name])
    kind = "prerouter" if "heads" in name else "lora"
    as_published = open_adapter(replicas(tier), tier.family, kind, K_SERVED[tag])
    adapter = open_adapter(directory, tier.family, kind, K_SERVED[tag])
    assert adapter.tensors.keys() == as_published.tensors.keys()
    assert adapter.header.tensors.keys().isdisjoint(as_published.header.tensors)
    assert same_bits(logits_of(directory), plain_logits[tier.name])


def test_one_adapter_tensor_under_two_names_is_refused(tmp_path, rewrite_adapter, refused):
    directory = released.write_replica(tmp_path / "replica", find_tier("unit-35b"))
    path = directory / "prerouter_edge0_35b.safetensors"
    twin = "layers.3.mlp.prerouter.fc2.weight"
    rewrite_adapter(path, arrays={twin: np.zeros((32, 64), np.float16)})
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: Engine(directory), path, "layers.3.", "second time")


# --- full shape, headers only --------------------------------------------------------------------------------------


@pytest.fixture(params=["35b", "8b"])
def full(request, tmp_path):
    """(tag, directory): the published directory at full shape, its data a hole in each file."""
    tag = request.param
    raw = CONFIGS[tag]()
    table = TABLES[tag](raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shards = released.in_shards(table, tag)
    for name, part in shards.items():
        released.write_sparse(tmp_path / name, part, {"format": "mlx"})
    if tag == "35b":
        released.write_index(tmp_path, shards, released.size(table))
    for kind in ("lora", "prerouter"):
        path = tmp_path / f"{kind}_edge0_{tag}.safetensors"
        fields = released.adapter_fields(tag, kind, K_SERVED[tag], OWNERS[tag])
        released.write_sparse(path, adapter_table(tag, kind), fields)
    yield tag, tmp_path
    for path in tmp_path.glob("*.safetensors"):  # 24 GB by name: not for a tool that follows sizes
        path.unlink()


EXPERTS = {  # bytes of one expert, one layer, all layers
    "35b": (1_769_472, 452_984_832, 18_119_393_280),
    "8b": (1_327_104, 169_869_312, 3_906_994_176),
}


def test_byte_arithmetic_of_the_full_shape(full):
    tag, directory = full
    config, index = read_config(directory), CheckpointIndex.open(directory)
    layout = ExpertLayout.of(index, config)
    layer = sum(piece.nbytes for piece in layout.layer_ranges(config.moe_layers[0]))
    assert (layout.expert_bytes, layer, layout.total_bytes) == EXPERTS[tag]
    rest = sum(entry.nbytes for entry in index.tensors.values()) - layout.total_bytes
    left_over = sum(entry.nbytes for name, entry in index.tensors.items() if ".pregate." in name)
    if tag == "35b":
        assert (rest, left_over) == (1_389_394_176, 0)
    else:
        assert rest - left_over == 530_178_048 + 10_173_248
    assert unplaced_tensors(index, config) == []
    for tensor in checkpoint_tensors(config):
        entry = find_tensor(index, tensor)
        assert entry.nbytes == prod(tensor.shape) * released.ITEM_BYTES[tensor.dtype]


def test_file_sizes_of_the_full_shape(full):
    """Each file is as long as the published one but for the header, whose text depends on the program that wrote it."""
    tag, directory = full
    shards = CheckpointIndex.open(directory).shards
    for shard, published in zip(shards, SHARD_SIZES[tag], strict=True):
        payload = sum(entry.nbytes for entry in shard.tensors.values())
        assert 110 < (published - payload) / len(shard.tensors) < 150
        assert abs(shard.file_bytes - published) < 4096
        assert shard.path.stat().st_blocks * 512 < 1 << 20  # nothing but headers was written
    assert sum(SHARD_SIZES["35b"]) == 19_509_027_517


@pytest.mark.parametrize("kind", ["lora", "prerouter"])
def test_adapters_of_the_full_shape(full, kind):
    tag, directory = full
    config = read_config(directory)
    adapter = open_adapter(directory, config.family, kind, K_SERVED[tag])
    wanted = lora_tensors(config) if kind == "lora" else head_tensors(config, OWNERS[tag], 512)
    entries = adapter.find(wanted)
    payload, published = sum(entry.nbytes for entry in entries.values()), ADAPTER_SIZES[tag, kind]
    if kind == "prerouter":
        assert payload == 2 * len(OWNERS[tag]) * {"35b": 2_097_152, "8b": 1_212_416}[tag]
        assert adapter.owners == OWNERS[tag] and len(entries) == {"35b": 99, "8b": 48}[tag]
    else:
        assert payload == 2 * {"35b": 21_166_080, "8b": 8_189_952}[tag]
        assert len(entries) == 2 * {"35b": 310, "8b": 153}[tag]
    assert abs(read_header(adapter.header.path).file_bytes - published) < 128
    assert 90 < (published - payload) / len(entries) < 140
