"""The two published directories, written down a second time: every config field, key, dtype, shape and file name.

The tables come from what was observed of the published files, not from `edge0.checkpoint.schema`, which is held
against them. At unit size a replica holds the bytes that synthesis would give the same tensors; at full size only
headers are written and the data is a hole in the file.
"""

import json
import os
from math import prod

import numpy as np

from edge0.checkpoint.schema import checkpoint_tensors, head_tensors, lora_tensors
from edge0.checkpoint.synth import adapter_bytes, checkpoint_bytes, from_bf16
from edge0.checkpoint.tokenizer import write_tokenizer
from edge0.families import parse_config

ITEM_BYTES = {"U32": 4, "F32": 4, "BF16": 2, "F16": 2}
VISION_BYTES = 20_401_929_952 - 19_508_787_456  # what the 35b index still counts and no shard holds
SHARD_KEYS = (383, 498, 504, 372)  # keys in each of the four 35b shards
NAN_BF16 = b"\xc0\x7f"


# --- config.json ---------------------------------------------------------------------------------------------------


def config_35b(**text):
    """config.json of edge0-35b; `text` replaces fields of the nested text model."""
    nested = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_bias": False,
        "attn_output_gate": True,
        "rms_norm_eps": 1e-06,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mamba_ssm_dtype": "float32",
        "bos_token_id": 248044,
        "eos_token_id": 248044,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
    } | text
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    for layer in range(nested["num_hidden_layers"]):
        for name in ("gate", "shared_expert_gate"):
            key = f"language_model.model.layers.{layer}.mlp.{name}"
            quantization[key] = {"group_size": 64, "bits": 8}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": nested,
        "vision_config": {"model_type": "qwen3_5_moe", "hidden_size": 1152, "depth": 27, "out_hidden_size": 2048},
        "tie_word_embeddings": False,
        "quantization": quantization,
        "quantization_config": quantization,
    }


def config_8b(**fields):
    """config.json of edge0-8b: no model_type, remote code named, and fields of a predictor that is no longer used."""
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config",
            "AutoModelForCausalLM": "modeling_bailing_moe_v3.BailingMoeV3ForCausalLM",
        },
        "vocab_size": 157184,
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "layer_group_size": 4,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_lower_bound": -5,
        "kda_safe_gate": True,
        "no_kda_lora": True,
        "rms_norm_eps": 1e-06,
        "rope_theta": 6000000,
        "rope_interleave": True,
        "rope_scaling": None,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": 156895,
        "pad_token_id": 156892,
        "torch_dtype": "bfloat16",
        "pregate_start_layer": 7,
        "pregate_hidden_size": 512,
        "pregate_cross_token": True,
        "pregate_use_prev_token": True,
        "pregate_use_prev_topk": True,
        "pregate_shallow_layers": 5,
        "pregate_shallow_hidden_size": 1024,
        "pregate_shallow_loss_weight": 1.5,
        "pregate_top_k": 8,
        "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
        "quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"},
    } | fields


def unit_config(tier):
    """The published config with the numbers of a unit tier, so that both have tensors of equal names and shapes."""
    if tier.family.tag == "35b":
        return config_35b(**tier.text)
    width = tier.text["hidden_size"] // 3
    return config_8b(**tier.text, pregate_hidden_size=width, pregate_shallow_hidden_size=2 * width)


# --- tensors: key -> (dtype, shape) --------------------------------------------------------------------------------


def packed(table, name, out, inp, bits=4, stack=()):
    table[f"{name}.weight"] = ("U32", (*stack, out, inp * bits // 32))
    table[f"{name}.scales"] = table[f"{name}.biases"] = ("BF16", (*stack, out, inp // 64))


def mlp(table, name, hidden, width, stack=()):
    for projection in ("gate_proj", "up_proj"):
        packed(table, f"{name}.{projection}", width, hidden, stack=stack)
    packed(table, f"{name}.down_proj", hidden, width, stack=stack)


def table_35b(raw):
    """All keys of edge0-35b, 1,757 at full shape, in the order in which the four files take them up."""
    text, table = raw["text_config"], {}
    hidden, vocab, experts = text["hidden_size"], text["vocab_size"], text["num_experts"]
    heads, kv_heads, head = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value_heads = text["linear_num_value_heads"]
    values = value_heads * text["linear_value_head_dim"]
    packed(table, "language_model.model.embed_tokens", vocab, hidden)
    for layer in range(text["num_hidden_layers"]):
        at = f"language_model.model.layers.{layer}"
        if layer % 4 == 3:
            packed(table, f"{at}.self_attn.q_proj", 2 * heads * head, hidden)
            packed(table, f"{at}.self_attn.k_proj", kv_heads * head, hidden)
            packed(table, f"{at}.self_attn.v_proj", kv_heads * head, hidden)
            packed(table, f"{at}.self_attn.o_proj", hidden, heads * head)
            table[f"{at}.self_attn.q_norm.weight"] = table[f"{at}.self_attn.k_norm.weight"] = ("BF16", (head,))
        else:
            table[f"{at}.linear_attn.conv1d.weight"] = ("BF16", (2 * keys + values, 4, 1))
            packed(table, f"{at}.linear_attn.in_proj_qkv", 2 * keys + values, hidden)
            packed(table, f"{at}.linear_attn.in_proj_z", values, hidden)
            packed(table, f"{at}.linear_attn.in_proj_b", value_heads, hidden)
            packed(table, f"{at}.linear_attn.in_proj_a", value_heads, hidden)
            table[f"{at}.linear_attn.dt_bias"] = table[f"{at}.linear_attn.A_log"] = ("BF16", (value_heads,))
            table[f"{at}.linear_attn.norm.weight"] = ("BF16", (text["linear_value_head_dim"],))
            packed(table, f"{at}.linear_attn.out_proj", hidden, values)
        table[f"{at}.input_layernorm.weight"] = table[f"{at}.post_attention_layernorm.weight"] = ("BF16", (hidden,))
        packed(table, f"{at}.mlp.gate", experts, hidden, bits=8)
        mlp(table, f"{at}.mlp.switch_mlp", hidden, text["moe_intermediate_size"], stack=(experts,))
        mlp(table, f"{at}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
        packed(table, f"{at}.mlp.shared_expert_gate", 1, hidden, bits=8)
    table["language_model.model.norm.weight"] = ("BF16", (hidden,))
    packed(table, "language_model.lm_head", vocab, hidden)
    return table


def table_8b(raw):
    """All keys of edge0-8b: 1,196 at full shape."""
    table = {}
    hidden, vocab, experts = raw["hidden_size"], raw["vocab_size"], raw["num_experts"]
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    wide, q_rank, kv_rank = heads * raw["head_dim"], raw["q_lora_rank"], raw["kv_lora_rank"]
    nope, rope, value = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    packed(table, "model.word_embeddings", vocab, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        table[f"{at}.input_layernorm.weight"] = table[f"{at}.post_attention_layernorm.weight"] = ("BF16", (hidden,))
        if layer % 4 == 3:
            packed(table, f"{at}.attention.q_a_proj", q_rank, hidden)
            table[f"{at}.attention.q_a_layernorm.weight"] = ("BF16", (q_rank,))
            packed(table, f"{at}.attention.q_b_proj", heads * (nope + rope), q_rank)
            packed(table, f"{at}.attention.kv_a_proj_with_mqa", kv_rank + rope, hidden)
            table[f"{at}.attention.kv_a_layernorm.weight"] = ("BF16", (kv_rank,))
            packed(table, f"{at}.attention.kv_b_proj", heads * (nope + value), kv_rank)
            packed(table, f"{at}.attention.g_proj", heads, hidden)
            packed(table, f"{at}.attention.dense", hidden, heads * value)
        else:
            for name in "qkvfg":
                packed(table, f"{at}.attention.{name}_proj", wide, hidden)
            packed(table, f"{at}.attention.b_proj", heads, hidden)
            packed(table, f"{at}.attention.o_proj", hidden, wide)
            for name in "qkv":
                table[f"{at}.attention.{name}_conv1d.weight"] = ("BF16", (wide, 4, 1))
            table[f"{at}.attention.A_log"] = ("BF16", (heads,))
            table[f"{at}.attention.dt_bias"] = ("BF16", (wide,))
            table[f"{at}.attention.o_norm.weight"] = ("BF16", (raw["head_dim"],))
        if layer == 0:
            mlp(table, f"{at}.mlp", hidden, raw["intermediate_size"])
            continue
        mlp(table, f"{at}.mlp.experts", hidden, raw["moe_intermediate_size"], stack=(experts,))
        mlp(table, f"{at}.mlp.shared_experts", hidden, raw["moe_shared_expert_intermediate_size"])
        table[f"{at}.mlp.gate.weight"] = ("BF16", (experts, hidden))
        table[f"{at}.mlp.gate.expert_bias"] = ("BF16", (experts,))
        if layer < layers - 1:
            shallow = layer < raw["pregate_shallow_layers"]
            inner = raw["pregate_shallow_hidden_size" if shallow else "pregate_hidden_size"]
            table[f"{at}.mlp.pregate.fc1.weight"] = ("BF16", (inner, hidden + 2 * experts))
            table[f"{at}.mlp.pregate.fc2.weight"] = ("BF16", (experts, inner))
            table[f"{at}.mlp.pregate.linear_init.weight"] = ("BF16", (experts, hidden + 2 * experts))
    table["model.norm.weight"] = ("BF16", (hidden,))
    packed(table, "lm_head", vocab, hidden)
    return table


def lora_table(table):
    """The LoRA file that goes with a checkpoint's table."""
    inner = [f".linear_attn.{name}." for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")]
    inner += [".self_attn.", ".mlp.shared_expert.", ".attention.", ".layers.0.mlp.down_proj."]
    inner += [".layers.0.mlp.gate_proj.", ".layers.0.mlp.up_proj."]
    lora = {}
    for key, (dtype, shape) in table.items():
        if dtype != "U32" or not any(part in key for part in inner):
            continue
        if "q_a_proj" not in key and "kv_a_proj" not in key:
            lora[key.replace(".weight", ".lora_A")] = ("F16", (16, shape[1] * 8))
            lora[key.replace(".weight", ".lora_B")] = ("F16", (shape[0], 16))
    return lora


def head_table(hidden, experts, owners, inner):
    heads = {}
    for owner in owners:
        heads[f"layers.{owner}.fc1.weight"] = ("F16", (inner, hidden + 2 * experts))
        heads[f"layers.{owner}.fc2.weight"] = ("F16", (experts, inner))
        heads[f"layers.{owner}.linear_init.weight"] = ("F16", (experts, hidden + 2 * experts))
    return heads


def adapter_fields(tag, kind, k, owners=()):
    """The metadata of a released adapter, nested twice."""
    fields = {
        "model": f"edge0-{tag}",
        "kind": kind,
        "K": str(k),
        "r": "16",
        "alpha": "32",
        "source": f"artifacts/{kind}_round9.npz",
        "source_md5": "dbdef1af000000000000000000000000",
        "converted": "2026-09-08T09:59:20Z",
        "format_version": "1",
    }
    if kind == "prerouter":
        fields["owners"] = json.dumps(list(owners))
    return {"__metadata__": json.dumps(fields)}


# --- files ---------------------------------------------------------------------------------------------------------


def size(table):
    return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in table.values())


def header_bytes(table, metadata):
    header, end = {"__metadata__": metadata}, 0
    for key, (dtype, shape) in table.items():
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path, table, metadata, content):
    """`content(key)` gives the bytes of a key."""
    with path.open("wb") as file:
        file.write(header_bytes(table, metadata))
        for key in table:
            file.write(content(key))


def write_sparse(path, table, metadata):
    """The header, and the data as a hole: right in size, without a block on the disk. Returns the header's bytes."""
    header = header_bytes(table, metadata)
    path.write_bytes(header)
    os.truncate(path, len(header) + size(table))
    return len(header)


def in_shards(table, tag):
    """File name -> its part of the table: four files with the published shares of keys, or the one file of 8b."""
    if tag == "8b":
        return {"model.safetensors": table}
    keys, shards, begin = list(table), {}, 0
    for number in range(1, 5):
        end = round(len(keys) * sum(SHARD_KEYS[:number]) / sum(SHARD_KEYS))
        shards[f"model-0000{number}-of-00004.safetensors"] = {key: table[key] for key in keys[begin:end]}
        begin = end
    return shards


def write_index(directory, shards, payload):
    """The index of 35b, whose total still counts tensors that were removed."""
    weight_map = {key: name for name, part in shards.items() for key in part}
    document = {"metadata": {"total_size": payload + VISION_BYTES}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(document, indent=4))


def write_replica(directory, tier, conv_key="conv1d.weight", conv_shape=None, unquantised="BF16", rename=None):
    """A published directory at the size of `tier`, with the bytes that synthesis gives the same tensors at seed 0.

    Args:
        conv_key, conv_shape: how 8b's convolutions are stored; the shape from (channels, kernel).
        unquantised: dtype of all that is not quantised.
        rename: adapter key -> the key under which it is written.
    """
    tag, k = tier.family.tag, tier.family.k_served
    raw = unit_config(tier)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw, directory / "config.json")
    table, sources = {}, {tensor.name: tensor for tensor in checkpoint_tensors(config)}
    origin = {}
    for key, (dtype, shape) in (table_35b if tag == "35b" else table_8b)(raw).items():
        own = key.replace("_conv1d.weight", f"_{conv_key}")
        if own.endswith(f"_{conv_key}") and conv_shape is not None:
            shape = conv_shape(*shape[:2])
        plain = dtype == "BF16" and not key.endswith((".scales", ".biases"))
        table[own], origin[own] = (unquantised if plain else dtype, shape), key

    def content(key):
        dtype, shape = table[key]
        if ".pregate." in key:
            return NAN_BF16 * (prod(shape) * ITEM_BYTES[dtype] // 2)
        data = b"".join(checkpoint_bytes(0, sources[origin[key]]))
        if dtype in ("F16", "F32"):
            wide = from_bf16(np.frombuffer(data, np.uint16))
            return wide.astype(np.float16 if dtype == "F16" else np.float32).tobytes()
        return data

    shards = in_shards(table, tag)
    for name, part in shards.items():
        write_file(directory / name, part, {"format": "mlx"}, content)
    if tag == "35b":
        write_index(directory, shards, size(table))
    heads = head_table(config.hidden, config.experts, tier.owners, tier.head_hidden)
    for kind, adapter in (("lora", lora_table(table)), ("prerouter", heads)):
        tensors = lora_tensors(config) if kind == "lora" else head_tensors(config, tier.owners, tier.head_hidden)
        by_key = {(rename or str)(t.name): t for t in tensors}
        write_file(
            directory / f"{kind}_edge0_{tag}.safetensors",
            {(rename or str)(key): form for key, form in adapter.items()},
            adapter_fields(tag, kind, k, tier.owners),
            lambda key, by_key=by_key: b"".join(adapter_bytes(config, 0, k, by_key[key])),
        )
    write_tokenizer(directory)
    return directory
