"""What the paper says of the order of training, of features, of authority and of recall, and what came out beside it.

A row per comparison, as found, whichever side it falls on. Claims of the ledger are judged in `analysis.ladder.claims`;
here stand also the comparisons for which the paper gives no result. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.ladder.pairs import FULL, nats, points, recalled, share
from analysis.ladder.rows import (
    ADVISORY,
    BASE_FEATURES,
    DISTIL_ALONE,
    FINAL,
    FULL_K_SET,
    INT4,
    JOINT,
    OWN_FEATURES,
    PHASE1,
    PHASE2,
    RUNGS,
    SFT_FIRST,
    Ladder,
    Side,
)
from analysis.statistics import Estimate, unpaired

COLLAPSE, ORDER = "tab2.distill_only_collapses", "train.order"  # claims of the ledger
# A rung, what it is set against, the ledger's claim or in words what the paper does.
ORDERS = (
    (PHASE2, SFT_FIRST, ORDER),
    (PHASE2, JOINT, ORDER),
    (DISTIL_ALONE, FINAL, COLLAPSE),
    (PHASE2, FULL_K_SET, "K is changed by swapping the set of files; no number"),
    (f"{FULL_K_SET}{FULL}", f"{INT4}{FULL}", "K is changed by swapping the set of files; no number"),
    (PHASE1, OWN_FEATURES, "heads are trained on the base's one-hots, not again on their own; no number"),
    (PHASE1, BASE_FEATURES, "served heads see one-hots of their own routes, which drift; no number"),
    (ADVISORY, PHASE1, "the prediction is the route, not a hint; no number"),
)


@dataclass(frozen=True)
class Found:
    """One comparison: `paper`, a claim's id or what the paper does; `arm`, the two sides; `of`, of what; `said`, how it
    came out."""

    paper: str
    arm: str
    what: str
    measured: str
    of: str
    said: str


def orders(ladder: Ladder) -> list[Found]:
    """The comparisons of `ORDERS`, then what recall saves; controls that were not run say so."""
    return [*(_compared(ladder, *names, paper) for *names, paper in ORDERS), _stall(ladder)]


def _compared(ladder: Ladder, name: str, other: str, paper: str) -> Found:
    side, base = (
        Side(one.removesuffix(FULL), ladder.full_k if one.endswith(FULL) else ladder.k) for one in (name, other)
    )
    about = paper, f"{side.rung}/{base.rung}", f"{side.rung} - {base.rung}, K={side.k}"
    if not ladder.has(side, base):
        missing = next(one.rung for one in (side, base) if not ladder.has(one))
        return Found(*about, "", "", f"{missing} was not run: run the ladder with --controls")
    weights = {side: 1.0, base: -1.0}
    exact, entropy = points(ladder, weights), nats(ladder, weights)
    measured = f"{exact.text('+.1f')} points, {entropy.text('+.4f')} nats"
    _, said = decided(side.rung, exact, entropy)
    if paper == COLLAPSE:
        measured += f"; repetitive {more_repetitive(ladder, side, base).text('+.1f')} points"
    if paper == ORDER:
        learnt = unpaired(*(recalled(ladder, one) for one in (side, base)))
        measured += f"; recall {learnt.text('+.0f')} points"
    return Found(*about, measured, exact.of, said)


def decided(name: str, exact: Estimate, entropy: Estimate) -> tuple[int, str]:
    """Whether `name` is better (1), worse (-1) or neither (0), and in words: by exact match, else by cross-entropy."""
    for low, high, measure in ((exact.low, exact.high, "exact match"), (-entropy.high, -entropy.low, "cross-entropy")):
        if low > 0 or high < 0:
            return (1 if low > 0 else -1), f"{name} is {'better' if low > 0 else 'worse'}, by {measure}"
    return 0, "undecided: both intervals span 0"


def more_repetitive(ladder: Ladder, side: Side, base: Side) -> Estimate:
    """How many points more of a side's answers are repetitive, taken as unpaired."""
    seeds = ladder.seeds_of(side, base)
    return unpaired(*(share(ladder.values("repetitive", {one: 1.0}, seeds), seeds) for one in (side, base)))


def _stall(ladder: Ladder) -> Found:
    """As advice, the recall of heads is the share of waits that they save; as the route all are saved."""
    sides = [side for side in with_heads(ladder) if side.rung in RUNGS]
    saved = ", ".join(f"{side.rung} {recalled(ladder, side).text('.0f')}%" for side in sides)
    what, said = "waits of predicted layers saved as advice", "as the route 100%, at the points of the table below"
    of = recalled(ladder, sides[-1]).of if sides else ""
    return Found("reads are over before their experts are needed; no number", "", what, saved, of, said)


def with_heads(ladder: Ladder) -> list[Side]:
    """Rungs of this K that have a recall, the least first."""
    sides = [side for side in ladder.sides if side.k == ladder.k and ladder.recall_of(side).size]
    return sorted(sides, key=lambda side: recalled(ladder, side).value)
