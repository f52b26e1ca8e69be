"""The recovery LoRA, unmerged, on the families' exact targets (paper section 3.3).

Merging and requantising would erase most of the correction, so `y = base(x) + 2 ((x A) B)` is computed beside the
quantised product for ever. Knows the file format and the modules; not why a target is one.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from edge0.checkpoint.adapters import Adapter
from edge0.checkpoint.arrays import load_arrays, reading
from edge0.checkpoint.schema import LORA_ALPHA, LORA_RANK, lora_targets, lora_tensors
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig


class LoRAMultiLinear(nn.Module):
    """LoRA beside one half of MLA's `kv_b_proj`, which mlx-lm keeps as one matrix per head.

    `down` `[r, latent]` is shared by the heads, `up` `[heads, features, r]` is each head's own. `latent_out` says
    that the base maps features to the latent (keys) rather than the latent to features (values).
    """

    down: mx.array
    up: mx.array

    def __init__(self, linear: nn.Module, scale: float, latent_out: bool):
        super().__init__()
        self.linear, self.scale, self.latent_out = linear, scale, latent_out
        heads, out, inp = linear.weight.shape
        self.heads, self.features = heads, inp if latent_out else out  # features of one head

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        y = self.linear(x, transpose=transpose)
        if transpose and self.latent_out:
            z = (x @ self.up) @ self.down
        else:
            z = (x @ self.down.T) @ self.up.swapaxes(-1, -2)
        return y + (self.scale * z).astype(y.dtype)


def apply_lora(model: nn.Module, config: ModelConfig, adapter: Adapter, dtype: mx.Dtype) -> int:
    """Put the adapter beside its targets; returns the number of targets.

    Raises:
        Edge0Error: ADAPTER_MISMATCH, TENSOR_MISSING, TENSOR_MISMATCH when the file does not fit the model;
            READ_FAILED, FILE_CHANGED when it cannot be read or is no longer the same.
    """
    path = adapter.header.path
    if (adapter.rank, adapter.alpha) != (LORA_RANK, LORA_ALPHA):
        raise Edge0Error(
            ErrorKind.ADAPTER_MISMATCH,
            "rank and alpha",
            path=path,
            expected=f"r={LORA_RANK} alpha={LORA_ALPHA}",
            found=f"r={adapter.rank} alpha={adapter.alpha}",
        )
    entries = adapter.find(lora_tensors(config))
    with reading([adapter.header]):
        arrays = {name: array.astype(dtype) for name, array in load_arrays(entries).items()}
        mx.eval(arrays)
    targets = wrap_lora(model, config, adapter.rank, adapter.alpha)
    bind_lora(targets, arrays)
    model.eval()
    return len(targets)


Wrapped = LoRALinear | tuple[LoRAMultiLinear, LoRAMultiLinear]  # MLA's kv_b_proj is two modules


def wrap_lora(model: nn.Module, config: ModelConfig, rank: int, alpha: int) -> dict[str, Wrapped]:
    """Put a correction beside every target, its values to be bound; returns the corrections by target."""
    modules, scale, wrapped = dict(model.named_modules()), alpha / rank, {}
    for target in lora_targets(config):
        parent_name, leaf = target.name.rsplit(".", 1)
        parent = modules[parent_name]
        if leaf == "kv_b_proj":
            parent.embed_q = LoRAMultiLinear(parent.embed_q, scale, latent_out=True)
            parent.unembed_out = LoRAMultiLinear(parent.unembed_out, scale, latent_out=False)
            wrapped[target.name] = (parent.embed_q, parent.unembed_out)
        else:
            parent[leaf] = wrapped[target.name] = LoRALinear.from_base(parent[leaf], r=rank, scale=scale)
    return wrapped


def bind_lora(targets: Mapping[str, Wrapped], arrays: Mapping[str, mx.array]) -> None:
    """Give the corrections their values: `<target>.lora_A` `[r, in]` and `<target>.lora_B` `[out, r]`."""
    for name, wrapped in targets.items():
        a, b = arrays[f"{name}.lora_A"], arrays[f"{name}.lora_B"]
        if isinstance(wrapped, tuple):
            keys, values = wrapped
            up, nope = b.reshape(keys.heads, -1, b.shape[-1]), keys.features
            keys.down, keys.up = a, mx.contiguous(up[:, :nope])
            values.down, values.up = a, mx.contiguous(up[:, nope:])
        else:
            wrapped.lora_a, wrapped.lora_b = a.T, b.T
