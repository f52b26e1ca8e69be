"""A trained model's weights as a checkpoint in the released layout: int4 in groups of 64, routers of 35b at 8 bits.

The inverse of loading: parameters under mlx-lm's names become the tensors that `schema` lists, each quantised from
bf16 as mlx-lm's own converter does. What the released 8b file holds of an earlier predictor is left out. Knows nothing
of training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from edge0.checkpoint.schema import Linear, Tensor, checkpoint_tensors
from edge0.checkpoint.synth import released_config, write_shard
from edge0.checkpoint.tokenizer import write_tokenizer
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import GROUP_SIZE, QWEN, ModelConfig, parse_config
from edge0.tiers import Tier


def write_checkpoint(
    tier: Tier,
    directory: Path,
    weights: Mapping[str, mx.array],
    about: Mapping[str, str],
    phrases: tuple[str, ...] = (),
) -> Path:
    """Quantise `weights` (fp32 or bf16, by the model's parameter names) and write them whole, or not at all.

    Args:
        about: what the shard's metadata says of where it comes from.
        phrases: tokens of the tokenizer beside bytes.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE when the directory exists or cannot be written; TENSOR_MISSING when a weight
            that the tier calls for is not among them.
    """
    if directory.exists():
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, "is there already", path=directory, hint="remove it first")
    config = parse_config(released_config(tier), directory / "config.json")
    tensors = [tensor for tensor in checkpoint_tensors(config) if not tensor.is_left_over]
    named = released_weights(weights, config)
    unfinished = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        contents = _Quantiser(named, directory)
        write_shard(unfinished / "model.safetensors", tensors, {"format": "mlx", **about}, contents)
        config_json = json.dumps(dict(config.raw), indent=1) + "\n"
        (unfinished / "config.json").write_text(config_json, encoding="utf-8")
        write_tokenizer(unfinished, phrases)
        unfinished.rename(directory)
    except OSError as error:
        detail = f"cannot be written ({error.strerror or error})"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=directory) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def released_weights(weights: Mapping[str, mx.array], config: ModelConfig) -> dict[str, mx.array]:
    """The model's parameters under the names, and in the shapes, of a released checkpoint; not quantised."""
    if config.family is QWEN:
        return dict(weights)
    named = {}
    for name, value in weights.items():
        if name.endswith(".unembed_out.weight"):
            continue  # with its keys
        if name.endswith(".embed_q.weight"):
            stem = name.removesuffix(".embed_q.weight")
            keys, values = value.swapaxes(-1, -2), weights[f"{stem}.unembed_out.weight"]
            whole = mx.concatenate([keys, values], axis=1)  # [heads, nope + value, rank]
            named[f"{stem}.kv_b_proj.weight"] = whole.reshape(-1, whole.shape[-1])
        else:
            named[name.replace(".mlp.switch_mlp.", ".mlp.experts.")] = value
    return named


class _Quantiser:
    """The bytes of each tensor; a matrix is quantised once for its three pieces."""

    def __init__(self, weights: Mapping[str, mx.array], place: Path):
        self._weights, self._place = weights, place
        self._pieces: dict[str, mx.array] = {}

    def __call__(self, tensor: Tensor) -> Iterator[bytes]:
        if tensor.linear is None:
            array = self._weight(tensor.name).reshape(tensor.shape).astype(mx.bfloat16)
        else:
            if tensor.name not in self._pieces:
                self._pieces = quantised(tensor.linear, self._weight(f"{tensor.linear.name}.weight"))
            array = self._pieces[tensor.name]
        plain = array if array.dtype == mx.uint32 else array.view(mx.uint16)
        yield np.array(plain).tobytes()

    def _weight(self, name: str) -> mx.array:
        if name not in self._weights:
            raise Edge0Error(
                ErrorKind.TENSOR_MISSING, "the trained model lacks a weight", path=self._place, tensor=name
            )
        return self._weights[name]


def quantised(linear: Linear, weight: mx.array) -> dict[str, mx.array]:
    """A matrix, or a stack of them, as weight (uint32), scales and biases (bf16), by their names in a file."""
    parts = mx.quantize(weight.astype(mx.bfloat16), group_size=GROUP_SIZE, bits=linear.bits)
    return {tensor.name: part for tensor, part in zip(linear.tensors(), parts, strict=True)}
