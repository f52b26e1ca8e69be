"""The reader threads: order, errors, the end, and what they write down."""

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.checkpoint.layout import ByteRange
from edge0.errors import Edge0Error, ErrorKind
from edge0.streaming.prefill import even_cuts
from edge0.streaming.reader import EngineReader, Reader, Target, joined
from edge0.streaming.source import read_failed
from edge0.telemetry.loads import DEMAND, LOADS, PREFETCH, PREFILL, Recorder


class SlowSource:
    """Notes the order of reads; the first one stands still until `gate` opens."""

    def __init__(self):
        self.started, self.gate, self.order, self.advised = threading.Event(), threading.Event(), [], []

    def read(self, piece, memories):
        (memory,) = memories
        self.started.set()
        self.gate.wait()
        self.order.append(piece.path.name)
        if piece.path.name.startswith("broken"):
            raise read_failed(piece, "the disk is gone")
        memory[:] = bytes([piece.offset % 256]) * piece.nbytes

    def advise(self, pieces):
        self.advised.append(tuple(pieces))


@pytest.fixture
def source():
    return SlowSource()


def job(recorder, name, purpose, nbytes=8, widen=False):
    """(record, ranges, targets, memory) of an expert of one piece."""
    memory = bytearray(nbytes * (2 if widen else 1))
    piece = ByteRange(Path(name), 5, nbytes)
    return recorder.load(0, 0, purpose, (piece,)), (piece,), [Target(memoryview(memory), widen)], memory


def test_demand_goes_before_prefetch_and_otherwise_first_come_first_served(source):
    recorder = Recorder()
    reader = Reader(source, recorder, threads=1, advise=False)
    futures = [reader.submit(*job(recorder, "first", PREFETCH)[:3])]
    assert source.started.wait(60)
    for name, purpose in [
        ("prefetch 1", PREFETCH),
        ("prefetch 2", PREFETCH),
        ("demand 1", DEMAND),
        ("prefill", PREFILL),
        ("prefetch 3", PREFETCH),
        ("demand 2", DEMAND),
    ]:
        futures.append(reader.submit(*job(recorder, name, purpose)[:3]))
    source.gate.set()
    for future in futures:
        future.result(60)
    reader.close()
    assert source.order == ["first", "demand 1", "prefill", "demand 2", "prefetch 1", "prefetch 2", "prefetch 3"]


def test_an_error_reaches_its_future_and_only_that(source):
    recorder = Recorder(rows=True)
    reader = Reader(source, recorder, threads=2, advise=False)
    source.gate.set()
    jobs = [job(recorder, name, DEMAND) for name in ("good 1", "broken", "good 2")]
    good, broken, also = (reader.submit(*parts[:3]) for parts in jobs)
    with pytest.raises(Edge0Error, match="the disk is gone") as caught:
        broken.result(60)
    assert caught.value.kind is ErrorKind.READ_FAILED and str(caught.value.path) == "broken"
    assert good.result(60) is None and also.result(60) is None
    reader.close()
    assert [bytes(parts[3]) for parts in jobs] == [b"\x05" * 8, bytes(8), b"\x05" * 8]
    assert len(recorder.loads) == 2


def test_an_unexpected_error_does_not_kill_the_thread(source):
    recorder = Recorder()
    reader = Reader(source, recorder, threads=1, advise=False)
    source.gate.set()
    record, ranges, targets, _ = job(recorder, "good", DEMAND)
    for wrong in (targets * 2, [], [Target(memoryview(bytearray(9)), False)]):
        assert isinstance(reader.submit(record, ranges, wrong).exception(60), ValueError)
    assert reader.submit(record, ranges, targets).exception(60) is None
    reader.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_close_finishes_what_is_queued_and_ends_the_threads(source, threads):
    recorder = Recorder()
    before = threading.active_count()
    reader = Reader(source, recorder, threads, advise=False)
    assert threading.active_count() == before + threads
    futures = [reader.submit(*job(recorder, f"{n}", PREFETCH)[:3]) for n in range(20)]
    source.gate.set()
    reader.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert len(source.order) == 20 and threading.active_count() == before
    reader.close()


@pytest.mark.parametrize("advise", [True, False])
def test_records_are_complete(source, advise):
    seen = []

    class Observer:
        def before(self, ranges, record):
            seen.append(("before", ranges, record.end_ns))
            record.cold_bytes = 3

        def after(self, record):
            seen.append(("after", record.cold_bytes))

    recorder = Recorder(Observer(), rows=True)
    reader = Reader(source, recorder, threads=1, advise=advise)
    source.gate.set()
    record, ranges, targets, _ = job(recorder, "x", DEMAND)
    reader.submit(record, ranges, targets).result(60)
    reader.close()
    assert recorder.loads == [record]
    assert (record.step, record.layer, record.expert, record.purpose, record.asked_bytes) == (-1, 0, 0, DEMAND, 8)
    assert 0 < record.submit_ns <= record.start_ns <= record.start_ns + record.advise_ns <= record.end_ns
    assert record.thread not in (0, threading.get_native_id())
    assert source.advised == ([ranges] if advise else []) and (record.advise_ns > 0) == advise
    assert seen == [("before", ranges, 0), ("after", 3)]


def test_the_engines_own_reads_have_ended_when_they_were_asked_for_and_are_its_waiting(source):
    recorder = Recorder(rows=True)
    before = threading.active_count()
    reader = EngineReader(source, recorder, advise=True)
    source.gate.set()
    record, ranges, targets, memory = job(recorder, "x", PREFETCH)
    future = reader.submit(record, ranges, targets)
    assert future.done() and future.exception() is None and memory == b"\x05" * 8
    assert recorder.loads == [record] and record.thread == threading.get_native_id()
    assert source.advised == [ranges] and threading.active_count() == before
    ((step, reason, layer, ns),) = recorder.waits
    assert (step, reason, layer) == (-1, LOADS, 0)
    assert ns >= record.end_ns - record.start_ns and recorder.totals.loads_wait_ns == ns
    failed = reader.submit(*job(recorder, "broken", DEMAND)[:3])
    assert failed.exception().kind is ErrorKind.READ_FAILED and len(recorder.waits) == 2
    reader.close()


def test_ctrl_c_during_one_of_the_engines_own_reads_ends_the_engines_work():
    class Interrupted(SlowSource):
        def read(self, piece, memories):
            raise KeyboardInterrupt

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        EngineReader(Interrupted(), recorder, advise=False).submit(*job(recorder, "x", DEMAND)[:3])


def test_looking_at_the_engines_own_reads_is_written_down_apart(source):
    class Observer:
        def before(self, ranges, record):
            pass

        def after(self, record):
            pass

    for make, looks in (
        (lambda recorder: EngineReader(source, recorder, advise=False), 2),
        (lambda recorder: Reader(source, recorder, threads=1, advise=False), 0),
    ):
        recorder = Recorder(Observer(), rows=True)
        reader = make(recorder)
        source.gate.set()
        reader.submit(*job(recorder, "x", DEMAND)[:3]).result(60)
        reader.close()
        assert len(recorder.observing) == looks


class Bytes:
    """A source whose byte at offset n is n % 251; it notes how many memories each read fills."""

    def __init__(self):
        self.vectors = []

    def read(self, piece, memories):
        self.vectors.append(len(memories))
        offset = piece.offset
        for memory in memories:
            memory[:] = bytes(n % 251 for n in range(offset, offset + len(memory)))
            offset += len(memory)


@given(
    st.lists(st.tuples(st.integers(1, 40).map(lambda n: 2 * n), st.booleans()), min_size=1, max_size=9),
    st.data(),
)
def test_ranges_fill_targets_in_order_however_they_are_cut(pieces, data):
    """One range for all targets, one each, or anything between: the same bytes, widened where asked."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(pieces) - 1))))) if len(pieces) > 1 else []
    source, recorder = Bytes(), Recorder()
    memories = [bytearray(nbytes * (2 if widen else 1)) for nbytes, widen in pieces]
    targets = [Target(memoryview(memory), widen) for memory, (_, widen) in zip(memories, pieces, strict=True)]
    ranges, offset = [], 7
    for low, high in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
        nbytes = sum(size for size, _ in pieces[low:high])
        ranges.append(ByteRange(Path("x"), offset, nbytes))
        offset += nbytes
    reader = Reader(source, recorder, threads=1, advise=False)
    reader.submit(recorder.load(0, 0, DEMAND, ranges), tuple(ranges), targets).result(60)
    reader.close()
    assert len(source.vectors) == len(ranges) == recorder.totals.calls and sum(source.vectors) == len(pieces)
    offset = 7
    for memory, (nbytes, widen) in zip(memories, pieces, strict=True):
        raw = np.array([n % 251 for n in range(offset, offset + nbytes)], np.uint8)
        expected = (raw.view(np.uint16).astype(np.uint32) << 16).tobytes() if widen else raw.tobytes()
        assert memory == expected
        offset += nbytes


@given(st.sets(st.integers(0, 11), min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_experts_of_a_layer_are_read_together_and_neighbours_in_one_read(experts, threads, records):
    """Three parts of 10, 4 and 6 bytes per expert, in stacks or in one record: the same bytes as expert by expert, and
    as many reads as each thread's share has runs of neighbours."""
    sizes, source, recorder = (10, 4, 6), Bytes(), Recorder(rows=True)
    reader = Reader(source, recorder, threads, advise=False, together=True)
    jobs = {}
    for expert in sorted(experts):
        if records:
            ranges, starts = (ByteRange(Path("x"), expert * 20, 20),), [expert * 20, expert * 20 + 10, expert * 20 + 14]
        else:
            starts = [1000 * part + expert * size for part, size in enumerate(sizes)]
            ranges = tuple(ByteRange(Path("x"), at, size) for at, size in zip(starts, sizes, strict=True))
        memories = [bytearray(size * (1 + (part > 0))) for part, size in enumerate(sizes)]
        targets = [Target(memoryview(memory), part > 0) for part, memory in enumerate(memories)]
        future = reader.submit(recorder.load(0, expert, DEMAND, ranges), ranges, targets)
        jobs[expert] = future, memories, starts
        assert not future.done()
    reader.flush()
    reader.close()
    for future, memories, starts in jobs.values():
        assert future.result(60) is None
        for part, (memory, at) in enumerate(zip(memories, starts, strict=True)):
            raw = np.array([n % 251 for n in range(at, at + sizes[part])], np.uint8)
            assert memory == ((raw.view(np.uint16).astype(np.uint32) << 16).tobytes() if part else raw.tobytes())
    shares = [sorted(experts)[cut] for cut in even_cuts(len(experts), -(-len(experts) // threads))]
    runs = sum(expert - 1 not in share for share in shares for expert in share)
    assert len(source.vectors) == runs * (1 if records else 3) == sum(load.calls for load in recorder.loads)
    assert sorted(load.expert for load in recorder.loads) == sorted(experts)


def test_what_the_device_gave_to_some_experts_together_is_shared_among_them(source):
    class Observer:
        def before(self, ranges, record):
            record.device_bytes = 0

        def after(self, record):
            record.device_bytes += 25

    recorder = Recorder(Observer(), rows=True)
    reader = Reader(source, recorder, threads=1, advise=True, together=True)
    source.gate.set()
    for name in ("a", "b"):
        reader.submit(*job(recorder, name, DEMAND)[:3])
    reader.flush()
    reader.close()
    first, second = recorder.loads
    assert (first.device_bytes, second.device_bytes) == (13, 12) and (first.calls, second.calls) == (2, 0)
    assert (first.start_ns, first.end_ns) == (second.start_ns, second.end_ns) and first.start_ns < first.end_ns
    assert len(source.advised) == 1 and len(source.advised[0]) == 2 and recorder.totals.calls == 2


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)))
def test_joined_ends_when_the_last_has_and_with_an_error_if_one_met_one(order, lost):
    futures = [Future() for _ in range(5)]
    whole = joined(futures)
    for number in order:
        assert not whole.done()
        if number in lost:
            futures[number].set_exception(OSError(number))
        else:
            futures[number].set_result(None)
    assert whole.done() and isinstance(whole.exception(), OSError) == bool(lost)


def test_widening_is_exact_for_every_bf16_pattern():
    """Also infinities, NaN and subnormals: the upper half of an fp32 is its bf16."""
    patterns = np.arange(1 << 16, dtype=np.uint16)

    class Source:
        def read(self, piece, memories):
            memories[0][:] = patterns.tobytes()

    recorder = Recorder()
    reader = Reader(Source(), recorder, threads=1, advise=False)
    record, ranges, targets, memory = job(recorder, "x", DEMAND, nbytes=patterns.nbytes, widen=True)
    reader.submit(record, ranges, targets).result(60)
    reader.close()
    assert np.array_equal(np.frombuffer(memory, np.uint32), patterns.astype(np.uint32) << 16)
