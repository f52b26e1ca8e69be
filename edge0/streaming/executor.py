"""How a layer's routed experts are found and applied: the exact path and the staged path (paper section 3.1).

exact    the router decides; its choice comes to the host, missing experts are read, one gather applies them. Also the
         way of prefill, in blocks of experts, so that a prompt may touch more experts than memory holds.
staged   the route was predicted one token earlier and its experts are in memory: no look at the host in between.

Both give the same bits for the same route. A routed expert that is not there is an error of the step, never a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from edge0.errors import Edge0Error, ErrorKind
from edge0.routing import Router
from edge0.streaming.experts import expert_mlp
from edge0.streaming.moe import StreamedMoE
from edge0.telemetry.loads import COMPUTE, DEMAND, LOADS, PREFILL, Recorder


class Lease(Protocol):
    """Some experts of one layer that were asked for; see `bank.Lease`."""

    experts: np.ndarray  # sorted ids
    stacks: Sequence[mx.array]

    def wait(self) -> None: ...
    def positions(self, rows: np.ndarray) -> mx.array: ...
    def release(self) -> None: ...


class Store(Protocol):
    """What holds experts: the bank, or the paper's stacks."""

    capacity: int  # experts
    nbytes: int

    def request(self, layer: int, experts: np.ndarray, purpose: str) -> Lease: ...


@dataclass(frozen=True)
class Prediction:
    """A route for one layer at the next token: device arrays `[1, 1, K]`, the ids on the host, and their experts."""

    indices: mx.array
    weights: mx.array
    ids: np.ndarray
    lease: Lease


@dataclass(frozen=True)
class Executed:
    """What one layer saw and routed: `[1, T, D]` and `[1, T, K]`."""

    x: mx.array
    indices: mx.array


@dataclass
class Running:
    """One forward pass: the predictions it may consume, what it routed, and the leases that its graph reads."""

    predictions: dict[int, Prediction] = field(default_factory=dict)
    executed: dict[int, Executed] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)


class Executor:
    """Applies routed experts for every block of the model; the engine sets `running` before each pass."""

    def __init__(self, store: Store, router: Router, recorder: Recorder):
        self._store, self._router, self._recorder = store, router, recorder
        self.running = Running()

    def __call__(self, block: StreamedMoE, x: mx.array, shared: mx.array) -> tuple[mx.array, mx.array]:
        prediction = self.running.predictions.get(block.layer)
        if prediction is not None:
            return self._staged(block, x, prediction)
        indices, weights = self._router(block.logits(x), block.bias())
        self.running.executed[block.layer] = Executed(x, indices)
        with self._recorder.waiting(COMPUTE, block.layer):
            mx.async_eval(indices)
            mx.async_eval(shared)  # does not depend on the route: computes while the host looks at it and reads
            ids = np.array(indices)
        outputs = self._exact(block, x, ids) if x.shape[1] == 1 else self._blocks(block, x, ids)
        return outputs, weights

    def _staged(self, block: StreamedMoE, x: mx.array, prediction: Prediction) -> tuple[mx.array, mx.array]:
        self.running.executed[block.layer] = Executed(x, prediction.indices)
        self.running.leases.append(prediction.lease)
        return self._apply(block, x, prediction.ids, prediction.lease), prediction.weights

    def _exact(self, block: StreamedMoE, x: mx.array, ids: np.ndarray) -> mx.array:
        lease = self._store.request(block.layer, np.unique(ids), DEMAND)
        self.running.leases.append(lease)
        with self._recorder.waiting(LOADS, block.layer):
            lease.wait()
        return self._apply(block, x, ids, lease)

    def _apply(self, block: StreamedMoE, x: mx.array, ids: np.ndarray, lease: Lease) -> mx.array:
        """Apply experts that are in memory; one that was routed and is not there ends the step."""
        rows = np.searchsorted(lease.experts, ids)
        absent = ids[lease.experts.take(rows, mode="clip") != ids]
        if absent.size:
            self._recorder.drops[self._recorder.step] += absent.size
            raise Edge0Error(
                ErrorKind.EXPERT_ABSENT,
                f"layer {block.layer} routed to experts that are not in memory",
                expected="all of them loaded",
                found=f"{absent.tolist()} absent",
            )
        return expert_mlp(x, lease.positions(rows), lease.stacks)

    def _blocks(self, block: StreamedMoE, x: mx.array, ids: np.ndarray) -> mx.array:
        """Many tokens: block after block of experts, the next block read while this one computes."""
        unique, flat, k = np.unique(ids), ids.reshape(-1), ids.shape[-1]
        rows = x.reshape(-1, x.shape[-1])
        half = max(1, self._store.capacity // 2)  # two blocks are held at a time
        cuts = [unique[start : start + half] for start in range(0, len(unique), half)]
        outputs, order = [], []
        following = self._store.request(block.layer, cuts[0], PREFILL)
        for number, experts in enumerate(cuts):
            lease = following
            try:
                if number + 1 < len(cuts):
                    following = self._store.request(block.layer, cuts[number + 1], PREFILL)
                    self.running.leases.append(following)
                with self._recorder.waiting(LOADS, block.layer):
                    lease.wait()
                pairs = np.flatnonzero(np.isin(flat, experts))
                output = self._apply(block, rows[mx.array(pairs // k)], flat[pairs][:, None], lease)[:, 0]
                with self._recorder.waiting(COMPUTE, block.layer):
                    mx.eval(output)
            finally:
                lease.release()
            outputs.append(output)
            order.append(pairs)
        inverse = mx.array(np.argsort(np.concatenate(order)))
        return mx.concatenate(outputs)[inverse].reshape(*ids.shape, -1)
