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
import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NoReturn

from edge0.errors import Edge0Error, ErrorKind

INDEX_NAME = "model.safetensors.index.json"
SHARD_PATTERN = "model*.safetensors"
LENGTH_FIELD_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own cap on the JSON part; index files are held to it as well."""
MAX_TENSORS = 1_000_000
"""Tensors that one header may list."""
MAX_SIZE = 2**63 - 1
"""Largest dimension, element count, byte count or offset: what a signed 64-bit file offset can hold."""

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
_DOWNLOAD_FILE = "download the file again"
_DOWNLOAD_INDEX = "download the index and its shards again, from one revision"

# Shortens and escapes: a hostile header must not put megabytes, or terminal control codes, into an error line.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 3, 8, 4, 120, 120


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
class ShardHeader:
    """One checked file. `data_offset` is the absolute byte where the data section begins; it runs to `file_bytes`."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    file_bytes: int
    data_offset: int


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
    with _regular_file(path, _DOWNLOAD_FILE) as (file, file_bytes):
        field = file.read(LENGTH_FIELD_BYTES)
        if len(field) < LENGTH_FIELD_BYTES:
            detail = "the file ends inside its header length, in bytes"
            _refuse(ErrorKind.HEADER_TOO_SHORT, detail, path, None, LENGTH_FIELD_BYTES, len(field))
        header_bytes = int.from_bytes(field, "little")
        limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_FIELD_BYTES)
        if not 1 <= header_bytes <= limit:
            detail = f"the header length does not fit the file's {file_bytes} bytes or the cap of {MAX_HEADER_BYTES}"
            hint = f"check that it is a safetensors file, and {_DOWNLOAD_FILE}"
            _refuse(ErrorKind.HEADER_LENGTH, detail, path, None, f"1 to {limit}", header_bytes, hint)
        raw = file.read(header_bytes)
    data_offset = LENGTH_FIELD_BYTES + header_bytes
    document = _parse_object(raw, path, "the header", ErrorKind.HEADER_UTF8, ErrorKind.HEADER_JSON, _DOWNLOAD_FILE)
    metadata = document.pop("__metadata__", {})
    _check_string_map(metadata, path, "__metadata__", ErrorKind.HEADER_METADATA, _DOWNLOAD_FILE)
    _check_count(path, len(document))
    tensors = {name: _tensor_entry(path, name, fields, data_offset) for name, fields in document.items()}
    _check_coverage(path, tensors, data_offset, file_bytes)
    return ShardHeader(path, MappingProxyType(metadata), MappingProxyType(tensors), file_bytes, data_offset)


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
        with _os_errors(directory, hint):
            listing = os.listdir(directory)
        index_path = directory / INDEX_NAME
        weight_map = _read_weight_map(index_path) if INDEX_NAME in listing else None
        if weight_map is not None:
            names = sorted(set(weight_map.values()))
        else:
            names = sorted(name for name in listing if fnmatch.fnmatchcase(name, SHARD_PATTERN))
        if not names:
            wanted = f"{INDEX_NAME} or {SHARD_PATTERN}"
            _refuse(ErrorKind.FILE_MISSING, "no checkpoint in this directory", directory, None, wanted, "neither", hint)
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
            _refuse(ErrorKind.TENSOR_MISSING, detail, self.directory, name, hint=hint)
        wanted = (entry.dtype if dtype is None else dtype, entry.shape if shape is None else tuple(shape))
        if wanted != (entry.dtype, entry.shape):
            detail, found = "the tensor has another dtype or shape", f"{entry.dtype} {list(entry.shape)}"
            expected = f"{wanted[0]} {list(wanted[1])}"
            _refuse(ErrorKind.TENSOR_MISMATCH, detail, entry.path, name, expected, found, hint)
        return entry


# --- errors and files ------------------------------------------------------------------------------------------


def _refuse(
    kind: ErrorKind,
    detail: str,
    path: Path,
    tensor: str | None = None,
    expected: object = None,
    found: object = None,
    hint: str = _DOWNLOAD_FILE,
) -> NoReturn:
    if tensor is not None and not (tensor.isprintable() and len(tensor) <= _SHORT.maxstring):
        tensor = _SHORT.repr(tensor)
    raise Edge0Error(kind, detail, path=path, tensor=tensor, expected=expected, found=found, hint=hint)


@contextmanager
def _os_errors(path: Path, hint: str) -> Iterator[None]:
    """Turns what the operating system says of `path` into an Edge0Error. Wraps system calls only, never parsing."""
    try:
        yield
    except FileNotFoundError as error:
        raise Edge0Error(ErrorKind.FILE_MISSING, "there is no such file or directory", path=path, hint=hint) from error
    except (OSError, ValueError) as error:  # ValueError: a path that the system cannot express, such as one with a NUL
        detail = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = "check its type and permissions"
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, detail, path=path, hint=hint) from error


@contextmanager
def _regular_file(path: Path, hint: str) -> Iterator[tuple[BinaryIO, int]]:
    """Opens `path` and yields it with its size in bytes. O_NONBLOCK: a FIFO is refused here, not waited for."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with _os_errors(path, hint), open(path, "rb", opener=opener) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        yield file, status.st_size


# --- JSON ------------------------------------------------------------------------------------------------------


def _parse_object(
    raw: bytes, path: Path, what: str, utf8_kind: ErrorKind, json_kind: ErrorKind, hint: str
) -> dict[str, object]:
    """The JSON object in `raw`, with no key twice at any level and integers saturated just beyond +-MAX_SIZE."""
    objects = 0

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal objects
        objects += 1
        _check_count(path, objects - 2)  # one object a tensor, __metadata__ and the whole: stop before memory fills
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                _refuse(json_kind, f"{what} holds this key twice", path, key, hint=hint)
            for text in (key, value):
                if isinstance(text, str):
                    text.encode()  # an escaped lone surrogate is legal JSON but cannot be written as UTF-8
            result[key] = value
        return result

    hooks = {"object_pairs_hook": unique, "parse_int": _saturated_int, "parse_constant": _refuse_constant}
    try:
        document = json.loads(raw.decode(), **hooks)
    except UnicodeError as error:
        raise Edge0Error(utf8_kind, f"{what} is not UTF-8: {error.reason}", path=path, hint=hint) from error
    except RecursionError as error:
        raise Edge0Error(json_kind, f"{what} is nested too deeply", path=path, hint=hint) from error
    except ValueError as error:
        raise Edge0Error(json_kind, f"{what} is not JSON: {error}", path=path, hint=hint) from error
    if not isinstance(document, dict) or not raw.startswith(b"{"):
        detail = f"{what} is not one JSON object from its first byte on"
        _refuse(json_kind, detail, path, None, "{", _SHORT.repr(raw[:16]), hint)
    return document


def _saturated_int(digits: str) -> int:
    """Keeps a number of a million digits from costing more than its reading: beyond 20 characters all are too large."""
    if digits == "-0":
        raise ValueError("-0 is no size and no offset")
    bound = MAX_SIZE + 1
    if len(digits) > 20:
        return -bound if digits.startswith("-") else bound
    return max(-bound, min(bound, int(digits)))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _check_count(path: Path, tensors: int) -> None:
    if tensors > MAX_TENSORS:
        _refuse(ErrorKind.TENSOR_COUNT, "too many tensors", path, None, f"at most {MAX_TENSORS}", f"{tensors} or more")


def _check_string_map(value: object, path: Path, key: str, kind: ErrorKind, hint: str) -> None:
    """JSON keys are strings already; only the values are in question."""
    if not isinstance(value, dict):
        _refuse(kind, "not a map", path, key, "a JSON object", _SHORT.repr(value), hint)
    for name, text in value.items():
        if not isinstance(text, str):
            _refuse(kind, f"not a string in {key}", path, name, "a string", _SHORT.repr(text), hint)


# --- one shard -------------------------------------------------------------------------------------------------


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor_entry(path: Path, name: str, fields: object, data_offset: int) -> TensorEntry:
    def refuse(kind: ErrorKind, detail: str, expected: object, found: object) -> NoReturn:
        _refuse(kind, detail, path, name, expected, _SHORT.repr(found))

    if not isinstance(fields, dict):
        refuse(ErrorKind.TENSOR_ENTRY, "the entry is not an object", "a JSON object", fields)
    if fields.keys() != _ENTRY_KEYS:
        refuse(ErrorKind.TENSOR_ENTRY, "the entry has other keys", sorted(_ENTRY_KEYS), sorted(fields))
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str):
        refuse(ErrorKind.TENSOR_ENTRY, "dtype is not a string", "a string", dtype)
    if not isinstance(shape, list):
        refuse(ErrorKind.TENSOR_ENTRY, "shape is not a list", "a list", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_int, offsets)):
        refuse(ErrorKind.TENSOR_ENTRY, "data_offsets is not a pair of integers", "[begin, end]", offsets)
    if dtype not in ITEM_BYTES:
        refuse(ErrorKind.TENSOR_DTYPE, "the dtype is not served", ", ".join(sorted(ITEM_BYTES)), dtype)
    if not all(_is_int(size) and size >= 0 for size in shape):
        refuse(ErrorKind.TENSOR_SHAPE, "a dimension is no non-negative integer", "integers from 0 on", shape)
    try:
        nbytes = checked_multiply(*shape, ITEM_BYTES[dtype])
    except OverflowError:
        refuse(ErrorKind.TENSOR_SHAPE, "the size in bytes overflows", f"at most {MAX_SIZE}", shape)
    begin, end = offsets
    if not 0 <= begin <= end <= MAX_SIZE - data_offset:
        detail = "data_offsets is negative, reversed or too large"
        refuse(ErrorKind.TENSOR_OFFSETS, detail, "0 <= begin <= end", offsets)
    if end - begin != nbytes:
        detail = f"data_offsets spans another length than {dtype} {_SHORT.repr(shape)}, in bytes"
        refuse(ErrorKind.TENSOR_OFFSETS, detail, nbytes, end - begin)
    return TensorEntry(name, dtype, tuple(shape), path, data_offset + begin, nbytes)


def _check_coverage(path: Path, tensors: Mapping[str, TensorEntry], data_offset: int, file_bytes: int) -> None:
    """The tensors must tile the data section: each byte belongs to exactly one, and the file ends with the last."""
    position, cut = data_offset, None
    for entry in sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < position:
            detail = "the tensor begins inside another, at file byte"
            _refuse(ErrorKind.TENSOR_OVERLAP, detail, path, entry.name, position, entry.offset)
        if entry.offset > position:
            detail = "the bytes before this tensor belong to none; it begins at file byte"
            _refuse(ErrorKind.TENSOR_HOLE, detail, path, entry.name, position, entry.offset)
        position += entry.nbytes
        if cut is None and position > file_bytes:
            cut = entry.name
    if position > file_bytes:
        detail = "the file ends before this tensor does; file bytes"
        _refuse(ErrorKind.FILE_TRUNCATED, detail, path, cut, position, file_bytes)
    if position < file_bytes:
        detail = "bytes follow the last tensor; file bytes"
        _refuse(ErrorKind.FILE_TRAILING, detail, path, None, position, file_bytes)


# --- many shards -----------------------------------------------------------------------------------------------


def _read_weight_map(path: Path) -> dict[str, str]:
    """The index file's map of tensor name to shard name; every shard name is that of a file beside the index."""
    kind = ErrorKind.INDEX_MALFORMED
    with _regular_file(path, _DOWNLOAD_INDEX) as (file, file_bytes):
        if file_bytes > MAX_HEADER_BYTES:
            detail = "the index is too large, in bytes"
            _refuse(kind, detail, path, None, f"at most {MAX_HEADER_BYTES}", file_bytes, _DOWNLOAD_INDEX)
        raw = file.read(file_bytes)
    document = _parse_object(raw, path, "the index", kind, kind, _DOWNLOAD_INDEX)
    weight_map = document.get("weight_map")
    _check_string_map(weight_map, path, "weight_map", kind, _DOWNLOAD_INDEX)
    if not weight_map:
        _refuse(kind, "the map is empty", path, "weight_map", "at least one tensor", "none", _DOWNLOAD_INDEX)
    for name, shard in weight_map.items():
        if not shard.isprintable() or shard in ("", ".") or ".." in shard or "/" in shard or "\\" in shard:
            detail, found = "weight_map gives no plain file name", _SHORT.repr(shard)
            _refuse(kind, detail, path, name, "a file beside the index", found, _DOWNLOAD_INDEX)
    return weight_map


def _merge(shards: Sequence[ShardHeader]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if name in tensors:
                detail = f"{tensors[name].path.name} holds a tensor of this name too"
                hint = "remove shards of another revision from the directory"
                _refuse(ErrorKind.TENSOR_DUPLICATE, detail, shard.path, name, hint=hint)
            tensors[name] = entry
    return tensors


def _check_weight_map(path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
    """Both ways: what the map says of each tensor holds, and the shards have no tensor that the map is silent about."""
    for name in {**weight_map, **tensors}:
        mapped = weight_map.get(name, "no shard")
        held = tensors[name].path.name if name in tensors else "no shard"
        if mapped != held:
            detail = "the index maps the tensor to one place and the shards hold it in another"
            _refuse(ErrorKind.INDEX_MISMATCH, detail, path, name, mapped, held, _DOWNLOAD_INDEX)
