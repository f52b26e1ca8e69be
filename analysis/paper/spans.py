"""A number that was printed with few digits, as the range of what it may have been: arithmetic on such ranges.

So that a rounding is never called a contradiction: two printed numbers agree when their ranges share a value. Ranges
here are of positive numbers where they are multiplied or divided, which is all that the paper's tables need.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.paper.claims import Stated


@dataclass(frozen=True)
class Span:
    """Everything from `low` to `high`."""

    low: float
    high: float

    @classmethod
    def of(cls, value: float) -> Span:
        """A printed number: half a unit of its last digit either way; a whole number half a unit of its ones."""
        half = 0.5 * 10 ** -(value.decimals if isinstance(value, Stated) else 0)
        return cls(value - half, value + half)

    def __add__(self, other: Span | float) -> Span:
        other = _span(other)
        return Span(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Span | float) -> Span:
        other = _span(other)
        return Span(self.low - other.high, self.high - other.low)

    def __mul__(self, other: Span | float) -> Span:
        other = _span(other)
        return Span(self.low * other.low, self.high * other.high)

    def __truediv__(self, other: Span | float) -> Span:
        other = _span(other)
        return Span(self.low / other.high, self.high / other.low)

    def __abs__(self) -> Span:
        ends = sorted((abs(self.low), abs(self.high)))
        return Span(0.0 if self.low <= 0 <= self.high else ends[0], ends[1])

    def meets(self, other: Span | float) -> bool:
        """Whether the two share a value."""
        other = _span(other)
        return self.low <= other.high and other.low <= self.high

    def text(self, decimals: int) -> str:
        """`5.15 to 5.31`."""
        return f"{self.low:.{decimals}f} to {self.high:.{decimals}f}"


def _span(value: Span | float) -> Span:
    return value if isinstance(value, Span) else Span(value, value)
