"""Repacking: a checkpoint with one page-aligned record per routed expert instead of nine slices of stacked tensors.

Every file of the new directory is an `Output`, a list of source ranges, which also decides after a crash whether a file
of the earlier run may stay: nothing is believed because of its name or size. All of it happens in a working directory
beside the target, which gets the target's name only when it is complete. Bytes are moved, never interpreted: this
module knows nothing of quantisation or MLX.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NoReturn

from edge0.checkpoint.header import INDEX_NAME, ITEM_BYTES, SHARD_PATTERN, CheckpointIndex, TensorEntry, check_identity
from edge0.checkpoint.layout import (
    RECORD_ALIGN,
    RECORDS_TENSOR,
    ByteRange,
    ExpertLayout,
    expert_tensor,
    has_records,
    record_bytes,
    records_metadata,
    records_path,
)
from edge0.checkpoint.output import RESUME, Output, make_folders, sync_folder
from edge0.checkpoint.strict import os_errors
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import ModelConfig, read_config

CHUNK_BYTES = 1 << 20  # most that is moved at once outside of experts, which move one at a time
OLD_LAYOUT = (SHARD_PATTERN, INDEX_NAME, "SHA256SUMS")  # top-level files that are not copied, used or not

Progress = Callable[[int, int], None]  # bytes done so far, bytes in all


@dataclass(frozen=True)
class Repacked:
    """What a run of `repack` left in `directory`. `kept`: files that were there from an earlier, broken run."""

    directory: Path
    layers: int
    records: int
    record_bytes: int
    expert_bytes: int
    total_bytes: int
    files: int
    kept: int


def repack(source: Path | str, target: Path | str, progress: Progress | None = None) -> Repacked:
    """Write the checkpoint `source` in the layout of records to the new directory `target`.

    Goes on where an earlier run was interrupted. `progress` counts each byte twice: written, and read back.

    Raises:
        Edge0Error: whatever the source is refused for; OPTION_INVALID when it has records already or the directories
            lie inside each other; OUTPUT_UNWRITABLE when the target exists, does not fit, or cannot be written or
            read back; OUTPUT_BUSY when another process is at it; READ_FAILED when the source cannot be read,
            FILE_CHANGED when it was changed meanwhile.
    """
    source, target = Path(source), Path(os.path.abspath(target))
    working = target.with_name(f".{target.name}.repacking")
    if has_records(source):
        raise Edge0Error(ErrorKind.OPTION_INVALID, "the checkpoint has one record per expert already", path=source)
    config, index = read_config(source), CheckpointIndex.open(source)
    layout = ExpertLayout.of(index, config)
    _check_places(source, target, working)
    outputs = _outputs(source, config, index, layout)
    total = sum(output.nbytes for output in outputs)
    done = kept = 0

    def report(within: int) -> None:
        if progress is not None:
            progress(done + within, 2 * total)

    with _only_process(target):
        _remove_strangers(working, outputs)
        _check_space(working, outputs)
        for output in outputs:
            if output.held_by(working / output.name, report):
                kept += 1
            else:
                output.write(working, report)
            done += 2 * output.nbytes
        for shard in index.shards:
            check_identity(shard.path, shard.identity)
        with writing(target, RESUME):
            for folder in _folders(working, outputs):
                sync_folder(folder)
            working.rename(target)
            sync_folder(target.parent)
    return Repacked(
        directory=target,
        layers=len(layout.layers),
        records=len(layout.layers) * layout.experts,
        record_bytes=record_bytes(layout.specs),
        expert_bytes=layout.total_bytes,
        total_bytes=total,
        files=len(outputs),
        kept=kept,
    )


# --- what is to be written -----------------------------------------------------------------------------------------


def _outputs(source: Path, config: ModelConfig, index: CheckpointIndex, layout: ExpertLayout) -> list[Output]:
    """Experts first, so that the large files are settled before small ones; then the rest, then the other files."""
    experts = {expert_tensor(config, layer, spec) for layer in layout.layers for spec in layout.specs}
    resident = [entry for shard in index.shards for entry in shard.tensors.values() if entry.name not in experts]
    return [
        *(_layer_output(config, layout, layer) for layer in layout.layers),
        _resident_output(resident),
        *_copies(source, {shard.path for shard in index.shards}),
    ]


def _layer_output(config: ModelConfig, layout: ExpertLayout, layer: int) -> Output:
    stride = record_bytes(layout.specs)
    nbytes = layout.experts * stride
    entry = {"dtype": "U8", "shape": [layout.experts, stride], "data_offsets": [0, nbytes]}
    head = _header({"__metadata__": records_metadata(config, layer), RECORDS_TENSOR: entry}, RECORD_ALIGN)
    name = records_path(Path(), layer).as_posix()

    def groups() -> Iterator[Sequence[ByteRange]]:
        return (layout.pieces(layer, expert) for expert in range(layout.experts))

    return Output(name, len(head) + nbytes, head, groups, stride)


def _resident_output(entries: list[TensorEntry]) -> Output:
    """Wide items first, each shard's in file order: so every tensor lies on a multiple of its item size."""
    entries = sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.path, entry.offset))
    header: dict = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    head = _header(header, 8)

    def groups() -> Iterator[Sequence[ByteRange]]:
        return (part for entry in entries for part in _cut(ByteRange(entry.path, entry.offset, entry.nbytes)))

    return Output("model.safetensors", len(head) + offset, head, groups)


def _copies(source: Path, shards: set[Path]) -> list[Output]:
    """All other regular files, links followed, but nothing hidden: what lies there is a download tool's own.

    Shards, their index and their checksums are of the old layout only.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    copies, visited = [], set()
    with os_errors(source, "check the files of the checkpoint"):
        for folder, folders, names in os.walk(source, onerror=fail, followlinks=True):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:  # a link that leads back
                folders.clear()
                continue
            visited.add((status.st_dev, status.st_ino))
            folders[:] = filter(_is_shown, folders)
            for path in sorted(Path(folder, name) for name in filter(_is_shown, names)):
                old = path.parent == source and any(fnmatchcase(path.name, pattern) for pattern in OLD_LAYOUT)
                if path.is_file() and not old and path not in shards:
                    piece = ByteRange(path, 0, path.stat().st_size)
                    name = path.relative_to(source).as_posix()
                    copies.append(Output(name, piece.nbytes, b"", partial(_cut, piece)))
    return copies


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _header(header: dict, align: int) -> bytes:
    """Length and JSON of a safetensors header, filled up with spaces: the data begins at a multiple of `align`."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def _cut(piece: ByteRange) -> Iterator[Sequence[ByteRange]]:
    for start in range(0, piece.nbytes, CHUNK_BYTES):
        yield (ByteRange(piece.path, piece.offset + start, min(CHUNK_BYTES, piece.nbytes - start)),)


# --- before anything is written ------------------------------------------------------------------------------------


def _check_places(source: Path, target: Path, working: Path) -> None:
    """Neither the target nor the working directory may be the source or lie inside it."""
    for place in (target, working):
        with writing(place, RESUME):
            inside = any(parent.exists() and parent.samefile(source) for parent in (place, *place.parents))
        if inside:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "the output would lie in the checkpoint itself",
                path=place,
                hint="name a directory outside of it",
            )


@contextmanager
def _only_process(target: Path) -> Iterator[None]:
    """Holds a lock on a file beside the target, and removes that file at the end.

    A lock counts only while its file has its name: one that was removed meanwhile belonged to a run that has ended.
    """
    path = target.with_name(f".{target.name}.repacking.lock")
    with ExitStack() as undo:
        with writing(path, RESUME):
            make_folders(path.parent)
            lock = undo.enter_context(path.open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno()))
            except BlockingIOError:
                held = False
        if not held:
            raise Edge0Error(ErrorKind.OUTPUT_BUSY, "another process is repacking to this directory", path=target)
        undo.callback(path.unlink, missing_ok=True)
        if os.path.lexists(target):
            hint = "remove it or name another directory"
            raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, "is there already", path=target, hint=hint)
        yield


def _folders(working: Path, outputs: list[Output]) -> set[Path]:
    """The working directory and every folder below it that the result has."""
    return {working / parent for output in outputs for parent in Path(output.name).parents}


def _remove_strangers(working: Path, outputs: list[Output]) -> None:
    """Leave nothing in the working directory but files and folders that the result has too."""
    files = {working / output.name for output in outputs}
    folders = _folders(working, outputs)
    with writing(working, RESUME):
        if working.is_symlink():
            working.unlink()
        for root, inner, names in os.walk(working, topdown=False):
            for path in (Path(root, name) for name in (*inner, *names)):
                linked = path.is_symlink()
                if path.is_dir() and not linked:
                    if path not in folders:
                        path.rmdir()
                elif linked or path not in files or not path.is_file():
                    path.unlink()


def _check_space(working: Path, outputs: list[Output]) -> None:
    """What is there with the right size counts as done: should it turn out wrong, its room is used again."""
    with writing(working, RESUME):
        status = os.statvfs(working.parent)
        needed = 0
        for output in outputs:
            path = working / output.name
            if not (path.exists() and path.stat().st_size == output.nbytes):
                needed += -(-output.nbytes // status.f_frsize) * status.f_frsize
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE,
            "the repacked checkpoint does not fit the free space, in bytes",
            path=working.parent,
            expected=needed,
            found=free,
            hint="make room or name a directory on another disk",
        )
