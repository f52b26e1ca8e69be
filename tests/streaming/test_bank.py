"""The bank against a plain model of it, with reads that end in any order, and against the checkpoint's bytes."""

import mmap
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge0 import Edge0Error, Engine, EngineOptions, ErrorKind
from edge0.checkpoint.layout import ByteRange, PartSpec
from edge0.streaming.bank import Bank, page_aligned_zeros, slot_bytes
from edge0.streaming.reader import Reader
from edge0.telemetry.loads import DEMAND, PREFETCH, WHOLE, Recorder

LAYERS, EXPERTS = 3, 5
SPECS = tuple(
    PartSpec(projection, part, "U32" if part == "weight" else "BF16", (2, 3 if part == "weight" else 1))
    for projection in ("gate_proj", "up_proj", "down_proj")
    for part in ("weight", "scales", "biases")
)


@pytest.mark.parametrize("dtype", [mx.uint32, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("shape", [(3, 5), (7, 64, 33), (1, 1)])
def test_memory_of_the_bank_begins_on_a_page_and_what_is_written_there_is_seen(shape, dtype):
    array = page_aligned_zeros(shape, dtype)
    assert array.shape == shape and array.dtype == dtype and not array.astype(mx.float32).any().item()
    raw = array.view(mx.uint16) if dtype == mx.bfloat16 else array
    mx.eval(raw)
    memory = memoryview(raw).cast("B")
    assert np.frombuffer(memory, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    memory[-2:] = b"\x01\x02"
    assert np.asarray(memoryview(raw)).reshape(-1).view(np.uint8)[-2:].tolist() == [1, 2]
    assert array.astype(mx.float32).any().item()


class Layout:
    """Ranges that name their expert; there is no file behind them."""

    specs, experts = SPECS, EXPERTS

    def __init__(self, stacked=True):
        self.stacked = stacked

    def ranges(self, layer, expert):
        return tuple(ByteRange(Path(f"{layer}.{expert}"), part, spec.nbytes) for part, spec in enumerate(SPECS))

    def layer_ranges(self, layer):
        if self.stacked:
            parts = enumerate(SPECS)
            return tuple(ByteRange(Path(f"{layer}.all"), part, EXPERTS * spec.nbytes) for part, spec in parts)
        nbytes = sum(spec.nbytes for spec in SPECS)
        return tuple(ByteRange(Path(f"{layer}.{expert}"), 0, nbytes) for expert in range(EXPERTS))


def contents(key, part):
    """The bytes that a file would hold of one piece."""
    seed = (key[0] * EXPERTS + key[1]) * len(SPECS) + part
    return np.random.default_rng(seed).integers(0, 256, SPECS[part].nbytes, np.uint8)


def stored(key, part, dtype):
    """The same as the bank must hold it."""
    raw = contents(key, part)
    if SPECS[part].dtype == "U32" or dtype == mx.bfloat16:
        return raw
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)


class Refusal(list):
    def append(self, waiter):
        raise AssertionError("the bank waits for a read that is not about to end")


class Promise(Future):
    """A future on which nobody may block before it is done: in these tests of one thread that would be for ever."""

    def __init__(self):
        super().__init__()
        self._waiters = Refusal()

    def exception(self, timeout=None):
        assert self.done()
        return super().exception(timeout)


class LateReader:
    """Scribbles over the target at once, as a read in progress would, and brings the bytes when it is told to."""

    def __init__(self):
        self.jobs = []

    def submit(self, record, ranges, targets):
        future = Promise()
        for target in targets:
            np.frombuffer(target.memory, np.uint8)[:] = 0xEE
        # A stacked tensor of a whole layer is told by its part, which the range's offset is here.
        part = ranges[0].offset if record.expert == WHOLE else None
        self.jobs.append(((record.layer, record.expert if part is None else ("part", part)), future, targets))
        return future

    def flush(self):
        pass

    def finish(self, job, error=None):
        self.jobs.remove(job)
        key, future, targets = job
        if error is not None:
            future.set_exception(error)
            return
        layer, expert = key
        if isinstance(expert, tuple):
            pieces = [np.concatenate([contents((layer, e), expert[1]) for e in range(EXPERTS)])]
        else:
            pieces = [contents(key, part) for part in range(len(SPECS))]
        for raw, target in zip(pieces, targets, strict=True):
            if target.widen:
                raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
            np.frombuffer(target.memory, np.uint8)[:] = raw
        future.set_result(None)


def bytes_of(lease, expert):
    """What the rows of a lease hold of one expert."""
    row = int(lease.slots[lease.experts.tolist().index(expert)])
    return [np.array(stack.view(mx.uint8))[row].ravel() for stack in lease.stacks]


def pick(data, entries):
    return entries[data.draw(st.integers(0, len(entries) - 1))]


class BankMachine(RuleBasedStateMachine):
    """Requests, releases and reads that end well or badly, in any order. The model keeps keys in order of last use."""

    @initialize(capacity=st.sampled_from([2, 3, 4, 6, 11]), dtype=st.sampled_from([mx.float32, mx.bfloat16]))
    def make(self, capacity, dtype):
        self.dtype, self.capacity, self.reader = dtype, capacity, LateReader()
        self.bank = Bank(Layout(), capacity, dtype, self.reader, Recorder())
        self.lru = OrderedDict()  # key -> None, oldest use first
        self.leases = []  # (lease, keys), not waited for yet
        self.ready = []

    def pinned(self):
        return {key for _, keys in self.leases + self.ready for key in keys}

    def loading(self):
        return {key for key, _, _ in self.reader.jobs}

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3))
    def request(self, layer, experts):
        keys = [(layer, expert) for expert in sorted(experts)]
        hits = [key for key in keys if key in self.lru]
        evictable = [key for key in self.lru if key not in self.pinned() | self.loading() | set(hits)]
        # Somebody may still lease the slot of an expert whose layer was read whole since: two copies for a while.
        leased = {int(slot) for lease, _ in self.leases + self.ready for slot in lease.slots}
        free = self.capacity - len(self.lru) - len(leased - set(self.bank._slot_of.values()))
        misses = [key for key in keys if key not in self.lru][: free + len(evictable)]  # see exhaustion below
        keys = sorted(hits + misses)
        if not keys:
            return
        for key in evictable[: max(0, len(misses) - free)]:
            del self.lru[key]
        for key in hits + misses:
            self.lru[key] = None
            self.lru.move_to_end(key)
        busy = {int(slot) for lease, _ in self.leases + self.ready for slot in lease.slots}
        before = list(self.reader.jobs)
        lease = self.bank.request(layer, np.array([expert for _, expert in keys]), DEMAND)
        read = [key for key, future, _ in self.reader.jobs if all(future is not job[1] for job in before)]
        assert read == misses
        taken = {int(slot) for slot, key in zip(lease.slots, keys, strict=True) if key in misses}
        assert not taken & busy and len(set(lease.slots.tolist())) == len(keys)
        self.leases.append((lease, keys))

    @precondition(lambda self: self.capacity >= EXPERTS)
    @rule(layer=st.integers(0, LAYERS - 1), buffer=st.integers(0, 1))
    def request_layer(self, layer, buffer):
        """A whole layer; its reads are ended by whoever waits, all at once."""
        span = range(buffer * EXPERTS, (buffer + 1) * EXPERTS)
        busy = {int(slot) for lease, _ in self.leases + self.ready for slot in lease.slots}
        if busy & set(span) or span.stop > self.capacity:
            assert not self.bank.buffer_free(buffer)
            return
        displaced = [key for key, slot in self.bank._slot_of.items() if slot in span or key[0] == layer]
        for job in [job for job in self.reader.jobs if job[0] in displaced]:
            self.reader.finish(job)  # the bank waits for reads into slots that it is about to give away
        if any(isinstance(expert, tuple) for (_, expert), _, _ in self.reader.jobs):
            return
        lease = self.bank.request_layer(layer, buffer)
        keys = [(layer, expert) for expert in range(EXPERTS)]
        for key in displaced:
            self.lru.pop(key, None)
        for key in keys:
            self.lru[key] = None
            self.lru.move_to_end(key)
        for job in [job for job in self.reader.jobs if isinstance(job[0][1], tuple)]:
            self.reader.finish(job)
        lease.wait()
        assert lease.slots.tolist() == list(span)
        self.ready.append((lease, keys))

    @precondition(lambda self: self.reader.jobs)
    @rule(data=st.data())
    def end_a_read(self, data):
        self.reader.finish(pick(data, self.reader.jobs))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def wait(self, data):
        entry = pick(data, self.leases)
        self.leases.remove(entry)
        lease, keys = entry
        for key in data.draw(st.permutations(keys)):
            for job in [job for job in self.reader.jobs if job[0] == key]:
                self.reader.finish(job)
        lease.wait()
        self.ready.append(entry)

    @precondition(lambda self: any(self.loading() & set(keys) for _, keys in self.leases))
    @rule(data=st.data())
    def wait_in_vain(self, data):
        waiting = [entry for entry in self.leases if self.loading() & set(entry[1])]
        lease, keys = entry = pick(data, waiting)
        jobs = [job for job in self.reader.jobs if job[0] in keys]
        lost = data.draw(st.sets(st.sampled_from([key for key, _, _ in jobs]), min_size=1))
        for job in jobs:
            self.reader.finish(job, OSError("no") if job[0] in lost else None)
        with pytest.raises(OSError, match="no"):
            lease.wait()
        for key in lost:
            del self.lru[key]
        # Everybody who waits for a lost expert learns of it; a request ends by releasing what it holds.
        for other in [other for other in self.leases if lost & set(other[1])]:
            if other is not entry:
                for job in [job for job in self.reader.jobs if job[0] in other[1]]:
                    self.reader.finish(job)
                with pytest.raises(OSError, match="no"):
                    other[0].wait()
            other[0].release()
            self.leases.remove(other)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def release(self, data):
        entry = pick(data, self.ready)
        self.ready.remove(entry)
        entry[0].release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_without_waiting(self, data):
        entry = pick(data, self.leases)
        self.leases.remove(entry)
        entry[0].release()

    @invariant()
    def leased_slots_hold_their_experts(self):
        for lease, keys in getattr(self, "ready", []):
            for key in keys:
                for part, found in enumerate(bytes_of(lease, key[1])):
                    assert np.array_equal(found, stored(key, part, self.dtype))

    def teardown(self):
        for lease, _ in getattr(self, "leases", []) + getattr(self, "ready", []):
            lease.release()
        assert not hasattr(self, "bank") or sum(self.bank._pins) == 0


TestBankMachine = BankMachine.TestCase
TestBankMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


# --- exhaustion and failures, one by one ---------------------------------------------------------------------------


@pytest.fixture
def reader():
    return LateReader()


def small_bank(reader, capacity):
    return Bank(Layout(), capacity, mx.float32, reader, Recorder())


def ask(bank, layer, *experts, purpose=DEMAND):
    return bank.request(layer, np.array(experts), purpose)


def finish_all(reader, error=None):
    for job in list(reader.jobs):
        reader.finish(job, error)


def test_a_bank_whose_slots_are_all_pinned_says_so(reader, refused):
    bank = small_bank(reader, 3)
    lease = ask(bank, 0, 0, 1, 2)
    refused(ErrorKind.BANK_TOO_SMALL, lambda: ask(bank, 1, 0), "3")
    finish_all(reader)
    refused(ErrorKind.BANK_TOO_SMALL, lambda: ask(bank, 1, 0), "3")
    lease.release()
    ask(bank, 1, 0, 1, 2)


def test_a_refused_request_pins_nothing(reader, refused):
    bank = small_bank(reader, 4)
    held, kept = ask(bank, 0, 0, 1), ask(bank, 0, 2)
    finish_all(reader)
    kept.release()
    refused(ErrorKind.BANK_TOO_SMALL, lambda: ask(bank, 0, 2, 3, 4))
    held.release()
    finish_all(reader)
    assert sum(bank._pins) == 0
    ask(bank, 1, 0, 1, 2, 3)


def test_least_recently_used_goes_first_and_a_hit_counts_as_a_use(reader):
    bank = small_bank(reader, 3)
    for expert in (0, 1, 2, 0):
        lease = ask(bank, 0, expert)
        finish_all(reader)
        lease.release()
    ask(bank, 1, 0).release()
    assert [key for key, _, _ in reader.jobs] == [(1, 0)]
    finish_all(reader)
    ask(bank, 0, 0, 2)
    assert not reader.jobs
    ask(bank, 0, 1)
    assert [key for key, _, _ in reader.jobs] == [(0, 1)]


def test_the_layers_of_both_layouts_lie_in_their_buffer_in_order():
    for stacked in (True, False):
        reader = LateReader()
        bank = Bank(Layout(stacked), 2 * EXPERTS, mx.float32, reader, Recorder())
        other = ask(bank, 2, 1, 3)
        finish_all(reader)
        other.release()
        for buffer, layer in ((1, 1), (0, 2)):
            lease = bank.request_layer(layer, buffer)
            assert len(reader.jobs) == (len(SPECS) if stacked else EXPERTS)
            if not stacked:  # one read fills the nine pieces of an expert
                assert all(len(targets) == len(SPECS) for _, _, targets in reader.jobs)
            finish_all(reader)
            lease.wait()
            assert lease.slots.tolist() == list(range(buffer * EXPERTS, (buffer + 1) * EXPERTS))
            for expert in range(EXPERTS):
                for part, found in enumerate(bytes_of(lease, expert)):
                    assert np.array_equal(found, stored((layer, expert), part, mx.float32))
        assert bank.held(2, np.arange(EXPERTS)).all() and bank.held(1, np.arange(EXPERTS)).all()
        assert not bank.buffer_free(0) and not bank.buffer_free(1) and bank.available == 0


def test_a_layer_buffer_in_use_is_refused_and_a_bank_without_one_has_none(reader, refused):
    bank = small_bank(reader, 2 * EXPERTS - 1)
    assert bank.buffer_free(0) and not bank.buffer_free(1)
    lease = bank.request_layer(0, 0)
    refused(ErrorKind.BANK_TOO_SMALL, lambda: bank.request_layer(1, 0), "layer buffer 0")
    finish_all(reader)
    lease.release()
    bank.request_layer(1, 0)


def test_a_whole_layer_that_was_not_read_is_forgotten(reader):
    bank = small_bank(reader, EXPERTS)
    lease = bank.request_layer(0, 0)
    reader.finish(reader.jobs[4], OSError("gone"))
    assert not bank.held(0, np.arange(EXPERTS)).any()
    finish_all(reader)
    with pytest.raises(OSError, match="gone"):
        lease.wait()
    lease.release()
    assert bank.available == EXPERTS and not bank.held(0, np.arange(EXPERTS)).any()
    again = ask(bank, 0, 0, 1, 2)
    assert len(reader.jobs) == 3
    finish_all(reader)
    again.wait()


def test_an_expert_that_somebody_leases_is_not_lost_when_its_layer_is_read_whole(reader):
    """Two copies for a while: the old slot serves who has it, and is free again when they let go."""
    bank = small_bank(reader, 2 * EXPERTS)
    blocker = ask(bank, 1, *range(EXPERTS))
    kept = ask(bank, 0, 2)
    finish_all(reader)
    blocker.release()
    (slot,) = kept.slots.tolist()
    buffer = 0 if slot >= EXPERTS else 1
    lease = bank.request_layer(0, buffer)
    finish_all(reader)
    for either in (kept, lease):
        either.wait()
        for part, found in enumerate(bytes_of(either, 2)):
            assert np.array_equal(found, stored((0, 2), part, mx.float32))
    assert bank.available == EXPERTS - 1
    kept.release(), lease.release()
    assert bank.available == 2 * EXPERTS
    ask(bank, 2, *range(EXPERTS)), ask(bank, 1, *range(EXPERTS))


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_read_that_cannot_even_be_asked_for_leaves_the_bank_as_it_was(reader, fails_at):
    bank = small_bank(reader, 2 * EXPERTS)
    submit, calls = reader.submit, []

    def breaking(*job):
        calls.append(job)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        future = submit(*job)
        finish_all(reader)
        return future

    reader.submit = breaking
    for ask_for in (lambda: ask(bank, 0, 0, 1, 2, 3, 4), lambda: bank.request_layer(1, 0)):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            ask_for()
        assert bank.available == 2 * EXPERTS and bank.buffer_free(0) and not bank.held(1, np.arange(EXPERTS)).any()
        assert bank.held(0, np.arange(EXPERTS)).sum() <= fails_at
    reader.submit = submit
    lease = ask(bank, 2, *range(EXPERTS))
    other = bank.request(1, np.arange(EXPERTS), DEMAND)
    finish_all(reader)
    lease.wait(), other.wait()
    assert bank.available == 0 and len({*lease.slots.tolist(), *other.slots.tolist()}) == 2 * EXPERTS


def test_a_slot_that_is_being_read_into_is_not_taken_while_there_is_another(reader):
    bank = small_bank(reader, 2)
    ask(bank, 0, 0, purpose=PREFETCH).release()
    lease = ask(bank, 0, 1)
    reader.finish(reader.jobs[1])
    lease.release()
    ask(bank, 0, 2)
    assert [key for key, _, _ in reader.jobs] == [(0, 0), (0, 2)]
    finish_all(reader)
    ask(bank, 0, 0).wait()
    assert not reader.jobs


def test_an_expert_that_is_on_its_way_is_not_read_twice(reader):
    bank = small_bank(reader, 3)
    first, second = ask(bank, 0, 1, purpose=PREFETCH), ask(bank, 0, 1)
    assert len(reader.jobs) == 1
    finish_all(reader)
    first.wait(), second.wait()
    assert first.slots.tolist() == second.slots.tolist()


def test_a_failed_read_is_forgotten_and_read_again(reader):
    bank = small_bank(reader, 3)
    lease = ask(bank, 0, 1, 2)
    reader.finish(reader.jobs[0], OSError("gone"))
    finish_all(reader)
    with pytest.raises(OSError, match="gone"):
        lease.wait()
    lease.release()
    again = ask(bank, 0, 1, 2)
    assert [key for key, _, _ in reader.jobs] == [(0, 1)]
    finish_all(reader)
    again.wait()
    for expert in (1, 2):
        assert all(np.array_equal(a, stored((0, expert), p, mx.float32)) for p, a in enumerate(bytes_of(again, expert)))


def test_a_failure_that_nobody_waited_for_is_read_again(reader):
    """A prefetch of a request that has ended must not fail the next one."""
    bank = small_bank(reader, 3)
    ask(bank, 0, 1, purpose=PREFETCH).release()
    finish_all(reader, OSError("gone"))
    lease = ask(bank, 0, 1)
    finish_all(reader)
    lease.wait()


def test_a_prefetch_that_failed_is_read_again_for_who_needs_it_now(reader):
    """The prefetch was on its way when the need arose; its failure is nobody's error but its own."""
    bank = small_bank(reader, 3)
    early, need = ask(bank, 0, 1, purpose=PREFETCH), ask(bank, 0, 1)
    reader.finish(reader.jobs[0], OSError("gone"))
    submit = reader.submit
    reader.submit = lambda *job: finished(reader, submit(*job))
    need.wait()
    assert all(np.array_equal(a, stored((0, 1), p, mx.float32)) for p, a in enumerate(bytes_of(need, 1)))
    early.release(), need.release()
    assert bank.available == 3 and bank.held(0, np.array([1])).all() and not bank._prefetches


def test_a_prefetch_that_fails_twice_is_an_error(reader):
    bank = small_bank(reader, 3)
    early, need = ask(bank, 0, 1, purpose=PREFETCH), ask(bank, 0, 1)
    reader.finish(reader.jobs[0], OSError("gone"))
    submit = reader.submit
    reader.submit = lambda *job: finished(reader, submit(*job), OSError("still gone"))
    with pytest.raises(OSError, match="still gone"):
        need.wait()
    early.release(), need.release()
    assert bank.available == 3 and not bank.held(0, np.array([1])).any() and not bank._prefetches


def test_reading_again_that_is_interrupted_leaves_the_slot_to_its_expert(reader):
    """Else two experts would come to share it."""
    bank = small_bank(reader, 3)
    early, need = ask(bank, 0, 1, purpose=PREFETCH), ask(bank, 0, 1)
    reader.finish(reader.jobs[0], OSError("gone"))
    submit, reader.submit = reader.submit, interrupted
    with pytest.raises(KeyboardInterrupt):
        need.wait()
    reader.submit = submit
    early.release(), need.release()
    leases = [ask(bank, 1, expert) for expert in range(3)]
    assert len({int(lease.slots[0]) for lease in leases}) == 3


def interrupted(*job):
    raise KeyboardInterrupt


def finished(reader, future, error=None):
    finish_all(reader, error)
    return future


def test_the_slot_of_a_failed_read_is_not_reused_while_it_is_leased(reader):
    bank = small_bank(reader, 2)
    broken, other = ask(bank, 0, 1), ask(bank, 0, 2)
    reader.finish(reader.jobs[0], OSError("gone"))
    with pytest.raises(OSError):
        broken.wait()
    with pytest.raises(Edge0Error):
        ask(bank, 0, 3)
    broken.release()
    assert ask(bank, 0, 3).slots.tolist() != other.slots.tolist()


class HeldSource:
    """A source whose reads start when `gate` opens."""

    def __init__(self):
        self.gate = threading.Event()

    def read(self, piece, memories):
        (memory,) = memories
        self.gate.wait()
        key = tuple(int(number) for number in piece.path.name.split("."))
        memory[:] = contents(key, piece.offset).tobytes()


def test_a_request_waits_for_reads_whose_slots_nobody_pins_any_more():
    source = HeldSource()
    reader = Reader(source, Recorder(), threads=1, advise=False)
    bank = small_bank(reader, 2)
    ask(bank, 0, 0, 1, purpose=PREFETCH).release()
    opener = threading.Timer(0.2, source.gate.set)
    opener.start()
    try:
        lease = ask(bank, 1, 3)
        lease.wait()
        assert all(np.array_equal(a, stored((1, 3), p, mx.float32)) for p, a in enumerate(bytes_of(lease, 3)))
    finally:
        source.gate.set()
        opener.join()
        reader.close()


# --- the real thing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advise", [True, False])
def test_slots_hold_exactly_the_checkpoints_bytes(checkpoint, advise):
    """Weights byte by byte; scales and biases widened from bf16 to fp32, which loses nothing."""
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=1 << 30, advise=advise, reader_threads=3)) as engine:
        layout = engine.layout
        everyone = np.arange(layout.experts)
        leases = {layer: engine.store.request(layer, everyone, PREFETCH) for layer in layout.layers}
        assert len({slot for lease in leases.values() for slot in lease.slots.tolist()}) == len(layout.records())
        for layer, lease in leases.items():
            lease.wait()
            rows = lease.slots[np.argsort(lease.experts)]
            for part, (spec, stack) in enumerate(zip(layout.specs, lease.stacks, strict=True)):
                held = np.array(stack)[rows]
                for expert in (0, 1, layout.experts - 1):
                    piece = layout.ranges(layer, expert)[part]
                    raw = np.fromfile(piece.path, np.uint8, piece.nbytes, offset=piece.offset)
                    if spec.dtype == "BF16":
                        raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
                    assert held[expert].view(np.uint8).ravel().tobytes() == raw.tobytes()
        assert engine.store.nbytes == sum(stack.nbytes for stack in engine.store.stacks)
        assert engine.store.nbytes == engine.store.capacity * slot_bytes(layout.specs, engine.dtype)


def test_hits_are_not_read_again(checkpoint):
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=1 << 30), Recorder(rows=True)) as engine:
        for _ in range(3):
            lease = engine.store.request(engine.config.moe_layers[0], np.array([1, 4, 9]), DEMAND)
            lease.wait()
            lease.release()
    assert sorted(load.expert for load in engine.recorder.loads) == [1, 4, 9]
    totals = engine.recorder.totals
    assert (totals.loads, totals.hits, totals.calls) == (3, 6, 27)
    assert totals.asked_bytes == 3 * engine.layout.expert_bytes
