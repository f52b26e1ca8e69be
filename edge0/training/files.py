"""Files that a training leaves: whole or not at all, and an error that names the one that cannot be written.

MLX says nothing of a disk that is full, so what it wrote is looked at before it takes the place of what was there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from edge0.checkpoint.header import read_header
from edge0.errors import Edge0Error, ErrorKind, writing


def check_writable(path: Path) -> None:
    """That a file can be made where `path` will be, and its folders; told before hours of work, not after.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_of(path).touch()
        partial_of(path).unlink()


def save_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    partial = partial_of(path)
    with writing(path, also=RuntimeError):
        mx.save_safetensors(str(partial), dict(arrays), dict(metadata))
        try:
            read_header(partial)
        except Edge0Error as error:
            partial.unlink()
            detail, hint = "was not written whole", "free some space"
            raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=path, hint=hint) from error
        partial.replace(path)


def partial_of(path: Path) -> Path:
    """What a file is called until it is complete."""
    return path.with_name(f".{path.name}")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
