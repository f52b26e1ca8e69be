"""The rules by which all experiments judge: ratios by side and size, values by machine and digits."""

import math
from pathlib import Path

import pytest

from analysis.paper.claims import Stated, load_claims
from analysis.paper.findings import SYNTHESISED, Status, absolute, relation
from analysis.statistics import Ratio, Spread, paired_ratio
from edge0.tiers import TIERS

CLAIMS = load_claims(Path(__file__).parents[2] / "results" / "paper" / "claims.yaml").by_id
GAIN = CLAIMS["tab3.gain"]
ABOVE, BELOW, SPANS = Ratio(2, 1.5, 2.5, 3), Ratio(0.5, 0.4, 0.6, 3), Ratio(1.11, 0.9, 1.37, 3)


def judged(*ratios, **more):
    return relation(GAIN, ratios, "ours", **more)


def test_a_sign_needs_every_interval_on_its_side():
    assert judged(ABOVE, ABOVE).status == Status.HOLDS
    assert judged(ABOVE, BELOW).status == judged(SPANS, BELOW).status == Status.FAILS
    assert judged(ABOVE, SPANS).why == "undecided: 1.11x (0.90-1.37), n=3, spans 1"
    assert judged(ABOVE, SPANS).status == Status.NOT_TESTABLE
    pair = judged(Ratio(2, math.nan, math.nan, 2))
    assert pair.status == Status.NOT_TESTABLE
    assert pair.why == "undecided: 2.00x (no interval), n=2, too few rounds for an interval"
    assert judged().why == "undecided: no round is valid in both arms"
    assert judged(ABOVE, blocked="the machine slept").why == "the machine slept"


def test_a_sign_may_lie_below_1():
    assert judged(BELOW, smaller=True).status == Status.HOLDS
    assert judged(ABOVE, smaller=True).status == Status.FAILS
    assert judged(SPANS, smaller=True).status == Status.NOT_TESTABLE


def test_a_count_that_is_equal_in_every_round_is_known():
    same = paired_ratio([3, 4, 5], [3, 4, 5])
    assert judged(same).status == judged(Ratio(1, 1, 1, 3), smaller=True).status == Status.FAILS


@pytest.mark.parametrize(
    ("ratio", "status", "words"),
    [
        (Ratio(1.7, 1.5, 1.9, 3), Status.HOLDS, "its interval meets the paper's 1.80-1.84"),
        (Ratio(1.6, 1.4, 1.796, 3), Status.HOLDS, "its interval meets"),  # 1.80 may have been 1.795
        (
            Ratio(1.27, 1.19, 1.36, 3),
            Status.DIFFERS,
            "the sign holds: 1.27x (1.19-1.36), n=3; its size is below the pa",
        ),
        (Ratio(2.5, 2.2, 2.9, 3), Status.DIFFERS, "its size is above the paper's 1.80-1.84"),
        (Ratio(1.5, 0.9, 2.5, 3), Status.NOT_TESTABLE, "undecided: 1.50x (0.90-2.50), n=3, spans 1"),
        (Ratio(0.8, 0.7, 0.9, 3), Status.FAILS, "the sign does not hold: 0.80x (0.70-0.90), n=3"),
    ],
)
def test_a_size_is_judged_by_its_side_and_by_the_stated_range(ratio, status, words):
    found = judged(ratio, size=GAIN.value)
    assert found.status == status and words in found.why


def test_several_places_widen_every_interval():
    """n = 3, logs of sd 0.05: 95% is x/ 1.132, 99% for five places is x/ 1.332."""
    ratio = paired_ratio([1.2 * math.exp(log) for log in (-0.05, 0.0, 0.05)], [1, 1, 1])
    assert judged(ratio).status == Status.HOLDS
    many = judged(ratio, places=5)
    assert many.status == Status.NOT_TESTABLE
    assert many.why == f"undecided: 1.20x ({1.2 / 1.3318:.2f}-{1.2 * 1.3318:.2f}), n=3 at 99.0% for 5 places, spans 1"


def test_what_is_no_synthesised_tier_is_released():
    assert set(SYNTHESISED) == set(TIERS)


K8 = CLAIMS["tab3.k8"]  # 1.8 and 3.3 tok/s on m2-16gb


HERE = Spread(1.83, 1.7, 1.9, 3)


def value(spread=HERE, machine="m2-16gb", tier="base-35b"):
    spreads = [spread] if spread else []
    return absolute(K8, "1.83", "there", machine=machine, tier=tier, spreads=spreads, paper=Stated("1.8"))


def test_a_value_is_judged_only_where_it_was_measured():
    assert value().status == Status.REPRODUCED
    for elsewhere in (value(machine="testbox"), value(machine=None), value(tier="mini-35b"), value(tier=None)):
        assert elsewhere.status == Status.NOT_TESTABLE and elsewhere.why == (
            "a value of m2-16gb with the released checkpoint; ours is there"
        )
    nowhere = absolute(CLAIMS["reuse.adjacent"], "0.2", "x", machine="m2-16gb", tier="base-35b", spreads=[])
    assert nowhere.status == Status.NOT_TESTABLE and "a value of the paper" in nowhere.why
    assert "no range to judge by" in value(spread=None).why and value(spread=None).status == Status.NOT_TESTABLE


@pytest.mark.parametrize(
    ("spread", "status"),
    [
        (Spread(1.76, 1.7, 1.8, 3), Status.REPRODUCED),  # prints as 1.8
        (Spread(1.9, 1.84, 2.0, 3), Status.WITHIN),
        (Spread(1.9, 1.86, 2.0, 3), Status.DIFFERS),
    ],
)
def test_a_value_is_held_to_the_stated_digits(spread, status):
    assert value(spread).status == status


def test_every_number_of_a_list_must_come_out():
    good, bad = Spread(1.8, 1.7, 1.9, 3), Spread(4.0, 3.9, 4.1, 3)
    for second, status in ((Spread(3.3, 3.2, 3.4, 3), Status.REPRODUCED), (bad, Status.DIFFERS)):
        found = absolute(K8, "ours", "there", machine="m2-16gb", tier="base-35b", spreads=[good, second])
        assert found.status == status and "n=3" in found.why
