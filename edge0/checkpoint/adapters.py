"""Adapter files: where they lie, and the check that one belongs to this model, kind and K.

Released adapters carry their metadata nested twice; upstream loads them without a look at it. Here a file made for
another model, K or format version is refused. Tensors are known by one name each, however the file spells it. Knows
nothing of what the tensors are used for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge0.checkpoint.header import ShardHeader, TensorEntry, read_header
from edge0.checkpoint.schema import LORA_ALPHA, LORA_RANK, Tensor
from edge0.checkpoint.strict import plain, refuse, shown
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import Family

FORMAT_VERSION = "1"
OFF = {"prerouter": "--prerouter off", "lora": "--no-lora"}
OTHER_SET = "use the adapter set of this model and K"


@dataclass(frozen=True)
class Adapter:
    """A checked adapter file. `tensors` has the names of the model's own paths; `owners` is empty for LoRA."""

    header: ShardHeader
    tensors: Mapping[str, TensorEntry]
    k: int
    rank: int
    alpha: int
    owners: tuple[int, ...]
    base: str | None = None  # fingerprint of the checkpoint that it was trained for; the released files name none

    def check_base(self, found: str) -> None:
        """That the adapter was trained for the base with this fingerprint, as far as it says.

        Raises:
            Edge0Error: ADAPTER_MISMATCH.
        """
        if self.base not in (None, found):
            detail, hint = "the adapter was trained for another base", "use the adapter set of this checkpoint"
            refuse(ErrorKind.ADAPTER_MISMATCH, detail, self.header.path, "base", self.base, found, hint)

    @property
    def inner_width(self) -> int:
        """The heads' hidden width, which only the file knows; 0 where its first fc1 is missing or no matrix."""
        first = self.tensors.get(f"layers.{self.owners[0]}.fc1.weight") if self.owners else None
        return first.shape[0] if first is not None and first.shape else 0

    def find(self, expected: Iterable[Tensor]) -> dict[Tensor, TensorEntry]:
        """Where each of the model's tensors lies; the file must hold these and no others.

        Raises:
            Edge0Error: TENSOR_MISSING, TENSOR_MISMATCH, ADAPTER_MISMATCH (a tensor that the model has no place for).
        """
        path, found = self.header.path, {}
        for tensor in expected:
            entry = self.tensors.get(tensor.name)
            if entry is None:
                refuse(ErrorKind.TENSOR_MISSING, "the adapter lacks a tensor", path, tensor.name, hint=OTHER_SET)
            if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                expected, held = f"{tensor.dtype} {list(tensor.shape)}", f"{entry.dtype} {shown(list(entry.shape))}"
                detail = "the adapter does not fit this model"
                refuse(ErrorKind.TENSOR_MISMATCH, detail, path, entry.name, expected, held, OTHER_SET)
            found[tensor] = entry
        extra = self.tensors.keys() - {tensor.name for tensor in found}
        if extra:
            name = self.tensors[min(extra)].name
            refuse(ErrorKind.ADAPTER_MISMATCH, "this model has no place for the tensor", path, name, hint=OTHER_SET)
        return found


def adapter_path(directory: Path, family: Family, kind: str, k: int) -> Path:
    """Where synthesis and training put the adapter of one K."""
    return directory / "artifacts" / f"k{k}" / adapter_name(family, kind)


def adapter_name(family: Family, kind: str) -> str:
    return f"{kind}_{family.adapter_stem}.safetensors"


def adapter_metadata(family: Family, kind: str, k: int, owners: Sequence[int], **more: str) -> dict[str, str]:
    """The released files' form: one key `__metadata__` that holds the fields as JSON text.

    `more`: `source` and what else is to be said of where the file comes from.
    """
    fields = {
        "model": family.adapter_stem.replace("_", "-"),
        "kind": kind,
        "K": str(k),
        "r": str(LORA_RANK),
        "alpha": str(LORA_ALPHA),
        **more,
        "format_version": FORMAT_VERSION,
    }
    if kind == "prerouter":
        fields["owners"] = json.dumps(list(owners))
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
            hint=f"put {name} there, or go without ({OFF[kind]}), or use the set of another K knowingly (--adapter-k)",
        )
    header = read_header(path)
    fields = _fields(header)

    def check(key: str, expected: str, matches: bool) -> None:
        if not matches:
            detail, found = "the adapter was made for something else", plain(str(fields.get(key)))
            refuse(ErrorKind.ADAPTER_MISMATCH, detail, path, key, expected, found, OTHER_SET)

    tag = rf"(?<![0-9.]){family.tag}(?![a-z0-9])"  # "8b" is not that of a 28b
    check("model", f"a name with {family.tag!r}", re.search(tag, fields.get("model", "").lower()) is not None)
    check("kind", kind, fields.get("kind") == kind)
    check("K", str(k), fields.get("K") == str(k))
    check("format_version", FORMAT_VERSION, fields.get("format_version") == FORMAT_VERSION)
    tensors = _by_model_path(header, family, kind)
    try:
        owners = _owners(fields["owners"]) if kind == "prerouter" else ()
        return Adapter(header, tensors, k, int(fields["r"]), int(fields["alpha"]), owners, fields.get("base"))
    except (KeyError, ValueError, RecursionError) as error:
        detail = f"a field is absent or malformed ({error!r})"
        refuse(ErrorKind.ADAPTER_METADATA, detail, path, "__metadata__", hint=OTHER_SET)


def _owners(text: str) -> tuple[int, ...]:
    """The layers that own a head, from a JSON list."""
    owners = json.loads(text)
    if not isinstance(owners, list) or not all(type(owner) is int for owner in owners):
        raise ValueError("owners is not a list of layer numbers")
    return tuple(owners)


def _by_model_path(header: ShardHeader, family: Family, kind: str) -> dict[str, TensorEntry]:
    """The file's tensors under one name each: `<module path>.lora_A`, `layers.<owner>.fc1.weight`.

    Raises:
        Edge0Error: ADAPTER_MISMATCH when two of the file's names are of one place.
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        own = name.replace(".mlp.prerouter.", ".", 1) if kind == "prerouter" else _full_path(name, family)
        if own in tensors:
            detail = f"the file holds this tensor a second time, as {plain(tensors[own].name)}"
            refuse(ErrorKind.ADAPTER_MISMATCH, detail, header.path, name, hint=OTHER_SET)
        tensors[own] = entry
    return tensors


def _full_path(name: str, family: Family) -> str:
    """A module path whose leading parts may be left out, as `model.layers.N.rest` on 35b, from the model's root on."""
    parts = family.layer_prefix.split(".")
    for start in range(1, len(parts)):
        if name.startswith(".".join(parts[start:]) + "."):
            return ".".join([*parts[:start], name])
    return name


def _fields(header: ShardHeader) -> dict[str, str]:
    path, hint = header.path, "use an adapter as it was published"
    try:
        fields = json.loads(header.metadata["__metadata__"])
    except (KeyError, ValueError, RecursionError):
        expected, found = "a key __metadata__ that holds JSON", shown(sorted(header.metadata))
        refuse(ErrorKind.ADAPTER_METADATA, "no nested metadata", path, "__metadata__", expected, found, hint)
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        refuse(ErrorKind.ADAPTER_METADATA, "nested metadata is not a map of strings", path, "__metadata__", hint=hint)
    return fields
