"""Repacking: a checkpoint with one page-aligned record per routed expert instead of nine slices of stacked tensors.

Every file of the new directory is a head and a list of source ranges (`Output`). The same list writes the file, reads
it back against the source, and decides after a crash whether a file of the earlier run may stay; nothing is believed
because of its name or size. All of it happens in a working directory beside the target, which gets the target's name
only when it is complete. Bytes are moved, never interpreted: this module knows nothing of quantisation or MLX.
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
from edge0.checkpoint.strict import os_errors
from edge0.errors import Edge0Error, ErrorKind
from edge0.tiers import ModelConfig, read_config

CHUNK_BYTES = 1 << 20  # most that is moved at once outside of experts, which move one at a time
PARTIAL_NAME = ".partial"  # the one file that is being written
OLD_LAYOUT = (SHARD_PATTERN, INDEX_NAME, "SHA256SUMS", PARTIAL_NAME)  # top-level files that are not copied
RESUME = "run the same command again: it goes on from here"

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


@dataclass(frozen=True)
class Output:
    """One file to be: `head`, then groups of source ranges, each filled up with zeros to a multiple of `stride`."""

    name: str  # relative to the directory
    nbytes: int
    head: bytes
    groups: Callable[[], Iterator[Sequence[ByteRange]]]
    stride: int = 1

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes in order, a few MiB at the most at a time.

        Raises:
            Edge0Error: READ_FAILED when a source file cannot be read, or ends early.
        """
        if self.head:
            yield self.head
        with _opened_on_demand() as read:
            for group in self.groups():
                parts = [read(piece) for piece in group]
                parts.append(bytes(-sum(map(len, parts)) % self.stride))
                yield b"".join(parts)


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
            if _holds(working / output.name, output, report):
                kept += 1
            else:
                _write(working, output, report)
            done += 2 * output.nbytes
        for shard in index.shards:
            check_identity(shard.path, shard.identity)
        with _writing(target):
            _sync_directory(working)
            working.rename(target)
            _sync_directory(target.parent)
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
        *_copies(source),
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


def _copies(source: Path) -> list[Output]:
    """All other regular files, links followed. Shards, their index and their checksums are of the old layout only."""

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
            for path in sorted(Path(folder, name) for name in names):
                old = path.parent == source and any(fnmatchcase(path.name, pattern) for pattern in OLD_LAYOUT)
                if path.is_file() and not old:
                    piece = ByteRange(path, 0, path.stat().st_size)
                    name = path.relative_to(source).as_posix()
                    copies.append(Output(name, piece.nbytes, b"", partial(_cut, piece)))
    return copies


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
        with _writing(place):
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
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
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


def _remove_strangers(working: Path, outputs: list[Output]) -> None:
    """Leave nothing in the working directory but files and folders that the result has too."""
    files = {working / output.name for output in outputs}
    folders = {parent for path in files for parent in path.parents}
    with _writing(working):
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
    with _writing(working):
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


# --- moving and comparing bytes ------------------------------------------------------------------------------------


def _write(working: Path, output: Output, report: Callable[[int], None]) -> None:
    """Write one file under another name, read it back, and give it its name."""
    path, unfinished = working / output.name, working / PARTIAL_NAME
    position = 0
    with _writing(path):
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for chunk in output.chunks():
            with _writing(path):
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            position += len(chunk)
            report(position)
        with _writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not _holds(unfinished, output, report):
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE,
            "the file does not read back as the source has it",
            path=path,
            hint=f"check the disk, and that nothing changes the source; then {RESUME}",
        )
    with _writing(path):
        unfinished.rename(path)
        _sync_directory(path.parent)


def _holds(path: Path, output: Output, report: Callable[[int], None]) -> bool:
    """Whether a file holds exactly what it should, read from the device where the system can be told to."""
    position = 0
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != output.nbytes:
                return False
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for chunk in output.chunks():
                if file.read(len(chunk)) != chunk:
                    return False
                position += len(chunk)
                report(output.nbytes + position)
    except OSError:  # it is not there, or the device cannot give it back
        return False
    return position == output.nbytes


@contextmanager
def _opened_on_demand() -> Iterator[Callable[[ByteRange], bytes]]:
    """Yields a function that reads a range; files are opened when first read and closed together."""
    descriptors: dict[Path, int] = {}

    def read(piece: ByteRange) -> bytes:
        parts, position, end = [], piece.offset, piece.offset + piece.nbytes
        try:
            if piece.path not in descriptors:
                descriptors[piece.path] = os.open(piece.path, os.O_RDONLY)
            while position < end:
                parts.append(os.pread(descriptors[piece.path], end - position, position))
                if not parts[-1]:
                    raise OSError(f"the file ends at byte {position}")
                position += len(parts[-1])
        except OSError as error:
            raise Edge0Error(
                ErrorKind.READ_FAILED,
                f"the source cannot be read: {error.strerror or error}",
                path=piece.path,
                tensor=f"bytes {piece.offset} to {end}",
                hint=f"check the disk and the file; then {RESUME}",
            ) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    try:
        yield read
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns what the system says of an output into an error that names it. Never wraps reads of the source."""
    try:
        yield
    except OSError as error:
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written: {error.strerror or error}", path=path, hint=RESUME
        ) from error


def _sync_directory(path: Path) -> None:
    """Make renames inside `path` last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
