"""Where every tensor of a checkpoint lies on disk, checked before a byte of it is believed.

A safetensors file opens with an 8-byte little-endian length and that many bytes of JSON that give each tensor's dtype,
shape and byte range. This module reads that header and nothing else of the file, refuses whatever the format does not
allow, and answers with absolute file offsets, so that a reader can fetch any range without a check of its own. Whatever
a file holds, the outcome is a `ShardHeader` or an `Edge0Error`: a framework that loads a short or lying shard serves
plausible nonsense, and that is found much later.

It does not know which tensors a model needs, what an expert is, or whether the bytes are the right ones: it checks
structure. `metadata.total_size` of an index file is ignored on purpose, because the released 35b index still counts
tensors that were removed from its shards.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from edge0.checkpoint.strict import (
    DOWNLOAD_FILE,
    MAX_SIZE,
    Document,
    check_string_map,
    os_errors,
    refuse,
    regular_file,
    shown,
)
from edge0.errors import ErrorKind

INDEX_NAME = "model.safetensors.index.json"
SHARD_PATTERN = "model*.safetensors"
LENGTH_FIELD_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own cap on the JSON part; index files are held to it as well."""
MAX_TENSORS = 100_000
"""Tensors that one header may list: fifty times what the released models have in all their shards."""
VALUES_PER_TENSOR = 16
"""JSON values that a header may hold per tensor of that cap: an entry is some 11, so that metadata has room too."""

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
        **dict.fromkeys(("U32", "I32", "F32"), 4),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
    }
)
"""Bytes per element of each dtype served. The sub-byte ones of the format (F4, F6_*) are refused like unknown ones."""

_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))
_DOWNLOAD_INDEX = "download the index and its shards again, from one revision"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `nbytes` bytes of shard `path`, from absolute byte `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileIdentity:
    """Which file lay at a path: one that was replaced, cut or written to since then has another identity."""

    device: int
    inode: int
    file_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def __str__(self) -> str:
        return f"inode {self.inode} of {self.file_bytes} bytes, written at {self.modified_ns} ns"


@dataclass(frozen=True)
class ShardHeader:
    """One checked file. `data_offset` is the absolute byte where the data section begins; it runs to `file_bytes`."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    file_bytes: int
    data_offset: int
    identity: FileIdentity


def check_identity(path: Path, identity: FileIdentity, descriptor: int | None = None) -> None:
    """Check that `path`, or what `descriptor` has open of it, is still the file of that identity.

    Raises Edge0Error: FILE_CHANGED, FILE_MISSING, FILE_UNREADABLE.
    """
    hint = "leave the checkpoint alone while it is in use, and start again"
    with os_errors(path, hint):
        found = FileIdentity.of(os.stat(path) if descriptor is None else os.fstat(descriptor))
    if found != identity:
        detail = "the file is not the one whose header was checked"
        refuse(ErrorKind.FILE_CHANGED, detail, path, None, identity, found, hint)


def checked_multiply(*factors: int) -> int:
    """Product of non-negative integers; OverflowError once a factor is negative, or a factor or the product so far is
    above `MAX_SIZE`. Every size that is computed from a file's numbers goes through here."""
    product = 1
    for factor in factors:
        if not 0 <= factor <= MAX_SIZE or (product := product * factor) > MAX_SIZE:
            raise OverflowError("a size is outside 0 to 2**63-1")
    return product


def read_header(path: os.PathLike[str] | str) -> ShardHeader:
    """Reads and checks the header of one safetensors file (a shard or an adapter); the data bytes are not read.

    Raises Edge0Error: FILE_MISSING, FILE_UNREADABLE, HEADER_*, TENSOR_COUNT, TENSOR_ENTRY, TENSOR_DTYPE, TENSOR_SHAPE,
    TENSOR_OFFSETS, TENSOR_OVERLAP, TENSOR_HOLE, FILE_TRUNCATED, FILE_TRAILING.
    """
    path = Path(path)
    with regular_file(path, DOWNLOAD_FILE) as (file, status):
        file_bytes = status.st_size
        field = file.read(LENGTH_FIELD_BYTES)
        if len(field) < LENGTH_FIELD_BYTES:
            detail = "the file ends inside its header length, in bytes"
            refuse(ErrorKind.HEADER_TOO_SHORT, detail, path, None, LENGTH_FIELD_BYTES, len(field))
        header_bytes = int.from_bytes(field, "little")
        limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_FIELD_BYTES)
        if not 1 <= header_bytes <= limit:
            detail = f"the header length does not fit the file's {file_bytes} bytes or the cap of {MAX_HEADER_BYTES}"
            hint = f"check that it is a safetensors file, and {DOWNLOAD_FILE}"
            refuse(ErrorKind.HEADER_LENGTH, detail, path, None, f"1 to {limit}", header_bytes, hint)
        raw = file.read(header_bytes)
    data_offset = LENGTH_FIELD_BYTES + header_bytes
    limit = VALUES_PER_TENSOR * MAX_TENSORS
    rules = Document("the header", ErrorKind.HEADER_UTF8, ErrorKind.HEADER_JSON, DOWNLOAD_FILE, limit)
    document = rules.parse(raw, path)
    metadata = document.pop("__metadata__", None)
    if metadata is None:  # MLX writes a null where it has none
        metadata = {}
    check_string_map(metadata, path, "__metadata__", ErrorKind.HEADER_METADATA, DOWNLOAD_FILE)
    if len(document) > MAX_TENSORS:
        refuse(ErrorKind.TENSOR_COUNT, "too many tensors", path, None, f"at most {MAX_TENSORS}", len(document))
    tensors = {name: _tensor_entry(path, name, fields, data_offset) for name, fields in document.items()}
    _check_coverage(path, tensors, data_offset, file_bytes)
    identity = FileIdentity.of(status)
    return ShardHeader(path, MappingProxyType(metadata), MappingProxyType(tensors), file_bytes, data_offset, identity)


@dataclass(frozen=True)
class CheckpointIndex:
    """All shards of a checkpoint directory, and each of their tensors by name."""

    directory: Path
    shards: tuple[ShardHeader, ...]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, directory: os.PathLike[str] | str) -> CheckpointIndex:
        """Reads every shard header of `directory`.

        With a `model.safetensors.index.json` its weight_map names the shards, and map and shards must agree on every
        tensor; other files in the directory are ignored. Without one, all `model*.safetensors` files are the shards.

        Raises Edge0Error: what `read_header` raises, INDEX_MALFORMED, INDEX_MISMATCH, TENSOR_DUPLICATE.
        """
        directory, hint = Path(directory), "check the path of the checkpoint"
        with os_errors(directory, hint):
            listing = os.listdir(directory)
        index_path = directory / INDEX_NAME
        weight_map = read_weight_map(index_path) if INDEX_NAME in listing else None
        if weight_map is not None:
            names = sorted(set(weight_map.values()))
        else:
            names = sorted(name for name in listing if fnmatch.fnmatchcase(name, SHARD_PATTERN))
        if not names:
            wanted = f"{INDEX_NAME} or {SHARD_PATTERN}"
            refuse(ErrorKind.FILE_MISSING, "no checkpoint in this directory", directory, None, wanted, "neither", hint)
        shards = tuple(read_header(directory / name) for name in names)
        tensors = _merge(shards)
        if weight_map is not None:
            _check_weight_map(index_path, weight_map, tensors)
        return cls(directory, shards, MappingProxyType(tensors))

    def require(self, name: str, dtype: str | None = None, shape: Sequence[int] | None = None) -> TensorEntry:
        """The entry of tensor `name`; `dtype` and `shape`, where given, must be what the file holds.

        Raises Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH.
        """
        hint = "check that config.json and the shards are of the same model"
        entry = self.tensors.get(name)
        if entry is None:
            detail = f"none of the checkpoint's {len(self.tensors)} tensors has this name"
            refuse(ErrorKind.TENSOR_MISSING, detail, self.directory, name, hint=hint)
        wanted = (entry.dtype if dtype is None else dtype, entry.shape if shape is None else tuple(shape))
        if wanted != (entry.dtype, entry.shape):
            detail, found = "the tensor has another dtype or shape", f"{entry.dtype} {list(entry.shape)}"
            expected = f"{wanted[0]} {list(wanted[1])}"
            refuse(ErrorKind.TENSOR_MISMATCH, detail, entry.path, name, expected, found, hint)
        return entry


# --- one shard -------------------------------------------------------------------------------------------------


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor_entry(path: Path, name: str, fields: object, data_offset: int) -> TensorEntry:
    def wrong(kind: ErrorKind, detail: str, expected: object, found: object) -> NoReturn:
        refuse(kind, detail, path, name, expected, shown(found))

    if not isinstance(fields, dict):
        wrong(ErrorKind.TENSOR_ENTRY, "the entry is not an object", "a JSON object", fields)
    if fields.keys() != _ENTRY_KEYS:
        wrong(ErrorKind.TENSOR_ENTRY, "the entry has other keys", sorted(_ENTRY_KEYS), sorted(islice(fields, 8)))
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str):
        wrong(ErrorKind.TENSOR_ENTRY, "dtype is not a string", "a string", dtype)
    if not isinstance(shape, list):
        wrong(ErrorKind.TENSOR_ENTRY, "shape is not a list", "a list", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_int, offsets)):
        wrong(ErrorKind.TENSOR_ENTRY, "data_offsets is not a pair of integers", "[begin, end]", offsets)
    if dtype not in ITEM_BYTES:
        wrong(ErrorKind.TENSOR_DTYPE, "the dtype is not served", ", ".join(sorted(ITEM_BYTES)), dtype)
    if not all(_is_int(size) and size >= 0 for size in shape):
        wrong(ErrorKind.TENSOR_SHAPE, "a dimension is no non-negative integer", "integers from 0 on", shape)
    try:
        nbytes = checked_multiply(*shape, ITEM_BYTES[dtype])
    except OverflowError:
        wrong(ErrorKind.TENSOR_SHAPE, "the size in bytes overflows", f"at most {MAX_SIZE}", shape)
    begin, end = offsets
    if not 0 <= begin <= end <= MAX_SIZE - data_offset:
        detail = "data_offsets is negative, reversed or too large"
        wrong(ErrorKind.TENSOR_OFFSETS, detail, "0 <= begin <= end", offsets)
    if end - begin != nbytes:
        detail = f"data_offsets spans another length than {dtype} {shown(shape)}, in bytes"
        wrong(ErrorKind.TENSOR_OFFSETS, detail, nbytes, end - begin)
    return TensorEntry(name, dtype, tuple(shape), path, data_offset + begin, nbytes)


def _check_coverage(path: Path, tensors: Mapping[str, TensorEntry], data_offset: int, file_bytes: int) -> None:
    """The tensors must tile the data section: each byte belongs to exactly one, and the file ends with the last."""
    position, cut = data_offset, None
    for entry in sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < position:
            detail = "the tensor begins inside another, at file byte"
            refuse(ErrorKind.TENSOR_OVERLAP, detail, path, entry.name, position, entry.offset)
        if entry.offset > position:
            detail = "the bytes before this tensor belong to none; it begins at file byte"
            refuse(ErrorKind.TENSOR_HOLE, detail, path, entry.name, position, entry.offset)
        position += entry.nbytes
        if cut is None and position > file_bytes:
            cut = entry.name
    if position > file_bytes:
        detail = "the file ends before this tensor does; file bytes"
        refuse(ErrorKind.FILE_TRUNCATED, detail, path, cut, position, file_bytes)
    if position < file_bytes:
        detail = "bytes follow the last tensor; file bytes"
        refuse(ErrorKind.FILE_TRAILING, detail, path, None, position, file_bytes)


# --- many shards -----------------------------------------------------------------------------------------------


def read_weight_map(path: Path) -> dict[str, str]:
    """The index file's map of tensor name to shard name; every shard name is that of a file beside the index."""
    kind = ErrorKind.INDEX_MALFORMED
    with regular_file(path, _DOWNLOAD_INDEX) as (file, status):
        if status.st_size > MAX_HEADER_BYTES:
            detail = "the index is too large, in bytes"
            refuse(kind, detail, path, None, f"at most {MAX_HEADER_BYTES}", status.st_size, _DOWNLOAD_INDEX)
        raw = file.read(status.st_size)
    rules = Document("the index", kind, kind, _DOWNLOAD_INDEX, VALUES_PER_TENSOR * MAX_TENSORS)
    document = rules.parse(raw, path)
    weight_map = document.get("weight_map")
    check_string_map(weight_map, path, "weight_map", kind, _DOWNLOAD_INDEX)
    if not weight_map:
        refuse(kind, "the map is empty", path, "weight_map", "at least one tensor", "none", _DOWNLOAD_INDEX)
    for name, shard in weight_map.items():
        if not shard.isprintable() or shard in ("", ".") or ".." in shard or "/" in shard or "\\" in shard:
            detail, found = "weight_map gives no plain file name", shown(shard)
            refuse(kind, detail, path, name, "a file beside the index", found, _DOWNLOAD_INDEX)
    return weight_map


def _merge(shards: Sequence[ShardHeader]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if name in tensors:
                detail = f"{tensors[name].path.name} holds a tensor of this name too"
                hint = "remove shards of another revision from the directory"
                refuse(ErrorKind.TENSOR_DUPLICATE, detail, shard.path, name, hint=hint)
            tensors[name] = entry
    return tensors


def _check_weight_map(path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
    """Both ways: what the map says of each tensor holds, and the shards have no tensor that the map is silent about."""
    for name in {**weight_map, **tensors}:
        mapped = weight_map.get(name, "no shard")
        held = tensors[name].path.name if name in tensors else "no shard"
        if mapped != held:
            detail = "the index maps the tensor to one place and the shards hold it in another"
            refuse(ErrorKind.INDEX_MISMATCH, detail, path, name, mapped, held, _DOWNLOAD_INDEX)
