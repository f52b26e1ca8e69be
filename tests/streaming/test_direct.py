"""Direct reads: the file's bytes whatever the range's edges, no page-cache pages, and refusals that name the file."""

import contextlib
import errno
import os
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import FILE_BYTES, PROMPT, TOKENS, direct_or_skip, engine_logits

from edge0 import Engine, EngineOptions
from edge0.checkpoint.layout import ByteRange
from edge0.errors import ErrorKind
from edge0.streaming import source as module
from edge0.streaming.source import DIRECT_ALIGN, DirectSource
from edge0.telemetry.loads import Recorder
from edge0.telemetry.pagecache import FilePages, self_test


@pytest.fixture
def source(file):
    source = direct_or_skip([file])
    yield source
    source.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, FILE_BYTES - 1),
    st.integers(1, FILE_BYTES),
    st.integers(1, 9),
    st.sampled_from([DIRECT_ALIGN, 8192, 1 << 20]),
)
def test_any_range_into_any_memories(file, source, offset, nbytes, parts, buffer):
    """Also where one read's buffer does not hold the range."""
    nbytes = min(nbytes, FILE_BYTES - offset)
    memory = bytearray(nbytes)
    cuts = sorted({nbytes * part // parts for part in range(parts + 1)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DIRECT_BYTES", buffer)
        with contextlib.closing(DirectSource([file])) as fresh:
            views = [memoryview(memory)[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
            fresh.read(ByteRange(file, offset, nbytes), views)
    assert memory == file.read_bytes()[offset : offset + nbytes]
    array = source.array(ByteRange(file, offset, nbytes))
    assert array.dtype == np.uint8 and array.tobytes() == memory


def test_short_reads_are_continued(file, source, monkeypatch):
    real, calls = os.preadv, []

    def stingy(descriptor, buffers, offset):
        calls.append(offset)
        return real(descriptor, [buffers[0][:DIRECT_ALIGN]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    assert source.array(ByteRange(file, 50, 9000)).tobytes() == file.read_bytes()[50:9050]
    assert calls == [0, 4096, 8192]


def test_an_io_error_and_an_early_end_name_the_file(file, source, monkeypatch, refused):
    piece = ByteRange(file, 64, 100)
    os.truncate(file, 70)
    refused(ErrorKind.READ_FAILED, lambda: source.array(piece), file, "ends after 6 of 100 bytes")
    os.truncate(file, 0)
    refused(ErrorKind.READ_FAILED, lambda: source.array(piece), file, "ends after 0 of 100 bytes")

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    refused(ErrorKind.READ_FAILED, lambda: source.array(piece), file, "Input/output error", "64 to 164")


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

    direct_or_skip([file]).close()
    monkeypatch.setattr(os, at, refusing)
    error = refused(kind, lambda: DirectSource([file, other]), other, os.strerror(number))
    assert ("refuses direct reads" in str(error)) == (kind is ErrorKind.OPTION_INVALID)
    monkeypatch.undo()
    assert set(os.listdir("/dev/fd")) == before


def test_a_file_that_is_not_there_is_named(tmp_path, refused):
    refused(ErrorKind.FILE_UNREADABLE, lambda: DirectSource([tmp_path / "absent.safetensors"]), "absent.safetensors")


def test_an_engine_reads_past_the_page_cache(copy_of, tier):
    """With explicit reads the same run fills the cache, so that an empty one says something."""
    directory = copy_of(tier.name)
    cached = {}
    for io in ("direct", "pread"):
        with Engine(directory, EngineOptions(k=4, io="pread"), Recorder()) as engine:
            paths = engine.layout.paths
        direct_or_skip(paths).close()
        report = self_test(paths[0])
        if report.method == "unavailable" or not report.evicts:
            pytest.skip(f"no verified eviction here: {report.reason}")
        with Engine(directory, EngineOptions(k=4, io=io), Recorder()) as engine:
            layers = [piece for layer in engine.config.moe_layers for piece in engine.layout.layer_ranges(layer)]
            pages = {path: FilePages(path, report.method) for path in paths}
            for path in paths:
                os.sync()
                pages[path].evict()
            engine_logits(engine, PROMPT, TOKENS[:4])
            found = [pages[p.path].residency([(p.offset, p.nbytes)]) for p in layers]
            cached[io] = sum(one.asked_bytes - one.cold_bytes for one in found)
            for one in pages.values():
                one.close()
            total = sum(one.asked_bytes for one in found)
    assert cached["pread"] > total // 4
    # Pages that experts share with other tensors may be cached for those.
    assert cached["direct"] < total // 20
    assert sys.platform == "linux" or cached["direct"] == 0
