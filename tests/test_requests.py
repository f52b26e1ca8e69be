"""Requests do not leak into one another: not through predictions, not through failures, not through pinned slots."""

import errno
import json
import os
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from reference import PROMPT, TOKENS, engine_logits, floor_bytes, same_bits

from edge0 import Edge0Error, Engine, EngineOptions, ErrorKind, Sampling
from edge0.telemetry.loads import DEMAND, PREFETCH, PREFILL, Recorder

SHORT = TOKENS[:8]
REQUESTS = {"first": (PROMPT, SHORT), "second": (PROMPT[5:12], TOKENS[10:18])}

FRESH = """
import json, sys
import mlx.core as mx, numpy as np
mx.set_default_device(mx.cpu)
from edge0 import Engine, EngineOptions
checkpoint, options, prompt, tokens, output = map(json.loads, sys.argv[1:])
with Engine(checkpoint, EngineOptions(**options)) as engine:
    request = engine.new_request()
    rows = [np.array(engine.prefill(request, prompt))] + [np.array(engine.step(request, token)) for token in tokens]
np.save(output, np.stack(rows))
"""


def pins(engine):
    return sum(engine.store._pins)


def floor_options(checkpoint, **options):
    """Options with the smallest bank that they allow, so that every step reads."""
    return EngineOptions(bank_bytes=floor_bytes(checkpoint, **options), **options)


def test_two_requests_in_one_process_give_the_bits_of_two_fresh_processes(tier, checkpoint, tmp_path):
    options = {"k": 4}
    fresh = {}
    for name, (prompt, tokens) in REQUESTS.items():
        output = tmp_path / f"{name}.npy"
        arguments = [json.dumps(value) for value in (str(checkpoint), options, prompt, tokens, str(output))]
        fresh[name] = subprocess.Popen([sys.executable, "-c", FRESH, *arguments]), output
    with Engine(checkpoint, EngineOptions(**options)) as engine:
        here = {name: engine_logits(engine, *request) for name, request in REQUESTS.items()}
        again = engine_logits(engine, *REQUESTS["first"])
        assert pins(engine) == 0 and engine.recorder.dropped == 0
    for name, (process, output) in fresh.items():
        assert process.wait() == 0
        assert same_bits(here[name], np.load(output))
    assert same_bits(again, here["first"])


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
@pytest.mark.parametrize("bank", ["floor", "large"])
def test_many_requests_leave_no_slot_pinned(checkpoint, prerouter, bank):
    options = EngineOptions(k=2, prerouter=prerouter, bank_bytes=1 << 30)
    if bank == "floor":
        options = floor_options(checkpoint, k=2, prerouter=prerouter)
    with Engine(checkpoint, options) as engine:
        runs = []
        for steps in (0, 1, 4, 2):
            runs.append(engine_logits(engine, PROMPT[:7], SHORT[:steps]))
            assert pins(engine) == 0
        assert all(same_bits(logits, runs[2][: len(logits)]) for logits in runs)
        assert engine.recorder.dropped == 0


def test_two_requests_can_take_turns(checkpoint):
    """All state of a request is its own: steps of two requests, interleaved, give the bits of each alone."""
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=1 << 30)) as engine:
        alone = [engine_logits(engine, *request) for request in REQUESTS.values()]
        running = [(engine.new_request(), prompt, tokens) for prompt, tokens in REQUESTS.values()]
        rows = [[np.array(engine.prefill(request, prompt))] for request, prompt, _ in running]
        for step in range(8):
            for row, (request, _, tokens) in zip(rows, running, strict=True):
                row.append(np.array(engine.step(request, tokens[step])))
        for request, *_ in running:
            request.release()
        assert pins(engine) == 0
    assert all(same_bits(np.stack(row), logits) for row, logits in zip(rows, alone, strict=True))


def test_a_prompt_may_come_in_two_calls(tier, checkpoint):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        whole = engine_logits(engine, PROMPT, SHORT)
        request = engine.new_request()
        engine.prefill(request, PROMPT[:9])
        rows = [np.array(engine.prefill(request, PROMPT[9:]))]
        rows += [np.array(engine.step(request, token)) for token in SHORT]
        request.release()
        assert pins(engine) == 0
    if tier.family.tag == "35b":
        assert same_bits(np.stack(rows), whole)
    else:
        np.testing.assert_allclose(np.stack(rows), whole, rtol=0, atol=1e-5)


def test_a_prediction_serves_the_next_token_and_not_one_after_more_of_a_prompt(checkpoints):
    """35b routes its first decode step natively, so that step may as well have been part of the prompt."""
    with Engine(checkpoints["unit-35b"], EngineOptions(k=2)) as engine:
        once = engine_logits(engine, PROMPT, TOKENS[:1])[1]
        request = engine.new_request()
        engine.prefill(request, PROMPT[:8])
        engine.step(request, PROMPT[8])
        engine.prefill(request, PROMPT[9:])
        logits = np.array(engine.step(request, TOKENS[0]))
        request.release()
        assert same_bits(logits, once) and pins(engine) == 0


# --- failures ------------------------------------------------------------------------------------------------------


class Fault:
    """Makes reads of one purpose fail with EIO while it is armed: an observer that marks the thread, and `preadv`."""

    def __init__(self, monkeypatch):
        self.purpose, self.hits, self._marked, self._real = None, 0, threading.local(), os.preadv
        monkeypatch.setattr(os, "preadv", self._preadv)

    def before(self, ranges, record):
        self._marked.fails = record.purpose == self.purpose

    def after(self, record):
        self._marked.fails = False

    def _preadv(self, *arguments):
        if getattr(self._marked, "fails", False):
            self.hits += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._real(*arguments)


FAILURES = [
    ("off", PREFILL),
    ("off", DEMAND),
    ("route", PREFILL),
    ("route", DEMAND),
    ("route", PREFETCH),
    ("advise", DEMAND),
]


def fail(engine, request, fault, purpose):
    """Drive `request` into a read error of `purpose`."""
    if purpose == PREFILL:
        fault.purpose = purpose
        engine.prefill(request, PROMPT[:7])
    engine.prefill(request, PROMPT[:7])
    for number, token in enumerate(TOKENS):
        if number == 1:
            fault.purpose = purpose
        engine.step(request, token)


@pytest.mark.parametrize(("prerouter", "purpose"), FAILURES)
def test_a_read_error_ends_the_request_and_nothing_else(checkpoint, monkeypatch, refused, prerouter, purpose):
    options = floor_options(checkpoint, k=2, prerouter=prerouter)
    fault = Fault(monkeypatch)
    with Engine(checkpoint, options, Recorder(fault)) as engine:
        expected = engine_logits(engine, PROMPT[:7], SHORT[:3])
        for _ in range(2):
            request = engine.new_request()
            shard = engine.layout.paths[0].parent
            refused(ErrorKind.READ_FAILED, lambda r=request: fail(engine, r, fault, purpose), shard, "bytes")
            assert fault.hits
            fault.purpose = None
            request.release()
            assert pins(engine) == 0
            assert same_bits(engine_logits(engine, PROMPT[:7], SHORT[:3]), expected)
            assert pins(engine) == 0 and engine.recorder.dropped == 0


def test_advice_that_could_not_be_read_does_not_end_a_request(checkpoint, monkeypatch):
    """A prefetch in advisory mode promises nothing: whoever needs the expert later reads it again."""
    options = floor_options(checkpoint, k=2, prerouter="advise")
    fault = Fault(monkeypatch)
    with Engine(checkpoint, options, Recorder(fault)) as engine:
        expected = engine_logits(engine, PROMPT, SHORT)
        fault.purpose = PREFETCH
        assert same_bits(engine_logits(engine, PROMPT, SHORT), expected)
        assert fault.hits and pins(engine) == 0


def test_a_failed_prefetch_of_an_ended_request_does_not_reach_the_next(checkpoint, monkeypatch):
    """The bank holds everything, so only a forgotten failure leads to a second read."""
    fault = Fault(monkeypatch)
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=1 << 30), Recorder(fault)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT[:2])
        fault.purpose = PREFETCH
        with pytest.raises(Edge0Error):
            for token in TOKENS:
                engine.step(request, token)
        assert fault.hits > 1
        fault.purpose = None
        request.release()
        logits = engine_logits(engine, PROMPT, SHORT)
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=1 << 30)) as engine:
        assert same_bits(logits, engine_logits(engine, PROMPT, SHORT))


class HeldPrefetches:
    """An observer that keeps the second step's prefetches from starting until `gate` opens."""

    def __init__(self):
        self.gate = threading.Event()

    def before(self, ranges, record):
        if record.purpose == PREFETCH and record.step == 1:
            self.gate.wait()

    def after(self, record):
        pass


def test_reads_still_under_way_for_an_ended_request_do_not_starve_the_next(checkpoint):
    """Their slots are not pinned any more, so at the worst the next request waits for them."""
    options = floor_options(checkpoint, k=2, reader_threads=16)  # more threads than reads that can be held
    with Engine(checkpoint, options) as engine:
        expected = engine_logits(engine, PROMPT, [])
    held = HeldPrefetches()
    with Engine(checkpoint, options, Recorder(held)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        for token in TOKENS[:2]:
            engine.step(request, token)
        request.release()
        opener = threading.Timer(0.3, held.gate.set)
        opener.start()
        try:
            assert same_bits(engine_logits(engine, PROMPT, []), expected)
        finally:
            held.gate.set()
            opener.join()


@pytest.mark.parametrize("prerouter", ["off", "route", "advise"])
def test_a_failure_of_mlx_itself_pins_nothing(checkpoint, monkeypatch, prerouter):
    """Evaluating fails, also the evaluation that the clean-up tries."""
    with Engine(checkpoint, floor_options(checkpoint, k=2, prerouter=prerouter)) as engine:
        expected = engine_logits(engine, PROMPT[:7], SHORT[:3])
        for steps in (None, 0, 2):
            request = engine.new_request()
            if steps is not None:
                engine.prefill(request, PROMPT[:7])
                for token in TOKENS[:steps]:
                    engine.step(request, token)
            with monkeypatch.context() as broken:
                broken.setattr(mx, "eval", failing)
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.prefill(request, PROMPT[:7]) if steps is None else engine.step(request, TOKENS[steps])
            assert pins(engine) == 0
            assert same_bits(engine_logits(engine, PROMPT[:7], SHORT[:3]), expected)


def failing(*_):
    raise RuntimeError("out of memory")


def test_a_prompt_that_fails_at_its_very_end_pins_nothing(checkpoints, refused):
    """8b asks for predictions when the prompt is over; others hold so many slots that there is no room for them."""
    directory = checkpoints["unit-8b"]
    with Engine(directory, floor_options(directory, k=2)) as engine:
        others = []
        with pytest.raises(Edge0Error) as caught:
            for token in range(100):  # different tokens, different predictions; what they pin stays pinned
                request = engine.new_request()
                engine.prefill(request, [token, token + 1])
                others.append(request)
        assert caught.value.kind is ErrorKind.BANK_TOO_SMALL and others and not request.predictions
        for request in others:
            request.release()
        assert pins(engine) == 0


def test_advice_that_the_system_refuses_is_no_failure(checkpoint, monkeypatch):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        expected = engine_logits(engine, PROMPT, SHORT[:3])

    def refuse(*_):
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        assert same_bits(engine_logits(engine, PROMPT, SHORT[:3]), expected)


def test_a_file_written_to_during_a_run_is_told_at_the_next_request(copy_of, tier, refused):
    directory = copy_of(tier.name)
    for options in ({"k": 2}, {"k": 2, "io": "mmap", "assembly": "stack"}):
        with Engine(directory, EngineOptions(**options)) as engine:
            engine_logits(engine, PROMPT, SHORT[:2])
            path = engine.layout.paths[0]
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                last = file.read()
                file.seek(-4, os.SEEK_END)
                file.write(last)
            os.utime(path, ns=(0, engine.layout.identities[path].modified_ns + 1))
            refused(ErrorKind.FILE_CHANGED, engine.new_request, path)


def test_tokens_of_any_integer_type_are_tokens_and_others_are_refused(checkpoint, refused):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        expected = np.array(engine.prefill(engine.new_request(), PROMPT))
        assert same_bits(np.array(engine.prefill(engine.new_request(), np.array(PROMPT))), expected)
        for wrong in ([1.0, 2.0], ["a"], np.array([1.5])):
            refused(ErrorKind.PROMPT_INVALID, lambda w=wrong: engine.prefill(engine.new_request(), w), "an integer of")


def test_an_invalid_prompt_is_refused_before_anything_is_read(checkpoint, refused):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        request = engine.new_request()
        for prompt in ([], [512], [-1], [3, 4000]):
            refused(ErrorKind.PROMPT_INVALID, lambda p=prompt: engine.prefill(request, p), "expected")
        refused(ErrorKind.PROMPT_INVALID, lambda: engine.step(request, 512), "0 to 511", "512")
        assert not engine.recorder.totals.loads


# --- generate ------------------------------------------------------------------------------------------------------


def test_generate_repeats_itself_and_stops(checkpoint):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
        first = list(engine.generate(PROMPT, 12, sampling))
        assert len(first) == 12 and list(engine.generate(PROMPT, 12, sampling)) == first
        greedy = list(engine.generate(PROMPT, 6))
        stop = greedy[3]
        assert list(engine.generate(PROMPT, 6, stop=[stop])) == greedy[: greedy.index(stop)]
        abandoned = engine.generate(PROMPT, 6)
        next(abandoned), next(abandoned)
        abandoned.close()
        assert pins(engine) == 0


def test_generate_is_greedy_over_the_engines_own_steps(checkpoint):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        tokens = list(engine.generate(PROMPT, 8))
        logits = engine_logits(engine, PROMPT, tokens[:-1])
    assert logits.argmax(axis=-1).tolist() == tokens


def test_close_ends_the_threads_and_the_descriptors(checkpoint):
    def readers():
        return sum(thread.name.startswith("edge0-reader") for thread in threading.enumerate())

    before, files = readers(), set(os.listdir("/dev/fd"))
    engine = Engine(checkpoint, EngineOptions(k=2, reader_threads=3))
    engine_logits(engine, PROMPT, SHORT[:2])
    assert readers() == before + 3
    engine.close()
    assert readers() == before
    assert len(os.listdir("/dev/fd")) <= len(files)


# --- what may not be served ----------------------------------------------------------------------------------------


def test_an_expert_that_is_routed_and_not_in_memory_ends_the_step_and_is_counted(checkpoint, refused):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        engine.step(request, TOKENS[0])
        layer, prediction = next(iter(request.predictions.items()))
        absent = next(id for id in range(32) if id not in prediction.lease.experts)
        prediction.ids[..., 0] = absent
        refused(ErrorKind.EXPERT_ABSENT, lambda: engine.step(request, TOKENS[1]), f"layer {layer}", absent)
        assert engine.recorder.dropped == 1 and pins(engine) == 0


def test_a_request_longer_than_the_context_is_refused(checkpoint, refused):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        request = engine.new_request()
        refused(ErrorKind.PROMPT_INVALID, lambda: engine.prefill(request, [1] * 4097), 4096, 4097)
        engine.prefill(request, PROMPT)
        request.tokens = 4096
        refused(ErrorKind.PROMPT_INVALID, lambda: engine.step(request, 1), 4096, 4097)
