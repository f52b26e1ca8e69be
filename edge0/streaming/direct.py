"""Reads that leave the page cache as it is: `O_DIRECT` on Linux, `F_NOCACHE` on macOS.

Where a process is held to a limit, the page cache counts against it: a byte that is kept there is missing from the
bank, and every page that is read in pushes another one out, which costs more than the copy. A direct read starts and
ends on block boundaries, in memory and in the file. A record of a repacked checkpoint begins on one, and a bank's
memories are made so: the device writes a record straight into its nine places. Elsewhere the blocks around a range go
into a page-aligned buffer of the reading thread, and the range is copied out of it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from edge0.checkpoint.layout import ByteRange
from edge0.errors import Edge0Error, ErrorKind
from edge0.streaming.source import OpenFiles, read_failed, unreadable

DIRECT_BYTES = 2 << 20  # one direct read at the most, and each reading thread's buffer
DIRECT_ALIGN = 4096  # bytes; a multiple of the logical block of every disk in use
DARWIN = sys.platform == "darwin"


class DirectSource(OpenFiles):
    """Some files, opened once and kept.

    Raises:
        Edge0Error: FILE_UNREADABLE; OPTION_INVALID when a file's file system refuses direct reads.
    """

    def __init__(self, paths: Iterable[Path]):
        self._own = threading.local()
        self._straight = True  # until the system refuses a read into the memories themselves
        super().__init__(paths)

    def _open(self, path: Path) -> int:
        """Some file systems refuse to open, others only to read: one block is read to know."""
        descriptor = None
        try:
            descriptor = os.open(path, os.O_RDONLY | (0 if DARWIN else os.O_DIRECT))
            if DARWIN:
                fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            os.preadv(descriptor, [self._buffer()[:DIRECT_ALIGN]], 0)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise unreadable(path, error) from error
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                f"option io: the file system refuses direct reads ({error.strerror})",
                path=path,
                expected="pread",
                found="direct",
                hint="or copy the checkpoint to a disk that takes them",
            ) from error
        return descriptor

    def _buffer(self) -> memoryview:
        """This thread's; an anonymous mapping starts on a page."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, DIRECT_BYTES))
        return self._own.buffer

    def read(self, piece: ByteRange, memories: Sequence[memoryview]) -> None:
        """Fill `memories` (together `piece.nbytes` bytes) from the file, one after the other.

        Raises:
            Edge0Error: READ_FAILED on an I/O error or when the file ends inside the range.
        """
        if self._straight and not piece.offset % DIRECT_ALIGN and self._read_straight(piece, memories):
            return
        buffer, rest = self._buffer(), list(memories)
        place, end = piece.offset, piece.offset + piece.nbytes
        while place < end:
            start = place - place % DIRECT_ALIGN
            length = min(len(buffer), -(-(end - start) // DIRECT_ALIGN) * DIRECT_ALIGN)
            try:
                count = os.preadv(self._files[piece.path], [buffer[:length]], start)
            except OSError as error:
                raise read_failed(piece, str(error)) from error
            got = buffer[place - start : min(count, end - start)]
            if not len(got):
                raise read_failed(piece, f"the file ends after {place - piece.offset} of {piece.nbytes} bytes")
            place += len(got)
            _scatter(got, rest)

    def _read_straight(self, piece: ByteRange, memories: Sequence[memoryview]) -> bool:
        """Without a copy, where memories begin and end as the disk wants them. What this does not bring, for whatever
        reason, is read again through the buffer, which tells what is wrong."""
        beyond = self._buffer()[: -piece.nbytes % DIRECT_ALIGN]  # up to the end of the range's last block
        try:
            return os.preadv(self._files[piece.path], [*memories, beyond], piece.offset) >= piece.nbytes
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._straight = False
            return False

    def advise(self, pieces: Sequence[ByteRange]) -> None:
        """Nothing: a hint would fill the page cache."""


def _scatter(data: memoryview, memories: list[memoryview]) -> None:
    """Copy bytes into the first of some memories; what was filled is taken off the list."""
    while len(data):
        part = data[: len(memories[0])]
        memories[0][: len(part)] = part
        data = data[len(part) :]
        if len(part) == len(memories[0]):
            memories.pop(0)
        else:
            memories[0] = memories[0][len(part) :]
