"""Direct reads: the file's bytes whatever the range's edges, no page-cache pages, and refusals that name the file."""

import contextlib
import errno
import mmap
import os
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import FILE_BYTES

from edge0 import Edge0Error
from edge0.checkpoint.layout import ByteRange
from edge0.errors import ErrorKind
from edge0.streaming import direct as module
from edge0.streaming.direct import DIRECT_ALIGN, DirectSource
from edge0.streaming.source import PreadSource
from edge0.telemetry.pagecache import FilePages, self_test


@pytest.fixture
def file(tmp_path):
    """A file of `FILE_BYTES` random bytes, no multiple of any block, on a file system that takes direct reads."""
    path = tmp_path / "model-00001-of-00001.safetensors"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, FILE_BYTES, np.uint8).tobytes())
    try:
        DirectSource([path]).close()
    except Edge0Error as error:
        if "refuses direct reads" not in str(error):
            raise
        pytest.skip(str(error))
    return path


@pytest.fixture
def source(file):
    with contextlib.closing(DirectSource([file])) as source:
        yield source


def read(source, path, offset, nbytes):
    memory = bytearray(nbytes)
    source.read(ByteRange(path, offset, nbytes), [memoryview(memory)])
    return memory


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, FILE_BYTES - 1),
    st.integers(1, FILE_BYTES),
    st.integers(1, 9),
    st.sampled_from([DIRECT_ALIGN, 8192, 1 << 20]),
)
def test_any_range_into_any_memories(file, offset, nbytes, parts, buffer):
    """Also where one read's buffer does not hold the range."""
    nbytes = min(nbytes, FILE_BYTES - offset)
    memory = bytearray(nbytes)
    cuts = sorted({nbytes * part // parts for part in range(parts + 1)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DIRECT_BYTES", buffer)
        with contextlib.closing(DirectSource([file])) as source:
            views = [memoryview(memory)[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
            source.read(ByteRange(file, offset, nbytes), views)
    assert memory == file.read_bytes()[offset : offset + nbytes]


PIECES = (1024, 512, 4096 + 512, 3072)  # together no whole number of pages


def pieces_of(memory, sizes=PIECES):
    """Places for some pieces, one after the other, each on a page of its own."""
    cuts = [place * 8192 for place in range(len(sizes))]
    return [memoryview(memory)[cut : cut + size] for cut, size in zip(cuts, sizes, strict=True)]


@pytest.mark.parametrize("unaligned", [0, 16])
def test_a_range_on_a_block_goes_straight_into_memories_on_blocks_and_else_through_the_buffer(
    file, source, monkeypatch, unaligned
):
    memory, real, calls = mmap.mmap(-1, 1 << 16), os.preadv, []

    def counted(descriptor, buffers, offset):
        calls.append(len(buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    sizes = (PIECES[0] - unaligned, *PIECES[1:])
    for _ in range(2):
        views = pieces_of(memory, sizes)
        source.read(ByteRange(file, 8192, sum(sizes)), views)
        assert b"".join(views) == file.read_bytes()[8192 : 8192 + sum(sizes)]
        views.clear()
    # A straight read has one buffer more than pieces; a refusal is remembered, and costs no second try.
    assert calls == ([5, 5] if not unaligned else [5, 1, 1])


def test_a_straight_read_that_ends_early_or_fails_is_told_by_the_one_through_the_buffer(file, source, refused):
    memory = mmap.mmap(-1, 1 << 16)
    os.truncate(file, 8192 + 2000)
    refused(ErrorKind.READ_FAILED, lambda: source.read(ByteRange(file, 8192, sum(PIECES)), pieces_of(memory)), file)
    os.truncate(file, 1 << 16)
    source.read(ByteRange(file, 8192, sum(PIECES)), pieces_of(memory))
    assert b"".join(pieces_of(memory)) == file.read_bytes()[8192 : 8192 + sum(PIECES)]


def test_short_reads_are_continued(file, source, monkeypatch):
    real, calls = os.preadv, []

    def stingy(descriptor, buffers, offset):
        calls.append(offset)
        return real(descriptor, [buffers[0][:DIRECT_ALIGN]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    assert read(source, file, 50, 9000) == file.read_bytes()[50:9050]
    assert calls == [0, 4096, 8192]


def test_an_io_error_and_an_early_end_name_the_file(file, source, monkeypatch, refused):
    def piece():
        return read(source, file, 64, 100)

    os.truncate(file, 70)
    refused(ErrorKind.READ_FAILED, piece, file, "ends after 6 of 100 bytes")
    os.truncate(file, 0)
    refused(ErrorKind.READ_FAILED, piece, file, "ends after 0 of 100 bytes")

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    refused(ErrorKind.READ_FAILED, piece, file, "Input/output error", "64 to 164")


@pytest.mark.parametrize("at", ["open", "preadv"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EINVAL, ErrorKind.OPTION_INVALID), (errno.EIO, ErrorKind.FILE_UNREADABLE)]
)
def test_a_file_system_that_refuses_direct_reads_is_told_apart_and_nothing_stays_open(
    file, tmp_path, monkeypatch, refused, at, number, kind
):
    """The second of two files is refused, at opening or at the first read."""
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"x" * 100)
    before, real, calls = set(os.listdir("/dev/fd")), getattr(os, at), []

    def refusing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, at, refusing)
    error = refused(kind, lambda: DirectSource([file, other]), other, os.strerror(number))
    assert ("refuses direct reads" in str(error)) == (kind is ErrorKind.OPTION_INVALID)
    monkeypatch.undo()
    assert set(os.listdir("/dev/fd")) == before


def test_a_file_that_is_not_there_is_named(tmp_path, refused):
    refused(ErrorKind.FILE_UNREADABLE, lambda: DirectSource([tmp_path / "absent.safetensors"]), "absent.safetensors")


def test_explicit_reads_bring_in_what_was_asked_for_and_no_more(tmp_path):
    """Also where they look like a sequence: the OS's own read-ahead once brought in a megabyte beyond."""
    path, pages = tmp_path / "model-00001-of-00001.safetensors", 4096
    path.write_bytes(np.random.default_rng(1).bytes(4 << 20))
    report = self_test(path)
    if report.method == "unavailable" or not report.evicts or sys.platform == "darwin":
        pytest.skip(f"no verified eviction here: {report.reason}")
    with contextlib.closing(FilePages(path, report.method)) as cache, contextlib.closing(PreadSource([path])) as source:
        os.sync()
        cache.evict()
        for piece in range(8):
            read(source, path, piece * 4 * pages, 4 * pages)
        assert cache.cached_bytes() == 32 * pages


def test_direct_reads_leave_the_page_cache_as_it_is(file, source):
    """Explicit reads of the same bytes fill it, so that an empty one says something."""
    report = self_test(file)
    if report.method == "unavailable" or not report.evicts:
        pytest.skip(f"no verified eviction here: {report.reason}")
    os.sync()
    with contextlib.closing(FilePages(file, report.method)) as pages:
        pages.evict()
        read(source, file, 0, FILE_BYTES)
        assert pages.cached_bytes() == 0 or sys.platform == "darwin"
        with contextlib.closing(PreadSource([file])) as explicit:
            read(explicit, file, 0, FILE_BYTES)
        assert pages.cached_bytes() == FILE_BYTES
