"""The session's order: every cell once per round, pairs near each other, and what an interrupted order keeps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.arms import ARMS
from experiments.options import SessionOptions
from experiments.plan import plan, whole_rounds

arms = st.lists(st.sampled_from(sorted(ARMS)), min_size=1, max_size=5, unique=True).map(tuple)
ks = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4, unique=True).map(tuple)


@given(arms, ks, st.integers(1, 6))
def test_plan_runs_every_cell_once_per_round_with_an_aa_twin_and_a_drift_run(arms, ks, rounds):
    runs = plan(SessionOptions(model="m", tier="t", arms=arms, ks=ks, rounds=rounds))
    cells = Counter((run.arm, run.k, run.round) for run in runs if run.role == "arm")
    assert cells == Counter({(arm, k, number): 1 for arm in arms for k in ks for number in range(rounds)})
    twins = [run for run in runs if run.role == "aa"]
    assert [(run.arm, run.k) for run in twins] == [(arms[0], max(ks))] * rounds
    assert [run.round for run in runs[:-1]] == sorted(run.round for run in runs[:-1])
    assert (runs[-1].role, runs[-1].arm, runs[-1].k) == ("drift", runs[0].arm, runs[0].k)
    for twin in twins:  # an A/A pair is neighbours, so that it shares the machine's mood
        places = [n for n, run in enumerate(runs[:-1]) if (run.arm, run.k, run.round) == (twin.arm, twin.k, twin.round)]
        assert places[1] - places[0] == 1


def test_order_rotates_and_the_aa_twin_goes_first_in_turn():
    runs = plan(SessionOptions(model="m", tier="t", arms=("ondemand", "prerouter"), ks=(8,), rounds=2))
    assert [(run.role, run.arm, run.round) for run in runs] == [
        ("arm", "ondemand", 0),
        ("aa", "ondemand", 0),
        ("arm", "prerouter", 0),
        ("arm", "prerouter", 1),
        ("aa", "ondemand", 1),
        ("arm", "ondemand", 1),
        ("drift", "ondemand", 0),
    ]


@given(ks, st.integers(2, 6))
def test_no_arm_of_a_pair_is_always_the_later_one_and_pairs_are_near(ks, rounds):
    names = ("ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap")
    runs = plan(SessionOptions(model="m", tier="t", arms=names, ks=ks, rounds=rounds))
    place = {(run.arm, run.k, run.round): n for n, run in enumerate(runs) if run.role == "arm"}
    for arm, base in (("prerouter", "ondemand"), ("prerouter-mmap", "ondemand-mmap"), ("ondemand", "ondemand-mmap")):
        for k in ks:
            distances = [place[arm, k, number] - place[base, k, number] for number in range(rounds)]
            assert min(distances) < 0 < max(distances)
            assert max(map(abs, distances)) <= len(names)  # within one K of one round


PAIR = plan(SessionOptions(model="m", tier="t", arms=("ondemand", "prerouter"), ks=(8,), rounds=2))


@pytest.mark.parametrize(
    ("finished", "kept"),
    [
        ([], 0),
        ([0], 0),
        ([0, 1], 0),
        ([0, 1, 2], 3),
        ([0, 1, 2, 3], 3),  # a round that was interrupted is run again whole
        ([0, 1, 2, 3, 5], 3),
        ([0, 2, 3, 4, 5], 0),  # what comes after a gap is of no use
        ([0, 1, 2, 3, 4, 5], 6),
        ([0, 1, 2, 3, 4, 5, 6], 7),  # the drift run is no part of the round whose first run it repeats
        ([0, 1, 2, 6], 3),
    ],
)
def test_only_whole_rounds_are_kept(finished, kept):
    assert whole_rounds(PAIR, [order in finished for order in range(len(PAIR))]) == kept


@given(arms, ks, st.integers(1, 4), st.data())
def test_kept_rounds_are_finished_and_what_is_run_again_begins_with_a_round(arms, ks, rounds, data):
    runs = plan(SessionOptions(model="m", tier="t", arms=arms, ks=ks, rounds=rounds))
    finished = data.draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))
    kept = whole_rounds(runs, finished)
    assert all(finished[:kept])
    if 0 < kept < len(runs) - 1:
        assert runs[kept].round == runs[kept - 1].round + 1
    if kept < len(runs):
        again = [
            n
            for n, run in enumerate(runs)
            if (run.round, run.role == "drift") == (runs[kept].round, kept == len(runs) - 1)
        ]
        assert not all(finished[n] for n in again)
