"""An engine under a route trace: every way of serving executes and reads the trace, bit for bit the same."""

import dataclasses
import functools
import io
from collections import defaultdict

import mlx.core as mx
import numpy as np
import pytest
from reference import PROMPT, engine_logits, executed_sets, floor_bytes, same_bits

from edge0 import Engine, EngineOptions, ErrorKind, Sampling
from edge0.commands.trace import record
from edge0.families import read_config
from edge0.routing import Router
from edge0.telemetry.loads import PREFETCH, Recorder
from edge0.trace import RouteTrace, generate

STEPS = 8
TOKENS = np.random.default_rng(8).integers(0, 512, STEPS).tolist()
WAYS = {
    "ondemand": {"prerouter": "off", "native": "exact"},
    "hot": {"prerouter": "off", "native": "hot"},
    "prerouter": {"prerouter": "route"},
    "one launch": {"prerouter": "route", "launch_groups": 1},
    "advise": {"prerouter": "advise"},
    "mmap": {"prerouter": "off", "io": "mmap", "assembly": "stack"},
    "prerouter-mmap": {"prerouter": "route", "io": "mmap", "assembly": "stack", "launch_groups": 1},
}


@functools.cache
def trace_of(checkpoint):
    config = read_config(checkpoint)
    return generate(config.moe_layers, config.experts, 4, STEPS, 0.25, 1, 5)


@pytest.fixture
def trace(checkpoint):
    return trace_of(checkpoint)


@functools.cache
def replayed(checkpoint, way):
    """Two requests of one engine under the trace: the sets that each step executed, and the first one's logits."""
    sets, logits = [], []
    with Engine(checkpoint, EngineOptions(k=4, **WAYS[way]), routes=trace_of(checkpoint)) as engine:
        for prompt in (PROMPT, PROMPT[:1]):
            request = engine.new_request()
            rows = [np.array(engine.prefill(request, prompt))]
            for token in TOKENS:
                rows.append(np.array(engine.step(request, token)))
                sets.append(executed_sets(engine))
            assert request.predictions == {}
            logits.append(np.stack(rows))
        assert engine.recorder.dropped == 0
    return sets, logits[0]


@pytest.mark.parametrize("way", WAYS)
def test_every_step_of_every_request_executes_the_trace(checkpoint, trace, way):
    expected = [{layer: frozenset(ids.tolist()) for layer, ids in trace.step(n).items()} for n in range(STEPS)]
    assert replayed(checkpoint, way)[0] == expected * 2


def test_ways_that_weigh_alike_give_the_same_bits(checkpoint):
    """Weights come from the router, or from a head where the layer is predicted; how experts are read is no matter."""
    rows = {way: replayed(checkpoint, way)[1] for way in WAYS}
    for way in ("hot", "advise", "mmap"):
        assert same_bits(rows[way], rows["ondemand"]), way
    for way in ("one launch", "prerouter-mmap"):
        assert same_bits(rows[way], rows["prerouter"]), way
    assert not same_bits(rows["prerouter"], rows["ondemand"])


@pytest.mark.parametrize("prerouter", ["off", "route"])
def test_a_replayed_recording_is_the_run_that_was_recorded(checkpoint, prerouter):
    """Tokens and logits, bit by bit: the trace is what would have been routed anyway."""
    options = EngineOptions(k=4, prerouter=prerouter)
    sampling = Sampling(0.7, seed=3)
    with Engine(checkpoint, options) as engine:
        trace = record(engine, PROMPT, STEPS, sampling)
        rows = engine_logits(engine, tokens=TOKENS)
        steps = [[frozenset(ids.tolist()) for ids in step] for step in trace.routes]
        text = list(engine.generate(PROMPT, STEPS + 1, sampling))
    with Engine(checkpoint, options, routes=trace) as engine:
        assert list(engine.generate(PROMPT, STEPS + 1, sampling)) == text
        again = record(engine, PROMPT, STEPS, sampling)
    assert [[frozenset(ids.tolist()) for ids in step] for step in again.routes] == steps
    with Engine(checkpoint, options) as engine:
        forced = recorded_routes(engine)
    with Engine(checkpoint, options, routes=forced) as engine:
        assert same_bits(engine_logits(engine, tokens=TOKENS), rows)


def recorded_routes(engine):
    """The trace of the forced tokens."""
    request = engine.new_request()
    engine.prefill(request, PROMPT)
    steps = []
    for token in TOKENS:
        engine.step(request, token)
        executed = engine.executor.running.executed
        steps.append([np.array(executed[layer].indices).reshape(-1) for layer in engine.config.moe_layers])
    request.release()
    return RouteTrace(np.array(steps), engine.config.moe_layers, engine.config.experts)


def test_all_ways_read_the_same_experts_at_the_same_bank(checkpoint):
    """In a trace that uses no expert twice, nor one of the prompt's, each route is one read: of its own step on demand,
    one step earlier where it is predicted."""
    config = read_config(checkpoint)
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        bank_bytes = floor_bytes(checkpoint, k=2)
        request = engine.new_request()
        engine.prefill(request, PROMPT[:1])
        touched = executed_sets(engine)
        request.release()
    rng = np.random.default_rng(0)
    columns = [
        rng.permutation(sorted(set(range(config.experts)) - touched[layer]))[: 2 * STEPS].reshape(STEPS, 2)
        for layer in config.moe_layers
    ]
    trace = RouteTrace(np.stack(columns, axis=1), config.moe_layers, config.experts)
    expected = {
        step: {(layer, int(expert)) for layer, ids in trace.step(step).items() for expert in ids}
        for step in range(STEPS)
    }
    for way in ("ondemand", "hot", "prerouter", "advise"):
        recorder = Recorder(rows=True)
        options = EngineOptions(k=2, bank_bytes=bank_bytes, **WAYS[way])
        with Engine(checkpoint, options, recorder, routes=trace) as engine:
            engine_logits(engine, PROMPT[:1], TOKENS)
            ahead = set() if engine.predictor is None else set(engine.schedule.predicted)
        found, purposes = defaultdict(set), defaultdict(int)
        for load in recorder.loads:
            if load.step >= 0 or load.purpose == PREFETCH:  # the prompt reads what it routes to itself
                purposes[load.purpose] += 1
                key = (load.layer, load.expert)
                served = load.step + (load.purpose == PREFETCH)
                assert key not in found[served]
                found[served].add(key)
        assert found == expected, way
        assert sum(purposes.values()) == 2 * STEPS * len(config.moe_layers)
        natively = 1 if config.family.tag == "35b" else 0  # steps before the first prediction
        assert purposes[PREFETCH] == 2 * len(ahead) * (STEPS - natively), way


def test_nobody_knows_the_route_before_the_router_has_spoken():
    """The forced ids reach the host only when the model's own choice has been computed, as without a trace."""
    logits, forced = mx.zeros((1, 1, 32)), mx.array([[[3, 9]]], mx.uint32)
    for router in (Router("softmax", 2, 1, 1, 1.0), Router("sigmoid-groups", 2, 8, 4, 2.5)):
        graph = io.StringIO()
        mx.export_to_dot(graph, router(logits, None, forced)[0])
        assert "Depends" in graph.getvalue() and "ArgPartition" in graph.getvalue()


def test_a_prompt_that_goes_on_starts_the_trace_anew(checkpoint, trace):
    first = {layer: frozenset(ids.tolist()) for layer, ids in trace.step(0).items()}
    with Engine(checkpoint, EngineOptions(k=4), routes=trace) as engine:
        request = engine.new_request()
        for _ in range(2):
            engine.prefill(request, PROMPT[:3])
            engine.step(request, 1)
            assert executed_sets(engine) == first
            engine.step(request, 2)
        request.release()


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
def test_a_request_that_outlives_its_trace_ends_and_the_engine_goes_on(checkpoint, trace, refused, prerouter):
    with Engine(checkpoint, EngineOptions(k=4, prerouter=prerouter), routes=trace) as engine:
        for _ in range(2):
            request = engine.new_request()
            engine.prefill(request, PROMPT)
            for token in TOKENS:
                engine.step(request, token)
            refused(ErrorKind.TRACE_INVALID, lambda request=request: engine.step(request, 1), "8 tokens", "token 9")
            assert sum(engine.store._pins) == 0


def test_a_trace_of_another_k_is_refused_before_weights_are_read(checkpoint, trace, refused):
    refused(
        ErrorKind.TRACE_INVALID, lambda: Engine(checkpoint, EngineOptions(k=2), routes=trace), "expected 2, found 4"
    )


@pytest.mark.parametrize("recall", [0.0, 0.8])
def test_advice_is_wrong_as_often_as_the_trace_says_and_the_route_never_is(checkpoint, trace, recall):
    wrong = dataclasses.replace(trace, recall=recall)
    named = [wrong.advice(step) for step in range(trace.tokens)]
    right = [trace.step(step) for step in range(trace.tokens)]
    found = [len(set(a[layer]) & set(r[layer])) for a, r in zip(named, right, strict=True) for layer in trace.layers]
    assert all(len(set(ids.tolist())) == trace.k for step in named for ids in step.values())
    assert np.mean(found) / trace.k == pytest.approx(recall, abs=0.1)
    assert all(np.array_equal(named[3][layer], wrong.advice(3)[layer]) for layer in trace.layers)
    with Engine(checkpoint, EngineOptions(k=4, **WAYS["advise"]), routes=wrong) as engine:
        assert same_bits(engine_logits(engine, tokens=TOKENS), replayed(checkpoint, "advise")[1])


def test_a_recall_is_kept_in_the_file_and_needs_wrong_experts_to_name(trace, tmp_path, refused):
    dataclasses.replace(trace, recall=0.5).save(tmp_path / "wrong")
    trace.save(tmp_path / "right")
    assert RouteTrace.load(tmp_path / "wrong").recall == 0.5 and RouteTrace.load(tmp_path / "right").recall == 1
    for recall in (1.5, -0.1, float("nan"), "1"):
        refused(ErrorKind.TRACE_INVALID, lambda recall=recall: dataclasses.replace(trace, recall=recall), "recall")
    every = np.arange(4)[None, None]
    refused(ErrorKind.TRACE_INVALID, lambda: RouteTrace(every, (0,), 4, recall=0.5), "recall", "wrong")
