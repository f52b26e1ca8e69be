"""A checkpoint as a GGUF file: `python -m experiments.peers.gguf MODEL OUT.gguf KIND --library DIR`.

KIND `q4_0` is what a peer is measured with: 4.5 bits a weight, equal to ours in bytes, on llama.cpp's fastest path; its
values are quantised anew and differ. `q4_1` is the same model number for number (fp32 where a matrix has no 4-bit
codes), at 5 bits, of which llama.cpp multiplies activations that it rounds to 8 bits. `f32` is the same without codes,
in plain arithmetic: the check that names, layouts and graph are right, for small models. Beside it OUT.json says what
it is, or why there is none: without the `gguf` package, for a model that llama.cpp's graph is not, or one too large.
Also how many bytes a token needs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.schema import checkpoint_tensors, find_tensor
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import EXPERT_BITS, ModelConfig, read_config
from experiments.peers import names
from experiments.peers.blocks import BLOCK, Affine, q4_1, read
from experiments.peers.library import importable
from experiments.publish import run_command, write_document

KINDS = {"q4_0": 2, "q4_1": 3, "f32": 0}  # with GGUF's own numbers of a file's type
MOST_F32_BYTES = 8 << 30
# What leaves a machine or a model without this peer, and is no fault: no package, heads or gates unlike its graph's.
REASONS = {ErrorKind.FILE_MISSING, ErrorKind.OPTION_INVALID, ErrorKind.LAYOUT_MALFORMED}


@dataclass
class Active:
    """Bytes that one token needs of a file: `fixed`, whatever it routes to, and `expert` for each expert of all layers.

    Of the embedding a token needs one row.
    """

    fixed: float = 0.0
    expert: float = 0.0

    def count(self, name: str, nbytes: int, config: ModelConfig) -> None:
        """`name`: of the GGUF file."""
        if "_exps." in name:
            self.expert += nbytes / config.experts
        else:
            self.fixed += nbytes / (config.vocab if name.startswith("token_embd") else 1)


def make(model: Path, out: Path, kind: str, library: Path) -> None:
    """Write OUT.gguf where that can be, and OUT.json.

    Raises:
        Edge0Error: whatever the checkpoint is refused for; OUTPUT_UNWRITABLE.
    """
    about = {"tier": model.resolve().name, "kind": kind, "gguf": None, "library": str(library), "reason": ""}
    try:
        about |= write(model, out, kind, library) | {"gguf": str(out), "bytes": out.stat().st_size}
    except Edge0Error as error:
        if error.kind not in REASONS:
            raise
        about["reason"] = str(error)
    write_document(out.with_suffix(".json"), model, about)


def write(model: Path, out: Path, kind: str, library: Path) -> dict[str, Any]:
    """Write the file, whole or not at all; returns what a token needs of it, and of the checkpoint.

    Raises:
        Edge0Error: whatever the checkpoint is refused for; FILE_MISSING without the `gguf` package; OUTPUT_UNWRITABLE.
    """
    config, index = read_config(model), CheckpointIndex.open(model)
    if kind == "f32":
        _check_size(config)
    with importable(library, "gguf") as gguf, writing(out), tempfile.TemporaryFile(dir=_folder(out)) as spool:
        partial = out.with_suffix(".partial")
        writer = gguf.GGUFWriter(partial, names.architecture(config))
        writer.add_file_type(KINDS[kind])
        writer.add_tokenizer_model("none")
        for key, value in names.metadata(config):
            _add(writer, f"{writer.arch}.{key}", value)
        kept, needs = [], {"gguf": Active(), "checkpoint": Active()}
        for name, (array, stored), nbytes in tensors(config, index, kind, gguf):
            needs["gguf"].count(name, array.nbytes, config)
            needs["checkpoint"].count(name, nbytes, config)
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, stored)
            kept.append((spool.tell(), array.dtype, array.shape))
            spool.write(np.ascontiguousarray(array).data)
        spool.flush()
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for offset, dtype, shape in kept:
            writer.write_tensor_data(np.memmap(spool, dtype, "r", offset, shape))
        writer.close()
        partial.replace(out)
    return {"active": {name: asdict(active) for name, active in needs.items()}}


def tensors(
    config: ModelConfig, index: CheckpointIndex, kind: str, gguf: ModuleType
) -> Iterator[tuple[str, tuple[np.ndarray, int], int]]:
    """(name there, (bytes or numbers, GGUF's number of their type), bytes here) in the checkpoint's order."""
    wanted = (tensor for tensor in checkpoint_tensors(config) if not tensor.is_left_over)
    for name, parts in groupby(wanted, key=lambda tensor: tensor.linear.name if tensor.linear else tensor.name):
        parts = [(part, find_tensor(index, part)) for part in parts]
        arrays, linear = [read(entry).reshape(part.shape) for part, entry in parts], parts[0][0].linear
        values = arrays[0] if linear is None else Affine.of(*arrays, linear.bits)
        places = names.places(config, name)
        nbytes = sum(entry.nbytes for _, entry in parts) // len(places)
        for target, change in places:
            yield target, encode(target, change(values), linear is not None, config, kind, gguf), nbytes


def encode(
    name: str, values: np.ndarray | Affine, quantised: bool, config: ModelConfig, kind: str, gguf: ModuleType
) -> tuple[np.ndarray, int]:
    """One tensor as the file holds it, and its type. `quantised`: the checkpoint has codes of it, so its bytes count.

    Q4_1 keeps every number; where it cannot, they are fp32, as all are in f32. Q4_0 keeps the bytes: 8-bit routers are
    Q8_0 and bf16 ones bf16. Vectors, which no path of llama.cpp takes otherwise, are fp32 in all.
    """
    types = gguf.GGMLQuantizationType
    if kind == "q4_1" and isinstance(values, Affine) and values.bits == EXPERT_BITS:
        return q4_1(values), types.Q4_1
    plain = values.values if isinstance(values, Affine) else np.ascontiguousarray(values, np.float32)
    chosen = types.F32
    if kind == "q4_0" and plain.ndim > 1:
        if quantised and plain.shape[-1] % BLOCK == 0:
            chosen = types.Q8_0 if isinstance(values, Affine) and values.bits > EXPERT_BITS else types.Q4_0
        elif names.is_router(config, name):
            chosen = types.BF16
    return (plain if chosen == types.F32 else gguf.quants.quantize(plain, chosen)), chosen


def _check_size(config: ModelConfig) -> None:
    """
    Raises:
        Edge0Error: OPTION_INVALID for a model whose weights are too many to be written as fp32.
    """
    matrices = (tensor.linear for tensor in checkpoint_tensors(config) if tensor.name.endswith(".weight"))
    nbytes = 4 * sum(one.out * one.inp * (one.experts or 1) for one in matrices if one is not None)
    if nbytes > MOST_F32_BYTES:
        sides = {"expected": f"at most {MOST_F32_BYTES >> 30} GiB", "found": f"{nbytes >> 30} GiB"}
        raise Edge0Error(ErrorKind.OPTION_INVALID, "too large as fp32", **sides)


def _add(writer, key: str, value) -> None:
    """One key of the file's metadata, as the type that the loader reads it as."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def _folder(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.peers.gguf", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--library", type=Path, required=True, help="folder of the peers' packages")
    options = parser.parse_args()
    return run_command(lambda: make(options.model, options.out, options.kind, options.library))


if __name__ == "__main__":
    sys.exit(main())
