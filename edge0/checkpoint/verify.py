"""Verification: everything that is wrong with the files of a checkpoint directory, found in one run.

Opening a checkpoint stops at its first fault; whoever repairs a download wants all of them. Every check here reports
what it finds and goes on, and a fault that only follows from another (a tensor of a shard that cannot be read) is not
told again. Headers only, unless checksums are asked for. A note is what is unusual and does no harm.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TypeVar

from tokenizers import Tokenizer

from edge0.checkpoint.adapters import adapter_name, open_adapter
from edge0.checkpoint.header import (
    INDEX_NAME,
    SHARD_PATTERN,
    CheckpointIndex,
    ShardHeader,
    TensorEntry,
    read_header,
    read_weight_map,
)
from edge0.checkpoint.layout import RECORDS_FOLDER, ExpertLayout, has_records, read_records_header, records_path
from edge0.checkpoint.schema import (
    LORA_ALPHA,
    LORA_RANK,
    checkpoint_tensors,
    find_tensor,
    head_tensors,
    is_left_over,
    lora_tensors,
    unplaced_tensors,
)
from edge0.checkpoint.strict import DOWNLOAD_FILE, regular_file, shown
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig, read_config
from edge0.prerouter.schedule import predicted_layers

KINDS = ("lora", "prerouter")
SUPERSEDED = ".mlp.pregate."
SUMS_NAME = "SHA256SUMS"
CHUNK_BYTES = 1 << 20
MAX_NAME = 120  # characters of a tensor name that are shown

# The published 8b files by name and size, and how their SHA-256 begins.
PUBLISHED = {
    ("model.safetensors", 4_508_697_328): "5bcde144",
    ("lora_edge0_8b.safetensors", 16_413_656): "a32ff07b",
    ("prerouter_edge0_8b.safetensors", 38_802_304): "5f05d25e",
}

Progress = Callable[[int, int], None]  # bytes hashed so far, bytes in all
T = TypeVar("T")


@dataclass
class Report:
    """What was found. `digests`: SHA-256 by file name, where asked for.

    `files` are the readable safetensors files; tensors and bytes are those of the model, without adapters.
    """

    problems: list[Edge0Error] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    files: int = 0
    tensors: int = 0
    expert_bytes: int = 0
    other_bytes: int = 0
    _told: set[str] = field(default_factory=set, repr=False)

    def problem(
        self, kind: ErrorKind, detail: str, path: Path | str, tensor: str | None = None, **sides: object
    ) -> None:
        if tensor is not None and not (tensor.isprintable() and len(tensor) <= MAX_NAME):
            tensor = shown(tensor)
        self._add(Edge0Error(kind, detail, path=path, tensor=tensor, **sides))

    def attempt(self, check: Callable[[], T]) -> T | None:
        """What `check` returns, or None where it refuses, which becomes a problem."""
        try:
            return check()
        except Edge0Error as error:
            self._add(error)
        except OSError as error:
            self.problem(ErrorKind.FILE_UNREADABLE, f"it cannot be read: {error.strerror}", error.filename)
        return None

    def _add(self, error: Edge0Error) -> None:
        """Two checks may open the same file: a problem is told once."""
        if str(error) not in self._told:
            self._told.add(str(error))
            self.problems.append(error)


def verify_files(directory: Path | str, sha256: bool = False, progress: Progress | None = None) -> Report:
    """Check a checkpoint in either layout: config, shards, index, experts, adapters, tokenizer; checksums if asked.

    Never raises for what is wrong with the checkpoint. `progress` is that of the checksums.
    """
    directory, report = Path(directory), Report()
    config = report.attempt(lambda: read_config(directory))
    shards = report.attempt(lambda: _check_shards(directory, report))
    if config is not None and shards is not None and shards.held:
        _check_tensors(config, CheckpointIndex(directory, (), shards.held), shards, report)
    report.attempt(lambda: _check_records(directory, config, report))
    report.attempt(lambda: _check_adapters(directory, config, report))
    report.attempt(lambda: _check_tokenizer(directory))
    if sha256:
        report.attempt(lambda: _check_digests(directory, report, progress))
    return report


# --- shards and their index ----------------------------------------------------------------------------------------


@dataclass
class _Shards:
    weight_map: dict[str, str]  # tensor -> shard; empty where no index says so
    unread: set[str] = field(default_factory=set)  # shards that cannot be read
    held: dict[str, TensorEntry] = field(default_factory=dict)

    def hide(self, name: str) -> bool:
        """Whether a tensor that was not found may be in a shard that cannot be read."""
        return self.weight_map.get(name) in self.unread if self.weight_map else bool(self.unread)


def _check_shards(directory: Path, report: Report) -> _Shards:
    index_path = directory / INDEX_NAME
    weight_map = report.attempt(lambda: read_weight_map(index_path)) if index_path.exists() else None
    shards = _Shards(weight_map or {})
    present = {path.name for path in directory.glob("*") if fnmatchcase(path.name, SHARD_PATTERN)}
    names = set(shards.weight_map.values()) or present
    if not names:
        wanted = f"{INDEX_NAME} or {SHARD_PATTERN}"
        report.problem(ErrorKind.FILE_MISSING, "no checkpoint in this directory", directory, expected=wanted)
    for name in sorted(present - names):
        report.notes.append(f"{directory / name}: is not in the index, and not used")
    for name in sorted(names):
        header = report.attempt(lambda name=name: read_header(directory / name))
        if header is None:
            shards.unread.add(name)
            continue
        report.files += 1
        report.tensors += len(header.tensors)
        report.other_bytes += sum(entry.nbytes for entry in header.tensors.values())
        for tensor, entry in header.tensors.items():
            first = shards.held.setdefault(tensor, entry)
            if first is not entry:
                detail = f"{first.path.name} holds a tensor of this name too"
                report.problem(ErrorKind.TENSOR_DUPLICATE, detail, entry.path, tensor=tensor)
    if shards.weight_map:
        _check_index(index_path, shards, report)
    return shards


def _check_index(path: Path, shards: _Shards, report: Report) -> None:
    """One problem per pair of places: two swapped shards would otherwise be hundreds of lines."""
    disagreements = defaultdict(list)
    for name in {**shards.weight_map, **shards.held}:
        mapped = shards.weight_map.get(name, "no shard")
        held = shards.held[name].path.name if name in shards.held else "no shard"
        if mapped != held and not (name not in shards.held and shards.hide(name)):
            disagreements[mapped, held].append(name)
    for (mapped, held), names in disagreements.items():
        detail = f"the index maps this tensor{_and_others(names)} to one place and the shards hold it in another"
        report.problem(ErrorKind.INDEX_MISMATCH, detail, path, tensor=names[0], expected=mapped, found=held)
    try:
        stated = json.loads(path.read_bytes())["metadata"]["total_size"]
    except (ValueError, LookupError, TypeError, RecursionError):  # nothing depends on it
        return
    total = sum(entry.nbytes for entry in shards.held.values())
    if stated != total and not shards.unread:
        report.notes.append(f"{path}: total_size says {shown(stated)} bytes, the shards hold {total}; it is not used")


# --- tensors against the config ------------------------------------------------------------------------------------


def _check_tensors(config: ModelConfig, index: CheckpointIndex, shards: _Shards, report: Report) -> None:
    """The shards' tensors against what the config calls for, without expert stacks where records hold the experts."""
    tensors = [tensor for tensor in checkpoint_tensors(config) if not tensor.is_left_over]
    stacks = {tensor.name for tensor in tensors if tensor.is_expert}
    if has_records(index.directory):
        tensors = [tensor for tensor in tensors if not tensor.is_expert]
        if left := sorted(stacks & index.tensors.keys()):
            report.notes.append(f"{left[0]}{_and_others(left)}: not used, records hold the experts")
    else:
        report.expert_bytes += sum(index.tensors[name].nbytes for name in stacks & index.tensors.keys())
        report.other_bytes -= report.expert_bytes
    hidden = 0
    for tensor in tensors:
        names = (tensor.name, *tensor.spellings)
        if not any(name in index.tensors for name in names) and any(map(shards.hide, names)):
            hidden += 1
        else:
            report.attempt(lambda tensor=tensor: find_tensor(index, tensor))
    if hidden:
        report.notes.append(f"{hidden} tensors were not looked for: their shards cannot be read")
    for entry in unplaced_tensors(index, config):
        detail = "the model of config.json has no place for this tensor"
        report.problem(ErrorKind.TENSOR_MISMATCH, detail, entry.path, tensor=entry.name)
    left_over = [name for name in index.tensors if is_left_over(name)]
    superseded = [name for name in left_over if SUPERSEDED in name]
    if superseded:
        report.notes.append(f"{len(superseded)} tensors mlp.pregate.* of the prerouter's predecessor are not used")
    if len(left_over) > len(superseded):
        report.notes.append(f"{len(left_over) - len(superseded)} tensors of vision or multi-token heads are not used")


def _check_records(directory: Path, config: ModelConfig | None, report: Report) -> None:
    """Each layer's file of records on its own; without a config its header alone."""
    if not has_records(directory):
        return
    present = set((directory / RECORDS_FOLDER).iterdir())
    if config is None:
        for path in sorted(present):
            report.attempt(lambda path=path: read_records_header(path))
        return
    for layer in config.moe_layers:
        alone = replace(config, dense_layers=layer, layers=layer + 1)  # the same model with no other expert layer
        layout = report.attempt(lambda alone=alone: ExpertLayout.of(CheckpointIndex(directory, (), {}), alone))
        if layout is not None:
            report.files += 1
            report.expert_bytes += layout.total_bytes
    for path in sorted(present - {records_path(directory, layer) for layer in config.moe_layers}):
        report.notes.append(f"{path}: is no layer of this model, and not used")


# --- adapters and tokenizer ----------------------------------------------------------------------------------------


def _check_adapters(directory: Path, config: ModelConfig | None, report: Report) -> None:
    """Every file that is named like an adapter, in all places where one is looked for."""
    artifacts = directory / "artifacts"
    for place in (directory, artifacts, *sorted(artifacts.glob("k*"))):
        for path in sorted(path for kind in KINDS for path in place.glob(f"{kind}_*.safetensors")):
            header = report.attempt(lambda path=path: read_header(path))
            if header is not None:
                report.files += 1
                if config is not None:
                    _check_adapter(directory, config, header, report)
    for kind in KINDS if config is not None else ():
        try:
            open_adapter(directory, config.family, kind, config.family.k_served)
        except Edge0Error as error:
            if error.kind is ErrorKind.ADAPTER_MISSING:
                report.notes.append(str(error))


def _check_adapter(directory: Path, config: ModelConfig, header: ShardHeader, report: Report) -> None:
    """One file: whether it is found for its K, was made for this model, and has its tensors."""
    path, family = header.path, config.family
    kind = path.name.partition("_")[0]
    if path.name != adapter_name(family, kind):
        report.notes.append(f"{path}: is not looked for: this model's is {adapter_name(family, kind)}")
        return
    k = _adapter_k(header) or family.k_served
    adapter = report.attempt(lambda: open_adapter(directory, family, kind, k))
    if adapter is None:
        return
    if adapter.header.path != path:
        report.notes.append(f"{path}: is not used: {adapter.header.path} comes first for K={k}")
        return
    try:
        config.check_k(k)
    except Edge0Error as error:
        report.problem(error.kind, error.detail, path, tensor="K", expected=error.expected, found=error.found)
    if kind == "lora":
        expected, found = (LORA_RANK, LORA_ALPHA), (adapter.rank, adapter.alpha)
        if expected != found:
            report.problem(ErrorKind.ADAPTER_MISMATCH, "rank and alpha", path, expected=expected, found=found)
        wanted = list(lora_tensors(config))
    else:
        report.attempt(lambda: predicted_layers(config, adapter.owners, path))
        wanted = list(head_tensors(config, adapter.owners, adapter.inner_width))
    for tensor in wanted:  # one at a time, since the adapter's own check ends with its first fault
        own = {tensor.name: adapter.tensors[tensor.name]} if tensor.name in adapter.tensors else {}
        report.attempt(lambda tensor=tensor, own=own: replace(adapter, tensors=own).find([tensor]))
    for name in sorted(adapter.tensors.keys() - {tensor.name for tensor in wanted}):
        detail, entry = "this model has no place for the tensor", adapter.tensors[name]
        report.problem(ErrorKind.ADAPTER_MISMATCH, detail, path, tensor=entry.name)


def _adapter_k(header: ShardHeader) -> int | None:
    """The K that a file is for: its folder says so, else its metadata."""
    folder = re.fullmatch(r"k(\d{1,4})", header.path.parent.name)
    try:
        return int(folder[1] if folder else json.loads(header.metadata["__metadata__"])["K"])
    except (LookupError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def _check_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise Edge0Error(ErrorKind.FILE_MISSING, "no tokenizer", path=path)
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower class
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, f"not a tokenizer ({error})", path=path) from error


# --- checksums -----------------------------------------------------------------------------------------------------


def _check_digests(directory: Path, report: Report, progress: Progress | None) -> None:
    """Hash every safetensors file and whatever SHA256SUMS lists, and compare."""
    listed = report.attempt(lambda: _listed_digests(directory / SUMS_NAME, report)) or {}
    held = (path.relative_to(directory).as_posix() for path in directory.rglob("*.safetensors"))
    names = sorted({*held, *listed})
    sizes = {name: (directory / name).stat().st_size for name in names if (directory / name).is_file()}
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, sum(sizes.values()))

    for name in names:
        path = directory / name
        digest = report.attempt(lambda path=path: _sha256(path, advance))
        if digest is None:
            continue
        report.digests[name] = digest
        if listed.get(name, digest) != digest:
            detail = f"its SHA-256 is not the one in {SUMS_NAME}"
            report.problem(ErrorKind.FILE_CHANGED, detail, path, expected=listed[name], found=digest)
        published = PUBLISHED.get((path.name, sizes.get(name)))
        if published is not None:
            verdict = "the published file" if digest.startswith(published) else "not the published file"
            report.notes.append(f"{path}: {verdict}, by its SHA-256")


def _listed_digests(path: Path, report: Report) -> dict[str, str]:
    """Name to digest of the lines of SHA256SUMS; empty where there is none."""
    listed: dict[str, str] = {}
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines() if path.exists() else (), 1):
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        name = PurePosixPath(match[2]) if match else None
        if name is None or name.is_absolute() or ".." in name.parts:
            detail = "not a digest and the name of a file in this directory"
            report.problem(ErrorKind.CHECKPOINT_INVALID, detail, path, tensor=f"line {number}")
        else:
            listed[name.as_posix()] = match[1].lower()
    return listed


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with regular_file(path, DOWNLOAD_FILE) as (file, _):
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _and_others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
