"""What a decode step costs by each way to compute on a CPU: `MODEL OUT_DIR [--kernels ..] [--k N] [--rounds N]`.

One engine for each way stays open in this process, with every expert in memory, so that nothing is read while it is
timed; where int8 kernels run, beside them the engine without adapters and stock mlx-lm's own forward by the same
kernels, whose experts never moved. A round runs a few steps of each, in turn first; all decode the same tokens and,
with random weights, choose their own routes. Writes rows; ratios are made from the files. Processor time is beside the
clock's, for a machine with neighbours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd

from edge0 import Engine, EngineOptions
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import read_config
from edge0.kernels.choice import kernel_name
from edge0.kernels.library import load
from edge0.pages import restart_with_large_pages
from edge0.telemetry.loads import DEMAND
from experiments.alone import alone
from experiments.plan import rotated
from experiments.publish import publish, run_command
from experiments.resident import logits_of, open_resident

PARTS = ("attention", "latent", "delta", "experts", "gated", "linears", "route", "dense", "combine", "mixture")
PROMPT_TOKENS = 8
WAYS = ("mlx", "int8", "exact")
ENGINE, BARE, RESIDENT = "engine", "engine-bare", "resident"  # with its adapters, without; mlx-lm's own forward


def everything(model: Path) -> int:
    """Bytes of a bank for every expert, scales of 32 bits too."""
    return ExpertLayout.of(CheckpointIndex.open(model), read_config(model)).total_bytes * 2


class EngineWay:
    """An engine and its request."""

    def __init__(self, model: Path, options: EngineOptions, prompt: list[int]):
        self.kernels_name, self.served = kernel_name(options.kernels), ENGINE if options.lora else BARE
        self._engine = Engine(model, options)
        self.kernels, self.close = self._engine.kernels, self._engine.close
        self._request = self._engine.new_request()
        self._engine.prefill(self._request, prompt)
        for layer in self._engine.config.moe_layers:  # routes move on with the context: every expert may be used
            lease = self._engine.store.request(layer, np.arange(self._engine.config.experts), DEMAND)
            lease.wait()
            lease.release()

    @property
    def loads(self) -> int:
        return self._engine.recorder.totals.loads

    def step(self, token: int) -> mx.array:
        return self._engine.step(self._request, token)


class ResidentWay:
    """Stock mlx-lm's forward by the kernels."""

    loads, served = 0, RESIDENT

    def __init__(self, model: Path, k: int, kernels: str, threads: int, prompt: list[int]):
        self.kernels_name = kernel_name(kernels)
        self._model, self.kernels = open_resident(model, read_config(model), k, kernels, threads)
        self.close = self.kernels.close
        self._cache = self._model.make_cache()
        logits_of(self._model, prompt, self._cache)

    def step(self, token: int) -> mx.array:
        return logits_of(self._model, [token], self._cache)


class Timed:
    """A way to decode, warmed up over all tokens of a round."""

    def __init__(self, way: EngineWay | ResidentWay, tokens: list[int]):
        self.way, self._tokens = way, tokens
        self.run()

    def run(self) -> dict[str, Any]:
        """One row of a round: means over its steps."""
        kernels, loads = self.way.kernels, self.way.loads
        before = Counter(kernels.spent) if kernels else Counter()
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for token in self._tokens:
            mx.eval(self.way.step(token))
        row = {
            "step_ms": (time.perf_counter_ns() - wall) / len(self._tokens) / 1e6,
            "cpu_ms": (time.process_time_ns() - cpu) / len(self._tokens) / 1e6,
            "loads": self.way.loads - loads,
        }
        spent = Counter(kernels.spent) - before if kernels else Counter()
        return row | {f"{part}_ms": spent[f"edge0_{part}"] / len(self._tokens) / 1e6 for part in PARTS}


def measure(model: Path, ways: Sequence[str], k: int, threads: int, steps: int, rounds: int, seed: int) -> pd.DataFrame:
    """A row for each way and round, in the order in which they ran."""
    config = read_config(model)
    rng = np.random.default_rng(seed)
    prompt, tokens = (rng.integers(0, config.vocab, count).tolist() for count in (PROMPT_TOKENS, steps))
    rows = []
    with ExitStack() as stack:
        opened = []
        for kernels in ways:
            options = EngineOptions(k=k, kernels=kernels, kernel_threads=threads, bank_bytes=everything(model))
            made = [partial(EngineWay, model, options, prompt)]
            if kernels == "int8":
                made.append(partial(EngineWay, model, replace(options, lora=False, prerouter="off"), prompt))
                made.append(partial(ResidentWay, model, k, kernels, threads, prompt))
            for make in made:
                way = make()
                stack.callback(way.close)
                opened.append(Timed(way, tokens))
        for number in range(rounds):
            for timed in rotated(opened, number):
                about = {"round": number, "kernels": timed.way.kernels_name, "served": timed.way.served}
                used = timed.way.kernels.threads if timed.way.kernels else threads
                rows.append(about | {"k": k, "threads": used, "steps": steps} | timed.run())
    return ordered(rows)


def ordered(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows that know their place in time."""
    frame = pd.DataFrame(rows)
    frame.insert(0, "order", range(len(frame)))
    return frame


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.kernel_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--kernels", nargs="+", choices=WAYS, help="default: mlx, and where they are built int8 and exact"
    )
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    @alone("the kernels")
    def command() -> None:
        given = options.k, options.threads, options.steps, options.rounds, options.seed
        rows = measure(options.model, options.kernels or WAYS[: 3 if load().loaded else 1], *given)
        publish(options.out, "kernels", rows, options.model, {"model": options.model.name, "k": options.k})

    return run_command(command)


if __name__ == "__main__":
    restart_with_large_pages()  # as arms have them
    sys.exit(main())
