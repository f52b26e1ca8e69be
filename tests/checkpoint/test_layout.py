"""Shapes, counts and bytes of the released checkpoints from their configurations, and where each expert lies."""

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout, part_specs
from edge0.checkpoint.schema import checkpoint_tensors, head_tensors, lora_tensors
from edge0.errors import ErrorKind
from edge0.families import parse_config, read_config

ITEM_BYTES = {"U32": 4, "BF16": 2, "F16": 2}

RELEASED_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
RELEASED_8B = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "vocab_size": 157184,
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "layer_group_size": 4,
    "head_dim": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "short_conv_kernel_size": 4,
}


def released(name):
    raw = {"35b": RELEASED_35B, "8b": RELEASED_8B}[name]
    return parse_config(raw | {"quantization": {"bits": 4, "group_size": 64}}, Path("config.json"))


def kinds(tensors):
    """How many tensors belong to experts, to other quantised matrices, to the old predictor, and to none of these."""
    counts = Counter()
    for tensor in tensors:
        if tensor.linear is None:
            counts["pregate" if ".pregate." in tensor.name else "plain"] += 1
        else:
            counts["quantised" if tensor.linear.experts is None else "experts"] += 1
    return dict(counts)


def nbytes(tensors):
    return sum(prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors)


# --- the released models -------------------------------------------------------------------------------------------


def test_released_35b_tensors_and_bytes():
    tensors = list(checkpoint_tensors(released("35b")))
    assert len({tensor.name for tensor in tensors}) == len(tensors) == 1757
    assert kinds(tensors) == {"quantised": 392 * 3, "experts": 40 * 9, "plain": 221}
    experts = [tensor for tensor in tensors if tensor.linear and tensor.linear.experts]
    assert nbytes(experts) == 18_119_393_280
    assert nbytes(tensors) - nbytes(experts) == 1_389_394_176
    eight_bit = {tensor.linear.name for tensor in tensors if tensor.linear and tensor.linear.bits == 8}
    assert len(eight_bit) == 80 and all(name.endswith(("mlp.gate", "mlp.shared_expert_gate")) for name in eight_bit)


def test_released_8b_tensors_and_bytes():
    tensors = list(checkpoint_tensors(released("8b")))
    assert len({tensor.name for tensor in tensors}) == len(tensors) == 1196
    assert kinds(tensors) == {"quantised": 236 * 3, "experts": 23 * 9, "plain": 215, "pregate": 22 * 3}
    experts = [tensor for tensor in tensors if tensor.linear and tensor.linear.experts]
    assert nbytes(experts) == 3_906_994_176
    assert nbytes(t for t in tensors if t.linear and not t.linear.experts) == 530_178_048
    assert nbytes(t for t in tensors if not t.linear and ".pregate." not in t.name) == 10_173_248
    assert all(tensor.linear is None for tensor in tensors if ".mlp.gate." in tensor.name)
    assert {int(tensor.name.split(".")[2]) for tensor in tensors if ".pregate." in tensor.name} == set(range(1, 23))


@pytest.mark.parametrize(
    ("name", "linears", "full"), [("35b", range(30), range(10)), ("8b", range(18), range(6))], ids=["35b", "8b"]
)
def test_released_layers_alternate_three_to_one(name, linears, full):
    config = released(name)
    names = [tensor.name for tensor in checkpoint_tensors(config)]
    recurrent = {int(n.split(".layers.")[1].split(".")[0]) for n in names if n.endswith("A_log")}
    assert recurrent == {layer for layer in range(config.layers) if layer % 4 != 3}
    assert len(recurrent) == len(linears) and config.layers - len(recurrent) == len(full)


@pytest.mark.parametrize(
    ("name", "expert_bytes", "gate_shape", "down_shape"),
    [("35b", 1_769_472, (512, 256), (2048, 64)), ("8b", 1_327_104, (512, 192), (1536, 64))],
)
def test_released_expert(name, expert_bytes, gate_shape, down_shape):
    config = released(name)
    specs = part_specs(config.hidden, config.expert_width)
    assert sum(spec.nbytes for spec in specs) == expert_bytes
    assert [(spec.projection, spec.part) for spec in specs] == [
        (projection, part)
        for projection in ("gate_proj", "up_proj", "down_proj")
        for part in ("weight", "scales", "biases")
    ]
    assert specs[0].shape == specs[3].shape == gate_shape and specs[6].shape == down_shape
    assert specs[1].shape == (512, config.hidden // 64) and specs[7].shape == (config.hidden, 8)
    assert {spec.dtype for spec in specs[::3]} == {"U32"} and specs[1].dtype == specs[2].dtype == "BF16"


@pytest.mark.parametrize(("name", "targets", "parameters"), [("35b", 310, None), ("8b", 153, 8_189_952)])
def test_released_lora(name, targets, parameters):
    tensors = list(lora_tensors(released(name)))
    assert len({tensor.name for tensor in tensors}) == len(tensors) == 2 * targets
    count = sum(prod(tensor.shape) for tensor in tensors)
    assert parameters is None or count == parameters
    if name == "35b":  # the released file without its header
        assert 42_413_928 - 100_000 < 2 * count < 42_413_928


@pytest.mark.parametrize(
    ("name", "owners", "tensors", "each"),
    [("35b", range(6, 39), 99, 2_097_152), ("8b", range(7, 23), 48, 1_212_416)],
)
def test_released_heads(name, owners, tensors, each):
    listed = list(head_tensors(released(name), tuple(owners), 512))
    assert len(listed) == tensors
    assert sum(prod(tensor.shape) for tensor in listed) == len(owners) * each


# --- where experts lie ---------------------------------------------------------------------------------------------


def layout_of(checkpoint):
    return ExpertLayout.of(CheckpointIndex.open(checkpoint), read_config(checkpoint))


def test_ranges_hold_what_the_safetensors_library_reads(checkpoint):
    config, layout = read_config(checkpoint), layout_of(checkpoint)
    assert layout.layers == config.moe_layers and layout.experts == config.experts
    checked = set()
    for path in layout.paths:
        for name, tensor in deserialize(path.read_bytes()):
            if f".{config.family.experts_key}." not in name:
                continue
            layer, projection, name_part = int(name.split(".layers.")[1].split(".")[0]), *name.split(".")[-2:]
            (part,) = (n for n, s in enumerate(layout.specs) if (s.projection, s.part) == (projection, name_part))
            stack = np.frombuffer(tensor["data"], np.uint8).reshape(config.experts, -1)
            assert tensor["dtype"] == layout.specs[part].dtype
            assert tuple(tensor["shape"]) == (config.experts, *layout.specs[part].shape)
            for expert in (0, 5, config.experts - 1):
                piece = layout.ranges(layer, expert)[part]
                assert piece.path == path and piece.nbytes == stack.shape[1]
                assert np.array_equal(np.fromfile(path, np.uint8, piece.nbytes, offset=piece.offset), stack[expert])
            checked.add((layer, part))
    assert len(checked) == len(layout.layers) * 9


def test_ranges_of_all_experts_tile_their_tensors(checkpoint):
    """Nothing twice, nothing between: per shard the ranges are as many bytes as the expert tensors."""
    config, layout = read_config(checkpoint), layout_of(checkpoint)
    spans = sorted((r.path, r.offset, r.nbytes) for key in layout.records() for r in layout.ranges(*key))
    for (path, offset, length), (following, start, _) in zip(spans, spans[1:], strict=False):
        assert following != path or offset + length <= start
    assert sum(length for _, _, length in spans) == layout.total_bytes
    assert layout.total_bytes == layout.expert_bytes * config.experts * len(config.moe_layers)
    assert len(layout.records()) == len(set(layout.records())) == config.experts * len(config.moe_layers)
    assert set(layout.paths) == {path for path, _, _ in spans}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"layers": 9}, ErrorKind.TENSOR_MISSING),
        ({"experts": 64}, ErrorKind.TENSOR_MISMATCH),
        ({"expert_width": 128}, ErrorKind.TENSOR_MISMATCH),
        ({"hidden": 256}, ErrorKind.TENSOR_MISMATCH),
    ],
)
def test_a_config_of_another_model(checkpoint, refused, change, kind):
    index, config = CheckpointIndex.open(checkpoint), replace(read_config(checkpoint), **change)
    refused(kind, lambda: ExpertLayout.of(index, config), checkpoint, "gate_proj")
