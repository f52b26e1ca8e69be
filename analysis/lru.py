"""Caches of whole records, simulated over a stream of accesses: last-used-first-kept (LRU), and the best possible.

A stream is a sequence of record numbers (any integers), one per access. Knows nothing of files, pages or time: the page
cache keeps pages, ages them in two lists, and shares them between neighbours, so its hits are near these, not equal.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

NEVER = 0  # stack distance of a first access


def stack_distances(stream: Sequence[int]) -> np.ndarray:
    """For each access, how many different records were used since its record's last use, itself included: int64 [n].

    An LRU cache of `capacity` records hits exactly where 1 <= distance <= capacity; `NEVER` marks first accesses.
    One pass, O(n log n): a Fenwick tree counts the places in the stream that are their record's latest use.
    """
    accesses = [int(record) for record in stream]
    n = len(accesses)
    tree = [0] * (n + 1)
    distances = np.zeros(n, np.int64)
    latest: dict[int, int] = {}

    def add(place: int, change: int) -> None:
        while place <= n:
            tree[place] += change
            place += place & -place

    for place, record in enumerate(accesses, start=1):
        before = latest.get(record)
        if before is not None:
            used_up_to = 0
            at = before
            while at > 0:
                used_up_to += tree[at]
                at -= at & -at
            distances[place - 1] = len(latest) - used_up_to + 1
            add(before, -1)
        latest[record] = place
        add(place, 1)
    return distances


def lru_hits(stream: Sequence[int], capacities: Iterable[int]) -> np.ndarray:
    """Hits of an LRU cache that starts empty, for each capacity in records: int64 [capacities]. One pass for all."""
    distances = stack_distances(stream)
    again = np.sort(distances[distances != NEVER])
    return np.searchsorted(again, np.asarray(list(capacities), np.int64), side="right").astype(np.int64)


def opt_hits(stream: Sequence[int], capacity: int) -> int:
    """Hits of the best possible cache of `capacity` records that starts empty and must take in each missed record.

    It gives up the record whose next use is farthest away (Belady). No cache that only knows the past does better.
    """
    accesses = [int(record) for record in stream]
    n = len(accesses)
    if capacity < 1:
        return 0
    next_use, upcoming = [0] * n, {}
    for place in range(n - 1, -1, -1):
        next_use[place] = upcoming.get(accesses[place], n)
        upcoming[accesses[place]] = place
    cached: dict[int, int] = {}  # record -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, record); entries that no longer agree with `cached` are stale
    hits = 0
    for place, record in enumerate(accesses):
        if record in cached:
            hits += 1
        elif len(cached) == capacity:
            while True:
                use, victim = heapq.heappop(farthest)
                if cached.get(victim) == -use:
                    del cached[victim]
                    break
        cached[record] = next_use[place]
        heapq.heappush(farthest, (-next_use[place], record))
    return hits


def simulate(
    stream: Sequence[int],
    sizes: Mapping[int, int] | Sequence[int],
    budget_bytes: int,
    start: Sequence[int] = (),
) -> np.ndarray:
    """Which accesses an LRU cache of `budget_bytes` finds in memory: bool [n]. `sizes`: bytes of each record.

    `start`: records that it holds before the first access, oldest first. A record larger than the budget is never kept.
    """
    cached: OrderedDict[int, int] = OrderedDict()
    used = 0
    hits = np.zeros(len(stream), bool)
    for place, record in enumerate([*start, *stream], start=-len(start)):
        record = int(record)
        found = record in cached
        if place >= 0:
            hits[place] = found
        if found:
            cached.move_to_end(record)
            continue
        size = int(sizes[record])
        if size > budget_bytes:
            continue
        cached[record] = size
        used += size
        while used > budget_bytes:
            used -= cached.popitem(last=False)[1]
    return hits
