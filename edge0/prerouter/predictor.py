"""From what a group of layers executed to the routes of the next token.

The predictor holds no state of a request: the one-hots of the token before travel in the request. Family rules
(design, section 3 rule 8): predictions are routed by the model's law without its bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from edge0.lazy import Array
from edge0.prerouter.heads import Heads
from edge0.routing import Router
from edge0.streaming.executor import Executed
from edge0.streaming.moe import StreamedMoE

EXECUTED, TEACHER = "executed", "teacher"


@dataclass(frozen=True)
class Forecast:
    """What one group's heads give; `indices` and `weights` are `[G, 1, K]`, in the order of `owners`."""

    owners: tuple[int, ...]
    indices: Array
    weights: Array
    history: dict[int, Array]  # owner -> what this token executed, `[1, 1, E]`

    def arrays(self) -> list[Array]:
        return [self.indices, self.weights, *self.history.values()]


class Predictor:
    """Runs heads. `feature` is "executed" (what was routed) or, for 8b, "teacher" (what its router would choose)."""

    def __init__(self, heads: Heads, router: Router, blocks: Mapping[int, StreamedMoE], feature: str):
        self._heads, self._router, self._blocks, self._feature = heads, router, blocks, feature

    def forecast(
        self,
        owners: tuple[int, ...],
        executed: Mapping[int, Executed],
        history: Mapping[int, Array],
        forced: np.ndarray | None = None,
    ) -> Forecast:
        """Predict the next token's routes of the layers after `owners`, from the last position of this pass.

        `forced` `[G, 1, K]`: what is to be predicted; the heads run as ever and give the weights.
        """
        seen = self.history(owners, executed)
        blank = self._heads.no_history()
        before = [self._before(owner, executed, history, blank) for owner in owners]
        xs = [executed[owner].x[:, -1:] for owner in owners]
        logits = self._heads(owners, self._heads.features(xs, [seen[owner] for owner in owners], before))
        indices, weights = self._router(logits, forced=forced)
        return Forecast(owners, indices, weights, seen)

    def history(self, owners: Iterable[int], executed: Mapping[int, Executed]) -> dict[int, Array]:
        """What the last position of a pass executed, for a next pass of one token."""
        return {owner: self._one_hot(owner, executed[owner], -1) for owner in owners}

    def _before(
        self, owner: int, executed: Mapping[int, Executed], history: Mapping[int, Array], blank: Array
    ) -> Array:
        if executed[owner].x.shape[1] > 1:
            return self._one_hot(owner, executed[owner], -2)
        return history.get(owner, blank)

    def _one_hot(self, owner: int, executed: Executed, position: int) -> Array:
        at = slice(position, position + 1 or None)
        indices = executed.indices[:, at]
        if self._feature == TEACHER:
            block = self._blocks[owner]
            indices, _ = self._router(block.logits(executed.x[:, at]), block.bias())
        return self._heads.one_hot(indices)
