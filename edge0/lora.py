"""The recovery LoRA, unmerged, on the families' exact targets (paper section 3.3).

Merging and requantising would erase most of the correction, so `y = base(x) + 2 ((x A) B)` is computed beside the
quantised product for ever. Knows the file format and the modules; not why a target is one.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from edge0.checkpoint.adapters import Adapter
from edge0.checkpoint.arrays import load_arrays, reading
from edge0.checkpoint.schema import LORA_ALPHA, LORA_RANK, lora_targets, lora_tensors
from edge0.errors import Edge0Error, ErrorKind
from edge0.tiers import ModelConfig


class LoRAMultiLinear(nn.Module):
    """LoRA beside one half of MLA's `kv_b_proj`, which mlx-lm keeps as one matrix per head.

    `down` `[r, latent]` is shared by the heads, `up` `[heads, features, r]` is each head's own. `latent_out` says
    that the base maps features to the latent (keys) rather than the latent to features (values).
    """

    def __init__(self, linear: nn.Module, down: mx.array, up: mx.array, scale: float, latent_out: bool):
        super().__init__()
        self.linear, self.down, self.up = linear, down, up
        self.scale, self.latent_out = scale, latent_out

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
    modules = dict(model.named_modules())
    scale = adapter.alpha / adapter.rank
    targets = [target.name for target in lora_targets(config)]
    for name in targets:
        a, b = (arrays[f"{name}.{part}"] for part in ("lora_A", "lora_B"))
        parent_name, leaf = name.rsplit(".", 1)
        parent = modules[parent_name]
        if leaf == "kv_b_proj":
            _split_kv_b(parent, a, b, scale)
            continue
        wrapped = LoRALinear.from_base(parent[leaf], r=adapter.rank, scale=scale)
        wrapped.lora_a, wrapped.lora_b = a.T, b.T
        parent[leaf] = wrapped
    model.eval()
    return len(targets)


def _split_kv_b(attention: nn.Module, a: mx.array, b: mx.array, scale: float) -> None:
    heads, nope = attention.num_heads, attention.qk_nope_head_dim
    up = b.reshape(heads, -1, b.shape[-1])
    keys, values = mx.contiguous(up[:, :nope]), mx.contiguous(up[:, nope:])
    attention.embed_q = LoRAMultiLinear(attention.embed_q, a, keys, scale, latent_out=True)
    attention.unembed_out = LoRAMultiLinear(attention.unembed_out, a, values, scale, latent_out=False)
