"""Puts the kernels in the places of a loaded model's layers and leaves; what is computed stays mlx-lm's.

Called once, when weights and adapters are in their places. Knows the shapes of modules; not their arithmetic.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.bailing_moe_v3 import BailingGate

from edge0.errors import Edge0Error, ErrorKind
from edge0.kernels.layers import KernelLayer, core_of
from edge0.kernels.library import load
from edge0.kernels.modules import KernelGate, KernelGated, KernelLinear
from edge0.kernels.runner import Kernels
from edge0.streaming.moe import StreamedMoE

def resolve(kernels: str) -> str:
    """What `EngineOptions.kernels` comes to on this machine: "int8", "exact" or "mlx".

    Raises:
        Edge0Error: OPTION_INVALID when kernels are asked for by name that cannot run here.
    """
    if kernels == "mlx":
        return kernels
    cpu = mx.default_device() == mx.Device(mx.cpu)
    if kernels == "auto":
        return "int8" if cpu and load().loaded is not None else "mlx"
    if not cpu or load().loaded is None:
        reason = load().reason if cpu else "MLX computes on a GPU"
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            f"option kernels: {kernels} cannot be used ({reason})",
            hint="kernels=auto or mlx computes with MLX's own",
        )
    return kernels


def use_kernels(model: nn.Module, kernels: Kernels, clip: float | None) -> None:
    """`clip`: what hidden states are held within after each layer.

    Raises:
        Edge0Error: OPTION_INVALID where a layer is of a kind that the kernels do not know.
    """
    layers = model.decoder_layers
    for number, layer in enumerate(layers):
        layers[number] = KernelLayer(kernels, layer, core_of(kernels, layer), clip)
        block = layer.mlp
        if isinstance(block, StreamedMoE):
            gate = KernelGate if isinstance(block.gate, BailingGate) else KernelLinear
            block.gate = gate(kernels, block.gate)
            block.use_kernels(partial(KernelGated, kernels))
        else:
            layers[number].mlp = KernelGated(kernels, block)
    top = model.language_model if "language_model" in model else model
    top.lm_head = KernelLinear(kernels, top.lm_head)
