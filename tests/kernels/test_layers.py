"""Attention of every kind against mlx-lm's own layer, and the same bits however a prompt is cut."""

import mlx.core as mx
import numpy as np
import pytest

from edge0 import models
from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.header import CheckpointIndex
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.kernels import layers
from edge0.kernels.layers import core_of
from edge0.lora import apply_lora
from tests.kernels.shapes import distance

TOKENS = 70  # a prompt of more than a block of keys, then single tokens


@pytest.fixture(scope="module")
def loaded(checkpoints):
    """Tier name -> a streamed model with its LoRA, layers as mlx-lm has them."""

    def load(directory):
        config = read_config(directory)
        model = models.load(directory, config, CheckpointIndex.open(directory), streamed=True)
        apply_lora(model, config, open_adapter(directory, config.family, "lora", 4), mx.float32)
        return model

    return {name: load(directory) for name, directory in checkpoints.items()}


def mlx_layer(model, number, x, cuts):
    """`x + attention(norm(x))` by mlx-lm, piece by piece."""
    layer, cache, outputs = model.decoder_layers[number], model.make_cache(), []
    attention = next(layer[name] for name in ("linear_attn", "self_attn", "attention") if name in layer)
    for cut in cuts:
        piece = mx.array(x[None, cut])
        mask = model.masks(piece, cache)[number]
        outputs.append(piece + attention(layer.input_layernorm(piece), mask, cache[number]))
        # A mask is made from the first cache of the kind: they all move together in a model.
        for index, other in enumerate(cache):
            if index != number and hasattr(other, "offset"):
                other.offset = cache[number].offset if hasattr(cache[number], "offset") else other.offset
        mx.eval(outputs[-1])
    out = mx.concatenate(outputs, axis=1)
    return np.array(out[0]), np.array(layer.post_attention_layernorm(out)[0])


def kernel_layer(kernels, model, number, x, cuts):
    cache, out, normed = model.make_cache()[number], np.empty_like(x), np.empty_like(x)
    core = core_of(kernels, model.decoder_layers[number])
    for cut in cuts:
        core(x[cut], cache, out[cut], normed[cut])
    return out, normed


def cut(*lengths):
    edges = np.cumsum([0, *lengths])
    return [slice(int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize(("tier_name", "number"), [("unit-35b", 0), ("unit-35b", 3), ("unit-8b", 1), ("unit-8b", 3)])
def test_a_layer_is_near_mlx_lms_and_its_bits_do_not_depend_on_the_cut(kernels, alone, loaded, tier_name, number):
    model, rng = loaded[tier_name], np.random.default_rng(number)
    x = rng.normal(size=(TOKENS + 3, model.decoder_layers[0].input_layernorm.weight.shape[0])).astype(np.float32)
    cuts = cut(TOKENS, 1, 1, 1)
    out, normed = kernel_layer(kernels, model, number, x, cuts)
    bound = {"exact": 1e-5, "int8": 3e-2}[kernels.kind]
    for found, expected in zip((out, normed), mlx_layer(model, number, x, cuts), strict=True):
        assert distance(found, expected) < bound
    for other, way in ((kernels, [1] * len(x)), (alone, [7, len(x) - 7])):
        assert all(map(np.array_equal, kernel_layer(other, model, number, x, cut(*way)), (out, normed)))


def test_a_cache_grows_where_it_stands(kernels, loaded):
    """Beyond the 256 tokens that mlx-lm's cache has room for at first."""
    model, rng = loaded["unit-35b"], np.random.default_rng(9)
    x = rng.normal(size=(300, 128)).astype(np.float32)
    together = kernel_layer(kernels, model, 3, x, cut(300))
    assert all(map(np.array_equal, kernel_layer(kernels, model, 3, x, cut(250, 1, 49)), together))


@pytest.mark.parametrize("name", ["unit-35b", "unit-8b"])
def test_heads_that_are_wider_than_the_kernels_scratch_are_refused(kernels, loaded, monkeypatch, refused, name):
    """Every kind of attention: C holds a head on its stack."""
    monkeypatch.setattr(layers, "WIDEST", 16)
    for layer in loaded[name].decoder_layers:
        refused(ErrorKind.OPTION_INVALID, lambda layer=layer: core_of(kernels, layer), "option kernels", "kernels=mlx")
