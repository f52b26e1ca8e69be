"""The four paths and the two layouts: the same bits for the same route, and each path really taken."""

import functools
import threading

import mlx.core as mx
import numpy as np
import pytest
from reference import (
    PROMPT,
    TOKENS,
    dequantised_logits,
    direct_or_skip,
    engine_logits,
    floor_bytes,
    relative_l2,
    same_bits,
    stock_model,
)
from reference import stock_logits as logits_of_stock

from edge0 import Edge0Error, Engine, EngineOptions, ErrorKind
from edge0.checkpoint.repack import repack
from edge0.streaming.source import PreadSource, read_failed
from edge0.telemetry.loads import DEMAND, PREFILL, WHOLE, Recorder

NATIVE = {"prerouter": "off", "lora": False}
PAPER = {"io": "mmap", "assembly": "stack"}
EVERYTHING = 1 << 30  # bytes: more than all experts of a unit tier
STEPS = 6
LONG = np.random.default_rng(5).integers(0, 512, 90).tolist()


@pytest.fixture(scope="module")
def repacked(checkpoints, tmp_path_factory):
    """Tier name -> the same checkpoint with one record per expert."""
    root = tmp_path_factory.mktemp("repacked")
    return {name: repack(directory, root / name).directory for name, directory in checkpoints.items()}


@functools.cache
def stock(checkpoint, k):
    return logits_of_stock(stock_model(checkpoint, k), PROMPT, TOKENS[:STEPS])


@functools.cache
def dequantised(checkpoint):
    return dequantised_logits(checkpoint, 4, tokens=TOKENS[:STEPS])


def run(directory, steps=STEPS, prompt=PROMPT, **options):
    """Logits, and a recorder that kept every read."""
    with Engine(directory, EngineOptions(**options), Recorder(rows=True)) as engine:
        logits = engine_logits(engine, prompt, TOKENS[:steps])
        assert engine.recorder.dropped == 0
        assert engine.store.available == engine.store.capacity
        return logits, engine.recorder


def prefill_loads(recorder):
    return [load for load in recorder.loads if load.purpose == PREFILL]


@functools.cache
def in_one_block(directory):
    """Logits of a prompt that is one chunk, read on demand, and of the steps after it."""
    return run(directory, k=4, bank_bytes=EVERYTHING, prefill="ondemand", **NATIVE)[0]


@functools.cache
def two_layers(directory):
    """Bytes of a bank that holds two whole layers and nothing more."""
    with Engine(directory, EngineOptions(k=2, **NATIVE)) as engine:
        return 2 * engine.config.experts * engine.plan.slot_bytes


# --- whole-layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 8])
def test_whole_layers_equal_stock_mlx_lm_and_are_read_once_per_chunk(checkpoint, k):
    options = {"k": k, "bank_bytes": EVERYTHING, "prefill": "whole-layer", **NATIVE}
    logits, recorder = run(checkpoint, **options)
    assert same_bits(logits, stock(checkpoint, k))
    loads = prefill_loads(recorder)
    layers = sorted({load.layer for load in loads})
    assert all(load.expert == WHOLE for load in loads) and len(loads) == 9 * len(layers)
    assert not [load for load in recorder.loads if load.purpose == DEMAND and load.layer in layers[-2:]]


@pytest.mark.parametrize("chunk", [7, 10, len(PROMPT) - 1])
def test_whole_layers_chunk_by_chunk(checkpoint, chunk):
    options = {"k": 4, "prefill_chunk": chunk, "bank_bytes": EVERYTHING, **NATIVE}
    logits, recorder = run(checkpoint, prefill="whole-layer", **options)
    assert same_bits(logits, run(checkpoint, prefill="ondemand", **options)[0])
    chunks = -(-len(PROMPT) // chunk)
    assert same_bits(logits, in_one_block(checkpoint))
    assert len(prefill_loads(recorder)) == 9 * chunks * len({load.layer for load in prefill_loads(recorder)})


def test_two_layer_buffers_and_nothing_more_are_enough(checkpoint, refused):
    """A bank of exactly two layers: every whole layer displaces the one before the last."""
    two = two_layers(checkpoint)
    logits, recorder = run(checkpoint, k=2, bank_bytes=two, prefill="whole-layer", **NATIVE)
    assert same_bits(logits, stock(checkpoint, 2))
    assert {load.expert for load in prefill_loads(recorder)} == {WHOLE}
    smaller = {"k": 2, "bank_bytes": two - 1, **NATIVE}
    refused(ErrorKind.BANK_TOO_SMALL, lambda: run(checkpoint, prefill="whole-layer", **smaller), "two of them")
    _, recorder = run(checkpoint, 0, LONG, **smaller)
    assert WHOLE not in {load.expert for load in recorder.loads}


def test_a_long_prompt_reads_each_expert_once_and_a_short_one_what_it_routes_to(checkpoint):
    options = {"k": 4, "bank_bytes": two_layers(checkpoint), **NATIVE}
    for prompt, whole in ((LONG, True), (PROMPT[:5], False)):
        logits, recorder = run(checkpoint, 0, prompt, **options)
        loads = prefill_loads(recorder)
        assert all((load.expert == WHOLE) == whole for load in loads)
        assert same_bits(logits, run(checkpoint, 0, prompt, prefill="ondemand", **options)[0])
        for layer in {load.layer for load in loads}:
            here = [load for load in loads if load.layer == layer]
            experts = {load.expert for load in here}
            assert len(here) == 9 if whole else len(here) == len(experts) <= 4 * 5


def test_layers_in_memory_are_computed_on_demand_between_whole_ones(checkpoint):
    """The second request finds the last two layers in the bank; the others are read whole once more."""
    with Engine(checkpoint, EngineOptions(k=4, **NATIVE)) as engine:
        slot = engine.store.nbytes // engine.store.capacity
        bank = (4 * engine.config.experts + 3) * slot
    with Engine(checkpoint, EngineOptions(k=4, bank_bytes=bank, **NATIVE), Recorder(rows=True)) as engine:
        first = engine_logits(engine, LONG, [])
        middle = engine.config.moe_layers[2]
        request = engine.new_request()
        lease = engine.store.request(middle, np.arange(engine.config.experts), PREFILL)
        lease.wait()
        lease.release()
        request.release()
        engine.recorder.loads.clear()
        assert same_bits(engine_logits(engine, LONG, []), first)
        loads = prefill_loads(engine.recorder)
        whole = {load.layer for load in loads if load.expert == WHOLE}
        assert middle not in whole and whole and engine.store.available == engine.store.capacity


@pytest.mark.parametrize("steps", [3])
def test_predictions_follow_a_prompt_of_whole_layers(checkpoint, steps):
    options = {"k": 4, "bank_bytes": EVERYTHING}
    assert same_bits(*(run(checkpoint, steps, LONG, prefill=way, **options)[0] for way in ("whole-layer", "ondemand")))


def test_a_layer_that_cannot_be_read_ends_the_prompt_and_not_the_engine(checkpoint, monkeypatch, refused):
    options = EngineOptions(k=4, bank_bytes=EVERYTHING, prefill="whole-layer", **NATIVE)
    real, broken = PreadSource.read, []

    def read(self, piece, memories):
        if piece.offset in broken:
            raise read_failed(piece, "Input/output error")
        real(self, piece, memories)

    monkeypatch.setattr(PreadSource, "read", read)
    with Engine(checkpoint, options) as engine:
        expected = engine_logits(engine, LONG, TOKENS[:1])
        for layer in (engine.config.moe_layers[0], engine.config.moe_layers[3], engine.config.moe_layers[-1]):
            broken[:] = [engine.layout.layer_ranges(layer)[4].offset]
            refused(ErrorKind.READ_FAILED, lambda: engine.prefill(engine.new_request(), LONG), "Input/output error")
            broken.clear()
            assert engine.store.available == engine.store.capacity
            assert same_bits(engine_logits(engine, LONG, TOKENS[:1]), expected)


def test_progress_tells_each_chunk_and_may_end_the_prompt(checkpoint):
    class Enough(Exception):
        pass

    options = EngineOptions(k=4, bank_bytes=EVERYTHING, prefill_chunk=32, **NATIVE)
    with Engine(checkpoint, options) as engine:
        done = []
        expected = np.array(engine.prefill(engine.new_request(), LONG, done.append))
        assert done == [30, 60, 90]

        def stop(tokens):
            if tokens == 60:
                raise Enough

        with pytest.raises(Enough):
            engine.prefill(engine.new_request(), LONG, stop)
        assert engine.store.available == engine.store.capacity
        assert same_bits(np.array(engine.prefill(engine.new_request(), LONG)), expected)


def test_every_chunk_of_a_long_prompt_reads_each_expert_once(checkpoint):
    """Also those that the chunk before left in the layer buffers: the first layers are read over them."""
    options = {"k": 4, "bank_bytes": two_layers(checkpoint), "prefill_chunk": 90}
    _, recorder = run(checkpoint, 0, LONG * 3, **options, **NATIVE)
    loads = prefill_loads(recorder)
    layers = {load.layer for load in loads}
    assert {load.expert for load in loads} == {WHOLE} and len(loads) == 3 * 9 * len(layers)


def test_a_long_prompt_reads_each_expert_once_per_chunk(checkpoints):
    directory = checkpoints["unit-35b"]
    prompt = np.random.default_rng(6).integers(0, 512, 310).tolist()
    for bank, chunks in ((two_layers(directory), 2), (EVERYTHING, 1)):  # a bank of everything keeps what it reads
        options = EngineOptions(k=4, bank_bytes=bank, prefill_chunk=200, **NATIVE)
        with Engine(directory, options, Recorder(rows=True)) as engine:
            engine.prefill(engine.new_request(), prompt)
            loads = prefill_loads(engine.recorder)
            assert sum(load.asked_bytes for load in loads) == chunks * engine.layout.total_bytes
            assert {load.expert == WHOLE for load in loads} == {chunks == 2}


def test_another_requests_predictions_in_a_buffer_are_told_where_whole_layers_were_asked_for(checkpoint, refused):
    with Engine(checkpoint, EngineOptions(k=4, bank_bytes=EVERYTHING, prefill="whole-layer")) as engine:
        first = engine.new_request()
        engine.prefill(first, LONG)
        engine.step(first, 1)
        while engine.store.buffer_free(0) and engine.store.buffer_free(1):
            engine.step(first, 2)
        second = engine.new_request()
        refused(ErrorKind.BANK_TOO_SMALL, lambda: engine.prefill(second, LONG), "another request")
        first.release()
        engine.prefill(engine.new_request(), LONG)


# --- hot -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("bank", ["floor", "half"])
def test_hot_equals_exact_with_hits_and_misses_in_one_layer(checkpoint, k, bank):
    options = {"k": k, **NATIVE}
    options["bank_bytes"] = floor_bytes(checkpoint, **options) * (1 if bank == "floor" else 2)
    hot, recorder = run(checkpoint, 12, native="hot", **options)
    exact, same = run(checkpoint, 12, native="exact", **options)
    assert same_bits(hot, exact)
    assert (recorder.totals.loads, recorder.totals.hits) == (same.totals.loads, same.totals.hits)
    demand = [load for load in recorder.loads if load.purpose == DEMAND]
    per_layer = {}
    for load in demand:
        per_layer[load.step, load.layer] = per_layer.get((load.step, load.layer), 0) + 1
    if k > 2:
        assert any(0 < count < k for count in per_layer.values())


def test_hot_with_lora_and_predictions(checkpoint):
    assert same_bits(*(run(checkpoint, k=4, native=native)[0] for native in ("hot", "exact")))


def test_a_failed_read_beside_a_computing_hit_ends_the_step_and_not_the_engine(checkpoint, monkeypatch, refused):
    options = EngineOptions(k=8, native="hot", **NATIVE)
    real, broken = PreadSource.read, []

    def read(self, piece, memories):
        if broken:
            raise read_failed(piece, "Input/output error")
        real(self, piece, memories)

    monkeypatch.setattr(PreadSource, "read", read)
    with Engine(checkpoint, options) as engine:
        expected = engine_logits(engine, PROMPT, TOKENS[:STEPS])
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        engine.step(request, TOKENS[0])
        broken.append(True)
        refused(ErrorKind.READ_FAILED, lambda: engine.step(request, TOKENS[1]))
        broken.clear()
        request.release()
        assert engine.store.available == engine.store.capacity
        assert same_bits(engine_logits(engine, PROMPT, TOKENS[:STEPS]), expected)


@pytest.mark.parametrize("failure", [OSError("no"), MemoryError(), KeyboardInterrupt()])
def test_hits_are_evaluated_before_their_slots_are_let_go(checkpoint, monkeypatch, failure):
    """Whatever a reader meets, also what is no Edge0Error."""
    options = EngineOptions(k=8, native="hot", **NATIVE)
    real, broken = PreadSource.read, []

    def read(self, piece, memories):
        if broken:
            raise failure
        real(self, piece, memories)

    monkeypatch.setattr(PreadSource, "read", read)
    with Engine(checkpoint, options) as engine:
        expected = engine_logits(engine, PROMPT, TOKENS[:3])
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        broken.append(True)
        with pytest.raises(type(failure)):
            for token in TOKENS:
                engine.step(request, token)
        broken.clear()
        assert engine.store.available == engine.store.capacity
        assert same_bits(engine_logits(engine, PROMPT, TOKENS[:3]), expected)


def test_hits_compute_while_misses_are_read(checkpoint, monkeypatch):
    """The misses of one layer are held back until its hits have been launched."""
    launched, gate = threading.Event(), []
    real_read, real_eval = PreadSource.read, mx.async_eval

    def read(self, piece, memories):
        if gate:
            assert launched.wait(30), "the hits were not launched while their neighbours were being read"
        real_read(self, piece, memories)

    def async_eval(*arrays):
        real_eval(*arrays)
        if gate and arrays and arrays[0].ndim == 4:  # expert outputs [1, 1, hits, hidden]
            launched.set()

    monkeypatch.setattr(PreadSource, "read", read)
    monkeypatch.setattr(mx, "async_eval", async_eval)
    with Engine(checkpoint, EngineOptions(k=8, native="hot", **NATIVE)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        layer = engine.config.moe_layers[0]
        block = engine.blocks[layer]
        x = mx.random.normal((1, 1, engine.config.hidden))
        indices, _ = engine.router(block.logits(x), block.bias())
        ids = np.unique(np.array(indices))
        engine.store.request(layer, ids[:3], DEMAND).wait()
        held = engine.store.held(layer, ids)
        if held.all():
            pytest.skip("the prompt left every expert of this layer in memory")
        gate.append(True)
        outputs, _ = engine.executor(block, x, block.shared(x))
        mx.eval(outputs)
        assert launched.is_set()


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"k": 4, "native": "exact", **NATIVE},
        {"k": 4, "native": "hot", **NATIVE},
        {"k": 4, "bank_bytes": EVERYTHING, "prefill": "whole-layer", **NATIVE},
        {"k": 4},
        {"k": 4, "prerouter": "advise"},
        {"k": 4, **PAPER},
        {"k": 4, "assembly": "stack", **NATIVE},
        {"k": 4, "assembly": "patch"},
        {"k": 4, "fill": "engine"},
        {"k": 4, "io": "direct"},
    ],
    ids=["exact", "hot", "whole-layer", "staged", "advise", "paper", "stack", "patch", "fill", "direct"],
)
def test_records_give_the_bits_of_the_stacked_layout(checkpoint, repacked, tier, options):
    if options.get("io") == "direct":
        direct_or_skip(checkpoint.glob("*.safetensors")).close()
    stacked, before = run(checkpoint, **options)
    records, after = run(repacked[tier.name], **options)
    assert same_bits(stacked, records)
    assert before.totals.loads == after.totals.loads and before.totals.asked_bytes == after.totals.asked_bytes
    if "assembly" not in options:
        assert {load.calls for load in before.loads if load.expert != WHOLE} == {9}
        assert {load.calls for load in after.loads} == {1}


def test_stock_mlx_lm_cannot_serve_records(repacked, tier):
    with pytest.raises(Edge0Error) as caught:
        stock_model(repacked[tier.name], 4)
    assert caught.value.kind is ErrorKind.LAYOUT_MALFORMED and "stacked" in str(caught.value)


# --- the contract of 1% --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"native": "hot"}, {"prefill": "whole-layer", "bank_bytes": EVERYTHING}])
def test_hot_and_whole_layer_stay_near_the_dequantised_reference(checkpoint, options):
    logits, _ = run(checkpoint, k=4, **NATIVE, **options)
    assert relative_l2(logits, dequantised(checkpoint)) < 0.01
