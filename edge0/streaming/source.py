"""Two ways to get the bytes of an expert: explicit reads, and page faults on a mapping (the paper's way).

A third, past the page cache, is in `direct`. All know files and offsets and nothing of experts, slots or MLX.
Descriptors are opened once and kept; every failure of the storage is an error that names the file and the bytes, never
silence.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from edge0.checkpoint.header import FileIdentity, check_identity
from edge0.checkpoint.layout import ByteRange
from edge0.errors import Edge0Error, ErrorKind

LONG_BYTES = 4 << 20  # from which a read is one of many experts
VECTORS = 1024  # memories that one preadv may fill (IOV_MAX of Linux and macOS)
_advise = getattr(os, "posix_fadvise", None)
ADVICE_BYTES = 128 << 10  # one read-ahead request is cut, silently, at the device's request size; this fits all


class Source(Protocol):
    def read(self, piece: ByteRange, memories: Sequence[memoryview]) -> None:
        """Fill `memories` (together `piece.nbytes` bytes) from the file, one after the other."""

    def array(self, piece: ByteRange) -> np.ndarray:
        """The bytes as a uint8 array: fresh memory, or a view of the mapping."""

    def advise(self, pieces: Sequence[ByteRange]) -> None:
        """Tell the kernel that these ranges will be read."""

    def check(self, identities: Mapping[Path, FileIdentity]) -> None:
        """Check that what is open are the files whose headers were read, unchanged since.

        Raises:
            Edge0Error: FILE_CHANGED. A file that was renamed over is not: the open one is still the old one.
        """

    def close(self) -> None: ...


class OpenFiles:
    """The descriptors of a source, opened once and kept: what was opened is what is read. A source adds `read`."""

    def __init__(self, paths: Iterable[Path]):
        self._files: dict[Path, int] = {}
        try:
            for path in paths:
                self._files[path] = self._open(path)
        except BaseException:
            OpenFiles.close(self)
            raise

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error

    def descriptor(self, path: Path) -> int:
        return self._files[path]

    def array(self, piece: ByteRange) -> np.ndarray:
        fresh = np.empty(piece.nbytes, np.uint8)
        self.read(piece, [memoryview(fresh)])
        return fresh

    def check(self, identities: Mapping[Path, FileIdentity]) -> None:
        for path, descriptor in self._files.items():
            check_identity(path, identities[path], descriptor)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


class PreadSource(OpenFiles):
    """`preadv` into the caller's memory; `advise` queues the reads of a whole expert at once where the OS can.

    The OS is told to read nothing ahead by itself: what it took for a sequence brought 2 to 4 MiB that nobody wanted.
    Long reads have descriptors of their own, where it may: without, they run at half the speed.
    """

    def __init__(self, paths: Iterable[Path]):
        paths = list(paths)
        self._long = OpenFiles(paths)
        try:
            super().__init__(paths)
        except BaseException:
            self._long.close()
            raise

    def _open(self, path: Path) -> int:
        descriptor = super()._open(path)
        if _advise is not None:
            with suppress(OSError):  # a hint, as `advise`
                _advise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def read(self, piece: ByteRange, memories: Sequence[memoryview]) -> None:
        """One system call, as long as the OS gives all that it was asked for.

        Raises:
            Edge0Error: READ_FAILED on an I/O error or when the file ends inside the range.
        """
        done, rest = 0, list(memories)
        descriptor = (self._long if piece.nbytes >= LONG_BYTES else self).descriptor(piece.path)
        while rest:
            try:
                count = os.preadv(descriptor, rest[:VECTORS], piece.offset + done)
            except OSError as error:
                raise read_failed(piece, str(error)) from error
            if count == 0:
                raise read_failed(piece, f"the file ends after {done} of {piece.nbytes} bytes")
            done += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][count:]

    def check(self, identities: Mapping[Path, FileIdentity]) -> None:
        super().check(identities)
        self._long.check(identities)

    def close(self) -> None:
        super().close()
        self._long.close()

    def advise(self, pieces: Sequence[ByteRange]) -> None:
        if _advise is None:
            return
        with suppress(OSError):  # a hint that is not taken is no failure; the read will tell
            for piece in pieces:
                file, end = self._files[piece.path], piece.offset + piece.nbytes
                for start in range(piece.offset, end, ADVICE_BYTES):
                    _advise(file, start, min(ADVICE_BYTES, end - start), os.POSIX_FADV_WILLNEED)


class FaultSource(OpenFiles):
    """Copies out of a read-only mapping, so that the kernel reads by page fault. `random` switches read-around off."""

    def __init__(self, paths: Iterable[Path], random: bool = False):
        super().__init__(paths)
        self._maps: dict[Path, mmap.mmap] = {}
        for path, descriptor in self._files.items():
            self._maps[path] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            if random:
                self._maps[path].madvise(mmap.MADV_RANDOM)

    def read(self, piece: ByteRange, memories: Sequence[memoryview]) -> None:
        """A storage error here is a SIGBUS of the process: a mapping has no other way to report one."""
        view, offset = memoryview(self._maps[piece.path]), piece.offset
        for memory in memories:
            memory[:] = view[offset : offset + len(memory)]
            offset += len(memory)

    def array(self, piece: ByteRange) -> np.ndarray:
        return np.frombuffer(self._maps[piece.path], np.uint8, piece.nbytes, piece.offset)

    def advise(self, pieces: Sequence[ByteRange]) -> None:
        """Nothing: in this way of reading, the fault itself is the request."""

    def unmap(self) -> None:
        """Drop the page-table entries, for a harness that evicts: mapped pages stay in the page cache."""
        for mapping in self._maps.values():
            mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        for mapping in self._maps.values():
            mapping.close()
        self._maps = {}
        super().close()


def read_failed(piece: ByteRange, why: str) -> Edge0Error:
    return Edge0Error(
        ErrorKind.READ_FAILED,
        f"an expert could not be read: {why}",
        path=piece.path,
        tensor=f"bytes {piece.offset} to {piece.offset + piece.nbytes}",
        hint="check the disk and the file; the request was ended",
    )


def unreadable(path: Path, error: OSError) -> Edge0Error:
    return Edge0Error(ErrorKind.FILE_UNREADABLE, f"cannot be opened ({error.strerror})", path=path)
