"""Puts the kernels in the places of a loaded model's layers and leaves; what is computed stays mlx-lm's.

Called once, when weights and adapters are in their places. Knows the shapes of modules; not their arithmetic.
"""

from __future__ import annotations

import logging

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.bailing_moe_v3 import BailingGate
from mlx_lm.tuner.lora import LoRALinear

from edge0.errors import Edge0Error, ErrorKind
from edge0.kernels.layers import KernelLayer, core_of
from edge0.kernels.library import load
from edge0.kernels.modules import KernelGate, KernelGated, KernelLinear
from edge0.kernels.runner import Kernels

log = logging.getLogger(__name__)


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


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """
    Raises:
        Edge0Error: OPTION_INVALID where a layer is of a kind that the kernels do not know.
    """
    layers = model.decoder_layers
    for number, layer in enumerate(layers):
        layers[number] = KernelLayer(layer, core_of(kernels, layer))
        if "gate_proj" in layer.mlp:
            layers[number].mlp = KernelGated(kernels, layer.mlp)
            continue
        for name, child in layer.mlp.children().items():
            if isinstance(child, nn.QuantizedLinear | LoRALinear):
                layer.mlp[name] = KernelLinear(kernels, child)
            elif isinstance(child, BailingGate):
                layer.mlp[name] = KernelGate(kernels, child)
            elif "gate_proj" in child:
                layer.mlp[name] = KernelGated(kernels, child)
    top = model.language_model if "language_model" in model else model
    top.lm_head = KernelLinear(kernels, top.lm_head)
