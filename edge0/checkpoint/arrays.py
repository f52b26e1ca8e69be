"""MLX arrays of checked files: loaded lazily, and held to be of the same files until they are evaluated.

MLX opens files by name a second time, after their headers were checked; `reading` closes that gap. Knows nothing of
models or adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from edge0.checkpoint.header import ShardHeader, TensorEntry, check_identity
from edge0.checkpoint.schema import Tensor
from edge0.errors import Edge0Error, ErrorKind


def load_arrays(entries: Mapping[Tensor, TensorEntry]) -> dict[str, mx.array]:
    """Name -> array in the tensor's own name and shape, whatever form its file has it in. Not read yet."""
    files = {path: mx.load(str(path)) for path in {entry.path for entry in entries.values()}}
    return {tensor.name: files[entry.path][entry.name].reshape(tensor.shape) for tensor, entry in entries.items()}


@contextmanager
def reading(headers: Iterable[ShardHeader]) -> Iterator[None]:
    """Within the block, arrays of these files are loaded and evaluated.

    Raises:
        Edge0Error: FILE_CHANGED when a file is not, at the end, the one whose header was checked; READ_FAILED when
            one cannot be read.
    """
    headers, failure = tuple(headers), None
    try:
        yield
    except RuntimeError as error:  # what MLX raises for a file that ends early or cannot be read
        failure = error
    for header in headers:
        check_identity(header.path, header.identity)
    if failure is not None:
        names = ", ".join(header.path.name for header in headers)
        raise Edge0Error(
            ErrorKind.READ_FAILED,
            f"weights could not be read from {names}: {failure}",
            path=headers[0].path.parent,
            hint="check the disk and the files",
        ) from failure
