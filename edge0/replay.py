"""Where a request stands in a route trace: what this pass routes to, and what its heads are to predict.

Without a trace the answer is always that the model decides. Knows nothing of layers' groups, of heads or of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge0.trace import RouteTrace


@dataclass(frozen=True)
class Replay:
    """The routes of one pass, and what is predicted of the next. None: the model decides. `ended`: the trace has no
    next step."""

    now: Mapping[int, np.ndarray] | None = None
    following: Mapping[int, np.ndarray] | None = None
    ended: bool = False

    @classmethod
    def of(cls, trace: RouteTrace | None, step: int, advised: bool = False) -> Replay:
        """Decode step `step` of a request, counted from its prompt's end; -1 is the prompt, which routes natively.
        `advised`: predictions are no routes, and may be wrong as often as the trace says.

        Raises:
            Edge0Error: TRACE_INVALID beyond the trace's end.
        """
        if trace is None:
            return cls()
        now = None if step < 0 else trace.step(step)
        ended = step + 1 == trace.tokens
        predicted = trace.advice if advised else trace.step
        return cls(now, None if ended else predicted(step + 1), ended)

    def route(self, layer: int) -> np.ndarray | None:
        """`[1, 1, K]`: what a layer routes to now."""
        return None if self.now is None else _rows(self.now, [layer])

    def forecast(self, layers: Sequence[int]) -> np.ndarray | None:
        """`[layers, 1, K]`: what these layers are predicted to route to at the next token."""
        return None if self.following is None else _rows(self.following, layers)


def _rows(routes: Mapping[int, np.ndarray], layers: Sequence[int]) -> np.ndarray:
    return np.stack([routes[layer] for layer in layers])[:, None].astype(np.uint32)
