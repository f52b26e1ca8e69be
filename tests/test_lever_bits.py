"""The levers: none of them changes a bit, and each of them really moves something."""

import functools

import pytest
from reference import PROMPT, TOKENS, direct_or_skip, engine_logits, floor_bytes, same_bits

from edge0 import Engine, EngineOptions, ErrorKind
from edge0.checkpoint.repack import repack
from edge0.streaming.source import PreadSource, read_failed
from edge0.telemetry.loads import DEMAND, HINT, PREFETCH, Recorder

STEPS = 10
LEVERS = {
    "frequency": {"eviction": "frequency"},
    "predicted": {"eviction": "predicted"},
    "layer": {"reads": "layer"},
    "direct, layer": {"reads": "layer", "io": "direct"},
    "hints": {"hints": 3},
    "hints, layer": {"hints": 3, "reads": "layer", "eviction": "predicted"},
    "yields": {"yields": True},
    "all": {"yields": True, "hints": 3, "reads": "layer", "eviction": "predicted"},
}


def run(directory, **options):
    """Logits of two requests, one after the other, at the smallest bank, and the recorder."""
    bank = floor_bytes(directory, **{key: options[key] for key in ("k", "prerouter") if key in options})
    with Engine(directory, EngineOptions(bank_bytes=bank, **options), Recorder(rows=True)) as engine:
        rows = [engine_logits(engine, prompt, TOKENS[:STEPS]) for prompt in (PROMPT, PROMPT[:3])]
        assert engine.recorder.dropped == 0 and engine.store.available == engine.store.capacity
    return rows, engine.recorder


@functools.cache
def plain(directory, prerouter):
    return run(directory, k=4, prerouter=prerouter)[0]


def has_effect(prerouter, options):
    return not (prerouter == "off" and "hints" in options or prerouter != "advise" and "yields" in options)


@pytest.mark.parametrize(
    ("prerouter", "lever"),
    [(way, name) for way in ("off", "route", "advise") for name in LEVERS if has_effect(way, LEVERS[name])],
)
def test_no_lever_changes_a_bit(checkpoint, prerouter, lever):
    options = LEVERS[lever]
    if options.get("io") == "direct":
        direct_or_skip(checkpoint.glob("*.safetensors")).close()
    rows, recorder = run(checkpoint, k=4, prerouter=prerouter, **options)
    assert all(same_bits(*pair) for pair in zip(rows, plain(checkpoint, prerouter), strict=True))
    totals = recorder.totals
    assert (
        len(recorder.loads) == totals.loads and sum(load.asked_bytes for load in recorder.loads) == totals.asked_bytes
    )
    if "hints" in options:
        assert totals.given_up or any(load.purpose == HINT for load in recorder.loads)
    else:
        assert not any(load.purpose == HINT for load in recorder.loads)


def test_neighbours_are_read_in_one_call(checkpoint, tmp_path):
    """Fewer calls for the same experts; records of this tier end with padding, so that none touches the next."""
    for directory, each in ((checkpoint, 9), (repack(checkpoint, tmp_path / "records").directory, 1)):
        calls = {}
        for reads in ("expert", "layer"):
            rows, recorder = run(directory, k=8, prerouter="off", reads=reads)
            assert all(same_bits(*pair) for pair in zip(rows, run(directory, k=8, prerouter="off")[0], strict=True))
            loads = [load for load in recorder.loads if load.purpose == DEMAND]
            calls[reads] = sum(load.calls for load in loads) / len(loads)
            assert recorder.totals.calls == sum(load.calls for load in recorder.loads)
        assert calls["expert"] == each and (calls["layer"] < 9 if each == 9 else calls["layer"] == 1)


def test_advice_that_was_not_read_in_time_is_dropped_and_a_need_is_never_behind_it(checkpoint, monkeypatch):
    """Every read takes longer than a layer: what is advised comes too late, and only what is needed is waited for."""
    real = PreadSource.read

    def slow(self, piece, memories):
        sum(range(20_000))
        real(self, piece, memories)

    rows = plain(checkpoint, "advise")
    monkeypatch.setattr(PreadSource, "read", slow)
    found, recorder = run(checkpoint, k=4, prerouter="advise", yields=True, reader_threads=1)
    assert all(same_bits(*pair) for pair in zip(rows, found, strict=True))
    assert recorder.totals.given_up > 0
    assert {DEMAND, PREFETCH} <= {load.purpose for load in recorder.loads}


@pytest.mark.parametrize("lever", ["all", "hints", "layer"])
def test_a_read_that_fails_ends_the_step_and_not_the_engine(checkpoint, monkeypatch, refused, lever):
    prerouter = "advise" if lever == "all" else "route"
    options = EngineOptions(k=4, prerouter=prerouter, **LEVERS[lever])
    real, broken = PreadSource.read, []

    def read(self, piece, memories):
        if broken:
            raise read_failed(piece, "Input/output error")
        real(self, piece, memories)

    def go_on():
        for token in TOKENS:
            engine.step(request, token)

    monkeypatch.setattr(PreadSource, "read", read)
    with Engine(checkpoint, options) as engine:
        expected = engine_logits(engine, PROMPT, TOKENS[:4])
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        broken.append(True)
        refused(ErrorKind.READ_FAILED, go_on)
        broken.clear()
        request.release()
        assert engine.store.available == engine.store.capacity
        assert same_bits(engine_logits(engine, PROMPT, TOKENS[:4]), expected)


def test_two_requests_that_take_turns_yield_to_each_other_and_keep_their_bits(checkpoint):
    options = EngineOptions(k=2, prerouter="advise", bank_bytes=1 << 30, **LEVERS["all"])
    with Engine(checkpoint, options) as engine:
        alone = [engine_logits(engine, prompt, TOKENS[:6]) for prompt in (PROMPT, PROMPT[4:9])]
        running = [engine.new_request() for _ in alone]
        rows = [
            [engine.prefill(request, prompt)] for request, prompt in zip(running, (PROMPT, PROMPT[4:9]), strict=True)
        ]
        for token in TOKENS[:6]:
            for row, request in zip(rows, running, strict=True):
                row.append(engine.step(request, token))
        for row, request, logits in zip(rows, running, alone, strict=True):
            request.release()
            assert all(same_bits(*pair) for pair in zip(row, logits, strict=True))
        assert engine.store.available == engine.store.capacity
