"""How two ends are written: the one form for intervals and ranges."""

import pytest

from analysis.units import interval


@pytest.mark.parametrize(
    ("low", "high", "form", "text"),
    [
        (1.404, 1.659, ".2f", "1.40-1.66"),
        (-0.054, 0.196, ".3f", "-0.054 to 0.196"),
        (-0.2, -0.1, ".1f", "-0.2 to -0.1"),
        (0.1, 0.2, "+.1f", "+0.1 to +0.2"),
        (0.006, 0.082, ".1%", "0.6%-8.2%"),
    ],
)
def test_a_dash_joins_only_ends_without_a_sign(low, high, form, text):
    assert interval(low, high, form) == text
