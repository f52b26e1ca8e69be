"""How far each way of applying routed experts lies from plain arithmetic on unpacked weights: `MODEL OUT_DIR`.

Every path answers one prompt and some forced tokens; what its executor gave for a layer is set beside the same experts,
unpacked from the file's bytes by numpy and multiplied in fp32, with the same input, route and weights (paper section
3.1). So a predicted route is judged like any other, and an error of one layer is not hidden by the next. Knows nothing
of how a path works: it looks at what goes in and comes out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from edge0 import Engine, EngineOptions
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import EXPERT_BITS, GROUP_SIZE, ModelConfig, read_config
from experiments.publish import run_command, stamped, write_document

PROMPT_TOKENS, STEPS = 20, 8
NATIVE = {"prerouter": "off", "lora": False}
PATHS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"native": "exact", **NATIVE},
    "hot": {"native": "hot", **NATIVE},
    "staged": {"native": "exact"},
    "whole-layer": {"prefill": "whole-layer", **NATIVE},
    "staged, filled by the engine": {"native": "exact", "fill": "engine"},
    "stack": {"io": "mmap", "assembly": "stack", **NATIVE},
    "stack, predicted": {"io": "mmap", "assembly": "stack", "launch_groups": 1},
    "patch, predicted": {"io": "mmap", "assembly": "patch", "launch_groups": 1},
}


@dataclass(frozen=True)
class Applied:
    """What the executor was asked and what it gave in one layer: `x [T, D]`, `ids` and `weights [T, K]`, `y [T, D]`."""

    layer: int
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    y: np.ndarray
    predicted: bool


class Witness:
    """Stands before an engine's executor and keeps what passes; evaluated only when the pass is over."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._pending: list[tuple] = []
        for block in engine.blocks.values():
            block.executor = self

    def __call__(self, block, x, shared):
        outputs, weights = self._engine.executor(block, x, shared)
        routed = (outputs * weights[..., None]).sum(axis=-2)
        # Of a prompt the engine keeps the routes of the last tokens only.
        indices = self._engine.executed_routes()[block.layer]
        kept = slice(-indices.shape[1], None)
        parts = (x[0, kept], indices[0], weights[0, kept], routed[0, kept])
        predicted = block.layer in self._engine.executor.running.predictions
        self._pending.append((block.layer, predicted, parts))
        return outputs, weights

    def applied(self) -> list[Applied]:
        """Everything since the last call, as fp32."""
        done = []
        for layer, predicted, (x, ids, weights, y) in self._pending:
            values = (np.array(part.astype(mx.float32)) for part in (x, weights, y))
            x, weights, y = values
            done.append(Applied(layer, x, np.array(ids), weights, y, predicted))
        self._pending = []
        return done


class Reference:
    """Routed experts in fp32 from the file's own bytes, by numpy."""

    def __init__(self, layout: ExpertLayout):
        self._layout = layout
        self._matrices = lru_cache(maxsize=2048)(self._read)

    def __call__(self, applied: Applied, rounded: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        """`y [T, D]` for the same input, route and weights; `rounded` is applied to each result on the way."""
        result = np.zeros_like(applied.y)
        for token, (x, ids) in enumerate(zip(applied.x, applied.ids, strict=True)):
            for expert, weight in zip(ids.tolist(), applied.weights[token], strict=True):
                gate, up, down = self._matrices(applied.layer, expert)
                raised, carried = rounded(gate @ x), rounded(up @ x)
                inner = rounded(raised / (1 + np.exp(-raised)) * carried)
                result[token] += rounded(weight * rounded(down @ inner))
        return rounded(result)

    def _read(self, layer: int, expert: int) -> list[np.ndarray]:
        """Gate, up and down, `[out, in]`."""
        parts = []
        for spec, piece in zip(self._layout.specs, self._layout.pieces(layer, expert), strict=True):
            raw = np.fromfile(piece.path, np.uint8, piece.nbytes, offset=piece.offset)
            if spec.dtype == "U32":
                words = raw.view("<u4").reshape(spec.shape)
                shifts = np.arange(0, 32, EXPERT_BITS, dtype=np.uint32)
                codes = (words[..., None] >> shifts) & np.uint32(2**EXPERT_BITS - 1)
                parts.append(codes.reshape(spec.shape[0], -1).astype(np.float32))
            else:
                wide = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(spec.shape)
                parts.append(np.repeat(wide, GROUP_SIZE, axis=-1))
        return [
            codes * scales + biases for codes, scales, biases in zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
        ]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest values that bf16 has, as fp32; ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def residual(expected: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> dict[str, float]:
    """Relative L2 of `values` from `expected`: the worst of all tokens and layers, and over everything."""
    wrong, size, worst = 0.0, 0.0, 0.0
    for y, right in zip(values, expected, strict=True):
        distance, length = (np.linalg.norm(part, axis=-1) for part in (y - right, right))
        wrong, size = wrong + float((distance**2).sum()), size + float((length**2).sum())
        worst = max(worst, float((distance / length).max()))
    return {"worst": worst, "overall": (wrong / size) ** 0.5}


def measure(model: Path, k: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """A row per path: layers' outputs compared, worst and overall relative L2, and how many were predicted.

    Raises:
        Edge0Error: whatever the checkpoint or the options are refused for.
    """
    config = read_config(model)
    layout = ExpertLayout.of(CheckpointIndex.open(model), config)
    reference = Reference(layout)
    tokens = np.random.default_rng(seed).integers(0, config.vocab, PROMPT_TOKENS + STEPS).tolist()
    rows = []
    for name, options in PATHS.items():
        found, about = _run(model, config, k, dict(options), tokens)
        expected = [reference(applied) for applied in found]
        # What bf16 alone would cost with the same inputs: the reference against itself, each result rounded.
        emulated = residual(expected, [reference(applied, to_bf16) for applied in found])["overall"]
        counts = {
            "outputs": sum(len(applied.x) for applied in found),
            "predicted": sum(applied.predicted for applied in found),
        }
        rows.append(
            {"path": name}
            | about
            | counts
            | residual(expected, [applied.y for applied in found])
            | {"bf16_overall": emulated}
        )
    return rows


def _run(
    model: Path, config: ModelConfig, k: int | None, options: dict[str, Any], tokens: list[int]
) -> tuple[list[Applied], dict[str, Any]]:
    """Everything that one path applied, and its K and precision; of whole layers the prompt alone takes the path."""
    whole_layers = options.get("prefill") == "whole-layer"
    if whole_layers:  # its bank holds two of them
        with Engine(model, EngineOptions(k=k, **NATIVE)) as engine:
            options["bank_bytes"] = max(2 * config.experts, engine.plan.bank_slots) * engine.plan.slot_bytes
    with Engine(model, EngineOptions(k=k, **options)) as engine:
        witness = Witness(engine)
        request = engine.new_request()
        engine.prefill(request, tokens[:PROMPT_TOKENS])
        found = witness.applied()
        for token in [] if whole_layers else tokens[PROMPT_TOKENS:]:
            engine.step(request, token)
            found += witness.applied()
        request.release()
        return found, {"k": engine.k, "dtype": str(engine.dtype).removeprefix("mlx.core.")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.math_residual", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder that gets SESSION/residuals.json")
    parser.add_argument("--k", type=int, help="experts per token; by default what the family serves")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    def command() -> None:
        rows = measure(options.model, options.k, options.seed)
        about = {"tier": options.model.resolve().name, "seed": options.seed, "paths": rows}
        about["mlx_device"] = str(mx.default_device())
        with stamped(options.out) as folder:
            write_document(folder / "residuals.json", options.model, about)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
