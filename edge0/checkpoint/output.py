"""Files made of ranges of other files: written, read back and compared, made to last.

An `Output` is a head and a list of source ranges. The same list writes the file and decides whether a file that is
there holds what it should. Bytes are moved, never interpreted: this module knows nothing of checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge0.checkpoint.layout import ByteRange
from edge0.errors import Edge0Error, ErrorKind, writing

PARTIAL_NAME = ".partial"  # the one file that is being written
RESUME = "run the same command again: it goes on from here"


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

    def write(self, directory: Path, report: Callable[[int], None]) -> None:
        """Write the file under another name, read it back, and give it its name.

        Args:
            report: told the bytes done so far: written, then read back on top of these.

        Raises:
            Edge0Error: OUTPUT_UNWRITABLE when it cannot be written or does not read back, READ_FAILED.
        """
        path, unfinished = directory / self.name, directory / PARTIAL_NAME
        position = 0
        with writing(path, RESUME):
            path.unlink(missing_ok=True)
            make_folders(path.parent)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for chunk in self.chunks():
                with writing(path, RESUME):
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                position += len(chunk)
                report(position)
            with writing(path, RESUME):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not self.held_by(unfinished, report):
            raise Edge0Error(
                ErrorKind.OUTPUT_UNWRITABLE,
                "the file does not read back as the source has it",
                path=path,
                hint=f"check the disk, and that nothing changes the source; then {RESUME}",
            )
        with writing(path, RESUME):
            unfinished.rename(path)
            sync_folder(path.parent)

    def held_by(self, path: Path, report: Callable[[int], None]) -> bool:
        """Whether a file holds exactly what it should, read from the device where the system can be told to."""
        position = 0
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self.nbytes:
                    return False
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for chunk in self.chunks():
                    if file.read(len(chunk)) != chunk:
                        return False
                    position += len(chunk)
                    report(self.nbytes + position)
        except OSError:  # it is not there, or the device cannot give it back
            return False
        return position == self.nbytes


def make_folders(path: Path) -> None:
    """Make a folder and those above it, each of which outlasts a power cut."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was made and renamed inside `path` last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
