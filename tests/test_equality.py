"""Every path gives the bits of the resident model for the same route, and stays near the dequantised reference."""

import functools

import mlx.core as mx
import numpy as np
import pytest
from reference import (
    PROMPT,
    TOKENS,
    dequantised_logits,
    direct_or_skip,
    engine_logits,
    executed_sets,
    floor_bytes,
    relative_l2,
    same_bits,
    sequence_run,
    stock_logits,
    stock_model,
)

from edge0 import Engine, EngineOptions
from edge0.streaming.executor import Prediction
from edge0.telemetry.loads import PREFETCH, Recorder

EXACT = {"prerouter": "off", "lora": False}
PAPER = {"io": "mmap", "assembly": "stack"}
WHOLE = 1 << 30  # bytes: more than all experts of a unit tier
STEPS = TOKENS[:10]


@functools.cache
def run(checkpoint, steps=6, **options):
    with Engine(checkpoint, EngineOptions(**options)) as engine:
        logits = engine_logits(engine, PROMPT, TOKENS[:steps])
        assert engine.recorder.dropped == 0
    return logits


@functools.cache
def stock(checkpoint, k, lora=False):
    return stock_logits(stock_model(checkpoint, k, lora), PROMPT, STEPS)


@functools.cache
def dequantised(checkpoint, k):
    return dequantised_logits(checkpoint, k, PROMPT, STEPS)


# --- exact, staged and resident ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 8])
def test_exact_path_equals_stock_mlx_lm(checkpoint, k):
    assert same_bits(run(checkpoint, len(STEPS), k=k, **EXACT), stock(checkpoint, k))


def test_exact_path_with_lora_equals_stock_mlx_lm_with_lora(checkpoint):
    logits = run(checkpoint, len(STEPS), k=4, prerouter="off")
    assert same_bits(logits, stock(checkpoint, 4, lora=True))
    assert not same_bits(logits, stock(checkpoint, 4))


@pytest.mark.parametrize("k", [4, 8])
def test_staged_path_fed_with_the_routers_own_routes_equals_stock_mlx_lm(checkpoint, k):
    """A first, exact run says what each layer routes; in a second, all layers are fed that as their prediction."""
    reference = stock(checkpoint, k)
    routes = []
    with Engine(checkpoint, EngineOptions(k=k, **EXACT)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        for token in STEPS:
            engine.step(request, token)
            routes.append(
                {
                    layer: engine.router(engine.blocks[layer].logits(entry.x), engine.blocks[layer].bias())
                    for layer, entry in engine.executor.running.executed.items()
                }
            )
            mx.eval(routes[-1])
    with Engine(checkpoint, EngineOptions(k=k, lora=False, bank_bytes=WHOLE)) as engine:
        request = engine.new_request()
        rows = [np.array(engine.prefill(request, PROMPT))]
        for token, forced in zip(STEPS, routes, strict=True):
            request.release()
            for layer, (indices, weights) in forced.items():
                ids = np.array(indices)
                lease = engine.store.request(layer, ids.flatten(), PREFETCH)
                request.predictions[layer] = Prediction(indices, weights, ids, lease)
            rows.append(np.array(engine.step(request, token)))
            executed = engine.executor.running.executed
            assert set(executed) == set(engine.config.moe_layers)
            assert all(executed[layer].indices is indices for layer, (indices, _) in forced.items())
    staged = np.stack(rows)
    assert same_bits(staged, reference)
    assert relative_l2(staged, dequantised(checkpoint, k)) < 0.01


# --- ways to hold and launch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
def test_the_papers_stacks_equal_the_bank(checkpoint, prerouter):
    bank = run(checkpoint, k=4, prerouter=prerouter)
    assert same_bits(run(checkpoint, k=4, prerouter=prerouter, **PAPER), bank)
    assert same_bits(run(checkpoint, k=4, prerouter=prerouter, assembly="stack"), bank)


OTHER_WAYS = {
    "patch": {"assembly": "patch"},
    "patch-mmap": {"assembly": "patch", "io": "mmap", "launch_groups": 1},
    "fill": {"fill": "engine"},
    "direct": {"io": "direct"},
    "direct-stack": {"io": "direct", "assembly": "stack"},
    "direct-fill": {"io": "direct", "fill": "engine", "advise": False},
}


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_ways_to_read_fill_and_assemble_change_no_bit(checkpoint, prerouter, way):
    if OTHER_WAYS[way].get("io") == "direct":
        direct_or_skip(checkpoint.glob("*.safetensors")).close()
    logits = run(checkpoint, k=4, prerouter=prerouter, **OTHER_WAYS[way])
    assert same_bits(logits, run(checkpoint, k=4, prerouter=prerouter))


def test_advice_changes_no_bit(checkpoint):
    assert same_bits(*(run(checkpoint, k=4, prerouter=prerouter) for prerouter in ("advise", "off")))


def test_routing_by_prediction_differs_from_routing_by_the_router(checkpoint):
    """Otherwise the equalities between arms would say nothing about predictions."""
    route, off = (run(checkpoint, k=4, prerouter=prerouter) for prerouter in ("route", "off"))
    assert same_bits(route[0], off[0])
    assert not same_bits(route[2:], off[2:])


@pytest.mark.parametrize("prerouter", ["route", "advise"])
def test_launch_groups_change_no_bit(checkpoint, prerouter):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        most = len(engine.schedule.predicted)
    assert most >= 5
    chosen = range(1, most + 1) if prerouter == "route" else (1, most)
    runs = [run(checkpoint, k=2, prerouter=prerouter, launch_groups=groups) for groups in chosen]
    assert all(same_bits(logits, runs[0]) for logits in runs[1:])


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
def test_bank_at_its_floor_equals_a_bank_of_everything(checkpoint, prerouter):
    options = {"k": 2, "prerouter": prerouter}
    small = run(checkpoint, bank_bytes=floor_bytes(checkpoint, **options), **options)
    assert same_bits(small, run(checkpoint, bank_bytes=WHOLE, **options))


def test_prefill_in_blocks_of_experts_equals_one_block(checkpoint):
    """A bank at the floor of K=2 holds a quarter of what the prompt touches in a layer."""
    options = {"k": 2, **EXACT}
    small = EngineOptions(bank_bytes=floor_bytes(checkpoint, **options), **options)
    with Engine(checkpoint, small, Recorder(rows=True)) as engine:
        blocks = engine_logits(engine, PROMPT, STEPS)
        touched = max(len(loads) for loads in _prefilled(engine).values())
        assert touched > engine.store.capacity // 2
    with Engine(checkpoint, EngineOptions(bank_bytes=WHOLE, **options)) as engine:
        assert same_bits(blocks, engine_logits(engine, PROMPT, STEPS))
        assert engine.store.capacity // 2 >= engine.config.experts


def _prefilled(engine):
    layers = {}
    for load in engine.recorder.loads:
        if load.purpose == "prefill":
            layers.setdefault(load.layer, set()).add(load.expert)
    return layers


@pytest.mark.parametrize("chunk", [1, 7, 19])
def test_prefill_chunks_change_no_bit_of_35b(checkpoints, chunk):
    whole = run(checkpoints["unit-35b"], k=4)
    assert same_bits(run(checkpoints["unit-35b"], k=4, prefill_chunk=chunk), whole)


@pytest.mark.parametrize("chunk", [7, 10])
def test_prefill_chunks_longer_than_one_change_no_bit_of_8b_without_predictions(checkpoints, chunk):
    whole = run(checkpoints["unit-8b"], k=4, prerouter="off")
    assert same_bits(run(checkpoints["unit-8b"], k=4, prerouter="off", prefill_chunk=chunk), whole)


# --- the contract of 1% relative L2 --------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [{}, PAPER, {"prerouter": "advise"}, None], ids=["exact", "paper", "advise", "stock"])
def test_paths_stay_near_the_dequantised_reference(checkpoint, arm):
    logits = stock(checkpoint, 4) if arm is None else run(checkpoint, **({"k": 4} | EXACT | arm))
    assert relative_l2(logits, dequantised(checkpoint, 4)[: len(logits)]) < 0.01


def test_predicted_routes_stay_near_the_dequantised_sequence(checkpoint):
    with Engine(checkpoint, EngineOptions(k=4, lora=False)) as engine:
        logits = engine_logits(engine, PROMPT, STEPS)
        sets = executed_sets(engine)
    reference, executor = sequence_run(checkpoint, 4, PROMPT, STEPS, dequantised=True)
    assert relative_l2(logits, reference) < 0.01
    assert sets == {layer: frozenset(np.array(route[0, -1]).tolist()) for layer, route in executor.executed.items()}
