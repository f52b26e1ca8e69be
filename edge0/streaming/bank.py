"""The slot bank: every expert that is in memory, in nine plain arrays that readers write into directly.

MLX does not see those writes, so soundness is kept here. A slot is handed out for writing only while no lease pins it;
a lease is released only after every graph that reads its slots was evaluated; the arrays are referenced for as long as
the bank lives and never become parameters. Knows nothing of layers' meaning, routing or time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, wait

import mlx.core as mx
import numpy as np

from edge0.checkpoint.layout import ExpertLayout, PartSpec
from edge0.errors import Edge0Error, ErrorKind
from edge0.streaming.reader import Reader, Target
from edge0.telemetry.loads import Recorder

Key = tuple[int, int]  # layer, expert


def slot_bytes(specs: Sequence[PartSpec], dtype: mx.Dtype) -> int:
    """Bytes of one slot when activations have `dtype`: fp32 widens scales and biases."""
    return sum(spec.nbytes * (2 if _widens(spec, dtype) else 1) for spec in specs)


def _widens(spec: PartSpec, dtype: mx.Dtype) -> bool:
    return spec.dtype == "BF16" and dtype == mx.float32


class Lease:
    """Some experts of one layer, on their way or there. Valid from `wait` to `release`."""

    def __init__(self, bank: Bank, layer: int, experts: np.ndarray, slots: np.ndarray, pending: dict[Key, Future]):
        self.layer, self.experts, self.slots = layer, experts, slots
        self._bank, self._pending = bank, pending

    @property
    def stacks(self) -> Sequence[mx.array]:
        return self._bank.stacks

    def wait(self) -> None:
        """Block until every expert is in its slot.

        Raises:
            Edge0Error: READ_FAILED; what was not read is forgotten, so that a later request reads it again.
        """
        failure: BaseException | None = None
        for key, future in self._pending.items():
            error = future.exception()
            if error is not None:
                self._bank.forget(key, future)
                failure = failure or error
        self._pending = {}
        if failure is not None:
            raise failure

    def positions(self, rows: np.ndarray) -> mx.array:
        """Indices into `experts` to rows of `stacks`, in the same shape."""
        return mx.array(self.slots[rows])

    def release(self) -> None:
        """Give the slots up for eviction; only once no unevaluated graph reads them."""
        self._bank.unpin(self.slots)
        self.slots = self.slots[:0]


class Bank:
    """`slots` experts of any layer, least recently used first out.

    Args:
        layout: where experts lie in the files.
        slots: capacity in experts.
        dtype: the activations' dtype.
    """

    def __init__(self, layout: ExpertLayout, slots: int, dtype: mx.Dtype, reader: Reader, recorder: Recorder):
        self._layout, self._reader, self._recorder = layout, reader, recorder
        self.capacity = slots
        self.nbytes = slots * slot_bytes(layout.specs, dtype)
        self.stacks: list[mx.array] = []
        self._raw: list[mx.array] = []
        memories: list[tuple[memoryview, int, bool]] = []
        for spec in layout.specs:
            kind = mx.uint32 if spec.dtype == "U32" else dtype if _widens(spec, dtype) else mx.bfloat16
            stack = mx.zeros((slots, *spec.shape), dtype=kind)
            mx.eval(stack)
            # bf16 has no buffer format; a uint16 view shares the memory.
            raw = stack.view(mx.uint16) if kind == mx.bfloat16 else stack
            mx.eval(raw)
            memory = memoryview(raw).cast("B")  # zeros were written: no read pays for the first touch of a page
            self.stacks.append(stack)
            self._raw.append(raw)
            memories.append((memory, len(memory) // slots, _widens(spec, dtype)))
        self._targets = [
            tuple(Target(memory[slot * size : (slot + 1) * size], widen) for memory, size, widen in memories)
            for slot in range(slots)
        ]
        self._slot_of: OrderedDict[Key, int] = OrderedDict()  # oldest use first
        self._free = list(range(slots - 1, -1, -1))
        self._pins = [0] * slots
        self._loading: dict[Key, Future] = {}

    def request(self, layer: int, experts: np.ndarray, purpose: str) -> Lease:
        """Pin the slots of some experts (sorted, unique ids) and start reading those that are not there.

        Raises:
            Edge0Error: BANK_TOO_SMALL when every slot is pinned.
        """
        pinned: list[int] = []
        pending: dict[Key, Future] = {}
        try:
            keys = [(layer, expert) for expert in experts.tolist()]
            self._forget_failed(keys)
            # Hits are pinned first, so that no miss may take their slots.
            for key in [key for key in keys if key in self._slot_of]:
                self._pin(key, pinned, pending)
            for key in [key for key in keys if key not in self._slot_of]:
                self._slot_of[key] = slot = self._take_slot()
                record = self._recorder.load(*key, purpose, self._layout.expert_bytes)
                self._loading[key] = self._reader.submit(record, self._layout.ranges(*key), self._targets[slot])
                self._pin(key, pinned, pending)
        except BaseException:
            self.unpin(np.array(pinned, np.uint32))
            raise
        return Lease(self, layer, experts, np.array([self._slot_of[key] for key in keys], np.uint32), pending)

    def _pin(self, key: Key, pinned: list[int], pending: dict[Key, Future]) -> None:
        """Hold one expert's slot, make it the most recently used, and note its read if that has not ended well."""
        slot = self._slot_of[key]
        self._slot_of.move_to_end(key)
        self._pins[slot] += 1
        pinned.append(slot)
        future = self._loading.get(key)
        if future is None:
            return
        if future.done() and future.exception() is None:
            del self._loading[key]
        else:
            pending[key] = future

    def _forget_failed(self, keys: list[Key]) -> None:
        """A read that failed for somebody who no longer waits is read again, not reported to somebody else."""
        for key in keys:
            future = self._loading.get(key)
            if future is not None and future.done() and future.exception() is not None:
                self.forget(key, future)

    def unpin(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self._pins[slot] -= 1

    def forget(self, key: Key, future: Future) -> None:
        """Drop an expert whose read failed; its slot holds nothing that may be used."""
        if self._loading.get(key) is future:
            del self._loading[key]
            self._free.append(self._slot_of.pop(key))

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
            raise Edge0Error(
                ErrorKind.BANK_TOO_SMALL,
                "every slot of the bank is in use",
                expected="a free slot",
                found=f"all {self.capacity} pinned",
                hint="another request holds predictions; release it, or give the bank more memory",
            )
        future = self._loading.pop(candidate, None)
        if future is not None:
            wait([future])
        return self._slot_of.pop(candidate)
