"""Every tensor of a checkpoint and of its adapters, by name, dtype and shape, as the released files have them.

The schema is a function of config.json alone; synthesis writes it, loading finds what it lists, tests count it. It
does not know values. Linear layers are listed once and expand to the three tensors of an affine quantised matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge0.checkpoint.header import CheckpointIndex, TensorEntry
from edge0.checkpoint.layout import expert_tensor, part_specs
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import EXPERT_BITS, GROUP_SIZE, QWEN, ModelConfig

ROUTER_BITS = 8  # 35b keeps its routers and shared-expert gates at 8 bits
UNQUANTISED = ("BF16", "F16", "F32")  # dtypes in which a checkpoint may hold what is not quantised
LEFT_OVER = (".mlp.pregate.", "vision_tower.", "model.visual.", "mtp.")  # in names of tensors that serve nothing here
LORA_RANK = 16
LORA_ALPHA = 32


@dataclass(frozen=True)
class Linear:
    """A quantised matrix `[out, in]`; experts stack `experts` of them on axis 0."""

    name: str
    out: int
    inp: int
    bits: int = EXPERT_BITS
    experts: int | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        stack = () if self.experts is None else (self.experts,)
        packed, groups = self.inp * self.bits // 32, self.inp // GROUP_SIZE
        return (
            Tensor(f"{self.name}.weight", "U32", (*stack, self.out, packed), self),
            Tensor(f"{self.name}.scales", "BF16", (*stack, self.out, groups), self),
            Tensor(f"{self.name}.biases", "BF16", (*stack, self.out, groups), self),
        )


@dataclass(frozen=True)
class Tensor:
    """One tensor as synthesis writes it. A file may also hold it under one of `spellings`, or in one of `shapes`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    linear: Linear | None = None  # set on the three pieces of a quantised matrix
    spellings: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()  # with the elements in the same order

    @property
    def is_left_over(self) -> bool:
        return is_left_over(self.name)

    @property
    def is_expert(self) -> bool:
        return self.linear is not None and self.linear.experts is not None


def raw(name: str, *shape: int) -> Tensor:
    """An unquantised bf16 tensor."""
    return Tensor(name, "BF16", shape)


def _convolution(prefix: str, channels: int, kernel: int) -> Tensor:
    """A depthwise convolution of the 8b family, which exporters store in three shapes and under two names."""
    return Tensor(
        f"{prefix}.weight",
        "BF16",
        (channels, kernel, 1),
        spellings=(f"{prefix}.conv.weight",),
        shapes=((channels, kernel), (channels, 1, kernel)),
    )


def is_left_over(name: str) -> bool:
    """Whether a tensor of this name is known to serve nothing: an earlier predictor, vision, multi-token heads."""
    return any(part in name for part in LEFT_OVER)


def find_tensor(index: CheckpointIndex, tensor: Tensor) -> TensorEntry:
    """Where `tensor` lies, in any of the forms that released files have.

    Raises:
        Edge0Error: TENSOR_MISSING; TENSOR_MISMATCH for another dtype or shape; TENSOR_DUPLICATE under two names.
    """
    held = [name for name in (tensor.name, *tensor.spellings) if name in index.tensors]
    if len(held) > 1:
        entry = index.tensors[held[1]]
        raise Edge0Error(
            ErrorKind.TENSOR_DUPLICATE, f"the same tensor is there as {held[0]}", path=entry.path, tensor=entry.name
        )
    name = held[0] if held else tensor.name
    entry = index.require(name)
    dtype = entry.dtype if tensor.linear is None and entry.dtype in UNQUANTISED else tensor.dtype
    shape = entry.shape if entry.shape in tensor.shapes else tensor.shape
    return index.require(name, dtype, shape)


def unplaced_tensors(index: CheckpointIndex, config: ModelConfig) -> list[TensorEntry]:
    """The tensors that this model has no use for and that are not known left-overs: the config is of another model."""
    known = {name for tensor in checkpoint_tensors(config) for name in (tensor.name, *tensor.spellings)}
    return [entry for name, entry in sorted(index.tensors.items()) if name not in known and not is_left_over(name)]


def checkpoint_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """All tensors in file order: embedding, layers from first to last, final norm, head."""
    top = "language_model." if config.family is QWEN else ""
    embedding = "model.embed_tokens" if config.family is QWEN else "model.word_embeddings"
    yield from Linear(f"{top}{embedding}", config.vocab, config.hidden).tensors()
    for layer in range(config.layers):
        prefix = f"{config.family.layer_prefix}.{layer}"
        yield raw(f"{prefix}.input_layernorm.weight", config.hidden)
        yield raw(f"{prefix}.post_attention_layernorm.weight", config.hidden)
        for item in _attention(config, layer, prefix):
            yield from item.tensors() if isinstance(item, Linear) else (item,)
        for item in _mlp(config, layer, prefix):
            yield from item.tensors() if isinstance(item, Linear) else (item,)
    yield raw(f"{top}model.norm.weight", config.hidden)
    yield from Linear(f"{top}lm_head", config.vocab, config.hidden).tensors()


def is_linear_attention(config: ModelConfig, layer: int) -> bool:
    """Gated DeltaNet (35b) or KDA (8b) rather than full attention."""
    key = "full_attention_interval" if config.family is QWEN else "layer_group_size"
    period = config.text[key]
    if (layer + 1) % period == 0:
        return False
    return config.family is QWEN or layer < config.layers // period * period


def attention_linears(config: ModelConfig, layer: int, prefix: str) -> list[Linear]:
    """The quantised matrices of one layer's attention, in file order."""
    return [item for item in _attention(config, layer, prefix) if isinstance(item, Linear)]


def _attention(config: ModelConfig, layer: int, prefix: str) -> list[Linear | Tensor]:
    text, hidden = config.text, config.hidden
    linear = is_linear_attention(config, layer)
    if config.family is QWEN:
        if linear:
            at = f"{prefix}.linear_attn"
            key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
            heads = text["linear_num_value_heads"]
            value = heads * text["linear_value_head_dim"]
            mixed = 2 * key + value
            return [
                Linear(f"{at}.in_proj_qkv", mixed, hidden),
                Linear(f"{at}.in_proj_z", value, hidden),
                Linear(f"{at}.in_proj_b", heads, hidden),
                Linear(f"{at}.in_proj_a", heads, hidden),
                Linear(f"{at}.out_proj", hidden, value),
                raw(f"{at}.conv1d.weight", mixed, text["linear_conv_kernel_dim"], 1),
                raw(f"{at}.A_log", heads),
                raw(f"{at}.dt_bias", heads),
                raw(f"{at}.norm.weight", text["linear_value_head_dim"]),
            ]
        at, width = f"{prefix}.self_attn", text["head_dim"]
        query, pair = text["num_attention_heads"] * width, text["num_key_value_heads"] * width
        return [
            Linear(f"{at}.q_proj", 2 * query, hidden),
            Linear(f"{at}.k_proj", pair, hidden),
            Linear(f"{at}.v_proj", pair, hidden),
            Linear(f"{at}.o_proj", hidden, query),
            raw(f"{at}.q_norm.weight", width),
            raw(f"{at}.k_norm.weight", width),
        ]
    at, heads = f"{prefix}.attention", text["num_attention_heads"]
    if linear:
        width = heads * text["head_dim"]
        kernel = text["short_conv_kernel_size"]
        return [
            *(Linear(f"{at}.{name}_proj", width, hidden) for name in "qkvfg"),
            Linear(f"{at}.b_proj", heads, hidden),
            Linear(f"{at}.o_proj", hidden, width),
            *(_convolution(f"{at}.{name}_conv1d", width, kernel) for name in "qkv"),
            raw(f"{at}.A_log", heads),
            raw(f"{at}.dt_bias", width),
            raw(f"{at}.o_norm.weight", text["head_dim"]),
        ]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    return [
        Linear(f"{at}.q_a_proj", q_rank, hidden),
        raw(f"{at}.q_a_layernorm.weight", q_rank),
        Linear(f"{at}.q_b_proj", heads * (nope + rope), q_rank),
        Linear(f"{at}.kv_a_proj_with_mqa", kv_rank + rope, hidden),
        raw(f"{at}.kv_a_layernorm.weight", kv_rank),
        Linear(f"{at}.kv_b_proj", heads * (nope + value), kv_rank),
        Linear(f"{at}.g_proj", heads, hidden),
        Linear(f"{at}.dense", hidden, heads * value),
    ]


def _mlp(config: ModelConfig, layer: int, prefix: str) -> list[Linear | Tensor]:
    text, hidden = config.text, config.hidden
    if layer < config.dense_layers:
        return mlp_linears(f"{prefix}.mlp", hidden, text["intermediate_size"])
    items: list[Linear | Tensor] = []
    if config.family is QWEN:
        items.append(Linear(f"{prefix}.mlp.gate", config.experts, hidden, ROUTER_BITS))
        items.append(Linear(f"{prefix}.mlp.shared_expert_gate", 1, hidden, ROUTER_BITS))
        items += mlp_linears(f"{prefix}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
    else:
        items.append(raw(f"{prefix}.mlp.gate.weight", config.experts, hidden))
        items.append(raw(f"{prefix}.mlp.gate.expert_bias", config.experts))
        shared = text["moe_shared_expert_intermediate_size"] * text["num_shared_experts"]
        items += mlp_linears(f"{prefix}.mlp.shared_experts", hidden, shared)
        if layer + 1 < config.layers:
            items += _superseded_predictor(config, layer, prefix)
    for spec in part_specs(hidden, config.expert_width):
        if spec.part == "weight":
            name = expert_tensor(config, layer, spec).removesuffix(".weight")
            inp = config.expert_width if spec.projection == "down_proj" else hidden
            items.append(Linear(name, spec.shape[0], inp, EXPERT_BITS, config.experts))
    return items


def _superseded_predictor(config: ModelConfig, layer: int, prefix: str) -> list[Linear | Tensor]:
    """What the released 8b file still holds of the prerouter's predecessor, on all but the last layer; ignored.

    Its hidden width is 512 of 1536, and twice that on the first five layers.
    """
    inner, width = config.hidden // 3 * (2 if layer < 5 else 1), feature_width(config)
    return [
        raw(f"{prefix}.mlp.pregate.fc1.weight", inner, width),
        raw(f"{prefix}.mlp.pregate.fc2.weight", config.experts, inner),
        raw(f"{prefix}.mlp.pregate.linear_init.weight", config.experts, width),
    ]


def mlp_linears(prefix: str, hidden: int, width: int) -> list[Linear | Tensor]:
    """A gated MLP's three matrices."""
    return [
        Linear(f"{prefix}.gate_proj", width, hidden),
        Linear(f"{prefix}.up_proj", width, hidden),
        Linear(f"{prefix}.down_proj", hidden, width),
    ]


def lora_targets(config: ModelConfig) -> Iterator[Linear]:
    """The linear layers that carry LoRA (paper section 3.3; the 8b file has none on shared experts).

    35b: all of attention and linear attention, and the shared experts. 8b: all of KDA, four of MLA, the dense layer.
    """
    without = (".q_a_proj", ".kv_a_proj_with_mqa")
    for layer in range(config.layers):
        prefix = f"{config.family.layer_prefix}.{layer}"
        for linear in attention_linears(config, layer, prefix):
            if not linear.name.endswith(without):
                yield linear
        for item in _mlp(config, layer, prefix):
            if isinstance(item, Linear) and item.experts is None and item.bits == EXPERT_BITS:
                if config.family is QWEN or layer < config.dense_layers:
                    yield item


def lora_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """`<module>.lora_A [16, in]` and `<module>.lora_B [out, 16]`, F16."""
    for linear in lora_targets(config):
        yield Tensor(f"{linear.name}.lora_A", "F16", (LORA_RANK, linear.inp), linear)
        yield Tensor(f"{linear.name}.lora_B", "F16", (linear.out, LORA_RANK), linear)


def feature_width(config: ModelConfig) -> int:
    """Inputs of a prerouter head: the hidden state and two one-hots over the experts (paper section 3.2)."""
    return config.hidden + 2 * config.experts


def head_tensors(config: ModelConfig, owners: tuple[int, ...], inner: int) -> Iterator[Tensor]:
    """`layers.<owner>.{fc1,fc2,linear_init}.weight`, F16, no biases."""
    width = feature_width(config)
    for owner in owners:
        yield Tensor(f"layers.{owner}.fc1.weight", "F16", (inner, width))
        yield Tensor(f"layers.{owner}.fc2.weight", "F16", (config.experts, inner))
        yield Tensor(f"layers.{owner}.linear_init.weight", "F16", (config.experts, width))
