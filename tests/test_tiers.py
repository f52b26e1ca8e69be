"""Tiers and config.json: what is read out of it, and one test for each way in which it can be wrong."""

import json
import os
from math import prod
from pathlib import Path

import pytest

from edge0 import TIERS, Edge0Error, Engine, EngineOptions, find_tier
from edge0.checkpoint.schema import checkpoint_tensors, head_tensors, lora_tensors
from edge0.checkpoint.synth import ITEM_BYTES, released_config
from edge0.errors import ErrorKind
from edge0.families import LING, POSITIONS, QWEN, parse_config, read_config
from edge0.prerouter.schedule import predicted_layers
from edge0.tiers import LEAST_LAYERS

DELETED = object()


def test_the_tiers_that_the_readme_names():
    assert set(TIERS) == {f"{size}-{family}" for size in ("unit", "tiny", "mini", "shape") for family in ("35b", "8b")}
    assert all(tier.family is (QWEN if name.endswith("35b") else LING) for name, tier in TIERS.items())
    assert all(find_tier(name) is tier and tier.name == name for name, tier in TIERS.items())
    for name, tier in TIERS.items():
        size = name.partition("-")[0]
        assert tier.ks == {"shape": (tier.family.k_served,), "tiny": (4,)}.get(size, (2, 4, 8))


def nbytes(tensors):
    return sum(prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "count", "experts", "rest", "lora", "heads"),
    [
        ("shape-35b", 1757, 18_119_393_280, 1_389_394_176, 620, 99),
        ("shape-8b", 1196, 3_906_994_176, 601_561_920, 306, 48),
    ],
)
def test_shapes_are_those_of_the_released_files(name, count, experts, rest, lora, heads):
    """Tensors, bytes of routed experts and of everything else, and adapter tensors, as published."""
    tier = find_tier(name)
    config = parse_config(released_config(tier), Path("config.json"))
    tensors = list(checkpoint_tensors(config))
    assert len(tensors) == count
    assert nbytes(tensor for tensor in tensors if tensor.is_expert) == experts
    assert nbytes(tensor for tensor in tensors if not tensor.is_expert) == rest
    assert len(list(lora_tensors(config))) == lora
    assert len(list(head_tensors(config, tier.owners, tier.head_hidden))) == heads
    assert sum(tier.text["rope_parameters"]["mrope_section"]) == 32 if tier.family is QWEN else True


@pytest.mark.parametrize("name", sorted(TIERS))
def test_fewer_layers_keep_the_rules(name):
    tier = find_tier(name)
    full = tier.text["num_hidden_layers"]
    for layers in {LEAST_LAYERS, (LEAST_LAYERS + full) // 2, full}:
        fewer = tier.with_layers(layers)
        config = parse_config(released_config(fewer), Path("config.json"))
        assert config.layers == layers and fewer.name != tier.name and fewer.ks == tier.ks
        predicted = predicted_layers(config, fewer.owners)
        assert (predicted[-1] == layers - 1) == tier.family.last_layer_predicted
        assert len(predicted) >= 3 and abs(fewer.owners[0] / layers - tier.owners[0] / full) <= 0.5 / layers
        assert {key: tier.text[key] for key in tier.text if key != "num_hidden_layers"} == {
            key: fewer.text[key] for key in fewer.text if key != "num_hidden_layers"
        }
    assert tier.with_layers(full).owners == tier.owners


@pytest.mark.parametrize("layers", [-1, 0, 5, 41])
def test_layers_out_of_range(refused, layers):
    refused(
        ErrorKind.OPTION_INVALID, lambda: find_tier("shape-35b").with_layers(layers), "shape-35b", "6 to 40", layers
    )


@pytest.mark.parametrize("name", ["", "mini", "MINI-35B", "edge0-35b", "unit-35b "])
def test_unknown_tier(refused, name):
    refused(ErrorKind.TIER_UNKNOWN, lambda: find_tier(name), "tier: no such tier", repr(name), "mini-35b", "unit-8b")


def test_what_is_read(checkpoints):
    config = read_config(checkpoints["unit-35b"])
    assert config.family is QWEN and config.text is config.raw["text_config"]
    assert (config.layers, config.hidden, config.experts, config.expert_width, config.vocab) == (8, 128, 32, 64, 512)
    assert (config.groups, config.groups_kept, config.moe_layers) == (1, 1, tuple(range(8)))
    config = read_config(checkpoints["unit-8b"])
    assert config.family is LING and config.text is config.raw
    assert (config.groups, config.groups_kept, config.moe_layers) == (8, 4, tuple(range(1, 8)))


def test_how_long_a_request_may_be():
    raw = released_config(find_tier("unit-35b"))
    assert parse_config(raw, Path("config.json")).positions == 4096
    change(raw["text_config"], "max_position_embeddings", DELETED)
    assert parse_config(raw, Path("config.json")).positions == POSITIONS


@pytest.mark.parametrize(("name", "ceiling"), [("unit-35b", 32), ("unit-8b", 16)])
def test_k_of_a_model(checkpoints, refused, name, ceiling):
    config = read_config(checkpoints[name])
    assert [config.check_k(k) for k in (1, 8, ceiling)] == [1, 8, ceiling]
    for k in (0, ceiling + 1):
        refused(ErrorKind.K_INVALID, lambda k=k: config.check_k(k), f"K={k}", f"1 to {ceiling}")


# --- config.json that is wrong -------------------------------------------------------------------------------------


def test_no_config(tmp_path, refused):
    refused(ErrorKind.FILE_MISSING, lambda: read_config(tmp_path), tmp_path / "config.json")
    refused(ErrorKind.FILE_MISSING, lambda: read_config(tmp_path / "nowhere"), tmp_path / "nowhere" / "config.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null", "\x00", "[" * 100_000])
def test_not_a_json_object(tmp_path, refused, text):
    (tmp_path / "config.json").write_text(text)
    refused(ErrorKind.CONFIG_MALFORMED, lambda: read_config(tmp_path), tmp_path / "config.json")


def test_not_utf8_and_not_a_file(tmp_path, refused):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    refused(ErrorKind.CONFIG_MALFORMED, lambda: read_config(tmp_path), tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    refused(ErrorKind.CONFIG_MALFORMED, lambda: read_config(tmp_path), tmp_path / "config.json")


@pytest.mark.parametrize(
    "names", [DELETED, None, [], "BailingMoeV3ForCausalLM", ["LlamaForCausalLM"], {"a": 1}, [1], [None], [["a"]], [{}]]
)
def test_another_architecture(refused, names):
    raw = released_config(find_tier("unit-8b"))
    change(raw, "architectures", names)
    refused(ErrorKind.CONFIG_FAMILY, lambda: parse_config(raw, Path("config.json")), "config.json", "architectures")


@pytest.mark.parametrize("text", [DELETED, None, [], "x"])
def test_no_text_config(refused, text):
    raw = released_config(find_tier("unit-35b"))
    change(raw, "text_config", text)
    refused(ErrorKind.CONFIG_MALFORMED, lambda: parse_config(raw, Path("config.json")), "config.json", "text_config")


@pytest.mark.parametrize("value", [None, 0, "4096", 4096.0])
def test_a_malformed_length(refused, value):
    raw = released_config(find_tier("unit-8b"))
    change(raw, "max_position_embeddings", value)
    refused(ErrorKind.CONFIG_MALFORMED, lambda: parse_config(raw, Path("config.json")), "max_position_embeddings")


READ_ALWAYS = ("num_hidden_layers", "hidden_size", "num_experts", "moe_intermediate_size", "vocab_size")
READ_GROUPED = (*READ_ALWAYS, "n_group", "topk_group")


@pytest.mark.parametrize("value", [DELETED, None, 0, -8, 8.0, "8", True, [8]])
@pytest.mark.parametrize(
    ("name", "key"), [("unit-35b", key) for key in READ_ALWAYS] + [("unit-8b", key) for key in READ_GROUPED]
)
def test_a_field_that_is_no_positive_integer(refused, name, key, value):
    raw = released_config(find_tier(name))
    change(raw.get("text_config", raw), key, value)
    refused(ErrorKind.CONFIG_MALFORMED, lambda: parse_config(raw, Path("config.json")), "config.json", key)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("unit-8b", "n_group", 5),
        ("unit-8b", "n_group", 64),
        ("unit-8b", "topk_group", 9),
        ("unit-35b", "hidden_size", 100),
        ("unit-35b", "moe_intermediate_size", 96),
        ("unit-8b", "hidden_size", 1),
    ],
)
def test_fields_that_contradict(refused, name, key, value):
    raw = released_config(find_tier(name))
    change(raw.get("text_config", raw), key, value)
    refused(ErrorKind.CONFIG_MALFORMED, lambda: parse_config(raw, Path("config.json")), "config.json", key, value)


SHAPES = {
    "unit-35b": (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "full_attention_interval",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "shared_expert_intermediate_size",
    ),
    "unit-8b": (
        "intermediate_size",
        "moe_shared_expert_intermediate_size",
        "num_attention_heads",
        "num_shared_experts",
        "layer_group_size",
        "head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "short_conv_kernel_size",
    ),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in SHAPES.items() for key in keys])
def test_a_shape_that_the_family_needs(copy_of, name, key):
    """Fields that only the schema or mlx-lm reads are checked like the rest, before anything is loaded."""
    directory = copy_of(name)
    path = directory / "config.json"
    original = path.read_text()
    for value in (DELETED, "4", 0, -4, None):
        raw = json.loads(original)
        change(raw.get("text_config", raw), key, value)
        path.write_text(json.dumps(raw))
        with pytest.raises(Edge0Error) as caught:
            Engine(directory, EngineOptions(k=2)).close()
        # A number that disagrees with the files may also be told of the tensor that it disagrees with.
        if not isinstance(value, int):
            assert caught.value.kind is ErrorKind.CONFIG_MALFORMED
            assert str(path) in str(caught.value) and key in str(caught.value)


def change(mapping, key, value):
    if value is DELETED:
        del mapping[key]
    else:
        mapping[key] = value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", None),
        ("rope_theta", 0),
        ("rope_theta", "1e7"),
        ("partial_rotary_factor", 5),
        ("partial_rotary_factor", True),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "x"),
    ],
)
def test_numbers_that_only_the_forward_pass_would_miss(copy_of, tier, refused, key, value):
    directory = copy_of(tier.name)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    text = raw.get("text_config", raw)
    (text if key == "rms_norm_eps" else text.get("rope_parameters", text))[key] = value
    path.write_text(json.dumps(raw))
    refused(ErrorKind.CONFIG_MALFORMED, lambda: read_config(directory), path, key, repr(value))


def test_a_config_that_is_no_file_is_not_waited_for(tmp_path, refused):
    os.mkfifo(tmp_path / "config.json")
    refused(ErrorKind.CONFIG_MALFORMED, lambda: read_config(tmp_path), "regular file")
