"""The two model families, and what a directory's config.json says of its model.

A *family* is an architecture with its file layout, routing law and prerouter rules; a directory says through its
config.json which one it is (`read_config`). Knows nothing of MLX, of weights, or of how a model runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edge0.errors import Edge0Error, ErrorKind

GROUP_SIZE = 64  # inputs that share one scale and one bias
EXPERT_BITS = 4
MOST_LAYERS, LARGEST = 1000, 2**31 - 1  # beyond these a config.json is damaged
POSITIONS = 131072  # tokens that a model was made for where config.json does not say (mlx-lm's own default)


@dataclass(frozen=True)
class Family:
    """What sets one architecture apart (paper sections 3.2, 3.3; Table 1)."""

    name: str
    tag: str  # how adapter metadata names the model
    architecture: str
    layer_prefix: str
    experts_key: str
    adapter_stem: str
    config_key: str | None  # where config.json nests the text model
    router: str  # "softmax" or "sigmoid-groups"
    last_layer_predicted: bool  # 35b computes a prediction for its last layer and never uses it
    first_step_predicted: bool  # 8b's heads also run on the prompt's last position
    k_served: int
    shape_fields: tuple[str, ...]  # further positive integers that the tensors' shapes depend on


QWEN = Family(
    name="qwen",
    tag="35b",
    architecture="Qwen3_5MoeForConditionalGeneration",
    layer_prefix="language_model.model.layers",
    experts_key="mlp.switch_mlp",
    adapter_stem="edge0_35b",
    config_key="text_config",
    router="softmax",
    last_layer_predicted=False,
    first_step_predicted=False,
    k_served=4,
    shape_fields=(
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
)
LING = Family(
    name="ling",
    tag="8b",
    architecture="BailingMoeV3ForCausalLM",
    layer_prefix="model.layers",
    experts_key="mlp.experts",
    adapter_stem="edge0_8b",
    config_key=None,
    router="sigmoid-groups",
    last_layer_predicted=True,
    first_step_predicted=True,
    k_served=8,
    shape_fields=(
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
)
FAMILIES = {family.architecture: family for family in (QWEN, LING)}


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that the engine itself reads; `text` holds all of the text model's."""

    family: Family
    raw: Mapping[str, Any]
    text: Mapping[str, Any]
    layers: int
    hidden: int
    experts: int
    expert_width: int
    vocab: int
    dense_layers: int  # leading layers without experts
    groups: int  # expert groups of the router (1: no groups)
    groups_kept: int
    positions: int  # tokens of a request that the model was made for

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.dense_layers, self.layers))

    def check_k(self, k: int) -> int:
        """K itself, if that many experts can be selected.

        Raises:
            Edge0Error: K_INVALID.
        """
        ceiling = self.experts // self.groups * self.groups_kept
        if not 1 <= k <= ceiling:
            raise Edge0Error(
                ErrorKind.K_INVALID,
                f"K={k} cannot be routed by this model ({self.experts} experts)",
                expected=f"1 to {ceiling}",
                found=k,
            )
        return k


def read_config(directory: Path | str) -> ModelConfig:
    """Read and check config.json.

    Raises:
        Edge0Error: FILE_MISSING, CONFIG_MALFORMED, CONFIG_FAMILY.
    """
    path = Path(directory) / "config.json"
    if path.exists() and not path.is_file():  # reading a FIFO would wait for ever
        raise Edge0Error(ErrorKind.CONFIG_MALFORMED, "is not a regular file", path=path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Edge0Error(
            ErrorKind.FILE_MISSING, "no config.json", path=path, hint="name the directory of a checkpoint"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise Edge0Error(ErrorKind.CONFIG_MALFORMED, f"cannot be read as JSON ({error})", path=path) from error
    return parse_config(raw, path)


def parse_config(raw: Any, path: Path) -> ModelConfig:
    """The checked view of a decoded config.json (see `read_config`)."""
    if not isinstance(raw, dict):
        raise Edge0Error(ErrorKind.CONFIG_MALFORMED, "is not a JSON object", path=path)
    names = raw.get("architectures")
    known = [name for name in names if isinstance(name, str) and name in FAMILIES] if isinstance(names, list) else []
    family = FAMILIES[known[0]] if known else None
    if family is None:
        raise Edge0Error(
            ErrorKind.CONFIG_FAMILY,
            "not an architecture that Edge0 serves",
            path=path,
            tensor="architectures",
            expected=" or ".join(FAMILIES),
            found=names,
        )
    text = raw.get(family.config_key) if family.config_key else raw
    if not isinstance(text, dict):
        raise Edge0Error(ErrorKind.CONFIG_MALFORMED, "is not an object", path=path, tensor=family.config_key)

    def field(key: str, default: int | None = None, most: int = LARGEST) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise Edge0Error(
                ErrorKind.CONFIG_MALFORMED,
                "is not an integer of a model's size",
                path=path,
                tensor=key,
                expected=f"1 to {most}",
                found=repr(value),
            )
        return value

    grouped = family.router == "sigmoid-groups"
    config = ModelConfig(
        family=family,
        raw=raw,
        text=text,
        layers=field("num_hidden_layers", most=MOST_LAYERS),
        hidden=field("hidden_size"),
        experts=field("num_experts"),
        expert_width=field("moe_intermediate_size"),
        vocab=field("vocab_size"),
        dense_layers=field("first_k_dense_replace", 1) if grouped else 0,
        groups=field("n_group") if grouped else 1,
        groups_kept=field("topk_group") if grouped else 1,
        positions=field("max_position_embeddings", POSITIONS),
    )
    for key in family.shape_fields:
        field(key)

    def refuse(key: str, detail: str, expected: str, found: object) -> NoReturn:
        raise Edge0Error(ErrorKind.CONFIG_MALFORMED, detail, path=path, tensor=key, expected=expected, found=found)

    rope = text.get("rope_parameters", {}) if family is QWEN else text
    if not isinstance(rope, dict):
        refuse("rope_parameters", "is not an object", "an object", repr(rope))
    for place, key, default, most in (
        (text, "rms_norm_eps", 1e-6, 1.0),
        (rope, "rope_theta", 1e4, 1e12),
        (rope, "partial_rotary_factor", 1.0, 1.0),
    ):
        value = place.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            refuse(key, "is not a number that a model can have", f"above 0, up to {most:g}", repr(value))
    if config.experts % config.groups:
        refuse("n_group", f"{config.experts} experts do not divide", f"a divisor of {config.experts}", config.groups)
    if config.groups_kept > config.groups:
        refuse("topk_group", "more groups are kept than there are", f"up to {config.groups}", config.groups_kept)
    quantization = raw.get("quantization", raw.get("quantization_config"))
    stated = [quantization.get(key) for key in ("bits", "group_size")] if isinstance(quantization, dict) else None
    if stated != [EXPERT_BITS, GROUP_SIZE]:
        refuse("quantization", "not the released quantisation", f"{EXPERT_BITS} bits, groups of {GROUP_SIZE}", stated)
    for key, width in (("hidden_size", config.hidden), ("moe_intermediate_size", config.expert_width)):
        if width % GROUP_SIZE:
            refuse(key, "is not a multiple of the quantisation group", f"a multiple of {GROUP_SIZE}", width)
    return config
