"""The paper's way of holding experts, kept as a labelled arm: one bundle of nine arrays per expert, stacked per step.

A bundle is made by the engine thread itself, from the mapping (page faults) or by a read, and kept in an LRU; each
request then builds nine stacked tensors out of its bundles (paper section 3.1, appendix B). Same interface as the bank;
nothing is read before `wait`, which is what makes a prediction's fill synchronous.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from edge0.checkpoint.layout import ExpertLayout
from edge0.streaming.bank import Key, slot_bytes
from edge0.streaming.source import Source
from edge0.telemetry.loads import Recorder

Bundle = list[mx.array]


class StackLease:
    """Some experts of one layer; `wait` reads what is missing and stacks."""

    def __init__(self, store: StackStore, layer: int, experts: np.ndarray, purpose: str):
        self.layer, self.experts, self.purpose = layer, experts, purpose
        self._store = store
        self.stacks: Sequence[mx.array] = ()

    def wait(self) -> None:
        if not self.stacks:
            bundles = self._store.bundles(self.layer, self.experts, self.purpose)
            self.stacks = [mx.stack(parts) for parts in zip(*bundles, strict=True)]
            mx.eval(self.stacks)

    def positions(self, rows: np.ndarray) -> mx.array:
        """Indices into `experts` to rows of `stacks`, in the same shape."""
        return mx.array(rows.astype(np.uint32))

    def release(self) -> None:
        self.stacks = ()


class StackStore:
    """An LRU of at most `capacity` bundles."""

    def __init__(self, layout: ExpertLayout, capacity: int, dtype: mx.Dtype, source: Source, recorder: Recorder):
        self._layout, self._source, self._recorder, self._dtype = layout, source, recorder, dtype
        self.capacity = capacity
        self.nbytes = capacity * slot_bytes(layout.specs, dtype)
        self._bundles: OrderedDict[Key, Bundle] = OrderedDict()

    def request(self, layer: int, experts: np.ndarray, purpose: str) -> StackLease:
        return StackLease(self, layer, experts, purpose)

    def held(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """Nothing computes ahead of its neighbours here: a step's stack is built of all its experts at once."""
        return np.zeros(len(experts), bool)

    def kept(self, layer: int) -> int:
        return 0

    @property
    def available(self) -> int:
        return self.capacity

    def buffer_free(self, buffer: int) -> bool:
        """There are no layer buffers."""
        return False

    def bundles(self, layer: int, experts: np.ndarray, purpose: str) -> list[Bundle]:
        """The bundles of some experts, reading those that the LRU lacks."""
        found = []
        for expert in experts.tolist():
            key = (layer, expert)
            bundle = self._bundles.pop(key, None)
            self._recorder.totals.hits += bundle is not None
            if bundle is None:
                bundle = self._load(key, purpose)
            self._bundles[key] = bundle
            found.append(bundle)
        while len(self._bundles) > self.capacity:
            self._bundles.popitem(last=False)
        return found

    def _load(self, key: Key, purpose: str) -> Bundle:
        ranges = self._layout.pieces(*key)
        self._recorder.totals.loads += 1
        record = self._recorder.load(*key, purpose, ranges)
        self._recorder.begin(record, ranges)
        bundle = []
        for piece, spec in zip(ranges, self._layout.specs, strict=True):
            data = self._source.array(piece)
            if spec.dtype == "U32":
                part = mx.array(data.view(np.uint32).reshape(spec.shape))
            else:
                part = mx.array(data.view(np.uint16).reshape(spec.shape)).view(mx.bfloat16).astype(self._dtype)
            bundle.append(part)
        mx.eval(bundle)
        self._recorder.finish(record)
        return bundle
