"""How fast an arm would decode: from its routes, a bank, a page cache and the cost of a load, step by step.

Pure arithmetic; knows nothing of files, machines or measurements. The time line follows the engine: layers in order,
the reads of layers that route for themselves when their router has chosen, those of predicted layers one token early,
as soon as their launch group has landed. Demand goes before prefetch; a read that began is not stopped.

Left out: graphs that are built, the shared expert that computes while a layer's reads run (what of it a calibration saw
is in its compute time), pages that neighbouring records share, and whatever the kernel reads around a record.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.lru import simulate

Record = int  # column x experts + expert


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    `routes` [tokens, columns, K]: the experts of each decode step, one column per MoE layer; `experts` of a layer;
    `expert_bytes` in the file; `predicted` [columns]: whether a head predicts the layer; `prompt`: routes of the tokens
    before, in the same columns (no rows: none). `warm_up`: steps at the start that are decoded, `repeats` times after
    the prompt, and not counted.
    """

    routes: np.ndarray
    experts: int
    expert_bytes: int
    predicted: tuple[bool, ...]
    warm_up: int = 0
    repeats: int = 1
    prompt: np.ndarray | None = None

    def __post_init__(self) -> None:
        tokens, columns, _ = self.routes.shape
        if len(self.predicted) != columns:
            raise ValueError(f"expected {columns} marks of predicted layers, found {len(self.predicted)}")
        if not 0 <= self.warm_up < tokens:
            raise ValueError(f"expected a warm-up shorter than the {tokens} tokens, found {self.warm_up}")

    @property
    def columns(self) -> int:
        return self.routes.shape[1]

    @property
    def steps(self) -> int:
        """Steps that count."""
        return len(self.routes) - self.warm_up


@dataclass(frozen=True)
class LoadCost:
    """One load takes `a_ms + b_ms x cold` on one thread. Of many threads' loads the device serves no more than
    `parallel` at once: 1 where threads together get no more than one alone, infinite where b holds beside others."""

    a_ms: float
    b_ms: float
    parallel: float = math.inf

    def __post_init__(self) -> None:
        if min(self.a_ms, self.b_ms) < 0 or self.parallel <= 0:
            raise ValueError(f"a load cost is not negative, and a device serves somebody: {self}")

    def ms(self, cold: float) -> float:
        return self.a_ms + self.b_ms * cold


@dataclass(frozen=True)
class Compute:
    """What a step takes besides loads: `step_ms`, spread over its layers, and `load_ms` more for each load that it asks
    for (submitting it, and the cores and memory that its reader takes from the computation)."""

    step_ms: float
    load_ms: float = 0.0


@dataclass(frozen=True)
class Arm:
    """A way to serve. `serial`: the engine's own thread reads, so every load is waited for (the paper's way)."""

    bank_slots: int
    cache_bytes: float
    prerouter: bool
    serial: bool = False
    threads: int = 2
    launch_groups: int = 3


@dataclass(frozen=True)
class Ask:
    """The loads that one layer asks for at one moment: `cold` [loads], 1.0 where the page cache lacks the record."""

    column: int
    cold: tuple[float, ...]
    prefetch: bool = False


@dataclass
class Step:
    """The loads of a decode step, by the column that asks; `ahead`: those for the next token, by column."""

    now: dict[int, Ask] = field(default_factory=dict)
    ahead: dict[int, Ask] = field(default_factory=dict)

    @property
    def asks(self) -> list[Ask]:
        return [*self.now.values(), *self.ahead.values()]


@dataclass(frozen=True)
class Prediction:
    """Means over the counted steps: milliseconds of a step and of waiting for loads in it, loads, and their cold share
    (NaN without loads)."""

    step_ms: float
    wait_ms: float
    loads: float
    cold_share: float
    expert_bytes: int

    @property
    def tok_s(self) -> float:
        return 1e3 / self.step_ms if self.step_ms else math.inf

    @property
    def mib(self) -> float:
        """Of expert bytes read from the device in a step."""
        return self.loads * self.cold_share * self.expert_bytes / 2**20 if self.loads else 0.0


def launch_groups(predicted: Sequence[bool], parts: int) -> list[range]:
    """The columns of each launch group: what lies before and behind the predicted ones, and these in `parts`."""
    places = [column for column, marked in enumerate(predicted) if marked]
    if not places:
        return [range(len(predicted))]
    start, stop = places[0], places[-1] + 1
    cuts = [start + round(part * (stop - start) / parts) for part in range(parts + 1)]
    edges = [0, *cuts, len(predicted)]
    return [range(low, high) for low, high in zip(edges, edges[1:], strict=False) if low < high]


def predict(work: Workload, arm: Arm, cost: LoadCost, compute: Compute) -> Prediction:
    """What an arm would take for the workload."""
    return timed(work, arm, cost, compute, loads_of(work, arm))


def timed(work: Workload, arm: Arm, cost: LoadCost, compute: Compute, steps: Sequence[Step]) -> Prediction:
    """`predict`, with the loads of every counted step given."""
    line = _serial if arm.serial else _overlapped
    took, waits = zip(*line(work, arm, cost, compute, steps), strict=True)
    colds = [share for step in steps for ask in step.asks for share in ask.cold]
    cold = float(np.mean(colds)) if colds else math.nan
    ahead = [sum(len(ask.cold) for ask in step.ahead.values()) for step in steps if step.ahead]
    here = [sum(len(ask.cold) for ask in step.now.values()) for step in steps]
    loads = float(np.mean(here)) + (float(np.mean(ahead)) if ahead else 0.0)  # the last step knows of no next token
    return Prediction(float(np.mean(took)), float(np.mean(waits)), loads, cold, work.expert_bytes)


# --- what is loaded, and how cold ------------------------------------------------------------------------------------


class Bank:
    """An LRU of `slots` records that is asked for a layer's set at once: none of a set makes room for another."""

    def __init__(self, slots: int):
        self._slots, self._held = slots, OrderedDict[Record, None]()

    def misses(self, records: Iterable[Record]) -> list[Record]:
        """The records of a set that have to be loaded; all of them are held then."""
        records = list(records)
        missing = [record for record in records if record not in self._held]
        for record in (*(record for record in records if record in self._held), *missing):
            self._held[record] = None
            self._held.move_to_end(record)
        while len(self._held) > self._slots:
            self._held.popitem(last=False)
        return missing


def loads_of(work: Workload, arm: Arm, seed: int = 0) -> list[Step]:
    """The loads of every counted step: those that a bank misses, and of these the ones that a page cache misses too.

    The page cache starts full of a seeded choice of records; the bank starts empty.
    """
    bank, asked = Bank(arm.bank_slots), []  # asked: (step or None, column, ahead, records)
    for _ in range(work.repeats):
        if work.prompt is not None:
            for column in range(work.columns if len(work.prompt) else 0):
                asked.append((None, column, False, bank.misses(_records(work, column, work.prompt[:, column]))))
        asked += [(None, *ask) for token in range(work.warm_up) for ask in _asks(work, arm, bank, token)]
    asked += [
        (token - work.warm_up, *ask)
        for token in range(work.warm_up, len(work.routes))
        for ask in _asks(work, arm, bank, token)
    ]
    total = work.columns * work.experts
    fits = int(min(arm.cache_bytes / work.expert_bytes, total))
    start = np.random.default_rng(seed).permutation(total)[:fits].tolist()
    stream = [record for *_, records in asked for record in records]
    warm = iter(simulate(stream, {r: 1 for r in range(total)}, fits, start).tolist())
    steps = [Step() for _ in range(work.steps)]
    for number, column, ahead, records in asked:
        cold = tuple(0.0 if next(warm) else 1.0 for _ in records)
        if number is not None:
            side = steps[number].ahead if ahead else steps[number].now
            side[column] = Ask(column, cold, ahead)
    return steps


def _records(work: Workload, column: int, experts: np.ndarray) -> list[Record]:
    return (column * work.experts + np.unique(experts)).tolist()


def _asks(work: Workload, arm: Arm, bank: Bank, token: int) -> Iterator[tuple[int, bool, list[Record]]]:
    """(column, ahead, records to load) of one step, in the order in which an engine asks for them."""
    for column, ahead in _order(work, arm):
        of = token + ahead
        if of < len(work.routes):
            yield column, ahead, bank.misses(_records(work, column, work.routes[of, column]))


def _order(work: Workload, arm: Arm) -> Iterator[tuple[int, bool]]:
    """The columns that ask in a step: in layer order, or where predicted layers are asked for ahead, when a group that
    owns their heads has landed: one group later, and no later than before the next group that routes for itself."""
    if not arm.prerouter or arm.serial:
        yield from ((column, False) for column in range(work.columns))
        return
    flying: deque[range] = deque()
    for group in launch_groups(work.predicted, arm.launch_groups):
        staged = all(work.predicted[column] for column in group)
        while len(flying) > staged:
            yield from _next_of(work, flying.popleft())
        yield from ((column, False) for column in group if not work.predicted[column])
        flying.append(group)
    for group in flying:
        yield from _next_of(work, group)


def _next_of(work: Workload, group: range) -> Iterator[tuple[int, bool]]:
    """The layers that the heads of a group predict: each one's next."""
    yield from ((c + 1, True) for c in group if c + 1 < work.columns and work.predicted[c + 1])


# --- time lines ------------------------------------------------------------------------------------------------------


def _serial(work: Workload, arm: Arm, cost: LoadCost, compute: Compute, steps: Sequence[Step]):
    """(step ms, wait ms): one thread computes and reads, one after the other."""
    for step in steps:
        loads = [share for ask in step.asks for share in ask.cold]
        wait = sum(map(cost.ms, loads))
        yield compute.step_ms + compute.load_ms * len(loads) + wait, wait


class _Readers:
    """Threads that take demand before prefetch, each first come, first served, and share one device."""

    def __init__(self, threads: int, cost: LoadCost):
        self._free = [0.0] * threads
        self._cost, self._device_free = cost, 0.0
        self._device_ms = cost.b_ms / cost.parallel  # of one record that is all cold
        self._queue: deque[tuple[float, float, int]] = deque()  # prefetches: asked at, cold, column
        self._ready: dict[int, float] = {}  # column -> when the last prefetch for it ended

    def prefetch(self, ask: Ask, at: float) -> None:
        self._ready[ask.column] = at
        self._queue.extend((at, cold, ask.column) for cold in ask.cold)

    def demand(self, ask: Ask, at: float) -> float:
        """When all loads of the ask have ended."""
        while self._queue and max(min(self._free), self._queue[0][0]) < at:
            self._start_next()
        return max((self._run(cold, at) for cold in ask.cold), default=at)

    def ready(self, column: int) -> float:
        """When what was prefetched for a column is there; nobody asks for anything else meanwhile."""
        while any(entry[2] == column for entry in self._queue):
            self._start_next()
        return self._ready.pop(column, 0.0)

    def _start_next(self) -> None:
        at, cold, column = self._queue.popleft()
        self._ready[column] = max(self._ready.get(column, 0.0), self._run(cold, at))

    def _run(self, cold: float, at: float) -> float:
        thread = min(range(len(self._free)), key=self._free.__getitem__)
        begin = max(self._free[thread], at)
        end = begin + self._cost.ms(cold)
        if cold:
            self._device_free = max(self._device_free, begin) + cold * self._device_ms
            end = max(end, self._device_free + self._cost.a_ms)
        self._free[thread] = end
        return end


def _overlapped(work: Workload, arm: Arm, cost: LoadCost, compute: Compute, steps: Sequence[Step]):
    """(step ms, wait ms): readers beside the computation."""
    groups = launch_groups(work.predicted, arm.launch_groups) if arm.prerouter else [range(work.columns)]
    readers = _Readers(arm.threads, cost)
    host = device = 0.0  # until when each is busy

    for step in steps:
        begin, waited = host, 0.0
        loads = sum(len(ask.cold) for ask in step.asks)
        layer_ms = (compute.step_ms + compute.load_ms * loads) / work.columns
        flying: deque[tuple[range, float]] = deque()

        def land(keep: int, step=step, flying=flying) -> None:
            nonlocal host
            while len(flying) > keep:
                group, ends = flying.popleft()
                host = max(host, ends)
                for column, _ in _next_of(work, group) if arm.prerouter else ():
                    if column in step.ahead:
                        readers.prefetch(step.ahead[column], host)

        for group in groups:
            land(1 if arm.prerouter and all(work.predicted[column] for column in group) else 0)
            for column in group:
                if arm.prerouter and work.predicted[column]:
                    there = max(host, readers.ready(column))
                    waited += there - host
                    host = there
            for column in group:
                if arm.prerouter and work.predicted[column]:
                    device = max(device, host) + layer_ms
                    continue
                host = device = max(host, device) + layer_ms
                if column in step.now:
                    there = readers.demand(step.now[column], host)
                    waited += there - host
                    host = device = there
            flying.append((group, device))
        land(0)
        yield host - begin, waited
