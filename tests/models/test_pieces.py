"""Attention in pieces: the bits of the whole on CPU, and nothing kept alive between chunks but the caches."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from reference import same_bits

from edge0.checkpoint.header import CheckpointIndex
from edge0.families import LING, read_config
from edge0.models import load
from edge0.models.pieces import InPieces


@pytest.fixture
def attentions(tier, checkpoint):
    """A linear and a full attention in pieces, each beside mlx-lm's own with the same weights."""
    config = read_config(checkpoint)
    index = CheckpointIndex.open(checkpoint)
    ours, stock = (load(checkpoint, config, index, streamed=streamed) for streamed in (True, False))
    ours.attend_in_pieces()
    return [
        [(attention_of(model.decoder_layers[layer]), model.make_cache()[layer]) for model in (ours, stock)]
        for layer in (2, 3)
    ]


def attention_of(layer):
    return next(layer[name] for name in ("attention", "linear_attn", "self_attn") if name in layer)


@pytest.mark.parametrize("lengths", [(2,), (300,), (31, 1, 270), (257, 65), (513,)])
def test_pieces_give_the_bits_of_the_whole(tier, attentions, lengths):
    for pair in attentions:
        for length in lengths:
            x = mx.random.normal((1, length, tier.text["hidden_size"]), key=mx.random.key(length))
            assert same_bits(*(attention(x, mask_of(cache, length, tier), cache) for attention, cache in pair))
            states = [state_arrays(cache) for _, cache in pair]
            assert all(same_bits(*arrays) for arrays in zip(*states, strict=True))


def mask_of(cache, length, tier):
    """As the families' own forward makes it."""
    if hasattr(cache, "cache"):
        return None
    return cache.make_mask(length, return_array=tier.family is LING, window_size=None)


def state_arrays(cache):
    return cache.cache if hasattr(cache, "cache") else [a[..., : cache.offset, :] for a in (cache.keys, cache.values)]


def test_a_piece_is_never_a_single_token(tier, attentions):
    """MLA takes another path for one token, with other bits."""
    seen = []
    cache = SimpleNamespace(state=[])
    for (attention, _), _ in attentions:
        assert isinstance(attention, InPieces)
        inner, attention.inner = attention.inner, lambda x, mask, cache: seen.append(x.shape[1]) or x
        for length in (attention.tokens + 1, 2 * attention.tokens + 1, 7 * attention.tokens + 3):
            seen.clear()
            attention(mx.zeros((1, length, 4)), None, cache)
            assert sum(seen) == length and 2 <= min(seen) and max(seen) <= attention.tokens
        attention.inner = inner


def test_no_more_than_a_piece_outlives_a_prompt(tier, attentions):
    """mlx-lm's KDA keeps its three convolution states as views of the last piece."""
    text = tier.text
    for (attention, cache), _ in attentions:
        piece = 3 * (attention.tokens + 3) * text["num_attention_heads"] * text["head_dim"] * 4
        x = mx.random.normal((1, 500, tier.text["hidden_size"]))
        mx.eval(x)
        before = mx.get_active_memory()
        mx.eval(attention(x, mask_of(cache, 500, tier), cache))
        assert mx.get_active_memory() - before < cache.nbytes + piece + (16 << 10)
