"""Ranges of printed numbers: what a rounding may hide, and arithmetic that never loses a possible value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.paper.claims import Stated
from analysis.paper.spans import Span

positive = st.floats(0.1, 1e3)


def test_a_printed_number_is_as_wide_as_its_last_digit():
    assert Span.of(Stated("0.20")) == Span(pytest.approx(0.195), pytest.approx(0.205))
    assert Span.of(Stated("0.2")) == Span(pytest.approx(0.15), pytest.approx(0.25))
    assert Span.of(397) == Span(396.5, 397.5)


@given(positive, positive, st.integers(0, 3))
def test_arithmetic_keeps_every_possible_value(a, b, decimals):
    x, y = (Span.of(Stated(f"{value:.{decimals}f}")) for value in (a, b))
    true = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}
    if x.low > 0 and y.low > 0:
        found = {"+": x + y, "-": x - y, "*": x * y, "/": x / y}
        for sign, span in found.items():
            slack = 1e-9 * (1 + abs(true[sign]))
            assert span.low - slack <= true[sign] <= span.high + slack, sign
            assert span.low <= span.high


def test_meeting_and_absolute_value():
    assert Span(1, 2).meets(2) and Span(1, 2).meets(Span(1.5, 9)) and not Span(1, 2).meets(2.1)
    assert abs(Span(-3, -1)) == Span(1, 3) and abs(Span(-1, 3)) == Span(0, 3)
    assert Span(1, 2).text(1) == "1.0 to 2.0"
