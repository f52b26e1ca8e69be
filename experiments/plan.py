"""The order in which a session runs its arms. Knows nothing of what a run does."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.options import SessionOptions


@dataclass(frozen=True)
class Run:
    """One place in the session's order."""

    role: str  # "arm", "aa" or "drift"
    arm: str
    k: int
    round: int

    def name(self, order: int) -> str:
        """The run's id within its session, where it is number `order`."""
        return f"{order:03}-{self.role}-{self.arm}-k{self.k}-r{self.round}"


def plan(options: SessionOptions) -> list[Run]:
    """The order of all runs: in each round every K, and within a K every arm, side by side.

    Both orders rotate; every other round runs backwards, so that no arm of a pair is always the later one. An A/A
    repeat of the first arm at the largest K stands beside its twin, and the very first run comes once more at the end.
    """
    ks = sorted(options.ks, reverse=True)
    runs = []
    for number in range(options.rounds):
        order = []
        for k in rotated(ks, number // 2):
            for arm in rotated(list(options.arms), number // 2):
                order.append(Run("arm", arm, k, number))
                if (arm, k) == (options.arms[0], ks[0]):
                    order.append(Run("aa", arm, k, number))
        runs += order if number % 2 == 0 else order[::-1]
    return [*runs, Run("drift", runs[0].arm, runs[0].k, 0)]


def whole_rounds(runs: list[Run], finished: list[bool]) -> int:
    """How many runs, from the first on, make up rounds that were finished whole; the drift run stands for itself."""
    kept = 0
    while kept < len(runs) and finished[kept]:
        last = kept
        while last + 1 < len(runs) and _together(runs[last + 1], runs[kept]):
            last += 1
        if not all(finished[kept : last + 1]):
            break
        kept = last + 1
    return kept


def _together(a: Run, b: Run) -> bool:
    return (a.round, a.role == "drift") == (b.round, b.role == "drift")


def rotated(items: list, places: int) -> list:
    """The same items in a circle, begun so many places later."""
    shift = places % len(items)
    return items[shift:] + items[:shift]
