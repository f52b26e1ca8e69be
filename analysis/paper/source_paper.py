"""The numbers that the paper prints, as ranges, and what a check of them is. Knows nothing of the checks themselves."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from analysis.paper.claims import Claims
from analysis.paper.spans import Span

KS = (2, 4, 8)
ARMS = ("ondemand", "prerouter")


class Outcome(enum.StrEnum):
    """What became of one check."""

    AGREES = "agrees"
    NOTE = "note"
    CONTRADICTED = "contradicted"


class Kind(enum.StrEnum):
    """What a check can show.

    ARITHMETIC: numbers that must agree whatever their rounding, or one of them cannot stand. CONSISTENCY: they should
    agree, but means of ratios or a second-hand copy may repair them, so that a miss is a note. BESIDE: two quantities
    side by side of which nothing must follow.
    """

    ARITHMETIC = "arithmetic"
    CONSISTENCY = "consistency"
    BESIDE = "beside"


@dataclass(frozen=True)
class Check:
    """One piece of arithmetic: the claims in it, what was computed, what came out.

    `against`: the claims that it speaks against where it does not agree.
    """

    claims: tuple[str, ...]
    what: str
    found: str
    outcome: Outcome = Outcome.NOTE
    against: tuple[str, ...] = ()
    kind: Kind = Kind.BESIDE


def judged(agrees: bool, claims: tuple[str, ...], what: str, found: str, against: tuple[str, ...] = ()) -> Check:
    """A check that agrees or contradicts; `against` is the first of its claims where nothing else is said."""
    outcome = Outcome.AGREES if agrees else Outcome.CONTRADICTED
    return Check(claims, what, found, outcome, against or claims[:1], Kind.ARITHMETIC)


def consistent(agrees: bool, claims: tuple[str, ...], what: str, found: str) -> Check:
    """A check that agrees or is a note against the first of its claims."""
    outcome = Outcome.AGREES if agrees else Outcome.NOTE
    return Check(claims, what, found, outcome, () if agrees else claims[:1], Kind.CONSISTENCY)


class Paper:
    """The claims' numbers as ranges."""

    def __init__(self, claims: Claims):
        self._claims = claims

    def number(self, claim: str, place: int | None = None) -> float:
        """A claim's number as printed, or the one at `place` of its list."""
        value = self._claims.by_id[claim].value
        return value if place is None else value[place]

    def span(self, claim: str, place: int | None = None) -> Span:
        """What that number may have been before it was rounded."""
        return Span.of(self.number(claim, place))

    def count(self, claim: str) -> int:
        """A claim that counts something, so that it has no rounding."""
        return int(self.number(claim))

    def loads(self, k: int, arm: str) -> Span:
        """Loads per step: MiB per step over MiB per load of Table 4."""
        return self.span(f"tab4.k{k}.{arm}", 2) / self.span(f"tab4.k{k}.{arm}", 0)

    def step_ms(self, k: int, arm: str) -> Span:
        """Milliseconds of a decode step, from Table 3's tok/s."""
        return Span(1000, 1000) / self.span(f"tab3.k{k}", ARMS.index(arm))

    def blocked_ms(self, k: int, arm: str) -> Span:
        """Milliseconds of a step that the main thread waits for loads, from Table 3."""
        return self.span(f"tab3.blocked.k{k}", ARMS.index(arm))
