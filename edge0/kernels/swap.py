"""Puts the kernels in the places of a loaded model's layers and leaves; what is computed stays mlx-lm's.

Called once, when weights and adapters are in their places. Knows the shapes of modules; not their arithmetic.
"""

from __future__ import annotations

from functools import partial

import mlx.nn as nn
from mlx_lm.models.bailing_moe_v3 import BailingGate

from edge0.kernels.layers import KernelLayer, core_of
from edge0.kernels.modules import HostNorm, KernelEmbedding, KernelGate, KernelGated, KernelLinear
from edge0.kernels.runner import Kernels
from edge0.streaming.moe import StreamedMoE


def use_kernels(model: nn.Module, kernels: Kernels, clip: float | None) -> None:
    """`clip`: what hidden states are held within after each layer.

    Raises:
        Edge0Error: OPTION_INVALID where a layer is of a kind that the kernels do not know.
    """
    layers = model.decoder_layers
    for number, layer in enumerate(layers):
        block, shared = layer.mlp, None
        if isinstance(block, StreamedMoE):
            gate = KernelGate if isinstance(block.gate, BailingGate) else KernelLinear
            block.gate = gate(kernels, block.gate)
            shared = block.use_kernels(partial(KernelGated, kernels))
        else:
            layer.mlp = KernelGated(kernels, block)
        layers[number] = KernelLayer(kernels, layer, core_of(kernels, layer), clip, shared)
    top = model.language_model if "language_model" in model else model
    table = "embed_tokens" if "embed_tokens" in top.model else "word_embeddings"
    setattr(top.model, table, KernelEmbedding(top.model[table]))
    top.model.norm = HostNorm(top.model.norm)
    top.lm_head = KernelLinear(kernels, top.lm_head)
