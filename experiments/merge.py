"""What merging a recovery LoRA into int4 weights would leave of it: `MODEL OUT_DIR --k K` (paper section 3.3).

Of every target: B is its weight as the checkpoint holds it, U = B + scale * B_lora A_lora is what an unmerged LoRA
serves, and M is U quantised again at the layer's own bits, in groups of 64, by the converter's own rule. What survives
is 1 - |U - M| / |U - B|: 1 where the grid takes the correction up, 0 where rounding costs as much as the correction
is worth, below 0 where it costs more. The same of the logits of three models that differ in these weights alone, at
each position of an answer, in fp32 and with the prerouter where there is one.

One adapter set or several, such as those of several seeds. Knows nothing of why a correction is large or small, nor
of what an answer is worth: exact match is the ladder's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
import psutil

from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.arrays import load_arrays, reading
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.quantise import quantised
from edge0.checkpoint.schema import (
    LORA_ALPHA,
    LORA_RANK,
    Linear,
    checkpoint_tensors,
    find_tensor,
    is_linear_attention,
    lora_targets,
    lora_tensors,
)
from edge0.checkpoint.synth import released_config
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import GROUP_SIZE, ModelConfig, read_config
from edge0.serving.vocabulary import Vocabulary
from edge0.tiers import find_tier
from edge0.training import teacher
from edge0.training.adapters import load_adapter
from edge0.training.corpus import Batch, Sample
from edge0.training.student import Student, Tensors
from edge0.training.tasks import TASKS, problems
from experiments.publish import run_command, stamped, write_document

SCALE = LORA_ALPHA / LORA_RANK
TOKENS, PROMPT_TOKENS = 32, 16  # of a sequence of seeded token ids
LOADING = 1.3  # memory of an fp32 model while it is loaded, over that of its weights


@dataclass(frozen=True)
class AdapterSet:
    """LoRA and, where there are some, heads for one checkpoint and K. `source` is what the LoRA's file says of it."""

    name: str
    source: str
    lora: Tensors
    heads: Tensors | None
    owners: tuple[int, ...]

    @classmethod
    def open(cls, directory: Path, model: Path, config: ModelConfig, k: int) -> AdapterSet:
        """
        Raises:
            Edge0Error: whatever an adapter is refused for; ADAPTER_MISMATCH for a LoRA that corrects nothing.
        """
        lora, _ = load_adapter(directory, "lora", k, model)
        file = open_adapter(directory, config.family, "lora", k)
        file.find(lora_tensors(config))
        if all(not lora[name].any() for name in lora if name.endswith(".lora_B")):
            detail = "the LoRA corrects nothing, so nothing of it can survive"
            hint = "train it first (edge0 train lora)"
            raise Edge0Error(ErrorKind.ADAPTER_MISMATCH, detail, path=file.header.path, hint=hint)
        try:
            heads, owners = load_adapter(directory, "prerouter", k, model)
        except Edge0Error as error:
            if error.kind is not ErrorKind.ADAPTER_MISSING:
                raise
            heads, owners = None, ()
        source = json.loads(file.header.metadata["__metadata__"]).get("source", "not said")
        return cls(directory.resolve().name, source, lora, heads, owners)

    def delta(self, linear: Linear) -> mx.array:
        """What the LoRA adds to a target, `[out, in]`."""
        return SCALE * (self.lora[f"{linear.name}.lora_B"] @ self.lora[f"{linear.name}.lora_A"])


@dataclass(frozen=True)
class Merged:
    """One target: M, `weight` `[out, in]` in fp32, and what was found of it."""

    weight: mx.array
    row: dict[str, Any]


def merge(linear: Linear, parts: Sequence[mx.array], delta: mx.array) -> Merged:
    """Merge `delta` `[out, in]` into a matrix, given as weight, scales and biases, and quantise it again."""
    base = unpacked(linear, parts)
    unmerged = base + delta
    again = tuple(quantised(linear, unmerged).values())
    merged = unpacked(linear, again)
    steps, floors = (mx.repeat(part.astype(mx.float32), GROUP_SIZE, axis=-1) for part in parts[1:])
    codes = mx.round((unmerged - floors) / mx.where(steps == 0, 1, steps))
    same_grid = mx.clip(codes, 0, 2**linear.bits - 1) * steps + floors
    change, step = rms(delta), np.abs(np.array(parts[1].astype(mx.float32)))
    row = {
        "bits": linear.bits,
        "weights": base.size,
        "survival": survival(rms(unmerged - merged), change),
        "survival_same_grid": survival(rms(unmerged - same_grid), change),
        "delta_rms": change,
        "step_median": float(np.median(step)),
        "step_mean": float(step.mean(dtype=np.float64)),
        "delta_over_step": change / float(np.median(step)),
        "requantised_rms": rms(unpacked(linear, tuple(quantised(linear, base).values())) - base),
        "codes_changed": float((code_numbers(linear, parts) != code_numbers(linear, again)).mean()),
    }
    return Merged(merged, row)


def unpacked(linear: Linear, parts: Sequence[mx.array]) -> mx.array:
    """A quantised matrix in fp32: scales and biases are widened first, so that no weight is rounded."""
    weight, *grid = parts
    return mx.dequantize(weight, *(part.astype(mx.float32) for part in grid), GROUP_SIZE, linear.bits)


def code_numbers(linear: Linear, parts: Sequence[mx.array]) -> mx.array:
    """The code of each weight, from 0."""
    return mx.dequantize(parts[0], mx.ones(parts[1].shape), mx.zeros(parts[1].shape), GROUP_SIZE, linear.bits)


def rms(values: mx.array) -> float:
    """Root mean square, summed in fp64."""
    return float(np.sqrt(np.mean(np.square(np.array(values)), dtype=np.float64)))


def survival(error: float, change: float) -> float:
    """1 - error / change; NaN where nothing changed, of which nothing can survive."""
    return 1 - error / change if change > 0 else float("nan")


def merged_targets(model: Path, config: ModelConfig, adapters: AdapterSet) -> Iterator[Merged]:
    """Every target in file order, one in memory at a time.

    Raises:
        Edge0Error: what the checkpoint is refused for.
    """
    index, prefix = CheckpointIndex.open(model), config.family.layer_prefix
    for linear in lora_targets(config):
        with reading(index.shards):
            parts = tuple(load_arrays({tensor: find_tensor(index, tensor) for tensor in linear.tensors()}).values())
            mx.eval(parts)
        number, _, rest = linear.name.removeprefix(f"{prefix}.").partition(".")
        merged = merge(linear, parts, adapters.delta(linear))
        about = {"adapters": adapters.name, "target": linear.name, "layer": int(number)}
        about |= {"kind": kind_of(config, int(number), rest), "projection": linear.name.rpartition(".")[2]}
        yield Merged(merged.weight, about | merged.row)


def kind_of(config: ModelConfig, layer: int, path: str) -> str:
    """What a target belongs to, `path` being its place within the layer."""
    if path.startswith("mlp."):
        return "shared expert" if ".shared_expert" in path else "dense"
    return "linear attention" if is_linear_attention(config, layer) else "attention"


def samples_for(model: Path, config: ModelConfig, count: int, seed: int) -> tuple[list[tuple[str, Sample]], str]:
    """At least `count` prompts with their answers, as many of each task and all held out, where the model is of a tier
    that is trained on them; else `count` sequences of seeded token ids. And in words which they are."""
    taught = (find_tier(name) for name in teacher.SCHEDULES)
    if any(json.loads(json.dumps(released_config(tier))) == config.raw for tier in taught):
        vocabulary = Vocabulary(model)
        held = [(task, islice(problems(task, seed, held=True), -(-count // len(TASKS)))) for task in TASKS]
        return [
            (task, teacher.sample_of(one, vocabulary)) for task, some in held for one in some
        ], "held-out problems, at the positions of their answers"
    ids = np.random.default_rng(seed).integers(0, config.vocab, (count, TOKENS))
    return [
        ("token ids", Sample(tuple(row), PROMPT_TOKENS, "")) for row in ids.tolist()
    ], f"seeded token ids, at the last {TOKENS - PROMPT_TOKENS} positions of {TOKENS}"


def too_large(config: ModelConfig) -> str:
    """Why the whole model cannot be held in fp32 now, "" where it can."""
    sizes = (
        linear.out * linear.inp * (linear.experts or 1)
        for linear in {tensor.linear for tensor in checkpoint_tensors(config) if tensor.linear is not None}
    )
    needed, free = int(4 * LOADING * sum(sizes)), psutil.virtual_memory().available
    return f"in fp32 the model needs {needed >> 20} MiB of memory, {free >> 20} are free" if needed > free else ""


def logit_rows(
    student: Student, adapters: AdapterSet, merged: Mapping[str, mx.array], samples: Sequence[tuple[str, Sample]]
) -> Iterator[dict[str, Any]]:
    """A row for each position of each answer: how far logits are moved by the LoRA, and how far a merged one is off.

    `merged`: the weight of each target. `student` has the adapters' owners; afterwards it has these weights.
    """
    student.use_lora()
    none = {name: mx.zeros_like(value) for name, value in adapters.lora.items()}
    pad = int(student.config.text["eos_token_id"])

    def forward(lora: Tensors) -> list[np.ndarray]:
        rows = []
        for _, sample in samples:
            batch = Batch.of([sample], pad)
            logits = student.forward(batch.tokens, batch.prompt_lengths, adapters.heads, lora)
            rows.append(np.array(logits[0, sample.prompt_length - 1 : -1].astype(mx.float32)))
        return rows

    before, unmerged = forward(none), forward(adapters.lora)
    put(student, merged)
    after = forward(none)
    for number, (task, sample) in enumerate(samples):
        changes, errors = (
            np.linalg.norm(unmerged[number].astype(np.float64) - other[number], axis=-1) for other in (before, after)
        )
        for place, (change, error) in enumerate(zip(changes.tolist(), errors.tolist(), strict=True)):
            about = {"adapters": adapters.name, "prompt": number, "task": task}
            about["position"] = sample.prompt_length - 1 + place
            yield about | {"change": change, "error": error, "survival": survival(error, change)}


def put(student: Student, matrices: Mapping[str, mx.array]) -> None:
    """Replace the weights beside which a student's LoRA stands, given by the names of the checkpoint."""
    named = student.model.sanitize({f"{name}.weight": value for name, value in matrices.items()})
    weights = [(f"{name.removesuffix('.weight')}.linear.weight", value) for name, value in named.items()]
    student.model.load_weights(weights, strict=False)
    mx.eval(student.model.parameters())


def measure(
    model: Path, k: int, directories: Sequence[Path], prompts: int, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Rows of targets, rows of positions (none where the model is too large to be held in fp32), and what they are.

    Raises:
        Edge0Error: whatever checkpoint or adapters are refused for; OPTION_INVALID for sets of one name.
    """
    config = read_config(model)
    config.check_k(k)
    sets = [AdapterSet.open(directory, model, config, k) for directory in directories]
    if len({one.name for one in sets}) < len(sets):
        names = ", ".join(one.name for one in sets)
        raise Edge0Error(ErrorKind.OPTION_INVALID, "adapter sets are told apart by their folder's name", found=names)
    samples, what = samples_for(model, config, prompts, seed)
    reason = too_large(config)
    weights, positions = [], []
    for adapters in sets:
        targets = {}
        for target in merged_targets(model, config, adapters):
            weights.append(target.row)
            if not reason:
                targets[target.row["target"]] = target.weight
        if not reason:
            student = Student(model, k, adapters.owners)
            positions += logit_rows(student, adapters, targets, samples)
    about = {
        "k": k,
        "seed": seed,
        "adapters": {one.name: one.source for one in sets},
        "prerouter": all(one.heads is not None for one in sets),
        "prompts": what,
        "logits_refused": reason,
        "mlx_device": str(mx.default_device()),
    }
    columns = "adapters prompt task position change error survival".split()
    return pd.DataFrame(weights), pd.DataFrame(positions, columns=columns), about


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.merge", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder that gets SESSION/merge.json and its rows")
    parser.add_argument("--k", type=int, required=True, help="experts per token, and the K of the adapters")
    parser.add_argument("--tier", help="name under which results are kept; by default the directory's")
    parser.add_argument("--adapters", type=Path, nargs="+", metavar="DIR", help="where the sets lie (default: MODEL)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts at the logits (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)  # fp32 throughout, so that nothing but the merge is rounded

    def command() -> None:
        sets = options.adapters or [options.model]
        weights, positions, about = measure(options.model, options.k, sets, options.prompts, options.seed)
        tier = options.tier or options.model.resolve().name
        with stamped(options.out) as folder:
            with writing(folder):
                weights.to_parquet(folder / "merge.parquet")
                positions.to_parquet(folder / "logits.parquet")
            write_document(folder / "merge.json", options.model, {"tier": tier} | about)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
