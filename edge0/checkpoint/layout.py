"""Where the bytes of each routed expert lie: nine ranges per expert, found in the validated header index.

An expert is one slice along axis 0 of nine stacked tensors (three projections, each weight, scales, biases), so its
ranges are `offset + expert * stride` and never need a look at the data. Knows nothing of reading, slots or MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from edge0.checkpoint.header import CheckpointIndex
from edge0.tiers import EXPERT_BITS, GROUP_SIZE, ModelConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class PartSpec:
    """One of the nine pieces of every expert; `shape` is that of a single expert."""

    projection: str
    part: str
    dtype: str  # "U32" (packed codes) or "BF16"
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (4 if self.dtype == "U32" else 2)


@dataclass(frozen=True)
class ByteRange:
    path: Path
    offset: int
    nbytes: int


def part_specs(hidden: int, width: int) -> tuple[PartSpec, ...]:
    """The nine pieces in reading order, for experts of `width` between `hidden` features (paper section 3.1)."""
    specs = []
    for projection in PROJECTIONS:
        rows, columns = (hidden, width) if projection == "down_proj" else (width, hidden)
        for part in PARTS:
            shape = (rows, columns * EXPERT_BITS // 32) if part == "weight" else (rows, columns // GROUP_SIZE)
            specs.append(PartSpec(projection, part, "U32" if part == "weight" else "BF16", shape))
    return tuple(specs)


def expert_tensor(config: ModelConfig, layer: int, spec: PartSpec) -> str:
    """The checkpoint's name of one stacked tensor."""
    family = config.family
    return f"{family.layer_prefix}.{layer}.{family.experts_key}.{spec.projection}.{spec.part}"


@dataclass(frozen=True)
class ExpertLayout:
    """Byte ranges of all routed experts of a checkpoint."""

    specs: tuple[PartSpec, ...]
    experts: int
    layers: tuple[int, ...]
    _first: Mapping[int, tuple[ByteRange, ...]]  # layer -> the nine ranges of expert 0

    @classmethod
    def of(cls, index: CheckpointIndex, config: ModelConfig) -> ExpertLayout:
        """
        Raises:
            Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH when the checkpoint is not what config.json says.
        """
        specs = part_specs(config.hidden, config.expert_width)
        first = {}
        for layer in config.moe_layers:
            entries = [
                index.require(expert_tensor(config, layer, spec), spec.dtype, (config.experts, *spec.shape))
                for spec in specs
            ]
            first[layer] = tuple(
                ByteRange(entry.path, entry.offset, spec.nbytes) for entry, spec in zip(entries, specs, strict=True)
            )
        return cls(specs, config.experts, config.moe_layers, first)

    def ranges(self, layer: int, expert: int) -> tuple[ByteRange, ...]:
        """The nine byte ranges of one expert, in the order of `specs`."""
        return tuple(ByteRange(r.path, r.offset + expert * r.nbytes, r.nbytes) for r in self._first[layer])

    @property
    def expert_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def total_bytes(self) -> int:
        return self.expert_bytes * self.experts * len(self.layers)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The shards that hold experts."""
        return tuple(sorted({r.path for ranges in self._first.values() for r in ranges}))

    def records(self) -> list[tuple[int, int]]:
        """Every (layer, expert)."""
        return [(layer, expert) for layer in self.layers for expert in range(self.experts)]
