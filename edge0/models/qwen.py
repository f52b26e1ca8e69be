"""The 35b family on mlx-lm's own `qwen3_5_moe.Model`: Gated DeltaNet and gated attention, softmax routing."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5_moe
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from edge0.models.pieces import InPieces
from edge0.streaming.moe import Gated, StreamedMoE

DELTA_TOKENS, FULL_TOKENS = 32, 64  # tokens of a prompt that linear and full attention take at a time


class QwenStreamedMoE(StreamedMoE):
    def __init__(self, block: nn.Module, layer: int):
        super().__init__(layer)
        self.gate = block.gate
        self.shared_expert = block.shared_expert
        self.shared_expert_gate = block.shared_expert_gate

    def logits(self, x: mx.array) -> mx.array:
        return self.gate(x)

    def shared(self, x: mx.array) -> mx.array:
        if self.shared_expert_gate is None:
            return self.shared_expert(x)
        return mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

    def use_kernels(self, gated: Callable[..., Gated]) -> Gated:
        self.shared_expert = gated(self.shared_expert, self.shared_expert_gate)
        self.shared_expert_gate = None  # is part of it
        return self.shared_expert


class ResidentModel(qwen3_5_moe.Model):
    """mlx-lm's model, with the handles that the engine's layer loop needs."""

    Args, Block = qwen3_5_moe.ModelArgs, QwenStreamedMoE

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return self.language_model.model.layers

    def embed(self, tokens: mx.array) -> mx.array:
        return self.language_model.model.embed_tokens(tokens)

    def masks(self, h: mx.array, cache: list) -> list[mx.array | str | None]:
        """One attention mask per layer, as mlx-lm's own forward makes them."""
        inner = self.language_model.model
        full = create_attention_mask(h, cache[inner.fa_idx])
        linear = create_ssm_mask(h, cache[inner.ssm_idx])
        return [linear if layer.is_linear else full for layer in inner.layers]

    def head(self, h: mx.array) -> mx.array:
        """Final norm and output matrix: hidden states to logits."""
        return self.language_model.lm_head(self.language_model.model.norm(h))


class StreamedModel(ResidentModel):
    """The same model with every MoE block replaced and no expert among its parameters."""

    def __init__(self, args: qwen3_5_moe.ModelArgs):
        super().__init__(args)
        for number, layer in enumerate(self.decoder_layers):
            layer.mlp = QwenStreamedMoE(layer.mlp, number)

    def attend_in_pieces(self) -> None:
        """Called once, when weights and adapters are in their places: module names change."""
        for layer in self.decoder_layers:
            if layer.is_linear:
                layer.linear_attn = InPieces(layer.linear_attn, DELTA_TOKENS, create_ssm_mask)
            else:
                layer.self_attn = InPieces(layer.self_attn, FULL_TOKENS, create_attention_mask)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {key: value for key, value in super().sanitize(weights).items() if ".switch_mlp." not in key}
