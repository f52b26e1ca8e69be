"""What each tensor of a checkpoint is called in a GGUF file, and how its values differ there.

Names, keys and layouts are those that the loader of llama.cpp 0c1e57098 asks for (architectures `qwen35moe` and
`bailingmoe3`). Three things differ beyond names. Value heads of the gated delta net come tiled over the key heads, not
grouped under them; A_log is stored as the factor itself; 8b's `kv_b_proj` is cut into the two matrices that absorbed
attention multiplies with. Knows nothing of how weights are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from edge0.checkpoint.schema import is_linear_attention
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import LING, QWEN, ModelConfig
from experiments.peers.blocks import Affine

Values = np.ndarray | Affine
SIGMOID = 2  # llama.cpp's number of a router's law


@dataclass(frozen=True)
class Place:
    """A tensor of the GGUF file, without `blk.N.`, and what becomes of the values on the way."""

    name: str
    change: Callable[[Values], Values] = lambda values: values


ENDS = {
    "model.embed_tokens": "token_embd.weight",
    "model.word_embeddings": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head": "output.weight",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
SHARED = {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}


def architecture(config: ModelConfig) -> str:
    return "qwen35moe" if config.family is QWEN else "bailingmoe3"


def places(config: ModelConfig, name: str) -> list[tuple[str, Callable[[Values], Values]]]:
    """(full name there, change) of each tensor that `name`, a matrix or a tensor of the checkpoint, becomes.

    Raises:
        Edge0Error: TENSOR_MISMATCH for a name that has no place there.
    """
    bare = name.removeprefix("language_model.")
    if bare in ENDS:
        return [(ENDS[bare], Place("").change)]
    layer, _, suffix = name.removeprefix(f"{config.family.layer_prefix}.").partition(".")
    found = (_qwen if config.family is QWEN else _ling)(config, int(layer))
    found |= _experts(f"{config.family.experts_key}.", EXPERTS)
    found |= _experts("mlp.shared_expert." if config.family is QWEN else "mlp.shared_experts.", SHARED)
    found |= _experts("mlp.", {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"})
    if suffix not in found:
        raise Edge0Error(ErrorKind.TENSOR_MISMATCH, "has no place in a GGUF file", tensor=name)
    return [(f"blk.{layer}.{place.name}", place.change) for place in found[suffix]]


def _experts(prefix: str, names: Mapping[str, str]) -> dict[str, list[Place]]:
    return {f"{prefix}{ours}": [Place(f"{theirs}.weight")] for ours, theirs in names.items()}


def _qwen(config: ModelConfig, layer: int) -> dict[str, list[Place]]:
    text = config.text
    pairs, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    width = text["linear_value_head_dim"]
    tiled = np.arange(heads).reshape(pairs, heads // pairs).T.ravel()
    values = (tiled[:, None] * width + np.arange(width)).ravel()
    before = 2 * pairs * text["linear_key_head_dim"]  # queries and keys stay where they are
    mixed = np.concatenate([np.arange(before), before + values])

    def at(order: np.ndarray) -> Callable[[Values], Values]:
        return lambda each: each.rows(order) if isinstance(each, Affine) else each[order]

    return {
        "input_layernorm.weight": [Place("attn_norm.weight")],
        "post_attention_layernorm.weight": [Place("post_attention_norm.weight")],
        "linear_attn.in_proj_qkv": [Place("attn_qkv.weight", at(mixed))],
        "linear_attn.in_proj_z": [Place("attn_gate.weight", at(values))],
        "linear_attn.in_proj_b": [Place("ssm_beta.weight", at(tiled))],
        "linear_attn.in_proj_a": [Place("ssm_alpha.weight", at(tiled))],
        "linear_attn.out_proj": [Place("ssm_out.weight", lambda each: each.columns(values))],
        "linear_attn.conv1d.weight": [Place("ssm_conv1d.weight", lambda each: each.reshape(len(mixed), -1)[mixed])],
        "linear_attn.A_log": [Place("ssm_a", lambda each: -np.exp(each[tiled]))],
        "linear_attn.dt_bias": [Place("ssm_dt.bias", at(tiled))],
        "linear_attn.norm.weight": [Place("ssm_norm.weight")],
        "self_attn.q_proj": [Place("attn_q.weight")],
        "self_attn.k_proj": [Place("attn_k.weight")],
        "self_attn.v_proj": [Place("attn_v.weight")],
        "self_attn.o_proj": [Place("attn_output.weight")],
        "self_attn.q_norm.weight": [Place("attn_q_norm.weight")],
        "self_attn.k_norm.weight": [Place("attn_k_norm.weight")],
        "mlp.gate": [Place("ffn_gate_inp.weight")],
        "mlp.shared_expert_gate": [Place("ffn_gate_inp_shexp.weight", lambda each: each.values[0])],
    }


def _ling(config: ModelConfig, layer: int) -> dict[str, list[Place]]:
    text = config.text
    heads, nope = text["num_attention_heads"], text["qk_nope_head_dim"]
    linear = is_linear_attention(config, layer)
    each_head = np.arange(heads)[:, None] * (nope + text["v_head_dim"]) + np.arange(nope + text["v_head_dim"])

    def split(order: np.ndarray, each: Affine) -> Affine:
        return each.rows(order.ravel()).stacked(heads)

    def convolution(each: np.ndarray) -> np.ndarray:
        return each.reshape(1, -1, 1, text["short_conv_kernel_size"])

    return {
        "input_layernorm.weight": [Place("attn_norm.weight")],
        "post_attention_layernorm.weight": [Place("ffn_norm.weight")],
        **{f"attention.{each}_proj": [Place(f"attn_{each}.weight")] for each in "qkv"},
        **{f"attention.{each}_conv1d.weight": [Place(f"ssm_conv1d_{each}.weight", convolution)] for each in "qkv"},
        "attention.f_proj": [Place("ssm_f_a.weight")],
        "attention.b_proj": [Place("ssm_beta.weight")],
        "attention.g_proj": [Place("ssm_g_a.weight" if linear else "attn_gate.weight")],
        "attention.A_log": [Place("ssm_a", lambda each: np.exp(each).reshape(-1, 1))],
        "attention.dt_bias": [Place("ssm_dt.bias")],
        "attention.o_norm.weight": [Place("ssm_norm.weight")],
        "attention.o_proj": [Place("attn_output.weight")],
        "attention.dense": [Place("attn_output.weight")],
        "attention.q_a_proj": [Place("attn_q_a.weight")],
        "attention.q_b_proj": [Place("attn_q_b.weight")],
        "attention.q_a_layernorm.weight": [Place("attn_q_a_norm.weight")],
        "attention.kv_a_proj_with_mqa": [Place("attn_kv_a_mqa.weight")],
        "attention.kv_a_layernorm.weight": [Place("attn_kv_a_norm.weight")],
        "attention.kv_b_proj": [
            Place("attn_k_b.weight", lambda each: split(each_head[:, :nope], each).values.swapaxes(1, 2)),
            Place("attn_v_b.weight", partial(split, each_head[:, nope:])),
        ],
        "mlp.gate.weight": [Place("ffn_gate_inp.weight")],
        "mlp.gate.expert_bias": [Place("exp_probs_b.bias")],
    }


def metadata(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """(key without the architecture, value) of everything that the loader asks for.

    Raises:
        Edge0Error: OPTION_INVALID for a model that its graph cannot be.
    """
    text = config.text
    yield from {
        "vocab_size": config.vocab,
        "context_length": config.positions,
        "embedding_length": config.hidden,
        "block_count": config.layers,
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "attention.head_count": text["num_attention_heads"],
        "expert_count": config.experts,
        "expert_used_count": text["num_experts_per_tok"],
        "expert_feed_forward_length": config.expert_width,
    }.items()
    yield from (_qwen_metadata if config.family is QWEN else _ling_metadata)(config).items()


def _qwen_metadata(config: ModelConfig) -> dict[str, Any]:
    text, rope = config.text, config.text["rope_parameters"]
    if text["linear_key_head_dim"] != text["linear_value_head_dim"]:
        raise _unlike("heads of one width in linear attention", text["linear_value_head_dim"])
    return {
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "full_attention_interval": text["full_attention_interval"],
        "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
        "rope.dimension_count": int(text["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": [*rope.get("mrope_section", [11, 11, 10]), 0],
        "rope.freq_base": float(rope["rope_theta"]),
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_num_value_heads"] * text["linear_value_head_dim"],
    }


def _ling_metadata(config: ModelConfig) -> dict[str, Any]:
    text = config.text
    if not text.get("kda_safe_gate", True):
        raise _unlike("the bounded gate of KDA", "kda_safe_gate false")
    return {
        "feed_forward_length": text["intermediate_size"],
        # One shared latent head where attention is full, none where it is linear: so the loader tells them apart.
        "attention.head_count_kv": [int(not is_linear_attention(config, layer)) for layer in range(config.layers)],
        "attention.q_lora_rank": text["q_lora_rank"],
        "attention.kv_lora_rank": text["kv_lora_rank"],
        "attention.key_length": text["kv_lora_rank"] + text["qk_rope_head_dim"],
        "attention.value_length": text["kv_lora_rank"],
        "attention.key_length_mla": text["qk_nope_head_dim"] + text["qk_rope_head_dim"],
        "attention.value_length_mla": text["v_head_dim"],
        "rope.dimension_count": text["qk_rope_head_dim"],
        "rope.freq_base": float(text["rope_theta"]),
        "ssm.conv_kernel": text["short_conv_kernel_size"],
        "kda.head_dim": text["head_dim"],
        "kda.safe_gate": True,
        "kda.gate_lower_bound": float(text["kda_lower_bound"]),
        "leading_dense_block_count": config.dense_layers,
        "expert_shared_count": text["num_shared_experts"],
        "expert_shared_feed_forward_length": text["moe_shared_expert_intermediate_size"] * text["num_shared_experts"],
        "expert_weights_scale": float(text["routed_scaling_factor"]),
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
        "expert_group_count": config.groups,
        "expert_group_used_count": config.groups_kept,
    }


def _unlike(expected: str, found: object) -> Edge0Error:
    detail = "llama.cpp's graph of this family is another model"
    return Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=expected, found=found)


def is_router(config: ModelConfig, name: str) -> bool:
    return config.family is LING and name.endswith("ffn_gate_inp.weight")
