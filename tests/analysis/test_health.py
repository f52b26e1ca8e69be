"""Text health by hand: loops of any length, n-grams in words and characters, how answers ended."""

import math

import pandas as pd
import pytest

from analysis.quality.health import distinct, health, repetitive, unit_of

SENTENCE = "Let me check this once more. "


@pytest.mark.parametrize(
    ("text", "looped"),
    [
        ("", False),
        ("111", False),  # an answer, not a loop
        ("1" * 8, True),
        ("12 12 12 12", True),
        ("12 12 13 13", False),
        ("abcabcabcabc", True),
        ("abcdabcd", False),  # twice
        ("The answer is 4." + SENTENCE * 3, True),  # a piece longer than a word
        ("The answer is 4." + SENTENCE * 2, False),
        ("x" * 10 + "abcdefghij", True),  # exactly half
        ("x" * 10 + "abcdefghijk", False),  # less than half
        ("abcdefghij" + "x" * 10, True),
        ("äöü\ud800" * 4, True),  # what a broken decoder may leave
    ],
)
def test_a_loop_is_a_piece_three_times_in_a_row_that_fills_half(text, looped):
    assert repetitive(text) is looped


def test_only_whole_repeats_count_towards_half():
    # abc four times and two letters more are 14 characters, whole repeats 12: enough for 24, not for 26.
    assert repetitive("abc" * 4 + "ab" + "0123456789")
    assert not repetitive("abc" * 4 + "ab" + "0123456789wz")


def test_distinct_ngrams_by_hand():
    assert distinct("the cat the cat", 1, "words") == 0.5
    assert distinct("the cat the cat", 2, "words") == pytest.approx(2 / 3)
    assert distinct("aab", 1, "characters") == pytest.approx(2 / 3)
    assert distinct("aab", 2, "characters") == 1
    assert math.isnan(distinct("a", 2, "characters")) and math.isnan(distinct("", 1, "words"))


def test_the_unit_follows_the_median_answer():
    assert unit_of(["42", "word " * 100, "7"]) == "characters"
    assert unit_of(["word " * 20, "word " * 20, "7"]) == "words"


def test_health_counts_answers():
    answers = pd.Series(["ababababab", "  ", "abcd", "a"])
    found = health(answers, pd.Series(["length", "end", "end", "end"]), pd.Series([10, 2, 4, 1]), "characters")
    assert (found.n, found.cut, found.empty, found.repetitive, found.median_tokens) == (4, 0.25, 0.25, 0.25, 3)
    assert found.distinct_1 == pytest.approx((0.2 + 0.5 + 1 + 1) / 4)
    assert found.distinct_2 == pytest.approx((2 / 9 + 1 + 1) / 3)  # the last answer has no pair
