"""Bundles: one expert as nine arrays of its own, kept in an LRU (paper section 3.1). The paper's arms build on them.

The engine thread makes a bundle itself, from the mapping (page faults) or by a read. Knows nothing of stacks.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import mlx.core as mx
import numpy as np

from edge0.checkpoint.layout import ExpertLayout
from edge0.streaming.bank import Key, slot_bytes
from edge0.streaming.source import Source
from edge0.telemetry.loads import Recorder

Bundle = list[mx.array]


class Bundles:
    """An LRU of at most `capacity` bundles. `advise`: announce an expert's nine ranges before reading them."""

    def __init__(
        self,
        layout: ExpertLayout,
        capacity: int,
        dtype: mx.Dtype,
        source: Source,
        recorder: Recorder,
        advise: bool,
    ):
        self._layout, self._source, self._recorder, self._dtype = layout, source, recorder, dtype
        self.capacity, self._advise = capacity, advise
        self.bundle_bytes = slot_bytes(layout.specs, dtype)  # of an expert, in a bundle as in a row of a stack
        self._bundles: OrderedDict[Key, Bundle] = OrderedDict()

    def of(self, layer: int, experts: list[int], purpose: str) -> list[Bundle]:
        """The bundles of some experts, reading those that the LRU lacks.

        Raises:
            Edge0Error: READ_FAILED.
        """
        found = []
        for expert in experts:
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
        if self._advise:
            self._source.advise(ranges)
            record.advise_ns = time.monotonic_ns() - record.start_ns
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


def stacked(bundles: list[Bundle]) -> list[mx.array]:
    """Nine evaluated stacks, one row per bundle."""
    stacks = [mx.stack(parts) for parts in zip(*bundles, strict=True)]
    mx.eval(stacks)
    return stacks
