"""Who goes when the bank is full: an order over the experts in memory, one class per rule.

A policy is told what is used, predicted and forgotten, and is asked for the expert that should go first among those
that may. It decides nothing else: whether an expert may go at all (nobody pins its slot, nobody writes to it) is known
by the bank alone. No rule changes a route or a bit, only what has to be read again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import log2
from typing import Protocol

Key = tuple[int, int]  # layer, expert


class Eviction(Protocol):
    def used(self, key: Key) -> None:
        """An expert was asked for; if it was not in memory, it is from now on."""

    def predicted(self, layer: int, experts: Iterable[int]) -> None:
        """A prediction names these experts for a layer's next token, and no others."""

    def forgotten(self, key: Key) -> None:
        """An expert is no longer in memory."""

    def first(self, may_go: Callable[[Key], bool]) -> Key | None:
        """Of the experts in memory that may go, the one that should; None where none may."""


class LeastRecent:
    """The one that was asked for longest ago. A prediction asks too, so that it counts as a use."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()  # oldest use first

    def used(self, key: Key) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def predicted(self, layer: int, experts: Iterable[int]) -> None:
        """Nothing beyond the use that a prediction's request is."""

    def forgotten(self, key: Key) -> None:
        self._keys.pop(key, None)

    def first(self, may_go: Callable[[Key], bool]) -> Key | None:
        return next((key for key in self._keys if may_go(key)), None)


class Frequency:
    """The one of the smallest count of uses, where a use counts half after `half_life` further uses of any expert.

    Counts outlive eviction: a popular expert that had to go is popular when it returns. Since all counts fade alike,
    their order only changes by a use; so each is kept as the logarithm of what it would be had it been scaled up since
    the first use of all, and never touched again.
    """

    def __init__(self, half_life: int):
        self._half_life, self._uses = half_life, 0
        self._scores: dict[Key, float] = {}  # of every expert that was ever used
        self._present: set[Key] = set()
        self._heap: list[tuple[float, Key]] = []  # of each expert in memory its score, and older ones that are skipped

    def used(self, key: Key) -> None:
        fresh = self._uses / self._half_life
        self._uses += 1
        before = self._scores.get(key)
        # log2(2^fresh + 2^before), where fresh is the larger or the counts before it weigh more.
        high, low = (fresh, before) if before is None or fresh >= before else (before, fresh)
        self._scores[key] = high if low is None else high + log2(1 + 2.0 ** (low - high))
        self._present.add(key)
        heapq.heappush(self._heap, (self._scores[key], key))
        if len(self._heap) > 4 * len(self._present) + 64:
            self._heap = [(self._scores[key], key) for key in self._present]
            heapq.heapify(self._heap)

    def predicted(self, layer: int, experts: Iterable[int]) -> None:
        """Nothing beyond the use that a prediction's request is."""

    def forgotten(self, key: Key) -> None:
        self._present.discard(key)

    def first(self, may_go: Callable[[Key], bool]) -> Key | None:
        passed: list[tuple[float, Key]] = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            score, key = entry
            if key not in self._present or self._scores[key] != score or (passed and passed[-1] == entry):
                continue  # gone, used since, or the same once more
            passed.append(entry)
            if may_go(key):
                found = key
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


class PredictedUse:
    """By what the pending predictions say of the next token, then the one that was asked for longest ago.

    Last go the experts that a prediction names. Of the others, those of a layer whose prediction does not name them are
    known not to be used by the next token; those of a layer that nobody predicts may be. So these are taken to have
    been used `lead` uses later than they were. (To keep them at any price loses where experts differ in popularity.)
    What a prediction says holds until the layer's next one.
    """

    def __init__(self, lead: int):
        self._lead, self._uses = lead, 0
        self._last: OrderedDict[Key, int] = OrderedDict()  # number of the last use, oldest first
        self._named: dict[int, frozenset[int]] = {}

    def used(self, key: Key) -> None:
        self._uses += 1
        self._last[key] = self._uses
        self._last.move_to_end(key)

    def predicted(self, layer: int, experts: Iterable[int]) -> None:
        self._named[layer] = frozenset(experts)

    def forgotten(self, key: Key) -> None:
        self._last.pop(key, None)

    def first(self, may_go: Callable[[Key], bool]) -> Key | None:
        unknown = named = None  # the oldest of a layer that nobody predicts, and of those that a prediction names
        for key, last in self._last.items():
            if unknown is not None and last > self._last[unknown] + self._lead:
                break
            names = self._named.get(key[0])
            if names is None:
                if unknown is None and may_go(key):
                    unknown = key
            elif key[1] not in names:
                if may_go(key):
                    return key
            elif named is None and may_go(key):
                named = key
        return named if unknown is None else unknown


def eviction(name: str, slots: int) -> Eviction:
    """The policy of `EngineOptions.eviction` for a bank of `slots`; frequencies fade as fast as the bank turns over."""
    if name == "frequency":
        return Frequency(slots)
    return PredictedUse(slots // 2) if name == "predicted" else LeastRecent()
