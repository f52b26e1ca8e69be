"""How a layer's routed experts are found and applied: the four paths (paper section 3.1; design, section 4).

exact        the router decides; its choice comes to the host, missing experts are read, one gather applies them.
hot          the same, but experts that are in memory compute while the missing ones are read. In a prompt the missing
             ones come in blocks, so that it may touch more experts than memory holds.
staged       the route was predicted one token earlier and its experts are in memory: no look at the host in between.
whole-layer  a long prompt: every expert of the layer is in a layer buffer, the next layer is being read meanwhile.

All give the same bits for the same route. A routed expert that is not there is an error of the step, never a zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from edge0.errors import Edge0Error, ErrorKind
from edge0.lazy import Array, finish, joined, start, take
from edge0.replay import Replay
from edge0.routing import Router
from edge0.streaming.experts import expert_mlp
from edge0.streaming.moe import StreamedMoE
from edge0.streaming.prefill import WholeLayers
from edge0.telemetry.loads import DEMAND, EVALUATE, LAUNCH, LOADS, PREFILL, ROUTE, Recorder

BLOCK_EXPERTS = 16  # missing experts of a prompt that are applied together


class Lease(Protocol):
    """Some experts of one layer that were asked for; see `bank.Lease`."""

    experts: np.ndarray  # ids, in the order in which they were asked for
    slots: np.ndarray  # rows of the stacks, one per expert; valid from `wait`
    stacks: Sequence[Array]

    waits: bool

    def ready(self) -> np.ndarray: ...
    def wait(self) -> None: ...
    def release(self) -> None: ...


class Store(Protocol):
    """What holds experts: the bank, or the paper's stacks."""

    capacity: int  # experts
    nbytes: int

    available: int  # experts that can be asked for now

    def request(self, layer: int, experts: np.ndarray, purpose: str) -> Lease: ...
    def held(self, layer: int, experts: np.ndarray) -> np.ndarray: ...


Experts = Callable[[Array, Array, Sequence[Array]], Array]


@dataclass(frozen=True)
class Prediction:
    """A route for one layer at the next token: `[1, 1, K]` to compute with, the ids on the host, and their experts."""

    indices: Array
    weights: Array
    ids: np.ndarray
    lease: Lease


@dataclass(frozen=True)
class Executed:
    """What one layer saw and routed: `[1, T, D]` and `[1, T, K]`; of a prompt the last two tokens."""

    x: Array
    indices: Array

    @classmethod
    def of(cls, x: Array, indices: Array) -> Executed:
        """Of a prompt the last tokens are copied out, or the layers' inputs would all stay in memory until its end."""
        tokens = x.shape[1]
        if tokens <= 2:
            return cls(x, indices)
        last = np.array([tokens - 2, tokens - 1])
        kept = cls(take(x, last, 1), take(indices, last, 1))
        start(kept.x, kept.indices)
        return kept


@dataclass
class Running:
    """One forward pass: the predictions it may consume, what it routed, and the leases that its graph reads."""

    predictions: dict[int, Prediction] = field(default_factory=dict)
    executed: dict[int, Executed] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    whole: WholeLayers | None = None
    replay: Replay = Replay()


class Executor:
    """Applies routed experts for every block of the model; the engine sets `running` before each pass.

    Args:
        native: "hot" or "exact", for layers that route for themselves.
        experts: the arithmetic of routed experts, as `expert_mlp`.
        later: the same for a token whose experts are all there; what it gives may be computed when it is added up.
    """

    def __init__(
        self,
        store: Store,
        router: Router,
        recorder: Recorder,
        native: str,
        experts: Experts = expert_mlp,
        later: Experts | None = None,
    ):
        self._store, self._router, self._recorder, self._native = store, router, recorder, native
        self._experts, self._later = experts, later or experts
        self.running = Running()

    def __call__(self, block: StreamedMoE, x: Array, shared: Array | None) -> tuple[Array, Array]:
        prediction, whole = self.running.predictions.get(block.layer), self.running.whole
        if prediction is not None:
            return self._staged(block, x, prediction)
        if whole is not None and block.layer in whole:
            return self._whole_layer(block, x, whole)
        indices, weights = self._route(block, x)
        ids = indices if isinstance(indices, np.ndarray) else self._look(block.layer, indices, shared)
        if whole is not None:
            whole.leave()  # the route was looked at, so the layer before has been evaluated
        outputs = self._step(block, x, ids) if x.shape[1] == 1 else self._prompt(block, x, ids)
        return outputs, weights

    def _route(self, block: StreamedMoE, x: Array) -> tuple[Array, Array]:
        indices, weights = self._router(block.logits(x), block.bias(), self.running.replay.route(block.layer))
        self.running.executed[block.layer] = Executed.of(x, indices)
        return indices, weights

    def _look(self, layer: int, indices: mx.array, shared: mx.array) -> np.ndarray:
        """A route that is still to be computed comes to the host."""
        with self._recorder.waiting(ROUTE, layer):
            start(indices)
            start(shared)  # does not depend on the route: computes while the host looks at it and reads
            return np.asarray(indices)

    def _staged(self, block: StreamedMoE, x: Array, prediction: Prediction) -> tuple[Array, Array]:
        self.running.executed[block.layer] = Executed(x, prediction.indices)
        self.running.leases.append(prediction.lease)
        return self._apply(block, x, prediction.ids, prediction.lease), prediction.weights

    def _whole_layer(self, block: StreamedMoE, x: Array, whole: WholeLayers) -> tuple[Array, Array]:
        with self._recorder.waiting(EVALUATE, block.layer):
            finish(x)  # with it every graph that reads the layer before
        lease = whole.enter()
        with self._recorder.waiting(LOADS, block.layer):
            lease.wait()
        indices, weights = self._route(block, x)
        # The slots of a layer buffer are a run: no look at the route is needed to find its rows.
        return self._experts(x, indices + int(lease.slots[0]), lease.stacks), weights

    def _step(self, block: StreamedMoE, x: Array, ids: np.ndarray) -> Array:
        """One token, exact or hot: what is in memory may compute while the rest is being read."""
        lease = self._ask(block.layer, ids.reshape(-1))
        if not lease.waits:
            return self._apply(block, x, ids, lease)
        ready = lease.ready()
        if self._native == "exact" or not ready.any():
            self._wait(lease, block.layer)
            return self._apply(block, x, ids, lease)
        places = np.flatnonzero(ready), np.flatnonzero(~ready)
        first = self._experts(x, lease.slots[places[0]].reshape(*ids.shape[:-1], -1), lease.stacks)
        with self._recorder.waiting(LAUNCH, block.layer):
            start(first)
        try:
            self._wait(lease, block.layer)
        except BaseException:
            finish(first)  # nothing may run on slots that are about to be let go
            raise
        rest = self._experts(x, lease.slots[places[1]].reshape(*ids.shape[:-1], -1), lease.stacks)
        return take(joined([first, rest], -2), np.argsort(np.concatenate(places)), -2)

    def _ask(self, layer: int, experts: np.ndarray) -> Lease:
        lease = self._store.request(layer, experts, DEMAND)
        self.running.leases.append(lease)
        return lease

    def _wait(self, lease: Lease, layer: int) -> None:
        with self._recorder.waiting(LOADS, layer):
            lease.wait()

    def _prompt(self, block: StreamedMoE, x: Array, ids: np.ndarray) -> Array:
        """Many tokens: block after block of experts, further blocks being read while one computes."""
        flat, k = ids.reshape(-1), ids.shape[-1]
        rows = x.reshape(-1, x.shape[-1])
        outputs, order = [], []
        for lease in self._blocks(block.layer, np.unique(ids)):
            pairs = np.flatnonzero(np.isin(flat, lease.experts))
            places = lease.slots[np.searchsorted(lease.experts, flat[pairs])]
            output = self._experts(take(rows, pairs // k, 0), places[:, None], lease.stacks)[:, 0]
            with self._recorder.waiting(EVALUATE, block.layer):
                finish(output)
            outputs.append(output)
            order.append(pairs)
        return take(joined(outputs, 0), np.argsort(np.concatenate(order)), 0).reshape(*ids.shape, -1)

    def _blocks(self, layer: int, experts: np.ndarray) -> Iterator[Lease]:
        """Some experts of a layer, those in memory first; each block is let go when the next one is asked for."""
        held = self._store.held(layer, experts)
        room = max(1, min(BLOCK_EXPERTS, self._store.available // 2))  # so that one can be read while one computes
        cuts = deque(
            part[start : start + room]
            for part in (experts[held], experts[~held])
            for start in range(0, len(part), room)
        )
        ahead: deque[Lease] = deque()
        try:
            while cuts or ahead:
                while cuts and (not ahead or len(cuts[0]) <= self._store.available):
                    ahead.append(self._store.request(layer, cuts.popleft(), PREFILL))
                self._wait(ahead[0], layer)
                yield ahead[0]
                ahead.popleft().release()
        finally:
            for lease in ahead:
                lease.release()

    def _apply(self, block: StreamedMoE, x: Array, ids: np.ndarray, lease: Lease) -> Array:
        """Apply a token's experts, leased in the order of their ids; one that was not leased ends the step."""
        routed, leased = ids.reshape(-1).tolist(), lease.experts.tolist()
        if routed != leased:
            absent = [expert for expert in routed if expert not in leased]
            self._recorder.drops[self._recorder.step] += len(absent)
            raise Edge0Error(
                ErrorKind.EXPERT_ABSENT,
                f"layer {block.layer} routed to experts that are not in memory",
                expected="all of them loaded",
                found=f"{absent} absent",
            )
        return self._later(x, lease.slots.reshape(ids.shape), lease.stacks)
