"""The state of serving: what a request carries from token to token, and what one forward pass holds while it runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from edge0.lazy import Array, finish
from edge0.prerouter.predictor import Forecast
from edge0.prerouter.schedule import LaunchGroup
from edge0.streaming.executor import Lease, Prediction, Running

log = logging.getLogger(__name__)


@dataclass
class Request:
    """Everything that one request carries from token to token; made new for each."""

    cache: list
    predictions: dict[int, Prediction] = field(default_factory=dict)  # layer -> its route at the next token
    history: dict[int, Array] = field(default_factory=dict)  # owner -> what it executed at the last token
    tokens: int = 0
    prompt_tokens: int = 0  # of `tokens`, those up to the end of the last prompt

    @property
    def nbytes(self) -> int:
        """Bytes of the attention caches and recurrent states, as allocated."""
        return sum(layer.nbytes for layer in self.cache)

    def release(self) -> None:
        """Let go of predictions that no token will consume."""
        for prediction in self.predictions.values():
            prediction.lease.release()
        self.predictions = {}


@dataclass
class Flight:
    """A launched group: its output, its heads' outputs, and the leases that its graph reads."""

    group: LaunchGroup
    output: Array
    forecast: Forecast | None
    leases: list[Lease]


@dataclass
class Pass(Running):
    """One forward pass of the engine: what the executor sees, the masks, and the groups in the air, oldest first."""

    masks: list = field(default_factory=list)
    advised: dict[int, Prediction] = field(default_factory=dict)  # advisory mode: what only warmed the bank
    flights: list[Flight] = field(default_factory=list)

    def let_go(self) -> None:
        """The pass failed: release everything that it holds, once no running graph reads it."""
        leases = [lease for flight in self.flights for lease in flight.leases] + self.leases
        leases += [prediction.lease for prediction in (*self.predictions.values(), *self.advised.values())]
        try:
            finish(*(flight.output for flight in self.flights))
        except Exception as error:  # perhaps it was MLX that failed; the first failure is the one that is told
            log.debug("a group of a failed pass could not be evaluated: %s", error)
        finally:
            for lease in leases:
                lease.release()
            if self.whole is not None:
                self.whole.release()
