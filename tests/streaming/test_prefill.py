"""Which layers are read whole, and that at most one is in use and one on its way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.errors import ErrorKind
from edge0.streaming.prefill import WHOLE_LAYER_FROM, WholeLayers, even_cuts, expected_coverage, whole_layers

EXPERTS = 128


class Store:
    """Notes what is asked for; `held` is the share of each layer that is in memory."""

    def __init__(self, shares=(), buffers=(True, True), outside=()):
        self.shares, self.buffers, self.log, self.busy = dict(shares), buffers, [], {}
        self.outside = dict(outside)  # of what is held of a layer, the share outside of the layer buffers

    capacity = 2 * EXPERTS

    def held(self, layer, experts):
        return np.arange(len(experts)) < self.shares.get(layer, 0) * len(experts)

    def kept(self, layer):
        return round(self.shares.get(layer, 0) * self.outside.get(layer, 1) * EXPERTS)

    def buffer_free(self, buffer):
        return self.buffers[buffer] and buffer not in self.busy

    def request_layer(self, layer, buffer):
        assert self.buffer_free(buffer)
        self.busy[buffer] = layer
        self.log.append(layer)
        return Lease(self, buffer)


class Lease:
    slots = np.arange(0)

    def __init__(self, store, buffer):
        self.store, self.buffer, self.layer = store, buffer, store.busy[buffer]

    def wait(self):
        """There is nothing to wait for."""

    def release(self):
        assert self.store.busy.pop(self.buffer) == self.layer


@given(st.integers(1, 64), st.integers(1, 300))
def test_coverage_is_the_mean_share_of_uniform_routes(k, tokens):
    coverage = expected_coverage(k, 64, tokens)
    assert 0 <= coverage <= 1 and coverage <= expected_coverage(k, 64, tokens + 1)
    assert expected_coverage(k, 64, 1) == pytest.approx(k / 64)
    if k == 3 and tokens < 40:
        rng = np.random.default_rng(tokens)
        seen = [len({e for _ in range(tokens) for e in rng.choice(64, 3, replace=False)}) / 64 for _ in range(200)]
        assert np.mean(seen) == pytest.approx(coverage, abs=0.03)


@pytest.mark.parametrize(("k", "tokens", "whole"), [(4, 27, False), (8, 27, False), (4, 512, True), (8, 3100, True)])
def test_the_released_35b_reads_a_short_prompts_experts_and_a_long_prompts_layers(k, tokens, whole):
    assert whole_layers(Store(), range(40), 256, k, tokens, "auto") == (list(range(40)) if whole else [])


def test_a_layer_that_is_in_memory_is_not_read_whole():
    store = Store(shares={1: 1.0, 2: 1 - WHOLE_LAYER_FROM / 2, 3: 0.01})
    assert whole_layers(store, range(5), EXPERTS, 8, 2000, "auto") == [0, 3, 4]
    assert whole_layers(store, range(5), EXPERTS, 8, 2000, "whole-layer") == [0, 1, 2, 3, 4]
    assert whole_layers(store, range(5), EXPERTS, 8, 2000, "ondemand") == []


def test_what_lies_in_the_buffers_is_lost_once_anything_is_read_whole():
    """After a first chunk the last two layers lie there; the next chunk's first layers are read over them."""
    store = Store(shares={3: 1.0, 4: 1.0}, outside={3: 0, 4: 0})
    assert whole_layers(store, range(5), EXPERTS, 8, 2000, "auto") == [0, 1, 2, 3, 4]
    big = Store()
    big.capacity = 5 * EXPERTS
    assert whole_layers(big, range(5), EXPERTS, 8, 2000, "auto") == []
    everything = Store(shares=dict.fromkeys(range(5), 1.0), outside={0: 0, 1: 0})
    assert whole_layers(everything, range(5), EXPERTS, 8, 2000, "auto") == []


@pytest.mark.parametrize("buffers", [(True, False), (False, True), (False, False)])
def test_without_two_free_buffers_nothing_is_read_whole_and_nothing_else_is_promised(buffers, refused):
    assert whole_layers(Store(buffers=buffers), range(5), 64, 8, 2000, "auto") == []
    refused(
        ErrorKind.BANK_TOO_SMALL, lambda: whole_layers(Store(buffers=buffers), range(5), 64, 8, 2000, "whole-layer")
    )


@given(st.integers(1, 5000), st.integers(1, 2048))
def test_cuts_are_even_few_and_cover_everything(length, most):
    cuts = even_cuts(length, most)
    sizes = [cut.stop - cut.start for cut in cuts]
    assert cuts[0].start == 0 and cuts[-1].stop == length and len(cuts) == -(-length // most)
    assert all(a.stop == b.start for a, b in zip(cuts, cuts[1:], strict=False))
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 2 or most <= 2 or length == 1


def test_one_token_is_a_decode_step():
    assert whole_layers(Store(), range(5), 64, 64, 1, "whole-layer") == []


@given(st.sets(st.integers(0, 20)), st.integers(0, 21))
def test_one_layer_in_use_and_one_on_its_way(layers, stop):
    """Layers that are not read whole come between; a prompt may end anywhere."""
    store, planned = Store(), sorted(layers)
    whole = WholeLayers(store, planned)
    assert store.log == planned[:1]
    for layer in range(stop):
        assert (layer in whole) == (layer in layers)
        if layer not in layers:
            whole.leave()
            assert len(store.busy) <= 1
            continue
        lease = whole.enter()
        assert lease.layer == layer and len(store.busy) <= 2
        assert store.log == planned[: planned.index(layer) + 2]
    whole.release()
    whole.release()
    assert not store.busy
