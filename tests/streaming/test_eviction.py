"""Each rule of who goes first, against a plain model of it; and the bank with each of them."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_bank import EXPERTS, LAYERS, LateReader, Layout, bytes_of, pick, stored

from edge0 import Edge0Error, ErrorKind
from edge0.streaming.bank import Bank
from edge0.streaming.eviction import Frequency, LeastRecent, PredictedUse, eviction
from edge0.telemetry.loads import DEMAND, HINT, PREFETCH, URGENCY, Recorder

NAMES = ("lru", "frequency", "predicted")
HALF_LIFE = 7
keys = st.tuples(st.integers(0, 2), st.integers(0, 4))
events = st.lists(
    st.one_of(
        st.tuples(st.just("used"), keys),
        st.tuples(st.just("forgotten"), keys),
        st.tuples(st.just("predicted"), st.tuples(st.integers(0, 2), st.frozensets(st.integers(0, 4), max_size=3))),
        st.tuples(st.just("first"), st.frozensets(keys)),
    ),
    max_size=80,
)


class Model:
    """All that ever happened; each rule is a look back at it."""

    def __init__(self):
        self.uses, self.present, self.named = [], set(), {}

    def last(self, key):
        return max(at for at, used in enumerate(self.uses) if used == key)

    def recent(self, key):
        return (self.last(key),)

    def frequency(self, key):
        return (sum(2.0 ** ((at - len(self.uses)) / HALF_LIFE) for at, used in enumerate(self.uses) if used == key),)

    def predicted(self, key):
        named = self.named.get(key[0])
        if named is None:
            return (0, self.last(key) + HALF_LIFE)
        return (key[1] in named, self.last(key))


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (LeastRecent, Model.recent),
        (lambda: Frequency(HALF_LIFE), Model.frequency),
        (lambda: PredictedUse(HALF_LIFE), Model.predicted),
    ],
    ids=NAMES,
)
@given(events=events)
def test_a_policy_names_who_a_plain_model_names(make, order, events):
    policy, model = make(), Model()
    for what, value in events:
        if what == "used":
            policy.used(value)
            model.uses.append(value)
            model.present.add(value)
        elif what == "forgotten" and value in model.present:
            policy.forgotten(value)
            model.present.remove(value)
        elif what == "predicted":
            policy.predicted(*value)
            model.named[value[0]] = value[1]
        elif what == "first":
            found, able = policy.first(value.__contains__), model.present & value
            assert (found is None) == (not able)
            if able:
                assert found in able
                assert order(model, found) == pytest.approx(min(order(model, key) for key in able), rel=1e-9)


def test_counts_fade_and_outlive_eviction():
    policy = Frequency(4)
    for _ in range(6):
        policy.used((0, 0))
    policy.used((0, 1))
    assert policy.first(lambda key: True) == (0, 1)
    policy.forgotten((0, 0))
    policy.used((0, 2)), policy.used((0, 0))
    assert policy.first(lambda key: True) == (0, 1)  # what came back is as popular as ever
    for _ in range(40):
        policy.used((0, 1))
    assert policy.first(lambda key: True) == (0, 2) and len(policy._heap) < 4 * 3 + 64 + 1


def test_a_prediction_lets_go_of_what_it_does_not_name():
    policy = PredictedUse(lead=3)
    for key in ((0, 0), (1, 0), (1, 1), (2, 0)):
        policy.used(key)
    policy.predicted(1, [0])
    order = []
    while (key := policy.first(lambda key: True)) is not None:
        order.append(key)
        policy.forgotten(key)
    assert order == [(1, 1), (0, 0), (2, 0), (1, 0)]


class QueuedReader(LateReader):
    """Reads begin and end when they are told to; until they have begun they may be cancelled."""

    def waiting(self):
        self.jobs = [job for job in self.jobs if not job[1].cancelled()]
        return [job for job in self.jobs if not job[1].running()]

    def begin(self, job):
        assert job[1].set_running_or_notify_cancel()

    def end(self, wanted):
        """Begin and end the reads of some experts."""
        self.waiting()
        for job in [job for job in self.jobs if job[0] in wanted]:
            if not job[1].running():
                self.begin(job)
            self.finish(job)


class YieldingMachine(RuleBasedStateMachine):
    """Advice and hints that nobody waits for, and needs that are waited for: whoever waits finds the right bytes."""

    @initialize(capacity=st.sampled_from([3, 5, 9, 12]), policy=st.sampled_from(NAMES), advised=st.booleans())
    def make(self, capacity, policy, advised):
        self.reader, self.recorder, self.advised = QueuedReader(), Recorder(), advised
        yielding = {HINT, PREFETCH} if advised else {HINT}
        policy = eviction(policy, capacity)
        self.bank = Bank(Layout(), capacity, mx.float32, self.reader, self.recorder, policy, yielding)
        self.advice, self.needs = [], []

    def ask(self, layer, experts, purpose):
        self.reader.end(self.settling())
        try:
            return self.bank.request(layer, np.array(sorted(experts)), purpose)
        except Edge0Error as error:
            assert error.kind is ErrorKind.BANK_TOO_SMALL
            return None

    def settling(self):
        """Experts whose read has begun, or may not be taken back, and whose slot the bank may wait for: in these tests
        of one thread nobody would end it."""
        self.reader.waiting()
        waited = {job[0] for job in self.reader.jobs if job[1].running()}
        return waited | {key for key, future in self.bank._loading.items() if not self.yields(future)}

    def yields(self, future):
        record = self.bank._hints.get(future)
        return record is not None and record.purpose in self.bank._yielding

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=2))
    def advise(self, layer, experts):
        lease = self.ask(layer, experts, PREFETCH)
        if lease is not None:
            self.advice.append(lease)

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.lists(st.integers(0, EXPERTS - 1), max_size=3, unique=True))
    def hint(self, layer, experts):
        available = self.bank.available
        self.bank.hint(layer, experts)
        assert self.bank.available == available

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=2))
    def need(self, layer, experts):
        lease = self.ask(layer, experts, DEMAND)
        if lease is None:
            return
        for job in self.reader.waiting():
            if job[0][0] == layer:  # what waits for this layer now is what it needs, or may not be taken back
                urgency = URGENCY[self.bank._hints[job[1]].purpose] if job[1] in self.bank._hints else 0
                assert urgency == 0 or not self.yields(job[1])
        self.reader.end({(layer, expert) for expert in experts})
        lease.wait()
        self.needs.append(lease)

    @precondition(lambda self: self.reader.waiting())
    @rule(data=st.data())
    def a_read_begins(self, data):
        self.reader.begin(pick(data, self.reader.waiting()))

    @precondition(lambda self: self.needs)
    @rule(data=st.data())
    def release(self, data):
        lease = pick(data, self.needs)
        self.needs.remove(lease)
        lease.release()

    @precondition(lambda self: self.advice)
    @rule(data=st.data())
    def let_advice_go(self, data):
        lease = pick(data, self.advice)
        self.advice.remove(lease)
        lease.release()

    @invariant()
    def who_needs_an_expert_has_its_bytes_and_nobody_has_more_than_there_is(self):
        if not hasattr(self, "bank"):
            return
        for lease in self.needs:
            for expert in lease.experts.tolist():
                for part, found in enumerate(bytes_of(lease, expert)):
                    assert np.array_equal(found, stored((lease.layer, expert), part, mx.float32))
        slots = list(self.bank._slot_of.values())
        assert len(slots) == len(set(slots)) <= self.bank.capacity and not set(slots) & set(self.bank._free)
        assert len(slots) + len(self.bank._free) == self.bank.capacity
        assert not any(future.cancelled() for future in self.bank._loading.values())
        assert set(self.bank._hints) <= set(self.bank._loading.values())

    def teardown(self):
        for lease in getattr(self, "needs", []) + getattr(self, "advice", []):
            lease.release()
        assert not hasattr(self, "bank") or sum(self.bank._pins) == 0


TestYieldingMachine = YieldingMachine.TestCase
TestYieldingMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def bank_of(*yielding, capacity=8, policy="lru"):
    reader = QueuedReader()
    bank = Bank(Layout(), capacity, mx.float32, reader, Recorder(), eviction(policy, capacity), yielding)
    return bank, reader


def ask(bank, layer, *experts, purpose=DEMAND):
    return bank.request(layer, np.array(experts), purpose)


def test_what_its_layer_needs_now_goes_before_what_was_advised_and_the_rest_is_dropped():
    bank, reader = bank_of(PREFETCH)
    advice, other = ask(bank, 0, 1, 2, 3, purpose=PREFETCH), ask(bank, 1, 1, purpose=PREFETCH)
    reader.begin(reader.jobs[0])
    need = ask(bank, 0, 1, 2)
    assert [job[0] for job in reader.waiting()] == [(1, 1), (0, 2)]  # (0, 1) is being read, (0, 3) is not wanted
    totals = bank._recorder.totals
    assert (totals.given_up, totals.loads, totals.hits, totals.calls) == (2, 3, 1, 27)
    reader.end({(0, 1), (0, 2)})
    need.wait()
    for lease in (advice, other, need):
        lease.release()
    assert bank.available == 8


def test_without_yielding_a_need_waits_for_the_advice_that_has_its_expert():
    bank, reader = bank_of()
    ask(bank, 0, 1, 2, purpose=PREFETCH)
    ask(bank, 0, 1)
    assert [job[0] for job in reader.waiting()] == [(0, 1), (0, 2)] and bank._recorder.totals.given_up == 0


def test_a_hint_takes_no_slot_that_somebody_has_and_gives_its_own_up():
    bank, reader = bank_of(HINT, capacity=3)
    need = ask(bank, 0, 0, 1)
    bank.hint(1, [0, 1, 2])
    assert [job[0] for job in reader.waiting()] == [(0, 0), (0, 1), (1, 0)] and bank.available == 1
    second = ask(bank, 2, 3)
    assert [job[0] for job in reader.waiting()] == [(0, 0), (0, 1), (2, 3)]
    assert bank._recorder.totals.given_up == 1 and second.slots.tolist() not in need.slots.tolist()


def test_a_prediction_needs_what_was_hinted_at_and_reads_it_itself():
    bank, reader = bank_of(HINT)
    bank.hint(1, [0, 1, 2])
    reader.begin(reader.jobs[0])
    lease = ask(bank, 1, 0, 1, purpose=PREFETCH)
    assert [job[0] for job in reader.waiting()] == [(1, 1)] and bank._recorder.totals.given_up == 2
    reader.end({(1, 0), (1, 1)})
    lease.wait()
