"""The model as training sees it: every weight plain fp32, whole sequences in one forward, predictions shifted by one.

The frozen base is the reconstruction of the int4 checkpoint, so that what is trained is what will be served. MoE blocks
are the engine's own, with an executor that routes whole sequences: at a predicted layer, positions from the first
predicted one on take the route that the layer before predicted one position earlier (paper section 3.2). A test pins
this to the engine's decode, token by token.

Adapters are plain dictionaries in the files' own names and shapes, bound to the model for one forward; so gradients,
optimiser and files all speak of the same tensors. Knows nothing of losses or data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from edge0 import models
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.schema import LORA_ALPHA, LORA_RANK
from edge0.families import ModelConfig, read_config
from edge0.lora import bind_lora, wrap_lora
from edge0.prerouter.heads import head_logits
from edge0.prerouter.predictor import EXECUTED
from edge0.prerouter.schedule import predicted_layers
from edge0.routing import Router, multi_hot
from edge0.streaming.moe import StreamedMoE
from edge0.training.loop import digest

Tensors = Mapping[str, mx.array]


@dataclass(frozen=True)
class Seen:
    """What one layer saw of a forward. `x` `[B, T, D]`, `logits` `[B, T, E]` of its own router, `indices` executed."""

    x: mx.array
    logits: mx.array
    native: mx.array  # experts that its own router would choose
    indices: mx.array
    predicted: mx.array  # experts that were predicted for a position, `indices` where none was


@dataclass
class Carry:
    """What a forward leaves for the next one of the same sequences: nothing of it is kept between requests."""

    position: int = 0
    executed: dict[int, mx.array] = field(default_factory=dict)  # owner -> one-hots of the last position `[B, 1, E]`
    forecast: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)  # predicted layer -> route


class SequenceExecutor:
    """Routes `[B, T]` positions at once; the blocks call it, one layer after the other.

    Args:
        router: of the K that is trained for; its own logits and the heads' go through it.
        owners: layers with a head; none: every layer routes for itself.
        feature: one-hots of what was "executed", or of what the owner's own router ("teacher") would choose.
        advisory: predictions are looked at and not followed: every layer routes for itself, as without heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        router: Router,
        owners: tuple[int, ...] = (),
        feature: str = EXECUTED,
        advisory: bool = False,
    ):
        self.config, self.router, self.owners, self.feature, self.advisory = config, router, owners, feature, advisory
        self.predicted = predicted_layers(config, owners) if owners else ()
        self.heads: Tensors | None = None
        self.begin(mx.zeros((1, 1), mx.int32), 1)

    def begin(self, prompt_lengths: mx.array, length: int, carry: Carry | None = None) -> None:
        """A new forward over `length` positions. `prompt_lengths` `[B, 1]` tokens that no prediction serves."""
        self.carry = carry or Carry()
        self.positions = self.carry.position + mx.arange(length)[None]
        self.prompt_lengths = prompt_lengths
        # 35b: the first decode step routes natively; 8b: the prompt's last position already predicts.
        self.first = prompt_lengths if self.config.family.first_step_predicted else prompt_lengths + 1
        self.served = self.positions >= self.first  # positions whose predicted layers take a prediction
        self.route: tuple[mx.array, mx.array] | None = None  # what the last head predicted, for the layer after it
        self.seen: dict[int, Seen] = {}
        self.head_logits: dict[int, mx.array] = {}  # owner -> what its head says of the next position
        self.next = Carry(self.carry.position + length)

    def __call__(self, block: StreamedMoE, x: mx.array, shared: mx.array) -> tuple[mx.array, mx.array]:
        layer, logits = block.layer, block.logits(x)
        native, weights = self.router(logits, block.bias())
        indices = predicted = native
        if self.heads is not None and layer in self.predicted:
            ahead = self._shifted(layer)
            if ahead is not None:
                predicted = mx.where(self.served[..., None], ahead[0].astype(native.dtype), native)
                if not self.advisory:
                    indices, weights = predicted, mx.where(self.served[..., None], ahead[1], weights)
        self.seen[layer] = Seen(x, logits, native, indices, predicted)
        if self.heads is not None and layer in self.owners:
            self._look_ahead(layer)
        return block.switch_mlp(x, indices), weights

    def _look_ahead(self, owner: int) -> None:
        self.head_logits[owner] = logits = head_logits(self.heads, owner, self.features(owner))
        self.route = self.router(logits)
        self.next.forecast[owner + 1] = tuple(part[:, -1:] for part in self.route)

    def _shifted(self, layer: int) -> tuple[mx.array, mx.array] | None:
        """The route that the layer before predicted, moved to the position it is for."""
        before = self.carry.forecast.get(layer)
        if self.positions.shape[1] == 1:
            return before
        route = self.route
        first = before or tuple(mx.zeros_like(part[:, :1]) for part in route)
        return tuple(mx.concatenate([a, part[:, :-1]], axis=1) for a, part in zip(first, route, strict=True))

    def features(self, owner: int) -> mx.array:
        """`[B, T, D + 2E]`: the layer's input, its one-hots of this position and of the one before."""
        seen = self.seen[owner]
        chosen = seen.indices if self.feature == EXECUTED else seen.native
        now = multi_hot(mx.stop_gradient(chosen), self.config.experts, seen.x.dtype)
        self.next.executed[owner] = now[:, -1:]
        last = self.carry.executed.get(owner)
        before = mx.concatenate([mx.zeros_like(now[:, :1]) if last is None else last, now[:, :-1]], axis=1)
        if not self.config.family.first_step_predicted:  # heads first run on the first decode step: no history there
            before = mx.where((self.positions == self.prompt_lengths)[..., None], 0, before)
        return mx.concatenate([seen.x, now, before], axis=-1)


class Student:
    """A checkpoint, dequantised and frozen, with adapters bound to it for each forward.

    Args:
        k: experts per token.
        owners: layers with a head, when routes are predicted.
    """

    def __init__(
        self,
        directory: Path,
        k: int,
        owners: tuple[int, ...] = (),
        feature: str = EXECUTED,
        advisory: bool = False,
    ):
        self.directory, self.config = directory, read_config(directory)
        model = models.load(directory, self.config, CheckpointIndex.open(directory), streamed=False)
        self._take(dequantize_model(model), Router.of(self.config, k), owners, feature, advisory)

    @classmethod
    def of(cls, model: models.Model, config: ModelConfig, k: int) -> Student:
        """A model that is being made, every weight trainable."""
        student = cls.__new__(cls)
        student.config = config
        student._take(model, Router.of(config, k))
        return student

    def _take(self, model: models.Model, router: Router, *more: Any) -> None:
        self.model = model
        self.blocks = models.replace_moe(model)
        self.executor = SequenceExecutor(self.config, router, *more)
        for block in self.blocks.values():
            block.executor = self.executor
        self._lora = None

    def fingerprint(self) -> str:
        """What tells two models apart: their routers' weights, as 64 hexadecimal digits."""
        return digest({str(layer): block.gate.weight for layer, block in self.blocks.items()})

    def use_lora(self) -> None:
        """Put zero corrections beside the targets; `forward` binds tensors to them."""
        if self._lora is None:
            self._lora = wrap_lora(self.model, self.config, LORA_RANK, LORA_ALPHA)

    def forward(
        self,
        tokens: mx.array,
        prompt_lengths: mx.array,
        heads: Tensors | None = None,
        lora: Tensors | None = None,
        cache: list | None = None,
        carry: Carry | None = None,
        checkpointing: bool = False,
    ) -> mx.array:
        """`[B, T]` tokens to `[B, T, V]` logits; what the layers saw is in `executor` until the next forward.

        With `checkpointing` only what passes from layer to layer is kept for the backward pass, the rest is computed
        again; `executor` then says nothing of this forward.
        """
        if (self._lora is None) != (lora is None):
            raise ValueError("a LoRA is bound in every forward once there is one: give its tensors, or zeros")
        executor = self.executor
        executor.heads = heads
        executor.begin(prompt_lengths, tokens.shape[1], carry)
        cache = cache or [None] * len(self.model.decoder_layers)
        h = self.model.embed(tokens)
        masks = self.model.masks(h, cache)
        if checkpointing:
            return self.model.head(self._recomputed(h, masks, heads, lora))
        if lora is not None:
            bind_lora(self._lora, lora)
        for layer, mask, state in zip(self.model.decoder_layers, masks, cache, strict=True):
            h = layer(h, mask, state)
        return self.model.head(h)

    def _recomputed(self, h: mx.array, masks: list, heads: Tensors | None, lora: Tensors | None) -> mx.array:
        """The layers one by one under `mx.checkpoint`: whatever a layer's gradient needs goes in and out by name."""
        executor, ahead = self.executor, ()

        for layer, mask in zip(self.model.decoder_layers, masks, strict=True):

            def one(h: mx.array, ahead: tuple, heads: Tensors | None, lora: Tensors | None, layer=layer, mask=mask):
                executor.heads, executor.route = heads, ahead[::-1] or None
                if lora is not None:
                    bind_lora(self._lora, lora)
                h = layer(h, mask, None)
                # Indices last: they are a stop_gradient, after which MLX would give cotangents to the wrong outputs.
                return h, executor.route[::-1] if executor.route else ()

            h, ahead = mx.checkpoint(one)(h, ahead, heads, lora)
        return h

    def recall(self, prompt_lengths: mx.array, lengths: mx.array) -> dict[int, mx.array]:
        """Predicted layer -> share of the experts its own router would choose that were predicted, served positions."""
        executor = self.executor
        counted = executor.served & (executor.positions < lengths)
        return {layer: _overlap(executor.seen[layer], counted) for layer in executor.predicted}


def _overlap(seen: Seen, counted: mx.array) -> mx.array:
    same = (seen.native[..., :, None] == seen.predicted[..., None, :]).any(axis=-1).mean(axis=-1)
    return (same * counted).sum() / mx.maximum(counted.sum(), 1)


def warm_start(student: Student, owners: Iterable[int], inner: int, seed: int) -> dict[str, mx.array]:
    """Untrained heads: the next layer's router on this layer's input, and a zero correction (paper section 4)."""
    config, tensors = student.config, {}
    width = config.hidden + 2 * config.experts
    keys = mx.random.split(mx.random.key(seed), len(tuple(owners)))
    for owner, key in zip(owners, keys, strict=True):
        router = student.blocks[owner + 1].gate.weight.astype(mx.float32)
        tensors[f"layers.{owner}.fc1.weight"] = mx.random.normal((inner, width), key=key) / width**0.5
        tensors[f"layers.{owner}.fc2.weight"] = mx.zeros((config.experts, inner))
        tensors[f"layers.{owner}.linear_init.weight"] = mx.pad(router, [(0, 0), (0, width - config.hidden)])
    mx.eval(tensors)
    return tensors
