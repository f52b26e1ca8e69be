"""Both sources give the file's bytes, and a storage that does not is an error that names the file."""

import errno
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import FILE_BYTES

from edge0.checkpoint.layout import ByteRange
from edge0.errors import ErrorKind
from edge0.streaming.source import FaultSource, PreadSource


@pytest.fixture
def source(file):
    source = PreadSource([file])
    yield source
    source.close()


PIECES = [(0, 1), (1, 4095), (4096, 4096), (777, 200_000), (FILE_BYTES - 5, 5), (0, FILE_BYTES)]


@pytest.mark.parametrize("make", [PreadSource, FaultSource, lambda paths: FaultSource(paths, random=True)])
@pytest.mark.parametrize(("offset", "nbytes"), PIECES)
def test_sources_give_the_files_bytes(file, make, offset, nbytes):
    source, piece = make([file]), ByteRange(file, offset, nbytes)
    expected = file.read_bytes()[offset : offset + nbytes]
    source.advise([piece])
    memory, cut = bytearray(nbytes), nbytes // 3
    view = memoryview(memory)
    source.read(piece, [part for part in (view[:cut], view[cut:]) if len(part)])
    assert memory == expected
    array = source.array(piece)
    assert array.dtype == np.uint8 and array.tobytes() == expected
    del array
    source.close()


def test_pieces_of_several_files_do_not_mix(file, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"\x07" * 100)
    for make in (PreadSource, FaultSource):
        source = make([file, other])
        assert source.array(ByteRange(other, 10, 20)).tobytes() == b"\x07" * 20
        assert source.array(ByteRange(file, 10, 20)).tobytes() == file.read_bytes()[10:30]
        source.close()


def test_unmap_keeps_the_mapping_readable(file):
    source, piece = FaultSource([file]), ByteRange(file, 100, 5000)
    first = source.array(piece).tobytes()
    source.unmap()
    assert source.array(piece).tobytes() == first == file.read_bytes()[100:5100]
    source.close()


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(1, 700))
def test_short_reads_into_many_memories_are_continued(sizes, most):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "file"
        path.write_bytes(np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes())
        real = os.preadv

        def stingy(descriptor, buffers, offset):
            taken, left = [], most
            for buffer in buffers:
                taken.append(buffer[:left])
                left -= len(taken[-1])
                if not left:
                    break
            return real(descriptor, taken, offset)

        patch.setattr(os, "preadv", stingy)
        source, memories = PreadSource([path]), [bytearray(size) for size in sizes]
        source.read(ByteRange(path, 33, sum(sizes)), [memoryview(memory) for memory in memories])
        source.close()
        assert b"".join(memories) == path.read_bytes()[33 : 33 + sum(sizes)]


def test_more_memories_than_one_call_takes(file, source):
    memories = [bytearray(2) for _ in range(3000)]
    source.read(ByteRange(file, 5, 6000), [memoryview(memory) for memory in memories])
    assert b"".join(memories) == file.read_bytes()[5:6005]


def test_signals_do_not_disturb_a_read(file, source):
    """EINTR: the interpreter goes on with the call after the handler has run."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        while len(seen) < 50:
            assert source.array(ByteRange(file, 0, FILE_BYTES)).tobytes() == file.read_bytes()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_short_reads_are_continued(file, source, monkeypatch):
    real, calls = os.preadv, []

    def stingy(descriptor, buffers, offset):
        calls.append(offset)
        return real(descriptor, [buffers[0][:777]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    assert source.array(ByteRange(file, 50, 5000)).tobytes() == file.read_bytes()[50:5050]
    assert calls == list(range(50, 5050, 777))


@pytest.mark.parametrize("after", [0, 1])
def test_an_io_error_names_the_file_and_the_bytes(file, source, monkeypatch, refused, after):
    real, calls = os.preadv, []

    def broken(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) > after:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, [buffers[0][:10]], offset)

    monkeypatch.setattr(os, "preadv", broken)
    error = refused(
        ErrorKind.READ_FAILED, lambda: source.array(ByteRange(file, 64, 100)), file, "64 to 164", "Input/output error"
    )
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("left", [0, 64, 163])
def test_a_file_cut_after_it_was_opened_is_an_error(file, source, refused, left):
    os.truncate(file, left)
    done = max(0, left - 64)
    refused(
        ErrorKind.READ_FAILED, lambda: source.array(ByteRange(file, 64, 100)), file, f"ends after {done} of 100 bytes"
    )


def test_a_file_replaced_after_it_was_opened_is_not_noticed_and_not_mixed(file, source):
    """Descriptors are kept: what was opened is what is read."""
    expected = file.read_bytes()[:1000]
    replacement = file.with_suffix(".new")
    replacement.write_bytes(b"\x00" * FILE_BYTES)
    replacement.rename(file)
    assert source.array(ByteRange(file, 0, 1000)).tobytes() == expected


def test_a_lost_descriptor_is_an_error(file, source, refused):
    (descriptor,) = source._files.values()
    os.close(descriptor)
    try:
        refused(ErrorKind.READ_FAILED, lambda: source.array(ByteRange(file, 0, 10)), file)
    finally:
        source._files = {}


def test_close_closes_every_descriptor_and_may_be_repeated(file):
    before = set(os.listdir("/dev/fd"))
    sources = [PreadSource([file]), FaultSource([file])]
    assert set(os.listdir("/dev/fd")) > before
    for source in sources:
        source.close()
        source.close()
    assert set(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("make", [PreadSource, FaultSource])
def test_a_file_that_cannot_be_opened_is_named(tmp_path, refused, make):
    refused(ErrorKind.FILE_UNREADABLE, lambda: make([tmp_path / "absent.safetensors"]), "absent.safetensors")
