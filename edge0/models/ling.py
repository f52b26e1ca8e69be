"""The 8b family on mlx-lm's own `bailing_moe_v3.Model`: KDA and MLA attention, sigmoid group routing.

The released file differs from what mlx-lm's class reads in two ways, both mended in `sanitize`: routed experts are
called `experts`, and `kv_b_proj` is quantised (the class wants it split into two plain matrices).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_moe_v3
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from edge0.families import EXPERT_BITS, GROUP_SIZE
from edge0.kernels.modules import KernelGate
from edge0.models.pieces import InPieces
from edge0.streaming.moe import Gated, StreamedMoE

DELTA_TOKENS, FULL_TOKENS = 32, 256  # tokens of a prompt that KDA and MLA take at a time


class LingStreamedMoE(StreamedMoE):
    def __init__(self, block: nn.Module, layer: int):
        super().__init__(layer)
        self.gate = block.gate
        self.shared_experts = block.shared_experts

    def logits(self, x: mx.array) -> mx.array:
        if isinstance(self.gate, KernelGate):
            return self.gate(x)
        return x.astype(mx.float32) @ self.gate.weight.astype(mx.float32).T

    def bias(self) -> mx.array:
        return self.gate.expert_bias

    def shared(self, x: mx.array) -> mx.array:
        return self.shared_experts(x)

    def use_kernels(self, gated: Callable[..., Gated]) -> Gated:
        self.shared_experts = gated(self.shared_experts)
        return self.shared_experts


class ResidentModel(bailing_moe_v3.Model):
    """mlx-lm's model on the released names, with the handles that the engine's layer loop needs."""

    Args, Block = bailing_moe_v3.ModelArgs, LingStreamedMoE

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return self.model.layers

    def embed(self, tokens: mx.array) -> mx.array:
        return self.model.word_embeddings(tokens)

    def masks(self, h: mx.array, cache: list) -> list[mx.array | None]:
        """One attention mask per layer, as mlx-lm's own forward makes them."""
        full = create_attention_mask(h, cache[self.model.attention_index], return_array=True)
        linear = create_ssm_mask(h, cache[self.model.linear_index])
        return [linear if layer.is_linear else full for layer in self.model.layers]

    def head(self, h: mx.array) -> mx.array:
        """Final norm and output matrix: hidden states to logits."""
        return self.lm_head(self.model.norm(h))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        renamed = {key.replace(".mlp.experts.", ".mlp.switch_mlp."): value for key, value in weights.items()}
        for key in [key for key in renamed if key.endswith("kv_b_proj.scales")]:
            stem = key.removesuffix(".scales")
            parts = [renamed.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases")]
            # Widened first: dequantising in bf16 would round the weights.
            parts[1:] = [part.astype(mx.float32) for part in parts[1:]]
            renamed[f"{stem}.weight"] = mx.dequantize(*parts, group_size=GROUP_SIZE, bits=EXPERT_BITS)
        return super().sanitize(renamed)


class StreamedModel(ResidentModel):
    """The same model with every MoE block replaced and no expert among its parameters."""

    def __init__(self, args: bailing_moe_v3.ModelArgs):
        super().__init__(args)
        for number, layer in enumerate(self.decoder_layers):
            if isinstance(layer.mlp, bailing_moe_v3.BailingSparseMoE):
                layer.mlp = LingStreamedMoE(layer.mlp, number)

    def attend_in_pieces(self) -> None:
        """Called once, when weights and adapters are in their places: module names change."""
        for layer in self.decoder_layers:
            if layer.is_linear:
                layer.attention = InPieces(layer.attention, DELTA_TOKENS, create_ssm_mask)
            else:
                full = partial(create_attention_mask, return_array=True)
                layer.attention = InPieces(layer.attention, FULL_TOKENS, full)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {key: value for key, value in super().sanitize(weights).items() if ".switch_mlp." not in key}
