"""What the storage below a checkpoint delivers: random reads of expert size, and whether a cache hides the device.

Reads go past the page cache where the system allows it (Linux O_DIRECT, macOS F_NOCACHE after eviction); where it does
not, they are buffered reads of evicted ranges, none read twice. Direct reads are what the device can do; advised reads
are what the engine's own way of reading gets out of it.

Does not know the drive: its own cache, an idle state, or that a file was written a moment ago (and may still lie in the
drive's, or the host's, memory) make it look faster than a checkpoint that was left alone for a day.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge0.checkpoint.layout import ByteRange
from edge0.errors import Edge0Error, ErrorKind
from edge0.streaming.direct import DIRECT_ALIGN, DirectSource
from edge0.streaming.source import PreadSource
from edge0.telemetry.host import describe_host
from edge0.telemetry.pagecache import DARWIN, LINUX, MEMORY_FILESYSTEMS, MINCORE, FilePages, thread_device_bytes

DIRECT, ADVISED, BUFFERED = "direct", "advised", "buffered"
THREADS = (1, 2, 4, 8)
NONE, SUSPECTED, UNKNOWN = "none", "suspected", "unknown"

_MIB = 1 << 20
_LEAST_READS = 4  # of each thread, however slow the device
_BLOCKS, _LEAST_BLOCKS, _PASS_SECONDS = 300, 30, 0.35
_P90_RATIO, _MEDIAN_RATIO, _FAST_US = 3.0, 1.5, 70.0


@dataclass(frozen=True)
class ReadRow:
    """Random reads by a number of threads at once: all of them together, and the median time of one.

    `device_share`: bytes that the device delivered over bytes read; None where the system does not count by thread.
    Well below 1, the reads were answered from memory (or the file system does not count).
    """

    threads: int
    mib_s: float
    median_ms: float
    n: int
    device_share: float | None = None


@dataclass(frozen=True)
class RandomReads:
    """`way`: direct, advised or buffered. `read_bytes`: of one read, the asked size rounded up to whole blocks."""

    way: str
    read_bytes: int
    rows: tuple[ReadRow, ...]


@dataclass(frozen=True)
class LowerCache:
    """Whether a cache below the page cache is `suspected`, ruled out (`none`) or `unknown`, and the times behind it.

    Times are microseconds of 4 KiB direct reads at random places, then of the same ones again.
    """

    verdict: str
    reason: str
    first_median_us: float | None = None
    again_median_us: float | None = None
    first_p90_us: float | None = None
    again_p90_us: float | None = None

    def times(self) -> dict[str, float | None]:
        """The four times by name."""
        return {key: value for key, value in asdict(self).items() if key.endswith("_us")}


Place = tuple[Path, int]  # (file, offset)
Read = Callable[[Path, int, memoryview], None]  # fills the memory from a place


def random_reads(
    path: os.PathLike[str] | str | Sequence[Path],
    read_bytes: int,
    threads: Sequence[int] = THREADS,
    seconds: float = 1.0,
    way: str | None = None,
    report: Callable[[str], None] = lambda what: None,
) -> RandomReads:
    """Read at random places of one file, or of several as if they were one, for `seconds` with each number of threads.

    `way` None is direct, or buffered where direct reads are refused. Every way but direct evicts the files first, and
    stops early when every place has been read once. `report` hears what is about to run.

    Raises:
        Edge0Error: OPTION_INVALID when no file holds one read, FILE_MISSING, FILE_UNREADABLE, READ_FAILED.
    """
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(one) for one in path]
    nbytes = -(-read_bytes // DIRECT_ALIGN) * DIRECT_ALIGN
    sizes = {one: _file_bytes(one) for one in paths}
    if max(sizes.values()) < nbytes:
        detail, expected = "no file is as long as one read", f">= {nbytes} bytes"
        raise Edge0Error(ErrorKind.OPTION_INVALID, detail, path=paths[0], expected=expected, found=max(sizes.values()))
    if way is None:
        way = DIRECT if all(map(_takes_direct, paths)) else BUFFERED
    rows = []
    files = [(one, size) for one, size in sizes.items() if size >= nbytes]
    with _opened([one for one, _ in files], way) as read:
        for count in threads:
            report(f"{way} reads, {count} thread{'s' if count > 1 else ''}")
            if way != DIRECT or DARWIN:  # macOS gives what is cached, even to readers that do not cache
                evict(paths)
            places = _anywhere(files, nbytes, count) if way == DIRECT else _each_once(files, nbytes, count)
            rows.append(_measure(read, places, nbytes, count, seconds))
    return RandomReads(way, nbytes, tuple(rows))


def lower_cache(path: os.PathLike[str] | str, host: Mapping[str, Any] | None = None) -> LowerCache:
    """Whether something below the page cache keeps the file in memory, such as the host of a virtual machine.

    `path`: a file, or a checkpoint directory, of which the largest file is taken. About 300 direct reads of 4 KiB,
    twice, in less than a second; nothing is written or evicted. A session on such a machine calls its times
    "guest-cold": cold for the guest, not for the device.

    Args:
        host: `describe_host` of the same path, where it is at hand.

    Raises:
        Edge0Error: FILE_MISSING, FILE_UNREADABLE, READ_FAILED.
    """
    path = largest_file(path)
    host = describe_host(path) if host is None else host
    if host["filesystem"] in MEMORY_FILESYSTEMS:
        return LowerCache(UNKNOWN, f"the file is on {host['filesystem']}, which is memory itself")
    if not _takes_direct(path):
        return LowerCache(UNKNOWN, "the file system refuses reads past the page cache")
    if DARWIN:
        evict([path])
    with _opened([path], DIRECT) as read:
        blocks = list(range(0, _file_bytes(path) - DIRECT_ALIGN + 1, DIRECT_ALIGN))
        offsets = random.Random(0).sample(blocks, min(_BLOCKS, len(blocks)))
        first = _block_times(read, path, offsets, _PASS_SECONDS)
        again = _block_times(read, path, offsets[: len(first)], 2 * _PASS_SECONDS)
    return judge_times(first, again, host.get("hypervisor"), host.get("device"))


def judge_times(
    first_us: Sequence[float], again_us: Sequence[float], hypervisor: bool | None, device: str | None
) -> LowerCache:
    """The verdict on two passes over the same blocks; times in microseconds.

    A hypervisor decides alone: its host may cache whatever it likes. Without one, a second pass that is much faster
    shows a cache that the first one filled, and a first pass faster than flash shows one that was full already.
    """
    if min(len(first_us), len(again_us)) < _LEAST_BLOCKS:
        found = f"only {min(len(first_us), len(again_us))} blocks could be read twice, {_LEAST_BLOCKS} are needed"
        return LowerCache(SUSPECTED if hypervisor else UNKNOWN, found + ("; this is a guest" if hypervisor else ""))
    medians = statistics.median(first_us), statistics.median(again_us)
    p90s = _p90(first_us), _p90(again_us)
    told = f"4 KiB direct reads: median {medians[0]:.0f} us, again {medians[1]:.0f} us"
    told += f"; p90 {p90s[0]:.0f} us, again {p90s[1]:.0f} us"
    reasons = []
    if hypervisor:
        reasons.append("this is a guest of a hypervisor, whose host may cache the disk")
    if p90s[0] / p90s[1] > _P90_RATIO or medians[0] / medians[1] > _MEDIAN_RATIO:
        reasons.append("the second pass over the same blocks was much faster")
    if medians[0] < _FAST_US and not (device or "").startswith("nvme") and not (DARWIN and hypervisor is False):
        reasons.append(f"a first pass below {_FAST_US:.0f} us is faster than flash memory")
    verdict, why = (SUSPECTED, "; ".join(reasons)) if reasons else (NONE, "nothing hints at one")
    if DARWIN and hypervisor is False:
        verdict, why = NONE, "macOS on the machine itself: there is no host below"
    return LowerCache(verdict, f"{why} ({told})", medians[0], medians[1], p90s[0], p90s[1])


def largest_file(path: os.PathLike[str] | str) -> Path:
    """The file itself, or the largest safetensors file in a checkpoint directory.

    Raises:
        Edge0Error: FILE_MISSING.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    found = sorted(path.rglob("*.safetensors"), key=_file_bytes)
    if not found:
        raise Edge0Error(
            ErrorKind.FILE_MISSING,
            "no safetensors file in this directory",
            path=path,
            hint="name the directory of a checkpoint",
        )
    return found[-1]


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        kind = ErrorKind.FILE_MISSING if error.errno == errno.ENOENT else ErrorKind.FILE_UNREADABLE
        raise Edge0Error(kind, str(error.strerror), path=path) from error


def _open(path: Path, direct: bool) -> int:
    """A descriptor for reading past the page cache, or through it without read-ahead. OSError passes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct and LINUX else 0))
    if direct and DARWIN:
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    if not direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _takes_direct(path: Path) -> bool:
    """Whether the file can be read past the page cache. Raises Edge0Error FILE_UNREADABLE."""
    if not (LINUX or DARWIN):
        return False
    try:
        DirectSource([path]).close()
    except Edge0Error as error:
        if error.kind is not ErrorKind.OPTION_INVALID:
            raise
        return False
    return True


@contextmanager
def _opened(paths: Sequence[Path], way: str) -> Iterator[Read]:
    """How to read from the files: advised as the engine does it, else straight into the memory, with nothing copied.

    Raises:
        Edge0Error: FILE_UNREADABLE. Reading raises READ_FAILED.
    """
    with ExitStack() as stack:
        if way == ADVISED:
            source = PreadSource(paths)
            stack.callback(source.close)

            def read(path: Path, offset: int, view: memoryview) -> None:
                piece = ByteRange(path, offset, len(view))
                source.advise([piece])
                source.read(piece, [view])

        else:
            descriptors: dict[Path, int] = {}
            for path in paths:
                try:
                    descriptors[path] = _open(path, way == DIRECT)
                except OSError as error:
                    raise Edge0Error(ErrorKind.FILE_UNREADABLE, str(error.strerror), path=path) from error
                stack.callback(os.close, descriptors[path])

            def read(path: Path, offset: int, view: memoryview) -> None:
                _read(path, descriptors[path], offset, view)

        yield read


def evict(paths: Sequence[Path]) -> None:
    """Take files out of the page cache, as far as the system does so."""
    for path in paths:
        with FilePages(path, MINCORE) as pages:
            pages.evict()


def _anywhere(files: Sequence[tuple[Path, int]], nbytes: int, seed: int) -> Iterator[Place]:
    """Endless random places, every block-aligned one as likely as any other."""
    rng = random.Random(seed)
    weights = [(size - nbytes) // DIRECT_ALIGN + 1 for _, size in files]
    while True:
        number = rng.choices(range(len(files)), weights)[0]
        yield files[number][0], rng.randrange(weights[number]) * DIRECT_ALIGN


def _each_once(files: Sequence[tuple[Path, int]], nbytes: int, seed: int) -> Iterator[Place]:
    """Places that share no byte, in random order: no read finds what an earlier one cached."""
    places = [(path, at) for path, size in files for at in range(0, size - nbytes + 1, nbytes)]
    random.Random(seed).shuffle(places)
    return iter(places)


def _measure(read: Read, places: Iterator[Place], nbytes: int, threads: int, seconds: float) -> ReadRow:
    lock = threading.Lock()  # iterators may not be advanced by two threads at once
    start_ns = time.perf_counter_ns()
    deadline_ns = start_ns + int(seconds * 1e9)

    def work() -> tuple[list[int], int]:
        times: list[int] = []
        device_bytes = thread_device_bytes() if LINUX else 0
        with mmap.mmap(-1, nbytes) as memory, memoryview(memory) as view:  # page-aligned, as direct reads need
            while len(times) < _LEAST_READS or time.perf_counter_ns() < deadline_ns:
                with lock:
                    place = next(places, None)
                if place is None:
                    break
                before_ns = time.perf_counter_ns()
                read(*place, view)
                times.append(time.perf_counter_ns() - before_ns)
        return times, thread_device_bytes() - device_bytes if LINUX else 0

    with ThreadPoolExecutor(threads) as pool:
        done = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
    elapsed = (time.perf_counter_ns() - start_ns) / 1e9
    times = [took for mine, _ in done for took in mine]
    read_bytes = len(times) * nbytes
    share = sum(device for _, device in done) / read_bytes if LINUX else None
    return ReadRow(threads, read_bytes / _MIB / elapsed, statistics.median(times) / 1e6, len(times), share)


def _read(path: Path, descriptor: int, offset: int, view: memoryview) -> None:
    """Fill `view` from one place by one call. Raises Edge0Error READ_FAILED."""
    try:
        got = os.preadv(descriptor, [view], offset)
    except OSError as error:
        raise Edge0Error(ErrorKind.READ_FAILED, f"at byte {offset}: {error}", path=path) from error
    if got != len(view):
        detail = f"at byte {offset}: short read"
        raise Edge0Error(ErrorKind.READ_FAILED, detail, path=path, expected=len(view), found=got)


def _block_times(read: Read, path: Path, offsets: Sequence[int], seconds: float) -> list[float]:
    """Microseconds of one 4 KiB read at each offset, until the time is over."""
    times: list[float] = []
    deadline = time.monotonic() + seconds
    with mmap.mmap(-1, DIRECT_ALIGN) as memory, memoryview(memory) as view:
        for offset in offsets:
            if time.monotonic() > deadline:
                break
            before_ns = time.perf_counter_ns()
            read(path, offset, view)
            times.append((time.perf_counter_ns() - before_ns) / 1e3)
    return times
