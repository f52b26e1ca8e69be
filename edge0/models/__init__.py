"""Loading the two families, streamed or resident, into mlx-lm's own classes.

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

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.schema import checkpoint_tensors
from edge0.models import ling, qwen
from edge0.streaming.moe import StreamedMoE
from edge0.tiers import EXPERT_BITS, GROUP_SIZE, QWEN, ModelConfig

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
    kind = family.StreamedModel if streamed else family.ResidentModel
    raw = copy.deepcopy(dict(config.raw))  # mlx-lm writes into the config that it is given
    model = kind(kind.Args.from_dict(raw))
    weights = model.sanitize(_tensors(index))
    _quantise(model, config)
    dtype = activation_dtype()
    model.load_weights([(key, w if w.dtype == mx.uint32 else w.astype(dtype)) for key, w in weights.items()])
    weights.clear()
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)  # one by one: the unconverted copy of only one tensor is alive at a time
    return model.eval()


def _quantise(model: nn.Module, config: ModelConfig) -> None:
    """Make the modules quantised that the checkpoint holds so, at the bits that its tensors were checked to have."""
    linears = {tensor.linear.name: tensor.linear for tensor in checkpoint_tensors(config) if tensor.linear}

    def quantised(path: str, module: nn.Module) -> bool | dict:
        linear = linears.get(path.replace(".mlp.switch_mlp.", f".{config.family.experts_key}."))
        return linear is not None and {"group_size": GROUP_SIZE, "bits": linear.bits}

    nn.quantize(model, GROUP_SIZE, EXPERT_BITS, class_predicate=quantised)


def _tensors(index: CheckpointIndex) -> dict[str, mx.array]:
    """The checkpoint's tensors, not read yet, from the shards that the index names and no other file."""
    arrays: dict[str, mx.array] = {}
    for shard in index.shards:
        arrays |= mx.load(str(shard.path))
    return {name: array for name, array in arrays.items() if ".mlp.pregate." not in name}


def moe_blocks(model: nn.Module) -> dict[int, StreamedMoE]:
    """The replaced blocks by layer."""
    return {layer.mlp.layer: layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, StreamedMoE)}


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the evaluated parameters: the resident part."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))
