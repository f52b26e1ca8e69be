"""Simulated caches: stack distances against a cache run access by access, and what must hold of any stream."""

from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.lru import NEVER, lru_hits, opt_hits, simulate, stack_distances

streams = st.lists(st.integers(0, 9), max_size=60)
capacities = st.integers(1, 12)


def brute_lru(stream, capacity):
    kept, hits = OrderedDict(), []
    for record in stream:
        hits.append(record in kept)
        kept[record] = None
        kept.move_to_end(record)
        if len(kept) > capacity:
            kept.popitem(last=False)
    return hits


def brute_opt(stream, capacity):
    """Most hits over every choice of what to give up."""
    states = {frozenset(): 0}
    for record in stream:
        reached = {}
        for kept, hits in states.items():
            if record in kept:
                choices = [(kept, hits + 1)]
            elif len(kept) < capacity:
                choices = [(kept | {record}, hits)]
            else:
                choices = [(frozenset(rest) | {record}, hits) for rest in combinations(kept, capacity - 1)]
            for state, count in choices:
                reached[state] = max(count, reached.get(state, 0))
        states = reached
    return max(states.values())


@given(streams)
def test_distances_count_the_different_records_since_the_last_use(stream):
    for place, distance in enumerate(stack_distances(stream)):
        before = [at for at in range(place) if stream[at] == stream[place]]
        assert distance == (len(set(stream[before[-1] : place])) if before else NEVER)


@given(streams, capacities)
def test_three_ways_to_the_same_lru(stream, capacity):
    expected = brute_lru(stream, capacity)
    assert lru_hits(stream, [capacity])[0] == sum(expected)
    assert simulate(stream, [3] * 10, 3 * capacity + 2).tolist() == expected


@given(streams)
def test_a_larger_lru_cache_keeps_what_a_smaller_one_does(stream):
    hits = [simulate(stream, [1] * 10, capacity) for capacity in range(1, 12)]
    for smaller, larger in zip(hits, hits[1:], strict=False):
        assert np.all(larger >= smaller)
    assert lru_hits(stream, range(1, 12)).tolist() == [int(each.sum()) for each in hits]


@given(streams, capacities)
def test_nothing_beats_the_best_and_the_best_is_no_dream(stream, capacity):
    best = opt_hits(stream, capacity)
    assert lru_hits(stream, [capacity])[0] <= best <= len(stream) - len(set(stream))
    if len(set(stream)) <= capacity:
        assert best == len(stream) - len(set(stream))


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
def test_the_best_is_what_trying_everything_finds(stream, capacity):
    assert opt_hits(stream, capacity) == brute_opt(stream, capacity)


@given(streams, st.lists(st.integers(1, 9), min_size=10, max_size=10), st.integers(0, 40))
def test_a_budget_in_bytes_is_never_exceeded(stream, sizes, budget):
    hits = simulate(stream, sizes, budget)
    for place in np.flatnonzero(hits):
        before = max(at for at in range(place) if stream[at] == stream[place])
        kept = {record for record in stream[before:place] if sizes[record] <= budget}  # larger ones are never taken in
        assert sum(sizes[record] for record in kept) <= budget


@given(streams, streams)
def test_what_a_cache_starts_with_is_as_if_it_had_been_used(start, stream):
    whole = simulate([*start, *stream], [2] * 10, 11)
    assert simulate(stream, [2] * 10, 11, start).tolist() == whole[len(start) :].tolist()


@pytest.mark.parametrize("stream, hits", [([], [0, 0]), ([7], [0, 0]), ([7, 7, 8, 7], [1, 2])])
def test_small_streams(stream, hits):
    assert lru_hits(stream, [1, 2]).tolist() == hits
    assert opt_hits(stream, 0) == 0
