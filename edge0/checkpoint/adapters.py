"""Adapter files: where they lie, and the check that one belongs to this model, kind and K.

Released adapters carry their metadata nested twice; upstream loads them without a look at it. Here a file made for
another model, K or format version is refused. Knows nothing of what the tensors are used for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edge0.checkpoint.header import ShardHeader, read_header
from edge0.checkpoint.schema import Tensor
from edge0.errors import Edge0Error, ErrorKind
from edge0.tiers import Family

FORMAT_VERSION = "1"


@dataclass(frozen=True)
class Adapter:
    """A checked adapter file. `owners` is empty for LoRA."""

    header: ShardHeader
    k: int
    rank: int
    alpha: int
    owners: tuple[int, ...]

    def check(self, expected: Iterable[Tensor]) -> None:
        """Compare the file's tensors with the model's, both ways.

        Raises:
            Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH, ADAPTER_MISMATCH (a tensor that the model has no place for).
        """
        path, extra = self.header.path, set(self.header.tensors)
        for tensor in expected:
            entry = self.header.tensors.get(tensor.name)
            if entry is None:
                raise Edge0Error(ErrorKind.TENSOR_MISSING, "the adapter lacks a tensor", path=path, tensor=tensor.name)
            if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                raise Edge0Error(
                    ErrorKind.TENSOR_MISMATCH,
                    "the adapter does not fit this model",
                    path=path,
                    tensor=tensor.name,
                    expected=f"{tensor.dtype} {list(tensor.shape)}",
                    found=f"{entry.dtype} {list(entry.shape)}",
                )
            extra.discard(tensor.name)
        if extra:
            raise Edge0Error(
                ErrorKind.ADAPTER_MISMATCH, "this model has no place for the tensor", path=path, tensor=min(extra)
            )


def adapter_path(directory: Path, family: Family, kind: str, k: int) -> Path:
    """Where synthesis and training put the adapter of one K."""
    return directory / "artifacts" / f"k{k}" / adapter_name(family, kind)


def adapter_name(family: Family, kind: str) -> str:
    return f"{kind}_{family.adapter_stem}.safetensors"


def nested_metadata(fields: dict[str, str]) -> dict[str, str]:
    """The released files' form: one key `__metadata__` that holds the fields as JSON text."""
    return {"__metadata__": json.dumps(fields)}


def open_adapter(directory: Path, family: Family, kind: str, k: int) -> Adapter:
    """Find, open and check an adapter: the set of this K first, then the places of the released files.

    Raises:
        Edge0Error: ADAPTER_MISSING, ADAPTER_METADATA, ADAPTER_MISMATCH, or what the file's header is refused for.
    """
    name = adapter_name(family, kind)
    places = [adapter_path(directory, family, kind, k), directory / name, directory / "artifacts" / name]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise Edge0Error(
            ErrorKind.ADAPTER_MISSING,
            f"no {kind} adapter for K={k}",
            path=places[0],
            hint=f"put {name} there, or switch the {kind} off",
        )
    header = read_header(path)
    fields = _fields(header)

    def check(key: str, expected: str, matches: bool) -> None:
        if not matches:
            raise Edge0Error(
                ErrorKind.ADAPTER_MISMATCH,
                "the adapter was made for something else",
                path=path,
                tensor=key,
                expected=expected,
                found=str(fields.get(key)),
                hint="use the adapter set of this model and K",
            )

    check("model", f"a name with {family.tag!r}", family.tag in fields.get("model", "").lower())
    check("kind", kind, fields.get("kind") == kind)
    check("K", str(k), fields.get("K") == str(k))
    check("format_version", FORMAT_VERSION, fields.get("format_version") == FORMAT_VERSION)
    try:
        owners = tuple(int(owner) for owner in json.loads(fields["owners"])) if kind == "prerouter" else ()
        return Adapter(header, k, int(fields["r"]), int(fields["alpha"]), owners)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise Edge0Error(
            ErrorKind.ADAPTER_METADATA, f"a field is absent or malformed ({error!r})", path=path, tensor="__metadata__"
        ) from error


def _fields(header: ShardHeader) -> dict[str, str]:
    try:
        fields = json.loads(header.metadata["__metadata__"])
    except (KeyError, ValueError, RecursionError) as error:
        raise Edge0Error(
            ErrorKind.ADAPTER_METADATA,
            "no nested metadata",
            path=header.path,
            tensor="__metadata__",
            expected="a key __metadata__ that holds JSON",
            found=sorted(header.metadata),
        ) from error
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise Edge0Error(
            ErrorKind.ADAPTER_METADATA,
            "nested metadata is not a map of strings",
            path=header.path,
            tensor="__metadata__",
        )
    return fields
