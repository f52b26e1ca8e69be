"""The serving model: steps that can be counted by hand, and what must hold of any routes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.prediction.serving_model import (
    Arm,
    Ask,
    Bank,
    Compute,
    LoadCost,
    Step,
    Workload,
    launch_groups,
    loads_of,
    predict,
    timed,
)

EXPERTS = 6
NOTHING = LoadCost(0, 0)


@st.composite
def workloads(draw):
    columns, k = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    first = draw(st.integers(1, columns - 1))
    tokens = draw(st.integers(2, 8))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    routes = np.argsort(rng.random((tokens, columns, EXPERTS)), axis=-1)[..., :k]
    predicted = tuple(first <= column for column in range(columns))
    return Workload(routes, EXPERTS, 1 << 20, predicted, draw(st.integers(0, tokens - 2)), 2)


def total(work):
    return work.columns * work.experts


def arm(work, prerouter=False, **changes):
    return Arm(**{"bank_slots": total(work), "cache_bytes": math.inf, "prerouter": prerouter} | changes)


def two_layers(predicted=(False, True)):
    """Two tokens of two layers, no expert twice."""
    return Workload(np.array([[[0], [1]], [[2], [3]]]), EXPERTS, 1 << 20, predicted)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_on_demand_by_hand():
    work = two_layers()
    said = predict(work, arm(work), LoadCost(3, 0), Compute(10, 1))
    assert (said.step_ms, said.wait_ms, said.loads, said.cold_share) == (10 + 2 + 6, 6, 2, 0)
    assert said.tok_s == pytest.approx(1000 / 18) and said.mib == 0


def test_readers_share_the_loads_of_a_layer():
    work = Workload(np.array([[[0, 1, 2]]]), EXPERTS, 1 << 20, (False,))
    times = {n: predict(work, arm(work, threads=n), LoadCost(3, 0), Compute(10)).wait_ms for n in (1, 2, 3)}
    assert times == {1: 9, 2: 6, 3: 3}
    cold = arm(work, threads=3, cache_bytes=0)
    assert predict(work, cold, LoadCost(3, 4, parallel=1), Compute(10)).wait_ms == 3 + 3 * 4  # one after the other
    assert predict(work, cold, LoadCost(3, 4, parallel=2), Compute(10)).wait_ms == 3 + 3 * 2
    assert predict(work, cold, LoadCost(3, 4), Compute(10)).wait_ms == 7


def test_a_prediction_hides_what_fits_behind_the_computation():
    """Layer 0 routes for itself, layer 1 is predicted: asked for when layer 0 has landed, one token before."""
    work = two_layers()
    steps = [Step({}, {1: Ask(1, (0.0,), True)}), Step()]
    line = {ms: timed(work, arm(work, True), LoadCost(ms, 0), Compute(10), steps) for ms in (8, 10, 14)}
    assert [said.wait_ms for said in line.values()] == [0, 0, 2]  # asked for at 5, needed at 10 + 5: half a mean of 4
    assert [said.step_ms for said in line.values()] == [10, 10, 12]


def test_the_paper_way_hides_nothing():
    work = two_layers()
    steps = [Step({}, {1: Ask(1, (1.0,), True)}), Step()]
    said = timed(work, arm(work, True, serial=True), LoadCost(8, 2), Compute(10), steps)
    assert (said.step_ms, said.wait_ms, said.cold_share) == (15, 5, 1)


def test_demand_goes_before_prefetch():
    """At 5 two prefetches wait for one reader; the demand of the next step finds one begun and one not."""
    work = Workload(np.zeros((2, 3, 1), int), EXPERTS, 1 << 20, (False, True, True))
    steps = [Step({}, {1: Ask(1, (0.0,), True), 2: Ask(2, (0.0,), True)}), Step({0: Ask(0, (0.0,))}, {})]
    said = timed(work, arm(work, True, threads=1, launch_groups=1), LoadCost(100, 0), Compute(3), steps)
    # Layer 0 lands at 1, and asks for layer 1; the reader is busy until 101. Layer 1 lands at 3, and asks for layer 2.
    # At 4 layer 0 of the second token asks: until 201, before layer 2, until 301. Then two layers, until 303.
    assert said.step_ms * 2 == 303 and said.wait_ms * 2 == (201 - 4) + (301 - 201)


def test_a_bank_makes_no_room_within_a_set():
    bank = Bank(2)
    assert bank.misses([1, 2]) == [1, 2] and bank.misses([2, 3]) == [3] and bank.misses([1, 3]) == [1]
    assert Bank(1).misses([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("predicted", "parts", "expected"),
    [
        ((False, True, True, True, False), 3, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        ((False, True, True, True, False), 1, [(0, 1), (1, 4), (4, 5)]),
        ((True, True), 1, [(0, 2)]),
        ((False, False), 3, [(0, 2)]),
    ],
)
def test_launch_groups(predicted, parts, expected):
    assert [(group.start, group.stop) for group in launch_groups(predicted, parts)] == expected


def test_what_came_before_is_in_memory():
    """A warm-up and a prompt load what the counted step needs; without them it is loaded in it."""
    routes = np.array([[[0]], [[0]]])
    counted = {w: loads_of(Workload(routes, EXPERTS, 1, (False,), w), Arm(3, 0, False)) for w in (0, 1)}
    assert [len(ask.cold) for step in counted[0] for ask in step.asks] == [1, 0]
    assert [len(ask.cold) for step in counted[1] for ask in step.asks] == [0]
    prompted = Workload(routes[:1], EXPERTS, 1, (False,), prompt=np.array([[[0]]]))
    assert loads_of(prompted, Arm(3, 0, False))[0].asks[0].cold == ()


@pytest.mark.parametrize("bad", [{"predicted": (True,)}, {"warm_up": 2}, {"warm_up": -1}])
def test_what_is_no_workload(bad):
    fields = {"routes": np.zeros((2, 2, 1), int), "experts": 2, "expert_bytes": 1, "predicted": (False, True)}
    with pytest.raises(ValueError, match="expected"):
        Workload(**fields | bad)


@pytest.mark.parametrize("bad", [(-1, 0), (0, -1), (0, 0, 0)])
def test_what_is_no_cost(bad):
    with pytest.raises(ValueError, match="cost"):
        LoadCost(*bad)


# --- laws ------------------------------------------------------------------------------------------------------------


@given(workloads(), st.integers(1, 30), st.integers(0, 10))
def test_a_larger_bank_never_loads_more_on_demand(work, slots, more):
    """LRU: what a smaller one holds, a larger one holds too (from one layer's set on)."""
    slots = max(slots, work.routes.shape[2])
    small, large = (
        sum(len(ask.cold) for step in loads_of(work, arm(work, bank_slots=n)) for ask in step.asks)
        for n in (slots, slots + more)
    )
    assert large <= small


@given(workloads(), st.booleans(), st.booleans(), st.integers(0, 30))
def test_loads_that_cost_nothing_leave_the_computation(work, prerouter, serial, cached):
    said = predict(work, arm(work, prerouter, serial=serial, cache_bytes=cached << 20), NOTHING, Compute(7))
    assert said.step_ms == pytest.approx(7) and said.wait_ms == pytest.approx(0, abs=1e-9)


@given(workloads(), st.booleans())
def test_with_everything_cached_a_load_costs_a(work, prerouter):
    way = arm(work, prerouter, serial=True)
    said = predict(work, way, LoadCost(2, 1000), Compute(7))
    asked = sum(len(ask.cold) for step in loads_of(work, way) for ask in step.asks)
    assert said.wait_ms == pytest.approx(2 * asked / work.steps)
    assert said.cold_share == 0 or (math.isnan(said.cold_share) and not asked)


@given(workloads(), st.booleans(), st.integers(0, 30), st.integers(0, 30))
def test_a_larger_page_cache_is_never_colder(work, prerouter, cached, more):
    """Of records that all weigh the same; both start with the first of one choice."""
    shares = []
    for count in (cached, cached + more):
        steps = loads_of(work, arm(work, prerouter, cache_bytes=count << 20))
        shares.append(sum(share for step in steps for ask in step.asks for share in ask.cold))
    assert shares[1] <= shares[0]


@settings(deadline=None)
@given(workloads(), st.floats(0, 9), st.floats(0, 9), st.integers(1, 3), st.sampled_from([1.0, 2.0, math.inf]))
def test_every_way_takes_at_least_the_computation_and_at_most_one_load_after_another(work, a, b, threads, parallel):
    cost, compute = LoadCost(a, b, parallel), Compute(20)
    for prerouter in (False, True):
        way = arm(work, prerouter, threads=threads, cache_bytes=3 << 20, launch_groups=1)
        steps = loads_of(work, way)
        spent = timed(work, way, cost, compute, steps)
        loads = sum(cost.ms(share) for step in steps for ask in step.asks for share in ask.cold) / len(steps)
        assert 20 - 1e-9 <= spent.step_ms <= 20 + loads + 1e-9
        assert spent.wait_ms <= spent.step_ms + 1e-9


@settings(deadline=None)
@given(workloads(), st.floats(0.1, 9), st.integers(1, 3))
def test_the_prerouter_is_not_slower_where_the_computation_is_equal(work, a, threads):
    """But for one read that demand found begun, for each layer that routes for itself: reads are not stopped."""
    cost, compute = LoadCost(a, 0), Compute(20)
    demand = [Step({c: Ask(c, (0.0,)) for c in range(work.columns)}) for _ in range(work.steps)]
    ahead = [
        Step(
            {c: Ask(c, (0.0,)) for c in range(work.columns) if not work.predicted[c]},
            {c: Ask(c, (0.0,), True) for c in range(work.columns) if work.predicted[c]} if n + 1 < work.steps else {},
        )
        for n in range(work.steps)
    ]
    without, with_ = (
        timed(work, arm(work, prerouter, threads=threads, launch_groups=1), cost, compute, steps).step_ms
        for prerouter, steps in ((False, demand), (True, ahead))
    )
    assert with_ <= without + a * work.predicted.count(False) + 1e-9
