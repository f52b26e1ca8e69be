"""Page-cache state of a checkpoint file: probe it, evict from it, warm it, count the bytes that the device delivered.

Linux has two probes that answer different questions. `cachestat(2)` counts a page as soon as its read is queued;
`mincore(2)` only when it can be copied. Both are kept: cold = neither, in flight = queued but not readable. macOS has
`mincore` alone, which there counts pages in flight as resident, so in-flight is always 0.

Knows nothing of experts or records; a range is (offset, nbytes) in one file. Does not know whether the storage below
has a cache of its own, and cannot evict pages that another process, or another mapping in this process, has mapped.

Why a self-test: mincore calls every page resident in a file that we neither own nor may write, and cachestat sees
nothing on overlay filesystems. Neither reports an error that would tell.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import mmap
import os
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import filesystem_of

Range = tuple[int, int]

PAGE_BYTES = mmap.PAGESIZE
CACHESTAT, MINCORE, UNAVAILABLE = "cachestat+mincore", "mincore", "unavailable"
LINUX, DARWIN = sys.platform == "linux", sys.platform == "darwin"
DEFAULT_METHOD = CACHESTAT if LINUX else MINCORE

_SYS_CACHESTAT = 451  # one number on every architecture that mlx is built for
_MADV_DONTNEED, _MADV_PAGEOUT, _MADV_POPULATE_READ = 4, 21, 22  # Linux
_MS_INVALIDATE, _RUSAGE_INFO_V4 = 2, 4  # macOS
_PROBE_SPAN_BYTES = 1 << 30
_EVICT_TRIES, _STUCK_TRIES = 50, 3
_SCRATCH_BYTES, _PLACES, _PLACE_BYTES = 8 << 20, 16, 1 << 20
_LOW_BIT = bytes(value & 1 for value in range(256))  # macOS sets further flag bits in what mincore returns
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}

_LIBC = C.CDLL(None, use_errno=True)  # CDLL releases the GIL around every call
_LIBC.mincore.argtypes = [C.c_void_p, C.c_size_t, C.c_void_p]
_LIBC.madvise.argtypes = [C.c_void_p, C.c_size_t, C.c_int]
_LIBC.msync.argtypes = [C.c_void_p, C.c_size_t, C.c_int]
_LIBC.syscall.restype = C.c_long


@dataclass(frozen=True)
class Residency:
    """State of the asked bytes: asked = cold + in flight + readable from memory. In-flight bytes have a read queued."""

    asked_bytes: int
    cold_bytes: int
    inflight_bytes: int


@dataclass(frozen=True)
class ProbeReport:
    """What can be believed on this machine, for this file.

    method: argument for `FilePages`, or "unavailable". evicts: `evict` left no resident page behind.
    counts_device_bytes: `thread_device_bytes` grew with a cold read. reason: one sentence for the log.
    """

    method: str
    evicts: bool
    counts_device_bytes: bool
    reason: str


def page_spans(ranges: Iterable[Range]) -> list[tuple[int, int]]:
    """Page-aligned (start, end) spans that cover the ranges: rounded outward, sorted, touching ones merged."""
    spans: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if nbytes == 0:
            continue
        start, end = offset // PAGE_BYTES * PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES) * PAGE_BYTES
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _cachestat(fd: int, offset: int, nbytes: int) -> int:
    """Pages of the span that are cached or have a read queued. Raises OSError: ENOSYS before Linux 6.5."""
    span, counts = (C.c_uint64 * 2)(offset, nbytes), (C.c_uint64 * 5)()
    if _LIBC.syscall(C.c_long(_SYS_CACHESTAT), C.c_long(fd), span, counts, C.c_long(0)):
        raise OSError(C.get_errno(), "cachestat")
    return counts[0]


class FilePages:
    """The page-cache state of one file, through one descriptor and one shared read-only mapping of the whole file.

    Probing is safe from several threads at once: nothing is shared but the descriptor and the mapping. The file must
    not change its size while this object is open.

    Raises (constructor): Edge0Error FILE_MISSING, FILE_UNREADABLE, OPTION_INVALID (method), PROBE_UNAVAILABLE.
    """

    def __init__(self, path: os.PathLike[str] | str, method: str = DEFAULT_METHOD):
        self.path = Path(path)
        if method not in (CACHESTAT, MINCORE):
            kind = ErrorKind.PROBE_UNAVAILABLE if method == UNAVAILABLE else ErrorKind.OPTION_INVALID
            expected = f"{CACHESTAT} or {MINCORE}"
            raise Edge0Error(kind, "no usable probe", path=self.path, expected=expected, found=method)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Edge0Error(ErrorKind.FILE_MISSING, "no such file", path=self.path) from error
        except OSError as error:
            raise Edge0Error(ErrorKind.FILE_UNREADABLE, str(error.strerror), path=self.path) from error
        self._map: mmap.mmap | None = None
        try:
            self.file_bytes = os.fstat(self._fd).st_size
            if hasattr(os, "posix_fadvise"):  # warm() must cache what it reads and no read-ahead beyond it
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            if self.file_bytes:
                self._map = mmap.mmap(self._fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._base: int = np.frombuffer(self._map, np.uint8).ctypes.data  # valid until the mapping is closed
            self._uses_cachestat = method == CACHESTAT
            if self._uses_cachestat:
                _cachestat(self._fd, 0, PAGE_BYTES)
        except (OSError, ValueError) as error:
            self.close()
            raise Edge0Error(
                ErrorKind.PROBE_UNAVAILABLE,
                f"{method} fails here: {error}",
                path=self.path,
                hint="take the method that self_test reports",
            ) from error

    def __enter__(self) -> FilePages:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close descriptor and mapping."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def cached_bytes(self) -> int:
        """Bytes of the file in the page cache; with cachestat this includes pages in flight."""
        if self._uses_cachestat:
            pages = _cachestat(self._fd, 0, 0)
        else:
            starts = range(0, self.file_bytes, _PROBE_SPAN_BYTES)
            pages = sum(self._count(at, min(_PROBE_SPAN_BYTES, self.file_bytes - at)) for at in starts)
        beyond_end = -self.file_bytes % PAGE_BYTES
        last_page = self.file_bytes // PAGE_BYTES * PAGE_BYTES
        return pages * PAGE_BYTES - (beyond_end if beyond_end and self._is_cached(last_page) else 0)

    def residency(self, ranges: Sequence[Range]) -> Residency:
        """Sum over the ranges, exact to the byte at range edges. Raises ValueError for a range outside the file."""
        asked = cold = inflight = 0
        for offset, nbytes in ranges:
            self._check(offset, nbytes)
            if nbytes:
                absent, queued = self._absent(offset, nbytes)
                asked, cold, inflight = asked + nbytes, cold + absent, inflight + queued
        return Residency(asked, cold, inflight)

    def evict(self, ranges: Sequence[Range] | None = None) -> None:
        """Drop the ranges, rounded outward to pages, or the whole file (after a sync: dirty pages cannot be dropped).

        Waits for pages in flight (up to 50 ms a span). Pages that another mapping holds stay, without an error: probe
        afterwards. Raises OSError from the advice call.
        """
        if ranges is None:
            with contextlib.suppress(OSError):  # a filesystem that cannot sync has nothing dirty
                os.fsync(self._fd)
            ranges = [(0, self.file_bytes)]
        for offset, nbytes in ranges:
            self._check(offset, nbytes)
        for start, end in page_spans(ranges):
            if DARWIN:
                if _LIBC.msync(self._base + start, end - start, _MS_INVALIDATE):
                    raise OSError(C.get_errno(), "msync")
            else:
                self._drop(start, end)

    def warm(self, ranges: Sequence[Range] | None = None, chunk_bytes: int = 8 << 20) -> None:
        """Read the ranges (default: the whole file) into the page cache. Raises Edge0Error READ_FAILED."""
        ranges = [(0, self.file_bytes)] if ranges is None else ranges
        for offset, nbytes in ranges:
            self._check(offset, nbytes)
        scratch = memoryview(bytearray(min(chunk_bytes, max((nbytes for _, nbytes in ranges), default=0))))
        for offset, nbytes in ranges:
            at, end = offset, offset + nbytes
            while at < end:
                want = min(len(scratch), end - at)
                try:
                    got = os.preadv(self._fd, [scratch[:want]], at)
                except OSError as error:
                    raise Edge0Error(ErrorKind.READ_FAILED, f"at byte {at}: {error}", path=self.path) from error
                if got == 0:
                    detail = f"at byte {at}: end of file"
                    raise Edge0Error(ErrorKind.READ_FAILED, detail, path=self.path, expected=want, found=0)
                at += got

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.file_bytes:
            raise ValueError(f"range ({offset}, {nbytes}) is outside {self.path} of {self.file_bytes} bytes")

    def _resident(self, start: int, nbytes: int) -> bytes:
        """One byte a page, 1 where the page is readable; start is page-aligned."""
        pages = C.create_string_buffer(-(-nbytes // PAGE_BYTES))
        if _LIBC.mincore(self._base + start, nbytes, pages):
            raise OSError(C.get_errno(), "mincore")
        return pages.raw.translate(_LOW_BIT)

    def _count(self, start: int, nbytes: int) -> int:
        return self._resident(start, nbytes).count(1)

    def _is_cached(self, start: int) -> bool:
        """Whether the page at start is cached or queued."""
        return bool(_cachestat(self._fd, start, PAGE_BYTES) if self._uses_cachestat else self._count(start, PAGE_BYTES))

    def _absent(self, offset: int, nbytes: int) -> tuple[int, int]:
        """(cold, in-flight) bytes of one non-empty range."""
        start, end = offset // PAGE_BYTES * PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES) * PAGE_BYTES
        pages = (end - start) // PAGE_BYTES
        queued = _cachestat(self._fd, start, end - start) if self._uses_cachestat else pages
        if queued == 0:
            return nbytes, 0
        resident = self._resident(start, end - start)
        missing = resident.count(0)
        if missing == 0:
            return 0, 0
        # Bytes of the two edge pages that lie outside the range, where those pages are missing.
        cuts = [(start, offset - start, resident[0]), (end - PAGE_BYTES, end - offset - nbytes, resident[-1])]
        cuts = [(page, cut) for page, cut, readable in cuts if cut and not readable]
        absent = missing * PAGE_BYTES - sum(cut for _, cut in cuts)
        waiting = queued - (pages - missing) if self._uses_cachestat else 0
        if waiting <= 0:
            return absent, 0
        if waiting >= missing:
            return 0, absent
        waiting_bytes = waiting * PAGE_BYTES - sum(cut for page, cut in cuts if self._is_cached(page))
        waiting_bytes = min(max(waiting_bytes, 0), absent)  # the cache moves between the two probes
        return absent - waiting_bytes, waiting_bytes

    def _drop(self, start: int, end: int) -> None:
        """Linux: drop the pages of one span; what needs more than the advice is waited for or split."""
        stuck = 0
        for _ in range(_EVICT_TRIES):
            _LIBC.madvise(self._base + start, end - start, _MADV_DONTNEED)  # a page in our page table would stay
            os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)
            if self._uses_cachestat and not _cachestat(self._fd, start, end - start):
                return
            readable = self._count(start, end - start)
            if self._uses_cachestat and _cachestat(self._fd, start, end - start) > readable:
                time.sleep(0.001)  # a page is locked until its read arrives
                continue
            if readable == 0 or stuck == _STUCK_TRIES:
                return
            stuck += 1
            if stuck == 1:
                self._split_edges(start, end)
            else:
                time.sleep(0.001)  # the kernel's own scans hold pages for a moment

    def _split_edges(self, start: int, end: int) -> None:
        """Break up large folios that cross an edge: the kernel drops a folio whole or, if part lies outside, not.

        Paging out one mapped page of a large folio splits it. Where the kernel cannot, the pages stay cached.
        """
        for page in {start, end - PAGE_BYTES}:
            if self._count(page, PAGE_BYTES):
                _LIBC.madvise(self._base + page, PAGE_BYTES, _MADV_POPULATE_READ)  # resident: maps it, no read
                _LIBC.madvise(self._base + page, PAGE_BYTES, _MADV_PAGEOUT)


def darwin_rusage() -> dict[str, int]:
    """Bytes of this process on macOS: disk_read, disk_written, rss, footprint, peak_footprint. Raises OSError."""
    buffer = (C.c_uint8 * 1024)()
    if _LIBC.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, buffer):
        raise OSError(C.get_errno(), "proc_pid_rusage")
    return parse_rusage_v4(bytes(buffer))


def parse_rusage_v4(raw: bytes) -> dict[str, int]:
    """Named bytes of a `struct rusage_info_v4`: a 16-byte UUID, then unsigned 64-bit words."""
    words = struct.unpack_from("<29Q", raw, 16)
    names = {"rss": 6, "footprint": 7, "disk_read": 16, "disk_written": 17, "peak_footprint": 28}
    return {name: words[index] for name, index in names.items()}


def thread_device_bytes() -> int:
    """Bytes that the device delivered so far because of this thread, read-ahead included; take differences.

    Linux: blocks of I/O submitted by the calling thread. macOS: of the whole process. Raises Edge0Error
    PROBE_UNAVAILABLE on other systems.
    """
    if LINUX:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock * 512
    if DARWIN:
        return darwin_rusage()["disk_read"]
    raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, f"no per-thread device counter on {sys.platform}")


def self_test(path: os.PathLike[str] | str, scratch_dir: os.PathLike[str] | str | None = None) -> ProbeReport:
    """Try eviction and probes on a scratch file beside `path`, then compare the two probes on `path` itself.

    Reads the first page of `path` and writes 8 MiB into `scratch_dir` (default: the folder of `path`, else the system's
    temporary folder). Raises Edge0Error FILE_MISSING, FILE_UNREADABLE.
    """
    path = Path(path)
    with FilePages(path, MINCORE) as pages:
        if pages.file_bytes == 0:
            return ProbeReport(UNAVAILABLE, False, False, f"{path.name} is empty")
        if (kind := filesystem_of(path)[0]) in MEMORY_FILESYSTEMS:
            return ProbeReport(UNAVAILABLE, False, False, f"{path.name} is on {kind}, which is always in memory")
        if LINUX and not _may_probe(path):
            return ProbeReport(UNAVAILABLE, False, False, f"mincore needs ownership of or write access to {path.name}")
        method, told = _compare_probes(pages)
    if method == UNAVAILABLE:
        return ProbeReport(UNAVAILABLE, False, False, told)
    for place in [scratch_dir or path.parent, tempfile.gettempdir()]:
        scratch_kind = filesystem_of(place)[0]
        if scratch_kind in MEMORY_FILESYSTEMS:
            continue  # nothing can be evicted there
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=place, prefix=".edge0-probe-") as scratch:
            scratch.write(os.urandom(_SCRATCH_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
            honest, evicts, counts, found = _try_scratch(scratch.name)
            told = f"{told}; scratch file on {scratch_kind}: {found}"
            return ProbeReport(method if honest else UNAVAILABLE, evicts, counts, told)
    return ProbeReport(method, False, False, f"{told}; no disk folder to write a scratch file to, eviction not tested")


def _may_probe(path: Path) -> bool:
    return os.geteuid() in (0, path.stat().st_uid) or os.access(path, os.W_OK, effective_ids=True)


def _compare_probes(pages: FilePages) -> tuple[str, str]:
    """(method, reason) from cachestat against mincore at up to 16 places of the file, at rest."""
    size, fd = pages.file_bytes, pages._fd
    starts = sorted({index * size // _PLACES // PAGE_BYTES * PAGE_BYTES for index in range(_PLACES)})
    places = [(start, min(_PLACE_BYTES, size - start)) for start in starts]
    for _ in range(3):  # a read that is queued, or a page reclaimed, at this moment lets the two differ
        pages.warm([(0, min(PAGE_BYTES, size))])  # at least one page to compare
        seen = pages._count(0, 1)
        if not seen:
            continue
        if not LINUX:
            return MINCORE, "mincore is the only probe of this system"
        try:
            pairs = [(_cachestat(fd, start, nbytes), pages._count(start, nbytes)) for start, nbytes in places]
        except OSError as error:
            return MINCORE, f"cachestat fails ({error})"
        if all(queued == readable for queued, readable in pairs):
            return CACHESTAT, f"cachestat equals mincore at {len(places)} places"
        time.sleep(0.01)
    if not seen:
        return UNAVAILABLE, "mincore does not see a page that was just read"
    return MINCORE, f"cachestat and mincore disagree (pages, {len(places)} places: {pairs})"


def _try_scratch(path: str) -> tuple[bool, bool, bool, str]:
    """(mincore tells the truth, evict works, device bytes are counted, what was seen) on a clean 8 MiB file."""
    half = _SCRATCH_BYTES // 2
    with FilePages(path, MINCORE) as pages:
        pages.evict()
        after_write = pages.cached_bytes()
        before = thread_device_bytes()
        pages.warm([(0, half)])
        device_bytes, after_read = thread_device_bytes() - before, pages.cached_bytes()
        pages.evict()
        after_evict = pages.cached_bytes()
    near = half // 100  # the kernel may reclaim, or hold, a few pages at any moment
    evicts = max(after_write, after_evict) <= near
    honest = half - near <= after_read <= (half + near if evicts else _SCRATCH_BYTES - near)
    seen = f"{after_write} bytes cached after eviction, {after_read} after reading {half}"
    return honest, evicts, evicts and half - near <= device_bytes <= 2 * half, f"{seen}, {device_bytes} from the device"
