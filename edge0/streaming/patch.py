"""The paper's incremental stack, kept as a labelled arm: a layer's stacked tensors stay, and changed rows are patched.

Nine tensors of K rows per layer live from token to token; a request writes only the rows whose expert is another one
now (paper, appendix B). Bundles are read and held as in `stack`, so that a patched row is in memory twice.

Soundness: an MLX array is a value. A patch makes new arrays out of the old ones, and MLX lets them share memory only
when nothing else refers to the old: no lease, and no graph that was not evaluated. Whoever holds older stacks keeps
them as they were.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edge0.streaming.bundles import Bundles
from edge0.streaming.stack import StackStore
from edge0.telemetry.loads import PREFILL, Recorder

NOBODY = -1  # the expert of a row that was never written


class PatchStore(StackStore):
    """Patches the `rows` rows of a layer's stacks; a prompt's experts, or more than `rows`, are stacked anew.

    Args:
        rows: experts per layer and token (K).
        layers: the model's expert layers; each keeps `rows` rows.
    """

    def __init__(self, bundles: Bundles, recorder: Recorder, rows: int, layers: int):
        super().__init__(bundles)
        self.nbytes += rows * layers * bundles.bundle_bytes
        self._recorder, self._rows = recorder, rows
        self._patched: dict[int, tuple[list[int], list[mx.array]]] = {}  # layer -> the expert of each row, the stacks

    def stacks(self, layer: int, experts: np.ndarray, purpose: str) -> tuple[list[mx.array], np.ndarray]:
        """See `StackStore.stacks`. A layer whose patch fails is forgotten, and stacked anew by the next request."""
        if purpose == PREFILL or len(experts) > self._rows:
            return super().stacks(layer, experts, purpose)
        wanted = experts.tolist()
        # Taken out: only an array that nothing else refers to is patched in its own memory.
        owners, stacks = self._patched.pop(layer, ([], []))
        missing = [expert for expert in wanted if expert not in owners]
        self._recorder.totals.hits += len(wanted) - len(missing)
        bundles = self._bundles.of(layer, missing, purpose)
        if not stacks:
            owners = [NOBODY] * self._rows
            stacks = [mx.zeros((self._rows, *part.shape), part.dtype) for part in bundles[0]]
        free = [row for row, owner in enumerate(owners) if owner not in wanted]
        for row, expert, bundle in zip(free, missing, bundles, strict=False):
            owners[row] = expert
            place = mx.array([row])
            for number, part in enumerate(bundle):
                stacks[number] = mx.slice_update(stacks[number], part[None], place, (0,))
        mx.eval(stacks)
        self._patched[layer] = owners, stacks
        return list(stacks), np.array([owners.index(expert) for expert in wanted], np.uint32)
