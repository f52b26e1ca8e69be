"""The patched stacks: only changed rows are written, others and whoever holds older stacks keep their bytes."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import PROMPT, TOKENS, engine_logits, same_bits

from edge0 import Engine, EngineOptions, ErrorKind
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import read_config
from edge0.streaming.bank import slot_bytes
from edge0.streaming.bundles import Bundles
from edge0.streaming.patch import PatchStore
from edge0.streaming.source import PreadSource, read_failed
from edge0.streaming.stack import StackStore
from edge0.telemetry.loads import DEMAND, PREFETCH, PREFILL, Recorder

ROWS, LAYERS, CAPACITY = 3, 2, 5


class Opened:
    """A patch store over a checkpoint, and a stack store to compare it with."""

    def __init__(self, directory):
        config = read_config(directory)
        self.layout = ExpertLayout.of(CheckpointIndex.open(directory), config)
        self.layers, self.experts = config.moe_layers[:LAYERS], config.experts
        self.source = PreadSource(self.layout.paths)
        self.recorder = Recorder(rows=True)
        parts = (self.layout, CAPACITY, mx.float32, self.source)
        self.patch = PatchStore(Bundles(*parts, self.recorder, True), self.recorder, ROWS, LAYERS)
        self.stack = StackStore(Bundles(*parts, Recorder(), False))

    def ask(self, layer, experts, purpose=DEMAND):
        lease = self.patch.request(self.layers[layer], np.array(sorted(experts)), purpose)
        lease.wait()
        return lease

    def expected(self, layer, experts):
        lease = self.stack.request(self.layers[layer], np.array(sorted(experts)), DEMAND)
        lease.wait()
        return [np.array(stack) for stack in lease.stacks]


def held(lease):
    """What a lease's stacks hold of its experts, in their order."""
    rows = lease.slots
    return [np.array(stack)[rows] for stack in lease.stacks]


def equal(left, right):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(left, right, strict=True))


@pytest.fixture
def opened(checkpoint):
    opened = Opened(checkpoint)
    yield opened
    opened.source.close()


def test_only_rows_whose_expert_changed_are_written(opened, monkeypatch):
    written, real = [], mx.slice_update
    monkeypatch.setattr(mx, "slice_update", lambda a, *rest: written.append(1) or real(a, *rest))
    first = opened.ask(0, [1, 4, 6])
    rows = dict(zip(first.experts.tolist(), first.slots.tolist(), strict=True))
    first.release()
    assert len(written) == 3 * 9
    second = opened.ask(0, [1, 5, 6], PREFETCH)
    assert len(written) == 4 * 9
    assert dict(zip(second.experts.tolist(), second.slots.tolist(), strict=True)) == {
        1: rows[1],
        5: rows[4],
        6: rows[6],
    }
    opened.ask(0, [1, 5, 6])
    assert len(written) == 4 * 9
    assert (opened.recorder.totals.loads, opened.recorder.totals.hits) == (4, 5)


def test_a_row_needs_neither_its_bundle_nor_a_read(opened):
    """Bundles of other layers push those of a patched layer out of the LRU; its rows stay."""
    opened.ask(0, [1, 4, 6])
    for experts in ([0, 1, 2], [3, 4, 5]):
        opened.ask(1, experts)
    loads = opened.recorder.totals.loads
    assert equal(held(opened.ask(0, [1, 4, 6])), opened.expected(0, [1, 4, 6]))
    assert opened.recorder.totals.loads == loads


def test_older_stacks_keep_their_bytes(opened):
    """A lease that was not released, and a graph that was not evaluated, see what was there when they were made."""
    lease = opened.ask(0, [1, 4, 6])
    graphs = [stack[mx.array(lease.slots)] for stack in lease.stacks]
    for experts in ([0, 2, 3], [2, 3, 5]):
        opened.ask(0, experts).release()
    expected = opened.expected(0, [1, 4, 6])
    assert equal(held(lease), expected)
    lease.release()
    opened.ask(0, [0, 2, 7]).release()
    assert equal([np.array(graph) for graph in graphs], expected)


def test_a_patch_reuses_the_memory_of_stacks_that_nobody_holds(opened):
    def address(array):
        return np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data

    lease = opened.ask(0, [1, 4, 6])
    places = [address(stack) for stack in lease.stacks]
    lease.release()
    lease = opened.ask(0, [1, 4, 7])
    assert [address(stack) for stack in lease.stacks] == places
    kept = opened.ask(0, [1, 4, 5])  # beside a lease that was not released
    assert [address(stack) for stack in kept.stacks] != places


def test_prompts_and_more_experts_than_rows_are_stacked_anew(opened):
    opened.ask(0, [1, 4, 6]).release()
    for experts, purpose in ((range(6), DEMAND), ([0, 2], PREFILL)):
        lease = opened.ask(0, experts, purpose)
        assert lease.stacks[0].shape[0] == len(experts)
        assert equal(held(lease), opened.expected(0, experts))
    loads = opened.recorder.totals.loads
    assert equal(held(opened.ask(0, [1, 4, 6])), opened.expected(0, [1, 4, 6]))
    assert opened.recorder.totals.loads == loads


requests = st.tuples(
    st.integers(0, LAYERS - 1), st.sets(st.integers(0, 7), min_size=1, max_size=5), st.sampled_from([DEMAND, PREFILL])
)


@given(st.lists(requests, min_size=1, max_size=12), st.data())
def test_any_requests_hold_what_a_fresh_stack_holds(checkpoints, asked, data):
    opened = Opened(checkpoints["unit-35b"])
    leases = []
    for layer, experts, purpose in asked:
        leases.append((opened.ask(layer, experts, purpose), opened.expected(layer, experts)))
        if data.draw(st.booleans()):
            leases.pop(0)[0].release()
        assert all(equal(held(lease), expected) for lease, expected in leases)
    opened.source.close()


def test_a_failed_read_forgets_the_layer_and_the_next_request_reads_again(opened, monkeypatch, refused):
    opened.ask(0, [1, 4, 6]).release()
    real = PreadSource.array

    def array(self, piece):
        raise read_failed(piece, "Input/output error")

    monkeypatch.setattr(PreadSource, "array", array)
    refused(ErrorKind.READ_FAILED, lambda: opened.ask(0, [1, 5, 6]), "Input/output error")
    monkeypatch.setattr(PreadSource, "array", real)
    assert equal(held(opened.ask(0, [1, 5, 6])), opened.expected(0, [1, 5, 6]))


def test_an_engine_of_patches_counts_both_copies_and_survives_a_failed_read(checkpoint, monkeypatch, refused):
    real, broken = PreadSource.array, []

    def array(self, piece):
        if broken:
            raise read_failed(piece, "Input/output error")
        return real(self, piece)

    monkeypatch.setattr(PreadSource, "array", array)
    with Engine(checkpoint, EngineOptions(k=4, assembly="patch")) as engine:
        layers = len(engine.config.moe_layers)
        slot = slot_bytes(engine.layout.specs, engine.dtype)
        assert engine.store.nbytes == (engine.store.capacity + 4 * layers) * slot
        expected = engine_logits(engine, PROMPT, TOKENS[:3])
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        broken.append(True)
        with pytest.raises(Exception) as caught:
            for token in TOKENS:
                engine.step(request, token)
        assert caught.value.kind is ErrorKind.READ_FAILED
        broken.clear()
        assert same_bits(engine_logits(engine, PROMPT, TOKENS[:3]), expected)


def test_two_requests_in_turn_do_not_disturb_each_other(checkpoint):
    """Each step of one changes rows that the other's next step finds changed."""
    with Engine(checkpoint, EngineOptions(k=4, assembly="patch")) as engine:
        alone = [engine_logits(engine, prompt, TOKENS[:4]) for prompt in (PROMPT, PROMPT[::-1])]
        both = [engine.new_request(), engine.new_request()]
        rows = [
            [np.array(engine.prefill(request, prompt))]
            for request, prompt in zip(both, (PROMPT, PROMPT[::-1]), strict=True)
        ]
        for token in TOKENS[:4]:
            for request, logits in zip(both, rows, strict=True):
                logits.append(np.array(engine.step(request, token)))
        for request in both:
            request.release()
        assert all(same_bits(np.stack(mixed), single) for mixed, single in zip(rows, alone, strict=True))


@pytest.mark.parametrize("advise", [True, False])
def test_a_bundles_nine_ranges_are_announced_before_they_are_read(checkpoint, monkeypatch, advise):
    opened, said = Opened(checkpoint), []
    monkeypatch.setattr(opened.source, "advise", lambda pieces: said.append(("advise", len(pieces))))
    read = opened.source.array
    monkeypatch.setattr(opened.source, "array", lambda piece: said.append("read") or read(piece))
    store = StackStore(Bundles(opened.layout, CAPACITY, mx.float32, opened.source, opened.recorder, advise))
    store.request(opened.layers[0], np.array([4]), DEMAND).wait()
    assert said == [("advise", 9)] * advise + ["read"] * 9
    (record,) = opened.recorder.loads
    assert (record.advise_ns > 0) == advise
    opened.source.close()


@pytest.mark.parametrize(("io", "advised"), [("pread", True), ("mmap", False)])
def test_an_engine_that_stacks_announces_what_it_reads_explicitly(checkpoints, io, advised):
    recorder = Recorder(rows=True)
    options = EngineOptions(k=4, prerouter="off", assembly="stack", io=io)
    with Engine(checkpoints["unit-35b"], options, recorder) as engine:
        engine.prefill(engine.new_request(), PROMPT)
    assert {load.advise_ns > 0 for load in recorder.loads} == {advised}
