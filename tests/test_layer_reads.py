"""A layer's reads together: fewer calls, the same bits, and a failure that ends the step alone."""

import functools

import pytest
from reference import PROMPT, TOKENS, engine_logits, floor_bytes, same_bits

from edge0 import Engine, EngineOptions, ErrorKind
from edge0.checkpoint.repack import repack
from edge0.streaming.source import PreadSource, read_failed
from edge0.telemetry.loads import DEMAND, Recorder

STEPS = 10


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


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
def test_a_layers_reads_together_change_no_bit(checkpoint, prerouter):
    rows, recorder = run(checkpoint, k=4, prerouter=prerouter, reads="layer")
    assert all(same_bits(*pair) for pair in zip(rows, plain(checkpoint, prerouter), strict=True))
    totals = recorder.totals
    assert (
        len(recorder.loads) == totals.loads and sum(load.asked_bytes for load in recorder.loads) == totals.asked_bytes
    )


def test_neighbours_are_read_in_one_call(checkpoint, tmp_path):
    """Fewer calls for the same experts; records of this tier end with padding, so that none touches the next."""
    for directory, each in ((checkpoint, 9), (repack(checkpoint, tmp_path / "records").directory, 1)):
        calls, expected = {}, None
        for reads in ("expert", "layer"):
            rows, recorder = run(directory, k=8, prerouter="off", reads=reads)
            expected = expected or rows
            assert all(same_bits(*pair) for pair in zip(rows, expected, strict=True))
            loads = [load for load in recorder.loads if load.purpose == DEMAND]
            calls[reads] = sum(load.calls for load in loads) / len(loads)
            assert recorder.totals.calls == sum(load.calls for load in recorder.loads)
        assert calls["expert"] == each and (calls["layer"] < 9 if each == 9 else calls["layer"] == 1)


def test_a_read_that_fails_ends_the_step_and_not_the_engine(checkpoint, monkeypatch, refused):
    real, broken = PreadSource.read, []

    def read(self, piece, memories):
        if broken:
            raise read_failed(piece, "Input/output error")
        real(self, piece, memories)

    def go_on():
        for token in TOKENS:
            engine.step(request, token)

    monkeypatch.setattr(PreadSource, "read", read)
    with Engine(checkpoint, EngineOptions(k=4, reads="layer")) as engine:
        expected = engine_logits(engine, PROMPT, TOKENS[:4])
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        broken.append(True)
        refused(ErrorKind.READ_FAILED, go_on)
        broken.clear()
        request.release()
        assert engine.store.available == engine.store.capacity
        assert same_bits(engine_logits(engine, PROMPT, TOKENS[:4]), expected)


def test_two_requests_that_take_turns_keep_their_bits(checkpoint):
    options = EngineOptions(k=2, prerouter="advise", reads="layer", bank_bytes=1 << 30)
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
