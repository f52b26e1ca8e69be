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

from edge0.checkpoint.arrays import load_arrays, reading
from edge0.checkpoint.header import CheckpointIndex, TensorEntry
from edge0.checkpoint.layout import has_records
from edge0.checkpoint.schema import Tensor, checkpoint_tensors, find_tensor, unplaced_tensors
from edge0.checkpoint.strict import refuse
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import EXPERT_BITS, GROUP_SIZE, QWEN, ModelConfig
from edge0.models import ling, qwen
from edge0.streaming.moe import StreamedMoE

Model = qwen.ResidentModel | ling.ResidentModel


SCALES = (".scales", ".biases")  # ends of the names of what is kept in another dtype for the kernels


def activation_dtype() -> mx.Dtype:
    """fp32 on CPU, bf16 on a GPU (design, section 3 rule 7)."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


def load(
    directory: Path, config: ModelConfig, index: CheckpointIndex, *, streamed: bool, scales: mx.Dtype | None = None
) -> Model:
    """Load the resident part (`streamed`) or all of the model, evaluated, on the calling thread.

    `scales`: dtype of the scales and biases of quantised matrices; None: that of the activations.

    Raises:
        Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH, TENSOR_DUPLICATE when the tensors are not what config.json calls
            for; CONFIG_MALFORMED when mlx-lm cannot build that model; LAYOUT_MALFORMED when all of a repacked
            checkpoint is wanted; READ_FAILED, FILE_CHANGED when a shard cannot be read or is no longer the same.
    """
    if not streamed and has_records(index.directory):
        raise Edge0Error(
            ErrorKind.LAYOUT_MALFORMED,
            "a repacked checkpoint cannot be loaded as a whole",
            path=index.directory,
            hint="the resident arm needs the stacked layout: name the checkpoint that this one was made from",
        )
    entries = _entries(config, index, experts=not streamed)
    model = build(config, directory, streamed=streamed)
    dtype = activation_dtype()
    with reading(index.shards):
        weights = model.sanitize(load_arrays(entries))
        _quantise(model, config)
        kept = {key: scales or dtype for key in weights if key.endswith(SCALES)}
        model.load_weights(
            [(key, w if w.dtype == mx.uint32 else w.astype(kept.get(key, dtype))) for key, w in weights.items()]
        )
        weights.clear()
        for _, value in tree_flatten(model.parameters()):
            mx.eval(value)  # one by one: the unconverted copy of only one tensor is alive at a time
    return model.eval()


def _entries(config: ModelConfig, index: CheckpointIndex, experts: bool) -> dict[Tensor, TensorEntry]:
    """Where each tensor lies that is to be loaded; those of experts only on demand, left-overs never."""
    wanted = (t for t in checkpoint_tensors(config) if not t.is_left_over and (experts or not t.is_expert))
    entries = {tensor: find_tensor(index, tensor) for tensor in wanted}
    for entry in unplaced_tensors(index, config):
        detail = "the model of config.json has no place for this tensor"
        hint = "check that config.json and the shards are of the same model"
        refuse(ErrorKind.TENSOR_MISMATCH, detail, entry.path, entry.name, hint=hint)
    return entries


def build(config: ModelConfig, directory: Path, *, streamed: bool) -> Model:
    """The model of a config, without weights.

    Raises:
        Edge0Error: CONFIG_MALFORMED when mlx-lm cannot build it.
    """
    family = qwen if config.family is QWEN else ling
    kind = family.StreamedModel if streamed else family.ResidentModel
    raw = copy.deepcopy(dict(config.raw))  # mlx-lm writes into the config that it is given
    try:
        return kind(kind.Args.from_dict(raw))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Edge0Error(
            ErrorKind.CONFIG_MALFORMED, f"no model can be built from it ({error})", path=directory / "config.json"
        ) from error


def _quantise(model: nn.Module, config: ModelConfig) -> None:
    """Make the modules quantised that the checkpoint holds so, at the bits that its tensors were checked to have."""
    linears = {tensor.linear.name: tensor.linear for tensor in checkpoint_tensors(config) if tensor.linear}

    def quantised(path: str, module: nn.Module) -> bool | dict:
        linear = linears.get(path.replace(".mlp.switch_mlp.", f".{config.family.experts_key}."))
        return linear is not None and {"group_size": GROUP_SIZE, "bits": linear.bits}

    nn.quantize(model, GROUP_SIZE, EXPERT_BITS, class_predicate=quantised)


def replace_moe(model: Model) -> dict[int, StreamedMoE]:
    """Put the engine's blocks in place of a whole model's own, which keep their experts as `switch_mlp`; by layer.

    The blocks have no executor yet. For training, where experts are parameters.
    """
    blocks = {}
    for number, layer in enumerate(model.decoder_layers):
        if "switch_mlp" in layer.mlp:
            whole = layer.mlp
            layer.mlp = blocks[number] = model.Block(whole, number)
            layer.mlp.switch_mlp = whole.switch_mlp
    return blocks


def moe_blocks(model: nn.Module) -> dict[int, StreamedMoE]:
    """The replaced blocks by layer."""
    return {layer.mlp.layer: layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, StreamedMoE)}


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the evaluated parameters: the resident part."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))
