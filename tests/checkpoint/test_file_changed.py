"""A file that is not the one whose header was checked: refused while it is being opened, without effect afterwards."""

import os
import shutil

import mlx.core as mx
import pytest
from reference import PROMPT, TOKENS, engine_logits, floor_bytes, same_bits

from edge0 import Engine, EngineOptions, models, synthesise
from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.header import CheckpointIndex, check_identity, read_header
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.lora import apply_lora
from edge0.prerouter.heads import Heads


@pytest.fixture
def private(copy_of, tier):
    return copy_of(tier.name)


def replace_with_copy(path):
    """Another file of the same bytes under the same name, as a download that is finished by renaming."""
    fresh = path.with_name("fresh")
    shutil.copy(path, fresh)
    fresh.rename(path)


def touch(path):
    """Written to in place: the bytes may be the same, but nobody has checked them."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    os.truncate(path, path.stat().st_size + 1)


CHANGES = [replace_with_copy, touch, cut, grow]


# --- identity ------------------------------------------------------------------------------------------------------


def test_an_untouched_file_keeps_its_identity(checkpoint):
    for path in sorted(checkpoint.glob("model*.safetensors")):
        header = read_header(path)
        assert header.identity.file_bytes == header.file_bytes == path.stat().st_size
        check_identity(path, header.identity)
        with path.open("rb") as file:
            check_identity(path, header.identity, file.fileno())
        assert read_header(path).identity == header.identity


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_has_another(private, refused, change):
    path = sorted(private.glob("model*.safetensors"))[0]
    identity = read_header(path).identity
    with path.open("rb") as file:
        change(path)
        refused(ErrorKind.FILE_CHANGED, lambda: check_identity(path, identity), path, str(identity.inode))
        with path.open("rb") as again:
            refused(ErrorKind.FILE_CHANGED, lambda: check_identity(path, identity, again.fileno()), path)
        if change is replace_with_copy:
            check_identity(path, identity, file.fileno())  # what is open is still the old one
        else:
            refused(ErrorKind.FILE_CHANGED, lambda: check_identity(path, identity, file.fileno()), path)


def test_a_file_that_is_gone(private, refused):
    path = sorted(private.glob("model*.safetensors"))[0]
    identity = read_header(path).identity
    path.unlink()
    refused(ErrorKind.FILE_MISSING, lambda: check_identity(path, identity), path)


# --- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_changed_between_its_header_and_its_tensors(private, refused, change, streamed):
    config, index = read_config(private), CheckpointIndex.open(private)
    path = index.shards[-1].path
    change(path)
    refused(ErrorKind.FILE_CHANGED, lambda: models.load(private, config, index, streamed=streamed), path)


def test_a_shard_changed_while_its_tensors_are_read(private, refused, monkeypatch):
    config, index = read_config(private), CheckpointIndex.open(private)
    path, quantise = index.shards[0].path, models._quantise

    def replacing(*arguments):  # the shards are open at this point, and nothing was read yet
        replace_with_copy(path)
        quantise(*arguments)

    monkeypatch.setattr(models, "_quantise", replacing)
    refused(ErrorKind.FILE_CHANGED, lambda: models.load(private, config, index, streamed=True), path)


def test_a_shard_that_cannot_be_read(checkpoint, refused, monkeypatch):
    config, index = read_config(checkpoint), CheckpointIndex.open(checkpoint)

    def fails(path):
        raise RuntimeError("[read] Unable to read from file.")

    monkeypatch.setattr(mx, "load", fails)
    refused(
        ErrorKind.READ_FAILED,
        lambda: models.load(checkpoint, config, index, streamed=True),
        checkpoint,
        index.shards[0].path.name,
        "Unable to read",
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["lora", "prerouter"])
def test_an_adapter_changed_between_its_header_and_its_tensors(private, refused, kind, change):
    config, index = read_config(private), CheckpointIndex.open(private)
    adapter = open_adapter(private, config.family, kind, 4)
    change(adapter.header.path)

    def use():
        if kind == "lora":
            apply_lora(models.load(private, config, index, streamed=True), config, adapter, mx.float32)
        else:
            Heads(adapter, config, (adapter.owners,), mx.float32)

    refused(ErrorKind.FILE_CHANGED, use, adapter.header.path)


def test_a_shard_replaced_after_the_resident_part_was_loaded(private, refused, monkeypatch):
    """Experts must not come from a file that nobody has checked, even when its first half was."""
    path, load = sorted(private.glob("model*.safetensors"))[0], models.load

    def replacing(*arguments, **options):
        model = load(*arguments, **options)
        replace_with_copy(path)
        return model

    monkeypatch.setattr(models, "load", replacing)
    refused(ErrorKind.FILE_CHANGED, lambda: Engine(private, EngineOptions(k=4)).close(), path)


# --- running -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("io", "assembly"), [("pread", "bank"), ("mmap", "stack")])
def test_files_replaced_during_a_run_do_not_reach_it(tier, private, checkpoint, tmp_path, io, assembly):
    """Renamed over: the engine has the old files open. It gives their tokens, and a new engine those of the new."""
    other = synthesise(tier, tmp_path / "other", seed=1)
    options = {"k": 4, "io": io, "assembly": assembly, "prerouter": "off", "lora": False}
    options["bank_bytes"] = floor_bytes(checkpoint, **options)  # experts are read anew for each token
    with Engine(checkpoint, EngineOptions(**options)) as engine:
        expected = engine_logits(engine, PROMPT, TOKENS[:8])
    with Engine(private, EngineOptions(**options)) as engine:
        request = engine.new_request()
        rows = [engine.prefill(request, PROMPT)]
        rows += [engine.step(request, token) for token in TOKENS[:2]]
        for path in sorted(other.rglob("*.safetensors*")):
            path.rename(private / path.relative_to(other))
        rows += [engine.step(request, token) for token in TOKENS[2:8]]
        request.release()
        assert same_bits(mx.stack(rows), expected)
        assert same_bits(engine_logits(engine, PROMPT, TOKENS[:8]), expected)
    with Engine(private, EngineOptions(**options)) as engine:
        assert not same_bits(engine_logits(engine, PROMPT, TOKENS[:8]), expected)
