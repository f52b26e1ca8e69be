"""Trained tensors as adapter files, and back: F16, in the released form, with the base that they were trained for.

Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from edge0.checkpoint.adapters import adapter_metadata, adapter_path, open_adapter
from edge0.checkpoint.fingerprint import fingerprint
from edge0.checkpoint.header import CheckpointIndex
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.training.files import check_writable, save_arrays


def adapter_place(directory: Path, kind: str, k: int, base: Path) -> Path:
    """Where `save_adapter` will write: known before hours of training, and that it may.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE, also where something is there that was not trained here, such as a released file.
    """
    family = read_config(base).family
    path = adapter_path(directory, family, kind, k)
    if path.exists() and open_adapter(directory, family, kind, k).base is None:
        detail, hint = "is there already, and was not trained here", "name another directory (--out)"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=path, hint=hint)
    check_writable(path)
    return path


def save_adapter(
    directory: Path,
    kind: str,
    k: int,
    tensors: Mapping[str, mx.array],
    owners: tuple[int, ...],
    source: str,
    base: Path | None = None,
) -> Path:
    """Write "prerouter" or "lora" tensors where the engine looks for the adapter of this K; returns the path.

    Args:
        base: the checkpoint that they were trained for, where that is not `directory`.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE as `adapter_place`; what the base is refused for.
    """
    base = base or directory
    config = read_config(base)
    about = {"source": source, "base": fingerprint(CheckpointIndex.open(base), config)}
    metadata = adapter_metadata(config.family, kind, k, owners, **about)
    path = adapter_place(directory, kind, k, base)
    save_arrays(path, {name: value.astype(mx.float16) for name, value in tensors.items()}, metadata)
    return path


def load_adapter(
    directory: Path, kind: str, k: int, base: Path | None = None
) -> tuple[dict[str, mx.array], tuple[int, ...]]:
    """The tensors in fp32, as the engine will use them, and the owners of heads.

    Args:
        base: the checkpoint that they were trained for, where that is not `directory`.

    Raises:
        Edge0Error: whatever the adapter is refused for.
    """
    base = base or directory
    config = read_config(base)
    adapter = open_adapter(directory, config.family, kind, k)
    adapter.check_base(fingerprint(CheckpointIndex.open(base), config))
    arrays = mx.load(str(adapter.header.path))
    tensors = {name: arrays[entry.name].astype(mx.float32) for name, entry in adapter.tensors.items()}
    mx.eval(tensors)
    return tensors, adapter.owners
