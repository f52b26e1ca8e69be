"""Layers of mlx-lm's models whose attention, with the norms around it, is one call of the kernels.

What a layer's attention is made of (matrices, norms, angles) is taken from mlx-lm's own modules after loading; its
cache stays mlx-lm's own object, whose arrays are written in place. Tokens are computed one by one in their order, so
the bits do not depend on how a prompt is cut. One sequence at a time. Knows nothing of experts.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from edge0.errors import Edge0Error, ErrorKind
from edge0.kernels import library
from edge0.kernels.modules import KernelGated, Routed, matrix
from edge0.kernels.runner import Kernels, Matrix, address, floats
from edge0.lazy import Array
from edge0.lora import LoRAMultiLinear

PIECE_TOKENS = 64  # of a prompt, that attention takes at a time: its memory grows with them
ROOM_TOKENS = 64  # by which a cache grows: it is copied then
WIDEST = 1024  # elements of a head, as in attention.h and delta.h


class Core(Protocol):
    def __call__(self, x: np.ndarray, cache: Any, out: np.ndarray, normed: np.ndarray) -> None:
        """`[t, hidden]` to `x + attention(norm(x))` and the norm of that."""


class KernelLayer:
    """A decoder layer: attention by the kernels, experts as they were."""

    def __init__(self, kernels: Kernels, layer: nn.Module, core: Core, clip: float | None, shared: KernelGated | None):
        """`shared`: the shared expert of a layer with experts."""
        self.mlp, self.is_linear = layer.mlp, layer.is_linear
        self._kernels, self._core, self._clip, self._shared = kernels, core, clip, shared

    def __call__(self, x: Array, mask: Any = None, cache: Any = None) -> np.ndarray:
        """`[1, T, D]` to the same; the mask is that of one sequence, causal."""
        (values,) = floats(x)
        out, normed = np.empty_like(values), np.empty_like(values)
        for start in range(0, len(values), PIECE_TOKENS):
            cut = slice(start, start + PIECE_TOKENS)
            self._core(values[cut], cache, out[cut], normed[cut])
        if self._shared is None:
            nobody = np.zeros((len(out), 0), np.float32)
            none = np.zeros((*nobody.shape, out.shape[1]), np.float32)
            return self._kernels.combine(out, none, nobody, self.mlp(normed), self._clip)[None]
        y, weights = self.mlp.executor(self.mlp, normed[None], None)
        if isinstance(y, Routed):
            # Made anew for each token: what it names would otherwise outlive its lease.
            mixture = library.Mixture(*(part.pointer for part in (*y.matrices, *self._shared.parts)))
            return self._kernels.mixture(out, normed, y.slots, mixture, floats(weights)[0], self._clip)[None]
        return self._kernels.combine(out, floats(y)[0], floats(weights)[0], self._shared(normed), self._clip)[None]


def core_of(kernels: Kernels, layer: nn.Module) -> Core:
    """
    Raises:
        Edge0Error: OPTION_INVALID where attention is of a kind or a size that the kernels do not know.
    """
    latent = KimiDelta if layer.is_linear else LatentAttention
    for name, kind in (("linear_attn", GatedDelta), ("self_attn", GatedAttention), ("attention", latent)):
        if name in layer:
            return kind(kernels, layer, layer[name])
    raise _unknown("a layer without attention")


def _unknown(what: str) -> Edge0Error:
    return Edge0Error(ErrorKind.OPTION_INVALID, f"option kernels: {what}", hint="use kernels=mlx")


class _Core:
    """The structure that C reads, and the arrays that it points to."""

    kind: type[ctypes.Structure]

    def __init__(self, kernels: Kernels, layer: nn.Module, **fields: Any):
        self._kernels, self._kept = kernels, []
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        if before.eps != after.eps:
            raise _unknown("two norms of a layer differ")
        hidden = len(before.weight)
        norms = library.Norms(self._floats(before.weight), self._floats(after.weight), before.eps, hidden)
        values = {name: self._value(value) for name, value in fields.items()}
        self._struct = self.kind(norms=norms, **values)
        self._pointer = ctypes.pointer(self._struct)

    def _value(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            value = matrix(value)
        if isinstance(value, Matrix):
            self._kept.append(value)
            return value.pointer
        return self._floats(value) if isinstance(value, mx.array | np.ndarray) else value

    def _floats(self, values: mx.array | np.ndarray) -> int:
        self._kept.append(np.ascontiguousarray(np.asarray(values), np.float32))
        return address(self._kept[-1])


def _turns(rope: nn.Module, traditional: bool) -> np.ndarray:
    """Angle per position of each rotated pair.

    Raises:
        Edge0Error: OPTION_INVALID for a rotation that changes with the length.
    """
    if type(rope) is not nn.RoPE or rope.traditional != traditional:
        raise _unknown(f"positions by {type(rope).__name__} are not known")
    half = rope.dims // 2
    return rope.scale * np.float64(rope.base) ** (-np.arange(half) / half)


def _room(cache: KVCache, tokens: int, heads: int, key: int, value: int) -> tuple[np.ndarray, np.ndarray]:
    """The cache's arrays with room for `tokens` more, seen through numpy."""
    needed = cache.offset + tokens
    if cache.keys is None or cache.keys.shape[2] < needed:
        room = -(-needed // ROOM_TOKENS) * ROOM_TOKENS
        grown = [mx.zeros((1, heads, room, width)) for width in (key, value)]
        mx.eval(grown)
        if cache.keys is not None:
            for new, old in zip(grown, (cache.keys, cache.values), strict=True):
                np.asarray(new)[:, :, : cache.offset] = np.asarray(old)[:, :, : cache.offset]
        cache.keys, cache.values = grown
    return np.asarray(cache.keys), np.asarray(cache.values)


def _states(cache: ArraysCache, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """The cache's arrays, zeros before the first token, seen through numpy."""
    if cache[0] is None:
        for number, shape in enumerate(shapes):
            cache[number] = mx.zeros(shape)
        mx.eval(cache.cache)
    return [np.asarray(cache[number]) for number in range(len(shapes))]


class GatedAttention(_Core):
    """35b's full attention."""

    kind = library.Attention

    def __init__(self, kernels: Kernels, layer: nn.Module, module: nn.Module):
        self._shape = module.num_key_value_heads, module.head_dim
        turns = _turns(module.rope, traditional=False)
        if module.q_norm.eps != module.k_norm.eps or module.head_dim > WIDEST:
            raise _unknown("this attention is not known")
        super().__init__(
            kernels,
            layer,
            q=module.q_proj,
            k=module.k_proj,
            v=module.v_proj,
            o=module.o_proj,
            q_norm=module.q_norm.weight,
            k_norm=module.k_norm.weight,
            turns=turns,
            heads=module.num_attention_heads,
            pairs=module.num_key_value_heads,
            width=module.head_dim,
            rotated=module.rope.dims,
            eps=module.q_norm.eps,
            scale=module.scale,
        )

    def __call__(self, x: np.ndarray, cache: KVCache, out: np.ndarray, normed: np.ndarray) -> None:
        heads, width = self._shape
        keys, values = _room(cache, len(x), heads, width, width)
        self._kernels.run(
            "edge0_attention",
            self._pointer,
            address(x),
            len(x),
            cache.offset,
            address(keys),
            address(values),
            keys.shape[2],
            address(out),
            address(normed),
        )
        cache.offset += len(x)


class LatentAttention(_Core):
    """8b's full attention (MLA). A LoRA on its plain matrices is merged: they are fp32, so nothing is lost."""

    kind = library.Latent

    def __init__(self, kernels: Kernels, layer: nn.Module, module: nn.Module):
        latent, rotated = module.kv_lora_rank, module.qk_rope_head_dim
        self._shape = latent, rotated
        turns = _turns(module.rope, traditional=True)
        if max(latent, module.v_head_dim) > WIDEST or module.q_lora_rank is None:
            raise _unknown("this latent attention is not known")
        super().__init__(
            kernels,
            layer,
            q_a=module.q_a_proj,
            q_b=module.q_b_proj,
            kv_a=module.kv_a_proj_with_mqa,
            gate=module.g_proj,
            o=module.dense,
            q_norm=module.q_a_layernorm.weight,
            kv_norm=module.kv_a_layernorm.weight,
            turns=turns,
            keys=_merged(module.embed_q),
            values=_merged(module.unembed_out),
            heads=module.num_heads,
            latent=latent,
            plain=module.qk_nope_head_dim,
            rotated=rotated,
            width=module.v_head_dim,
            q_rank=module.q_lora_rank,
            q_eps=module.q_a_layernorm.eps,
            kv_eps=module.kv_a_layernorm.eps,
            scale=module.scale,
        )

    def __call__(self, x: np.ndarray, cache: KVCache, out: np.ndarray, normed: np.ndarray) -> None:
        latents, others = _room(cache, len(x), 1, *self._shape)
        self._kernels.run(
            "edge0_latent",
            self._pointer,
            address(x),
            len(x),
            cache.offset,
            address(latents),
            address(others),
            address(out),
            address(normed),
        )
        cache.offset += len(x)


def _merged(module: nn.Module) -> np.ndarray:
    """`[heads, out, in]` of one half of `kv_b_proj`, its LoRA added."""
    if not isinstance(module, LoRAMultiLinear):
        return np.asarray(module.weight)
    down, up = (np.asarray(part).astype(np.float32) for part in (module.down, module.up))
    both = np.swapaxes(up @ down, -1, -2) if module.latent_out else up @ down
    return np.asarray(module.linear.weight) + np.float32(module.scale) * both


class _DeltaCore(_Core):
    """Linear attention; `_channels` of each stream's convolution, `_state` of its memory."""

    kind = library.Delta
    _channels: list[int]
    _state: tuple[int, int, int]
    _kept_tokens: int

    def __init__(self, kernels: Kernels, layer: nn.Module, **fields: Any):
        if max(self._state[1:]) > WIDEST:
            raise _unknown(f"heads of more than {WIDEST} elements are not known")
        super().__init__(kernels, layer, **fields)

    def __call__(self, x: np.ndarray, cache: ArraysCache, out: np.ndarray, normed: np.ndarray) -> None:
        shapes = [(1, self._kept_tokens, channels) for channels in self._channels] + [(1, *self._state)]
        *histories, state = _states(cache, shapes)
        self._kernels.run(
            "edge0_delta",
            self._pointer,
            address(x),
            len(x),
            (ctypes.c_void_p * len(histories))(*map(address, histories)),
            address(state),
            address(out),
            address(normed),
        )


def _taps(module: nn.Conv1d) -> np.ndarray:
    """`[taps, channels]` of a depthwise convolution."""
    return np.asarray(module.weight)[..., 0].T


class GatedDelta(_DeltaCore):
    """35b's linear attention (Gated DeltaNet)."""

    def __init__(self, kernels: Kernels, layer: nn.Module, module: nn.Module):
        self._channels = [module.conv_dim]
        self._state = module.num_v_heads, module.head_v_dim, module.head_k_dim
        self._kept_tokens = module.conv_kernel_size - 1
        super().__init__(
            kernels,
            layer,
            in0=module.in_proj_qkv,
            in1=module.in_proj_z,
            in2=module.in_proj_b,
            in3=module.in_proj_a,
            o=module.out_proj,
            taps0=_taps(module.conv1d),
            rate=np.exp(np.asarray(module.A_log)),
            shift=module.dt_bias,
            norm=module.norm.weight,
            streams=1,
            key_heads=module.num_k_heads,
            heads=module.num_v_heads,
            key=module.head_k_dim,
            value=module.head_v_dim,
            count=module.conv_kernel_size,
            eps=module.norm.eps,
            lower=0.0,
        )


class KimiDelta(_DeltaCore):
    """8b's linear attention (KDA): three streams, a decay for each element of a key."""

    def __init__(self, kernels: Kernels, layer: nn.Module, module: nn.Module):
        heads, width = module.num_heads, module.head_dim
        self._channels = 3 * [heads * width]
        self._state = heads, width, width
        self._kept_tokens = module.conv_kernel_size - 1
        super().__init__(
            kernels,
            layer,
            in0=module.q_proj,
            in1=module.k_proj,
            in2=module.v_proj,
            in3=module.g_proj,
            in4=module.b_proj,
            in5=module.f_proj,
            o=module.o_proj,
            taps0=_taps(module.q_conv1d),
            taps1=_taps(module.k_conv1d),
            taps2=_taps(module.v_conv1d),
            rate=np.exp(np.asarray(module.A_log)),
            shift=module.dt_bias,
            norm=module.o_norm.weight,
            streams=3,
            key_heads=heads,
            heads=heads,
            key=width,
            value=width,
            count=module.conv_kernel_size,
            eps=module.o_norm.eps,
            lower=module.lower_bound,
        )
