"""The shapes that can be synthesised.

A *tier* is a family at a shape: only needed to make a checkpoint, never to serve one. Knows nothing of MLX, of weights,
or of how a model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from edge0.families import LING, QWEN, Family

LEAST_LAYERS = 6  # of a tier: one full attention layer, and three predicted ones for the default launch groups


@dataclass(frozen=True)
class Tier:
    """A shape that `edge0 synth` can make."""

    name: str
    family: Family
    text: Mapping[str, Any]
    owners: tuple[int, ...]  # layers that own a head: head N predicts layer N+1
    head_hidden: int
    shards: int
    ks: tuple[int, ...] = (2, 4, 8)

    def first_owner(self, layers: int) -> int:
        """The first layer with a head in a model of so many layers: gate layers are in proportion to the tier's."""
        proportional = round(self.owners[0] * layers / self.text["num_hidden_layers"])
        return max(self.text.get("first_k_dense_replace", 0), proportional)

    def with_layers(self, layers: int) -> Tier:
        """The same widths in fewer layers.

        The gate layers before the first head shrink in proportion; the last layer is predicted, or not, as before.

        Raises:
            Edge0Error: OPTION_INVALID.
        """
        present = self.text["num_hidden_layers"]
        if not LEAST_LAYERS <= layers <= present:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                f"so many layers of {self.name} cannot be made",
                tensor="layers",
                expected=f"{LEAST_LAYERS} to {present}",
                found=layers,
            )
        return replace(
            self,
            name=f"{self.name}-{layers}-layers",
            text={**self.text, "num_hidden_layers": layers},
            owners=tuple(range(self.first_owner(layers), layers - 1)),
        )


def _qwen(layers: int, hidden: int, experts: int, width: int, heads: int, head_dim: int, linear: int) -> dict[str, Any]:
    rotary = head_dim // 4 // 2
    return {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 512,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 4,
        "linear_num_key_heads": linear,
        "linear_num_value_heads": 2 * linear,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3],
            "mrope_interleaved": True,
        },
    }


def _ling(layers: int, hidden: int, experts: int, width: int, heads: int, rank: int, head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "layer_group_size": 4,
        "q_lora_rank": rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "v_head_dim": head_dim,
        "short_conv_kernel_size": 4,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "no_kda_lora": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6000000.0,
        "rope_interleave": True,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "torch_dtype": "bfloat16",
    }


# What the released models have and the formulas above do not.
_SHAPE_35B = {
    "vocab_size": 248320,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_SHAPE_8B = {"vocab_size": 157184, "intermediate_size": 4608, "kv_lora_rank": 512, "max_position_embeddings": 131072}

# Trained on two cores: every second layer has full attention, and the recurrence's state is a quarter of unit-35b's.
_TINY_35B = {"full_attention_interval": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
_TINY_8B = {"layer_group_size": 2}

# Gate layers in proportion to the released models: 35b 0-6 and 39 of 40, 8b 1-7 of 24 (design, section 3 rule 8).
TIERS: dict[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier("shape-35b", QWEN, _qwen(40, 2048, 256, 512, 16, 256, 16) | _SHAPE_35B, tuple(range(6, 39)), 512, 4, (4,)),
        Tier("shape-8b", LING, _ling(24, 1536, 128, 512, 16, 256, 128) | _SHAPE_8B, tuple(range(7, 23)), 512, 1, (8,)),
        Tier("mini-35b", QWEN, _qwen(12, 1024, 64, 256, 8, 128, 4), tuple(range(1, 11)), 128, 4),
        Tier("mini-8b", LING, _ling(12, 1024, 64, 256, 8, 128, 64), tuple(range(3, 11)), 128, 1),
        Tier("unit-35b", QWEN, _qwen(8, 128, 32, 64, 4, 32, 2), tuple(range(0, 7)), 64, 4),
        Tier("unit-8b", LING, _ling(8, 128, 32, 64, 4, 64, 32), tuple(range(2, 7)), 64, 1),
        Tier("tiny-35b", QWEN, _qwen(6, 128, 32, 64, 4, 32, 2) | _TINY_35B, tuple(range(5)), 128, 1, (4,)),
        Tier("tiny-8b", LING, _ling(6, 128, 32, 64, 4, 64, 32) | _TINY_8B, tuple(range(1, 5)), 128, 1, (4,)),
    )
}


def find_tier(name: str) -> Tier:
    """The tier of that name.

    Raises:
        Edge0Error: TIER_UNKNOWN.
    """
    if name not in TIERS:
        raise Edge0Error(
            ErrorKind.TIER_UNKNOWN, "no such tier", tensor="tier", expected=", ".join(TIERS), found=repr(name)
        )
    return TIERS[name]
