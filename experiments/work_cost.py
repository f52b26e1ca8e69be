"""What a decode step costs against the work in it: K, layers, experts. `MODELS OUT_DIR [--tier mini-35b] [--rounds N]`.

The tier's widths stay; checkpoints of other layers and experts are synthesised into a folder below MODELS that goes
with the run. An engine of each shape stays open with every expert in memory and without adapters, so that nothing is
read or predicted: what is timed is computing and the engine's own bookkeeping. A round runs a few steps of each, in
turn first. Writes rows; whether they lie on lines is said from the files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from edge0 import EngineOptions, find_tier, synthesise
from edge0.pages import restart_with_large_pages
from edge0.tiers import Tier
from experiments.alone import alone
from experiments.kernel_cost import PROMPT_TOKENS, EngineWay, Timed, everything, ordered
from experiments.plan import rotated
from experiments.publish import publish, run_command

KS, LAYERS, EXPERTS = (2, 4, 8), (10, 20, 40), (64, 128, 256)


@dataclass(frozen=True)
class Shape:
    k: int
    layers: int
    experts: int


BASE = Shape(KS[-1], LAYERS[1], EXPERTS[0])
SHAPES = tuple(
    dict.fromkeys(
        replace(BASE, **{name: value})
        for name, values in (("k", KS), ("layers", LAYERS), ("experts", EXPERTS))
        for value in values
    )
)


def tier_of(tier: Tier, shape: Shape) -> Tier:
    """The tier's widths with another number of layers and experts."""
    text = {**tier.text, "num_hidden_layers": shape.layers, "num_experts": shape.experts}
    owners = tuple(range(tier.first_owner(shape.layers), shape.layers - 1))
    name = f"{tier.name}-{shape.layers}-layers-{shape.experts}-experts"
    return replace(tier, name=name, text=text, owners=owners, ks=(2,))


def measure(
    tier: Tier, root: Path, kernels: str, steps: int, rounds: int, seed: int, shapes: Sequence[Shape] = SHAPES
) -> pd.DataFrame:
    """A row for each shape and round, in the order in which they ran. Checkpoints are made below `root`."""
    rng = np.random.default_rng(seed)
    vocab = tier.text["vocab_size"]
    prompt, tokens = (rng.integers(0, vocab, count).tolist() for count in (PROMPT_TOKENS, steps))
    rows = []
    with ExitStack() as stack:
        opened = []
        for shape in shapes:
            made = tier_of(tier, shape)
            if not (root / made.name).exists():
                synthesise(made, root / made.name, seed)
            opened.append((shape, Timed(_way(root / made.name, shape.k, kernels, prompt), tokens)))
            stack.callback(opened[-1][1].way.close)
        for number in range(rounds):
            for shape, timed in rotated(opened, number):
                about = {"round": number, "kernels": timed.way.kernels_name, "steps": steps}
                took = timed.run()
                times = {name: took[name] for name in ("step_ms", "cpu_ms", "loads")}
                rows.append(about | asdict(shape) | times)
    return ordered(rows)


def _way(model: Path, k: int, kernels: str, prompt: list[int]) -> EngineWay:
    options = EngineOptions(k=k, kernels=kernels, bank_bytes=everything(model), lora=False, prerouter="off")
    return EngineWay(model, options, prompt)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.work_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", type=Path, help="folder in which checkpoints lie; about 6 GB are made there")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tier", default="mini-35b")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    @alone("the cost of work")
    def command() -> None:
        tier = find_tier(options.tier)
        with tempfile.TemporaryDirectory(prefix=".work-", dir=options.models) as root:
            rows = measure(tier, Path(root), options.kernels, options.steps, options.rounds, options.seed)
            publish(options.out, "work", rows, Path(root) / tier_of(tier, BASE).name, {"tier": tier.name})

    return run_command(command)


if __name__ == "__main__":
    restart_with_large_pages()  # as arms have them
    sys.exit(main())
