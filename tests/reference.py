"""What the engine is compared with, written a second time and in another way.

Stock       mlx-lm's own model on the same bytes, all experts in memory, its own forward.
Dequantised the same model with every weight unpacked to fp32 by numpy, for the contract of 1% relative L2.
Sequence    a whole token sequence in one forward, predictions shifted by one position, experts read as whole layers.

Nothing here uses the engine's routing, heads, bank or schedule; the streamed model serves only as a place to plug in.
"""

import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.activations import swiglu
from mlx_lm.models.bailing_moe_v3 import _group_expert_select
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from safetensors.numpy import load_file

from edge0 import Edge0Error, Engine, EngineOptions, models
from edge0.checkpoint.adapters import adapter_path, open_adapter
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import read_config
from edge0.lora import apply_lora
from edge0.streaming.bank import slot_bytes
from edge0.streaming.direct import DirectSource

FILE_BYTES = 300_001  # of the file that the tests of the sources read
PROMPT = np.random.default_rng(1).integers(0, 512, 20).tolist()
TOKENS = np.random.default_rng(2).integers(0, 512, 24).tolist()


def same_bits(left, right):
    """Whether two fp32 arrays agree bit by bit, signs of zero included."""
    left, right = np.asarray(left, order="C"), np.asarray(right, order="C")
    assert left.dtype == right.dtype == np.float32 and left.shape == right.shape
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


def relative_l2(values, reference):
    """Largest relative L2 distance over the rows."""
    return (np.linalg.norm(values - reference, axis=-1) / np.linalg.norm(reference, axis=-1)).max()


def direct_or_skip(paths):
    """A source of direct reads, where the test's files lie on a file system that takes them."""
    try:
        return DirectSource(paths)
    except Edge0Error as error:
        if "refuses direct reads" not in str(error):
            raise
        pytest.skip(str(error))


# --- runs ----------------------------------------------------------------------------------------------------------


def engine_logits(engine, prompt=PROMPT, tokens=TOKENS):
    """`[1 + steps, vocab]`: after the prompt and after each forced token."""
    request = engine.new_request()
    try:
        rows = [np.array(engine.prefill(request, prompt))]
        rows += [np.array(engine.step(request, token)) for token in tokens]
    finally:
        request.release()
    return np.stack(rows)


@functools.cache
def floor_bytes(directory, **options):
    """The smallest bank that an engine with these options accepts."""
    with Engine(directory, EngineOptions(**options)) as engine:
        slots = engine.schedule.floor_slots(engine.config, engine.k)
        return slots * slot_bytes(engine.layout.specs, engine.dtype)


def executed_sets(engine):
    """Layer -> the set of experts that the last step of `engine` routed to."""
    executed = engine.executor.running.executed
    return {layer: frozenset(np.array(entry.indices).ravel().tolist()) for layer, entry in executed.items()}


def stock_model(directory, k, lora=False):
    """mlx-lm's own class, resident, routing `k` experts, with the adapter of that K beside it or not."""
    config = read_config(directory)
    model = models.load(directory, config, CheckpointIndex.open(directory), streamed=False)
    for layer in model.decoder_layers:
        if "switch_mlp" in layer.mlp:
            router = layer.mlp if hasattr(layer.mlp, "top_k") else layer.mlp.gate
            assert router.top_k == 8
            router.top_k = k
    if lora:
        apply_lora(model, config, open_adapter(directory, config.family, "lora", k), mx.float32)
    return model


def stock_logits(model, prompt=PROMPT, tokens=TOKENS):
    """`[1 + steps, vocab]` through the model's own `__call__` and caches."""
    cache = model.make_cache()
    rows = [np.array(model(mx.array([prompt]), cache=cache)[0, -1])]
    rows += [np.array(model(mx.array([[token]]), cache=cache)[0, -1]) for token in tokens]
    return np.stack(rows)


# --- dequantised ---------------------------------------------------------------------------------------------------


def unpack(weight, scales, biases, bits):
    """fp32 values of an affine quantised matrix `[..., out, in]`; scales and biases are widened before use."""
    words = np.array(weight)
    codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    codes = codes.reshape(*words.shape[:-1], -1).astype(np.float32)
    scales, biases = (np.array(part.astype(mx.float32)) for part in (scales, biases))
    group = codes.shape[-1] // scales.shape[-1]
    return codes * np.repeat(scales, group, axis=-1) + np.repeat(biases, group, axis=-1)


def dequantise(model):
    """Replace every quantised module of `model` by its plain fp32 form; returns the model."""
    plain = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear):
            continue
        weight = mx.array(unpack(module.weight, module.scales, module.biases, module.bits))
        if isinstance(module, QuantizedSwitchLinear):
            replacement = SwitchLinear(weight.shape[2], weight.shape[1], weight.shape[0], bias=False)
        elif isinstance(module, nn.QuantizedEmbedding):
            replacement = nn.Embedding(*weight.shape)
        else:
            replacement = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        replacement.weight = weight
        plain.append((name, replacement))
    assert plain
    model.update_modules(tree_unflatten(plain))
    return model.eval()


def dequantised_logits(directory, k, prompt=PROMPT, tokens=TOKENS):
    """The fp32 reference of the 1% contract."""
    return stock_logits(dequantise(stock_model(directory, k)), prompt, tokens)


# --- a whole sequence at once --------------------------------------------------------------------------------------


def layer_stacks(layout, layer):
    """All experts of one layer as nine arrays `[experts, ...]`, read with plain file reads, scales widened to fp32."""
    arrays = []
    for part, spec in enumerate(layout.specs):
        raw = bytearray()
        for expert in range(layout.experts):
            piece = layout.ranges(layer, expert)[part]
            with piece.path.open("rb") as file:
                file.seek(piece.offset)
                raw += file.read(piece.nbytes)
        shape = (layout.experts, *spec.shape)
        if spec.dtype == "U32":
            arrays.append(mx.array(np.frombuffer(raw, np.uint32).reshape(shape)))
        else:
            wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            arrays.append(mx.array(wide.view(np.float32).reshape(shape)))
    return arrays


class SequenceExecutor:
    """Routed experts of every layer for a sequence `[1, T, D]` that is run in one forward.

    At a predicted layer the positions from `first` on take the route that the layer before predicted one position
    earlier; all others take their own router's. `executed` keeps every layer's routes `[1, T, K]`.

    Args:
        prompt_length: positions that no prediction serves on 35b; on 8b the last of them already makes one.
        teacher: one-hots say what an owner's router would choose, not what was routed.
        dequantised: experts are unpacked to fp32 first.
    """

    def __init__(self, directory, config, k, prompt_length, teacher=False, dequantised=False):
        self._config, self._k, self._teacher = config, k, teacher
        layout = ExpertLayout.of(CheckpointIndex.open(directory), config)
        stacks = {layer: layer_stacks(layout, layer) for layer in layout.layers}
        self._experts = {
            layer: [unpacked_or_packed(parts[at : at + 3], dequantised) for at in (0, 3, 6)]
            for layer, parts in stacks.items()
        }
        weights = load_file(adapter_path(directory, config.family, "prerouter", k))
        owners = sorted({int(name.split(".")[1]) for name in weights})
        self._heads = {
            owner: [
                mx.array(weights[f"layers.{owner}.{part}.weight"].astype(np.float32))
                for part in ("linear_init", "fc1", "fc2")
            ]
            for owner in owners
        }
        softmax = config.family.router == "softmax"
        self.first = prompt_length + 1 if softmax else prompt_length
        self._no_history_at = prompt_length if softmax else None
        # The softmax family computes a prediction for its last layer and never uses it.
        self.predicted = [owner + 1 for owner in owners if owner + 1 < config.layers - (1 if softmax else 0)]
        self._forecast = {}
        self.executed = {}

    def __call__(self, block, x, shared):
        indices, weights = own = self._route(block.logits(x), block.bias())
        if block.layer in self.predicted:
            indices, weights = (
                mx.concatenate([native[:, : self.first], ahead[:, self.first - 1 : -1]], axis=1)
                for native, ahead in zip(own, self._forecast[block.layer - 1], strict=True)
            )
        self.executed[block.layer] = indices
        if block.layer in self._heads:
            seen = own[0] if self._teacher else indices
            self._forecast[block.layer] = self._route(self._head(block.layer, x, np.array(seen)), None)
        return self._apply(block.layer, x, indices), weights

    def _head(self, owner, x, seen):
        now = np.zeros((1, x.shape[1], self._config.experts), np.float32)
        np.put_along_axis(now, seen, 1, axis=-1)
        before = np.concatenate([np.zeros_like(now[:, :1]), now[:, :-1]], axis=1)
        if self._no_history_at is not None:
            before[:, self._no_history_at] = 0
        feature = mx.concatenate([x, mx.array(now), mx.array(before)], axis=-1)
        linear, fc1, fc2 = self._heads[owner]
        return feature @ linear.T + nn.gelu(feature @ fc1.T) @ fc2.T

    def _route(self, logits, bias):
        config, k = self._config, self._k
        if config.family.router == "softmax":
            shares = mx.softmax(logits, axis=-1, precise=True)
            indices = mx.argpartition(shares, kth=-k, axis=-1)[..., -k:]
            weights = mx.take_along_axis(shares, indices, axis=-1)
            return indices, weights / weights.sum(axis=-1, keepdims=True)
        bias = mx.zeros(config.experts) if bias is None else bias
        scale = config.text["routed_scaling_factor"]
        return _group_expert_select(logits, bias, k, config.groups, config.groups_kept, scale)

    def _apply(self, layer, x, indices):
        gate, up, down = self._experts[layer]
        rows = x[..., None, None, :]
        hidden = swiglu(gather(rows, gate, indices), gather(rows, up, indices))
        return gather(hidden, down, indices).squeeze(-2)


def unpacked_or_packed(parts, dequantised):
    return [mx.array(unpack(*parts, bits=4))] if dequantised else parts


def gather(x, parts, indices):
    """`x` times the chosen experts' matrix, packed (three arrays) or plain (one)."""
    if len(parts) == 1:
        return mx.gather_mm(x, parts[0].swapaxes(-1, -2), rhs_indices=indices)
    return mx.gather_qmm(x, *parts, rhs_indices=indices, transpose=True, group_size=64, bits=4)


def sequence_run(directory, k, prompt=PROMPT, tokens=TOKENS, lora=False, teacher=False, dequantised=False):
    """One forward over prompt and tokens; returns `[1 + steps, vocab]` and the executor with its routes."""
    config = read_config(directory)
    model = models.load(directory, config, CheckpointIndex.open(directory), streamed=True)
    if lora:
        apply_lora(model, config, open_adapter(directory, config.family, "lora", k), mx.float32)
    if dequantised:
        dequantise(model)
    executor = SequenceExecutor(directory, config, k, len(prompt), teacher, dequantised)
    for block in models.moe_blocks(model).values():
        block.executor = executor
    logits = model(mx.array([[*prompt, *tokens]]), cache=model.make_cache())
    return np.array(logits[0, len(prompt) - 1 :]), executor
