"""How long and how fast each training goes, as far as nobody says otherwise. Knows nothing of MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. `batch` is the sequences of a micro-batch; `accumulate` of them make one step."""

    steps: int
    batch: int
    learning_rate: float
    warmup: int = 20  # steps in which the rate grows from zero
    final_rate: float = 0.1  # of a cosine's end, as a share of learning_rate
    clip: float = 1.0  # largest norm of a step's gradient
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    accumulate: int = 1
    save_every: int = 100

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on: linear warm-up, then a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2)


PHASE1 = Schedule(steps=300, batch=60, learning_rate=2e-3, save_every=50)
PHASE2 = Schedule(steps=500, batch=50, learning_rate=5e-4, save_every=50)
PHASE3 = Schedule(steps=40, batch=32, learning_rate=2e-4, save_every=20)
SCHEDULES: Mapping[str, Schedule] = {
    "tiny-35b": Schedule(steps=3000, batch=50, learning_rate=2e-3, warmup=50),
    "tiny-8b": Schedule(steps=3000, batch=50, learning_rate=2e-3, warmup=50),
}
