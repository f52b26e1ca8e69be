"""Loading the two families, streamed or resident, through mlx-lm's own loader.

The streamed model never reads an expert tensor; the resident one is stock mlx-lm on the same bytes, the reference
of tests and of the `resident` arm. Activations follow the device: fp32 on CPU (bf16 accumulates wrongly there),
bf16 on Metal.
"""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.schema import checkpoint_tensors
from edge0.models import ling, qwen
from edge0.streaming.moe import StreamedMoE
from edge0.tiers import QWEN, ModelConfig

Model = qwen.ResidentModel | ling.ResidentModel


def activation_dtype() -> mx.Dtype:
    """fp32 on CPU, bf16 on a GPU (design, section 3 rule 7)."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


def load(directory: Path, config: ModelConfig, index: CheckpointIndex, *, streamed: bool) -> Model:
    """Load the resident part (`streamed`) or all of the model, evaluated, on the calling thread.

    Raises:
        Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH when a tensor is not what config.json calls for.
    """
    for tensor in checkpoint_tensors(config):
        if ".mlp.pregate." not in tensor.name:
            index.require(tensor.name, tensor.dtype, tensor.shape)
    family = qwen if config.family is QWEN else ling
    base = family.StreamedModel if streamed else family.ResidentModel
    dtype = activation_dtype()

    class Cast(base):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            clean = super().sanitize(weights)
            return {key: value if value.dtype == mx.uint32 else value.astype(dtype) for key, value in clean.items()}

    # mlx-lm writes into the config that it is given.
    raw = copy.deepcopy(dict(config.raw))
    model, _ = load_model(directory, lazy=True, model_config=raw, get_model_classes=lambda config: (Cast, base.Args))
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)  # one by one: the unconverted copy of only one tensor is alive at a time
    return model.eval()


def moe_blocks(model: nn.Module) -> dict[int, StreamedMoE]:
    """The replaced blocks by layer."""
    return {layer.mlp.layer: layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, StreamedMoE)}


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the evaluated parameters: the resident part."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))
