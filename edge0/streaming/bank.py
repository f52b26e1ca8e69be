"""The slot bank: every expert that is in memory, in nine plain arrays that readers write into directly.

MLX does not see those writes, so soundness is kept here. A slot is handed out for writing only while no lease pins it;
a lease is released only after every graph that reads its slots was evaluated; the arrays are referenced for as long as
the bank lives and never become parameters. The first and the second run of `experts` slots are also the two layer
buffers of long prompts: a whole layer lies there in its own order. Knows nothing of layers' meaning, routing or time.
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

import mlx.core as mx
import numpy as np

from edge0.checkpoint.layout import ExpertLayout, PartSpec
from edge0.errors import Edge0Error, ErrorKind
from edge0.streaming.reader import ExpertReader, Target, joined
from edge0.telemetry.loads import LOADS, PREFETCH, PREFILL, WHOLE, Recorder

Key = tuple[int, int]  # layer, expert


def slot_bytes(specs: Sequence[PartSpec], dtype: mx.Dtype) -> int:
    """Bytes of one slot when scales and biases are kept in `dtype`: fp32 widens them."""
    return sum(spec.nbytes * (2 if _widens(spec, dtype) else 1) for spec in specs)


def _widens(spec: PartSpec, dtype: mx.Dtype) -> bool:
    return spec.dtype == "BF16" and dtype == mx.float32


def page_aligned_zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An evaluated array that begins on a page, so that a direct read may go straight into it: MLX's own begin some
    bytes behind one. It is a part of a slightly larger one, whose memory it keeps."""
    items, spare = math.prod(shape), mmap.PAGESIZE // dtype.size
    whole = mx.zeros((items + spare,), dtype=dtype)
    raw = whole.view(mx.uint8)  # bf16 has no buffer format
    mx.eval(whole, raw)
    skip = -np.frombuffer(memoryview(raw), np.uint8).ctypes.data % mmap.PAGESIZE // dtype.size
    part = whole[skip : skip + items].reshape(shape)
    mx.eval(part)
    return part


class Lease:
    """Some experts of one layer, on their way or there. Valid from `wait` to `release`."""

    def __init__(
        self,
        bank: Bank,
        layer: int,
        experts: np.ndarray,
        slots: np.ndarray,
        pending: dict[Key, Future],
        purpose: str = PREFILL,
    ):
        self.layer, self.experts, self.slots = layer, experts, slots
        self._bank, self._pending, self._purpose = bank, pending, purpose

    @property
    def stacks(self) -> Sequence[mx.array]:
        return self._bank.stacks

    @property
    def waits(self) -> bool:
        """Whether some expert's read had not ended when it was asked for, and `wait` was not called since."""
        return bool(self._pending)

    def ready(self) -> np.ndarray:
        """For each expert, whether `wait` has nothing to do for it."""
        return np.array([(self.layer, expert) not in self._pending for expert in self.experts.tolist()], bool)

    def wait(self) -> None:
        """Block until every expert is in its slot.

        A prefetch that failed is read once more for whoever needs its expert now.

        Raises:
            Edge0Error: READ_FAILED (or whatever else a reader met); what was not read is forgotten, so that a later
                request reads it again.
        """
        failure: BaseException | None = None
        for key, future in self._pending.items():
            error = future.exception()
            if error is not None and self._purpose != PREFETCH and self._bank.was_prefetched(future):
                future = self._bank.read_again(key, future, self._purpose)
                error = future.exception()
            if error is not None:
                self._bank.forget(key, future)
                failure = failure or error
        self._pending = {}
        if failure is not None:
            raise failure

    def release(self) -> None:
        """Give the slots up for eviction; only once no unevaluated graph reads them."""
        self._bank.unpin(self.slots.tolist())
        self.slots = self.slots[:0]


class Bank:
    """`slots` experts of any layer, least recently used first out.

    Args:
        layout: where experts lie in the files.
        slots: capacity in experts.
        dtype: of scales and biases in memory: that of the activations where MLX computes.
    """

    def __init__(self, layout: ExpertLayout, slots: int, dtype: mx.Dtype, reader: ExpertReader, recorder: Recorder):
        self._layout, self._reader, self._recorder = layout, reader, recorder
        self.capacity = slots
        self.nbytes = slots * slot_bytes(layout.specs, dtype)
        self.stacks: list[mx.array] = []
        self._raw: list[mx.array] = []
        self._memories: list[tuple[memoryview, int, bool]] = []  # of each piece: memory, bytes per slot, widen
        for spec in layout.specs:
            kind = mx.uint32 if spec.dtype == "U32" else dtype if _widens(spec, dtype) else mx.bfloat16
            stack = page_aligned_zeros((slots, *spec.shape), kind)
            # bf16 has no buffer format; a uint16 view shares the memory.
            raw = stack.view(mx.uint16) if kind == mx.bfloat16 else stack
            mx.eval(raw)
            memory = memoryview(raw).cast("B")  # zeros were written: no read pays for the first touch of a page
            self.stacks.append(stack)
            self._raw.append(raw)
            self._memories.append((memory, len(memory) // slots, _widens(spec, dtype)))
        self._targets = [self._run(slot, 1) for slot in range(slots)]
        self._slot_of: OrderedDict[Key, int] = OrderedDict()  # oldest use first
        self._free = list(range(slots - 1, -1, -1))
        self._pins = [0] * slots
        self._loading: dict[Key, Future] = {}
        self._prefetches: set[Future] = set()  # those of them that nobody needed yet when they were asked for

    def request(self, layer: int, experts: np.ndarray, purpose: str) -> Lease:
        """Pin the slots of some experts (distinct ids) and start reading those that are not there, in order of ids.

        Raises:
            Edge0Error: BANK_TOO_SMALL when every slot is pinned.
        """
        keys = [(layer, expert) for expert in experts.tolist()]
        pending: dict[Key, Future] = {}
        if self._loading:
            self._forget_failed(keys)
        # Hits are pinned first, so that no miss may take their slots.
        pinned = [self._pin(key, pending) for key in keys if key in self._slot_of]
        self._recorder.totals.hits += len(pinned)
        if len(pinned) < len(keys):
            misses = sorted(key for key in keys if key not in self._slot_of)
            try:
                for key in misses:
                    self._read(key, self._take_slot(), purpose)
                    pinned.append(self._pin(key, pending))
            except BaseException:
                self.unpin(pinned)
                raise
            finally:
                self._reader.flush()
            self._recorder.totals.loads += len(misses)
            pinned = [self._slot_of[key] for key in keys]
        return Lease(self, layer, experts, np.array(pinned, np.uint32), pending, purpose)

    def _read(self, key: Key, slot: int, purpose: str) -> Future:
        """Start to read an expert into a slot that is nobody's; only then does the slot count as the expert's."""
        ranges = self._layout.ranges(*key)
        try:
            record = self._recorder.load(*key, purpose, ranges)
            future = self._reader.submit(record, ranges, self._targets[slot])
        except BaseException:
            if self._slot_of.get(key) != slot:  # a slot that is read again stays the expert's
                self._free.append(slot)
            raise
        self._slot_of[key], self._loading[key] = slot, future
        if purpose == PREFETCH:
            self._prefetches.add(future)
        return future

    def was_prefetched(self, future: Future) -> bool:
        """Whether that read was asked for before anybody needed it."""
        return future in self._prefetches

    def read_again(self, key: Key, failed: Future, purpose: str) -> Future:
        """The read that took the place of a failed one, for a lease that still pins its slot; started if none has."""
        current = self._loading.get(key)
        if current is failed:
            self._prefetches.discard(failed)
            again = self._read(key, self._slot_of[key], purpose)
            self._reader.flush()
            return again
        return current or failed

    def request_layer(self, layer: int, buffer: int) -> Lease:
        """Read a whole layer into layer buffer 0 or 1, over whatever lay there, and pin it.

        Raises:
            Edge0Error: BANK_TOO_SMALL when somebody still reads that buffer.
        """
        count = self._layout.experts
        first = buffer * count
        slots = range(first, first + count)
        if not self.buffer_free(buffer):
            raise self._all_in_use(f"layer buffer {buffer} is in use")
        for key in [key for key, slot in self._slot_of.items() if slot in slots or key[0] == layer]:
            self._vacate(key)
        pieces, stacked = self._layout.layer_ranges(layer), self._layout.stacked
        targets = [(target,) for target in self._run(first, count)] if stacked else self._targets[first : first + count]
        futures: list[Future] = []
        try:
            for number, (piece, target) in enumerate(zip(pieces, targets, strict=True)):
                record = self._recorder.load(layer, WHOLE if stacked else number, PREFILL, (piece,))
                futures.append(self._reader.submit(record, (piece,), target))
                self._reader.flush()  # long reads are jobs of their own
        except BaseException:
            wait(futures)  # the slots are free, and may be given away, once nothing writes to them
            raise
        self._free = [slot for slot in self._free if slot not in slots]
        if stacked:
            futures = [joined(futures)] * count
        pending = {(layer, expert): future for expert, future in enumerate(futures)}
        for expert, slot in enumerate(slots):
            self._slot_of[layer, expert] = slot
            self._pins[slot] += 1
        self._loading |= pending
        self._recorder.totals.loads += count
        return Lease(self, layer, np.arange(count), np.array(slots, np.uint32), pending)

    def buffer_free(self, buffer: int) -> bool:
        """Whether the bank has that layer buffer and nobody reads it."""
        first, end = buffer * self._layout.experts, (buffer + 1) * self._layout.experts
        return end <= self.capacity and not any(self._pins[first:end])

    def held(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """For each of some experts, whether it is in memory and its read has ended."""
        keys = [(layer, expert) for expert in experts.tolist()]
        there = [key in self._slot_of and (key not in self._loading or self._read_has_ended(key)) for key in keys]
        return np.array(there, bool)

    def kept(self, layer: int) -> int:
        """Experts of a layer that are in memory outside of the layer buffers."""
        buffers = 2 * self._layout.experts
        return sum(key[0] == layer and slot >= buffers for key, slot in self._slot_of.items())

    @property
    def available(self) -> int:
        """Slots that no lease pins."""
        return self._pins.count(0)

    def _read_has_ended(self, key: Key) -> bool:
        future = self._loading[key]
        return future.done() and future.exception() is None

    def _run(self, slot: int, count: int) -> tuple[Target, ...]:
        """The memory of `count` neighbouring slots, piece by piece."""
        return tuple(
            Target(memory[slot * size : (slot + count) * size], widen) for memory, size, widen in self._memories
        )

    def _vacate(self, key: Key) -> None:
        """Forget an expert; its slot is free once no lease pins it, and nothing is being written to it."""
        future = self._loading.get(key)
        if future is not None and not future.done():
            with self._recorder.waiting(LOADS, key[0]):
                wait([future])
        self._drop(key)

    def _drop(self, key: Key) -> None:
        """An expert is in memory no longer; whatever read it has ended."""
        self._prefetches.discard(self._loading.pop(key, None))
        self._free.append(self._slot_of.pop(key))

    def _pin(self, key: Key, pending: dict[Key, Future]) -> int:
        """Hold one expert's slot, make it the most recently used, and note its read if that has not ended well."""
        slot = self._slot_of[key]
        self._slot_of.move_to_end(key)
        self._pins[slot] += 1
        if key in self._loading:
            if self._read_has_ended(key):
                self._prefetches.discard(self._loading.pop(key))
            else:
                pending[key] = self._loading[key]
        return slot

    def _forget_failed(self, keys: list[Key]) -> None:
        """A read that failed for somebody who no longer waits is read again, not reported to somebody else."""
        for key in keys:
            future = self._loading.get(key)
            if future is not None and future.done() and future.exception() is not None:
                self.forget(key, future)

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._pins[slot] -= 1

    def forget(self, key: Key, future: Future) -> None:
        """Drop an expert whose read failed; its slot holds nothing that may be used."""
        if self._loading.get(key) is future:
            self._drop(key)

    def _take_slot(self) -> int:
        """A slot that nobody reads or writes: a free one, else the least recently used one that no lease pins. If all
        of those are still being read for somebody who let go, the oldest such read is waited for."""
        # A slot freed by a failed read may still be pinned by the lease that met the failure.
        slot = next((slot for slot in reversed(self._free) if not self._pins[slot]), None)
        if slot is not None:
            self._free.remove(slot)
            return slot
        candidate = None
        for key, slot in self._slot_of.items():
            if self._pins[slot]:
                continue
            if key not in self._loading or self._loading[key].done():
                candidate = key
                break
            candidate = candidate or key
        if candidate is None:
            raise self._all_in_use("every slot of the bank is in use")
        self._vacate(candidate)
        return self._free.pop()

    def _all_in_use(self, what: str) -> Edge0Error:
        return Edge0Error(
            ErrorKind.BANK_TOO_SMALL,
            what,
            expected="a free slot",
            found=f"{self.capacity - self.available} of {self.capacity} pinned",
            hint="another request holds predictions; release it, or give the bank more memory",
        )
