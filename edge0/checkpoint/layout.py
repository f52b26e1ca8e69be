"""Where the bytes of each routed expert lie, found in validated headers, in either of two layouts.

stacked  as released: an expert is one slice along axis 0 of nine stacked tensors (three projections, each weight,
         scales, biases): nine ranges, far apart, none page aligned.
records  as `edge0 repack` writes it: one file per layer, one page-aligned record per expert that holds the nine pieces
         one after the other: one range, one read.

Ranges are `offset + expert * stride` and never need a look at the data. Knows nothing of reading, slots or MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from edge0.checkpoint.header import CheckpointIndex, FileIdentity, ShardHeader, read_header
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import EXPERT_BITS, GROUP_SIZE, ModelConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARTS = ("weight", "scales", "biases")

RECORDS_FOLDER = "experts"  # beside model.safetensors; one file per layer
RECORDS_TENSOR = "records"  # U8 [experts, record bytes]
REPACK_AGAIN = "repack the checkpoint again"
RECORDS_FORMAT = {"format": "edge0-records", "version": "1"}
RECORD_ALIGN = 16 << 10  # the largest page size in use (Apple); a multiple of 4 KiB


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


def records_path(directory: Path, layer: int) -> Path:
    """The file of one layer's expert records."""
    return directory / RECORDS_FOLDER / f"layer-{layer:03}.safetensors"


def has_records(directory: Path) -> bool:
    """Whether a checkpoint directory was written by `edge0 repack`."""
    return (directory / RECORDS_FOLDER).is_dir()


def record_bytes(specs: tuple[PartSpec, ...]) -> int:
    """Bytes from one record to the next: the nine pieces, filled up with zeros to a whole number of pages."""
    return -(-sum(spec.nbytes for spec in specs) // RECORD_ALIGN) * RECORD_ALIGN


def records_metadata(config: ModelConfig, layer: int) -> dict[str, str]:
    """What a file of records says of itself; the header is padded so that the first record begins on a page."""
    pieces = " ".join(
        f"{spec.projection}.{spec.part}:{spec.nbytes}" for spec in part_specs(config.hidden, config.expert_width)
    )
    return {**RECORDS_FORMAT, "layer": str(layer), "pieces": pieces}


def read_records_header(path: Path) -> ShardHeader:
    """As `read_header`; what is wrong with a file that was made here is not mended by a download."""
    try:
        return read_header(path)
    except Edge0Error as error:
        sides = {"expected": error.expected, "found": error.found}
        raise Edge0Error(
            error.kind, error.detail, path=path, tensor=error.tensor, **sides, hint=REPACK_AGAIN
        ) from error


@dataclass(frozen=True)
class ExpertLayout:
    """Byte ranges of all routed experts of a checkpoint."""

    specs: tuple[PartSpec, ...]
    experts: int
    layers: tuple[int, ...]
    stacked: bool
    identities: Mapping[Path, FileIdentity]  # of the files that hold experts, when their headers were read
    _first: Mapping[int, tuple[ByteRange, ...]]  # layer -> the nine pieces of expert 0
    _record_bytes: int  # 0 where experts are stacked

    @classmethod
    def of(cls, index: CheckpointIndex, config: ModelConfig) -> ExpertLayout:
        """
        Raises:
            Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH when the checkpoint is not what config.json says;
                LAYOUT_MALFORMED and whatever a header is refused for when it was repacked.
        """
        specs = part_specs(config.hidden, config.expert_width)
        stacked = not has_records(index.directory)
        headers = {shard.path: shard for shard in index.shards}
        first = {}
        for layer in config.moe_layers:
            if not stacked:
                header = read_records_header(records_path(index.directory, layer))
                headers[header.path] = header
                first[layer] = record_pieces(header, config, layer, specs)
                continue
            entries = [
                index.require(expert_tensor(config, layer, spec), spec.dtype, (config.experts, *spec.shape))
                for spec in specs
            ]
            first[layer] = tuple(
                ByteRange(entry.path, entry.offset, spec.nbytes) for entry, spec in zip(entries, specs, strict=True)
            )
        identities = {r.path: headers[r.path].identity for pieces in first.values() for r in pieces}
        record = 0 if stacked else record_bytes(specs)
        return cls(specs, config.experts, config.moe_layers, stacked, identities, first, record)

    def pieces(self, layer: int, expert: int) -> tuple[ByteRange, ...]:
        """The nine pieces of one expert, in the order of `specs`, whatever the layout."""
        first = self._first[layer]
        if self.stacked:
            return tuple(ByteRange(r.path, r.offset + expert * r.nbytes, r.nbytes) for r in first)
        return tuple(ByteRange(r.path, r.offset + expert * self._record_bytes, r.nbytes) for r in first)

    def ranges(self, layer: int, expert: int) -> tuple[ByteRange, ...]:
        """What is read for one expert: its nine pieces, or the one record that holds them in the same order."""
        if self.stacked:
            return self.pieces(layer, expert)
        first = self._first[layer][0]
        return (ByteRange(first.path, first.offset + expert * self._record_bytes, self.expert_bytes),)

    def layer_ranges(self, layer: int) -> tuple[ByteRange, ...]:
        """What is read for a whole layer: nine stacked tensors, or one record per expert."""
        if self.stacked:
            return tuple(ByteRange(r.path, r.offset, r.nbytes * self.experts) for r in self._first[layer])
        return tuple(self.ranges(layer, expert)[0] for expert in range(self.experts))

    @property
    def expert_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def total_bytes(self) -> int:
        return self.expert_bytes * self.experts * len(self.layers)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold experts."""
        return tuple(sorted(self.identities))

    def records(self) -> list[tuple[int, int]]:
        """Every (layer, expert)."""
        return [(layer, expert) for layer in self.layers for expert in range(self.experts)]


def record_pieces(
    header: ShardHeader, config: ModelConfig, layer: int, specs: tuple[PartSpec, ...]
) -> tuple[ByteRange, ...]:
    """The nine pieces of expert 0 in a layer's file of records, which must be the file of this layer of this model."""
    entry = header.tensors.get(RECORDS_TENSOR)
    shape = (config.experts, record_bytes(specs))
    found = (dict(header.metadata), entry and entry.dtype, entry and entry.shape)
    wanted = (records_metadata(config, layer), "U8", shape)
    aligned = entry is not None and entry.offset % RECORD_ALIGN == 0
    if found != wanted or len(header.tensors) != 1 or not aligned:
        raise Edge0Error(
            ErrorKind.LAYOUT_MALFORMED,
            "not the records of this layer of this model",
            path=header.path,
            tensor=RECORDS_TENSOR,
            expected=f"{wanted} on a page boundary",
            found=found,
            hint=REPACK_AGAIN,
        )
    pieces, offset = [], entry.offset
    for spec in specs:
        pieces.append(ByteRange(header.path, offset, spec.nbytes))
        offset += spec.nbytes
    return tuple(pieces)
