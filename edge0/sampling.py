"""Choosing a token from logits, with mlx-lm's samplers, seeded once per request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from edge0.errors import Edge0Error, ErrorKind


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; the rest as in mlx-lm's `make_sampler`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, expected in (
            # Beyond these the scaled logits leave the range of fp32 and the choice is no longer one.
            ("temperature", self.temperature == 0 or 0.001 <= self.temperature <= 100, "0, or 0.001 to 100"),
            ("top_p", 0.001 <= self.top_p <= 1, "0.001 to 1"),
            ("top_k", self.top_k >= 0, ">= 0 (0: off)"),
            ("seed", 0 <= self.seed < 2**64, "0 to 2**64 - 1"),
        ):
            if not holds:
                raise Edge0Error(
                    ErrorKind.OPTION_INVALID, f"option {name}", expected=expected, found=getattr(self, name)
                )

    def sampler(self) -> Callable[[mx.array], int]:
        """A function from logits `[vocab]` to a token id; one per request.

        The function raises Edge0Error NUMERIC when the logits are not numbers.
        """
        mx.random.seed(self.seed)

        def sample(logits: mx.array) -> int:
            top_k = self.top_k if self.top_k < logits.shape[-1] else 0  # all of the vocabulary is no restriction
            choose = make_sampler(self.temperature, self.top_p, top_k=top_k)
            normaliser = mx.logsumexp(logits)
            token = choose((logits - normaliser)[None])
            mx.eval(normaliser, token)
            if not mx.isfinite(normaliser).item():
                raise Edge0Error(
                    ErrorKind.NUMERIC,
                    "the logits are not finite numbers",
                    expected="finite",
                    found=normaliser.item(),
                    hint="the checkpoint is damaged, or the hidden-state clip is off",
                )
            return int(token.item())

        return sample
