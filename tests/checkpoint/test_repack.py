"""Repacking: every byte arrives, in records on pages; nothing half-made gets the name; every broken run resumes."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from edge0.checkpoint import repack as module
from edge0.checkpoint.header import CheckpointIndex, read_header
from edge0.checkpoint.layout import RECORD_ALIGN, ExpertLayout, has_records, records_path
from edge0.checkpoint.repack import repack
from edge0.cli import main
from edge0.errors import EXIT_CODE, ErrorKind
from edge0.families import read_config


def layout_of(directory):
    return ExpertLayout.of(CheckpointIndex.open(directory), read_config(directory))


def content(pieces):
    return [piece.path.read_bytes()[piece.offset : piece.offset + piece.nbytes] for piece in pieces]


def tree(directory):
    """Every file below a directory, with its bytes; every folder, with none."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def working(target):
    return target.with_name(f".{target.name}.repacking")


def lock(target):
    return target.with_name(f".{target.name}.repacking.lock")


def flip(path, position=-1):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


class Stop(Exception):
    """Ends a repack from its progress callback."""


def stop_late(done, total):
    if done >= 0.99 * total:
        raise Stop


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new" / "out"


@pytest.fixture(scope="module")
def repacked(checkpoints, tmp_path_factory):
    """Tier name -> a repack made in one go. Shared: never write there."""
    root = tmp_path_factory.mktemp("repacked")
    return {name: repack(path, root / name).directory for name, path in checkpoints.items()}


@pytest.fixture
def whole(repacked, tier):
    """What a repack of the tier must come to."""
    return tree(repacked[tier.name])


# --- what is written -----------------------------------------------------------------------------------------------


def test_every_expert_is_one_record_on_a_page_with_the_bytes_of_its_nine_pieces(checkpoint, repacked, tier):
    old, new = layout_of(checkpoint), layout_of(repacked[tier.name])
    assert old.stacked and not new.stacked
    assert new.records() == old.records() and new.specs == old.specs and new.total_bytes == old.total_bytes
    for layer, expert in old.records():
        pieces = content(old.pieces(layer, expert))
        assert content(new.pieces(layer, expert)) == pieces
        (record,) = new.ranges(layer, expert)
        assert record.offset % RECORD_ALIGN == 0 and record.path == records_path(repacked[tier.name], layer)
        assert content([record]) == [b"".join(pieces)]


def test_record_files_are_safetensors_and_hold_zeros_after_each_expert(repacked, tier):
    layout = layout_of(repacked[tier.name])
    for path in layout.paths:
        (records,) = load_file(path).values()
        assert records.shape[0] == layout.experts and records.shape[1] % RECORD_ALIGN == 0
        assert records.shape[1] > layout.expert_bytes and not records[:, layout.expert_bytes :].any()
        assert records[:, : layout.expert_bytes].any(axis=1).all()


def test_other_tensors_and_files_are_unchanged(checkpoint, repacked, tier):
    old, new = CheckpointIndex.open(checkpoint), CheckpointIndex.open(repacked[tier.name])
    kept = {name for name in old.tensors if f".{tier.family.experts_key}." not in name}
    assert set(new.tensors) == kept and len(new.shards) == 1
    assert tier.name != "unit-8b" or any(".pregate." in name for name in kept)
    for name in kept:
        before, after = old.tensors[name], new.tensors[name]
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert content([after]) == content([before])
    with safe_open(repacked[tier.name] / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "mlx"}
    before, after = tree(checkpoint), tree(repacked[tier.name])
    others = {name for name in before if not name.startswith("model")}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "artifacts/k4"} < others
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    layers = {path.relative_to(repacked[tier.name]).as_posix() for path in layout_of(repacked[tier.name]).paths}
    assert after.keys() - others == {"model.safetensors", "experts", *layers}


def test_a_download_of_links_with_leftovers(copy_of, tier, whole, target, tmp_path):
    """Link farms are followed, a link that leads back is not; what belongs to the old layout stays behind."""
    files, links = copy_of(tier.name), tmp_path / "links"
    (links / "artifacts").mkdir(parents=True)
    for path in files.iterdir():
        if path.name != "artifacts":
            (links / path.name).symlink_to(path)
    for path in (files / "artifacts").iterdir():
        (links / "artifacts" / path.name).symlink_to(path, target_is_directory=True)
    (links / "artifacts" / "k2" / "again").symlink_to(links, target_is_directory=True)
    (links / "SHA256SUMS").write_text("0" * 64 + "  model.safetensors\n")
    if len(CheckpointIndex.open(files).shards) > 1:
        (links / "model-of-another-revision.safetensors").write_bytes(b"")
    repack(links, target)
    assert tree(target) == whole


def test_progress_ends_at_its_total_and_the_command_says_what_it_wrote(checkpoint, tier, target, capsys, whole):
    seen = []
    result = repack(checkpoint, target, lambda *numbers: seen.append(numbers))
    nbytes = sum(len(content) for content in whole.values() if content is not None)
    assert seen == sorted(seen) and seen[-1] == (2 * nbytes, 2 * nbytes) and result.total_bytes == nbytes
    shutil.rmtree(target)
    assert main(["repack", str(checkpoint), str(target)]) == 0
    line = capsys.readouterr().out
    layout = layout_of(target)
    assert f"{len(layout.layers)} layers, {len(layout.records())} records of {RECORD_ALIGN:,} bytes" in line
    assert str(target) in line and f"{layout.total_bytes:,}" in line and tree(target) == whole
    assert not working(target).exists() and not lock(target).exists()


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_an_output_that_is_there(checkpoint, tmp_path, refused, kind):
    target = tmp_path / "out"
    {"file": target.touch, "folder": target.mkdir, "link": lambda: target.symlink_to("nowhere")}[kind]()
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: repack(checkpoint, target), target, "there already")
    assert os.listdir(tmp_path) == ["out"]


def test_an_output_inside_the_source(copy_of, tier, tmp_path, refused):
    source = copy_of(tier.name)
    before = tree(source)
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / "out", source / "a" / "b", tmp_path / "link" / "out"):
        refused(ErrorKind.OPTION_INVALID, lambda target=target: repack(source, target), target.name)
    assert tree(source) == before


def test_a_source_that_is_the_working_directory_is_not_cleaned_away(copy_of, tier, tmp_path, refused):
    source = copy_of(tier.name).rename(working(tmp_path / "out"))
    before = tree(source)
    refused(ErrorKind.OPTION_INVALID, lambda: repack(source, tmp_path / "out"), source)
    working(tmp_path / "other").symlink_to(source.parent)
    repack(source, tmp_path / "other")
    assert tree(source) == before and (tmp_path / "other" / "experts").is_dir()


def test_sources_that_are_refused(copy_of, repacked, tier, target, refused):
    source = copy_of(tier.name)
    refused(ErrorKind.OPTION_INVALID, lambda: repack(repacked[tier.name], target), "already")
    shard = CheckpointIndex.open(source).shards[0].path
    os.truncate(shard, shard.stat().st_size - 1)
    refused(ErrorKind.FILE_TRUNCATED, lambda: repack(source, target), shard)
    (source / "config.json").unlink()
    refused(ErrorKind.FILE_MISSING, lambda: repack(source, target), "config.json")
    assert not target.parent.exists()


def test_an_output_that_cannot_be_made(checkpoint, tmp_path, refused):
    (tmp_path / "file").touch()
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: repack(checkpoint, tmp_path / "file" / "out"), tmp_path)
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: repack(checkpoint, tmp_path / ("o" * 300)), tmp_path)


# --- disks that fail -----------------------------------------------------------------------------------------------


def test_too_little_space_is_said_before_a_byte_is_written(checkpoint, target, refused, monkeypatch, whole):
    real, blocks = os.statvfs, 10

    def statvfs(path):
        values = list(real(path))
        values[1], values[4] = 4096, blocks  # f_frsize, f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    needed = sum(-(-len(content) // 4096) * 4096 for content in whole.values() if content is not None)
    parts = (f"expected {needed}", f"found {blocks * 4096}")
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: repack(checkpoint, target), *parts)
    assert os.listdir(target.parent) == []
    blocks = needed // 4096
    repack(checkpoint, target)


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_broken(checkpoint, target, refused, monkeypatch, whole, call, number):
    real, calls = getattr(os, call), 0

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        error = refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: repack(checkpoint, target), os.strerror(number), "again")
    assert working(target) in error.path.parents and not target.exists() and not lock(target).exists()
    repack(checkpoint, target)
    assert tree(target) == whole


def test_a_real_limit_of_file_size(checkpoint, target, whole):
    script = """
        import resource, sys
        from edge0.cli import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        sys.exit(main(["repack", *sys.argv[1:]]))
    """
    process = child(script, checkpoint, target)
    assert process.wait() == EXIT_CODE
    error = process.stderr.read()
    assert os.strerror(errno.EFBIG) in error and "layer-" in error and len(error.splitlines()) == 1
    repack(checkpoint, target)
    assert tree(target) == whole


def test_calls_that_do_less_than_asked(checkpoint, target, monkeypatch, whole):
    write, pread = os.write, os.pread
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:70_000]))
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: pread(descriptor, min(nbytes, 3000), offset))
    repack(checkpoint, target)
    assert tree(target) == whole


def test_a_source_that_cannot_be_read(checkpoint, target, refused, monkeypatch):
    def pread(descriptor, nbytes, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        refused(ErrorKind.READ_FAILED, lambda: repack(checkpoint, target), checkpoint, os.strerror(errno.EIO), "bytes ")
        patch.setattr(os, "pread", lambda *arguments: b"")
        refused(ErrorKind.READ_FAILED, lambda: repack(checkpoint, target), checkpoint, "the file ends at byte")


def test_what_reads_back_wrong_gets_no_name(checkpoint, target, refused, monkeypatch):
    real = os.fsync

    def corrupting(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.pwrite(descriptor, b"\xff\xfe\xfd", os.fstat(descriptor).st_size // 2)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", corrupting)
    error = refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: repack(checkpoint, target), "does not read back")
    assert not error.path.exists() and not target.exists()


def test_a_source_that_changes_meanwhile(copy_of, tier, target, refused):
    source = copy_of(tier.name)
    shard = CheckpointIndex.open(source).shards[-1].path

    def progress(done, total):
        if done == total:
            os.utime(shard)

    refused(ErrorKind.FILE_CHANGED, lambda: repack(source, target, progress), shard)
    assert not target.exists() and working(target).exists()


# --- interrupted runs ----------------------------------------------------------------------------------------------


def child(script, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


KILLED = """
    import os, signal, sys
    from edge0.checkpoint.repack import repack
    source, target, share = sys.argv[1], sys.argv[2], float(sys.argv[3])

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def at_the_last_rename(event, arguments):
        if event == "os.rename" and str(arguments[1]) == target:
            die()

    if share > 1:
        sys.addaudithook(at_the_last_rename)
    repack(source, target, lambda done, total: done >= share * total and die())
"""


def test_killed_again_and_again_it_ends_in_the_same_bytes(checkpoint, target, whole):
    """Each run is killed later than the one before: in the first bytes, in between, and just before the last rename."""
    for share in (0, 0.3, 0.6, 0.97, 2):
        assert child(KILLED, checkpoint, target, share).wait() < 0
        assert not target.exists() and working(target).exists()
    finished = {path for path in tree(working(target)) if (working(target) / path).is_file()}
    result = repack(checkpoint, target)
    assert result.kept == result.files == len(finished)
    assert tree(target) == whole and not working(target).exists() and not lock(target).exists()


def test_what_an_earlier_run_left_is_not_believed(checkpoint, target, whole):
    with pytest.raises(Stop):
        repack(checkpoint, target, stop_late)
    left = working(target)
    layers = sorted((left / "experts").iterdir())
    kept = sum(path.is_file() for path in left.rglob("*")) - 6  # the partial file, and five that are spoilt here
    flip(layers[0])
    os.truncate(layers[1], 100)
    layers[2].unlink()
    layers[2].symlink_to(layers[3])
    layers[4].unlink()
    layers[4].mkdir()
    os.truncate(layers[5], layers[5].stat().st_size + 1)
    (left / "experts" / "layer-999.safetensors").touch()
    (left / "strange" / "folder").mkdir(parents=True)
    (left / "strange" / "folder" / "file").touch()
    assert (left / ".partial").exists()
    assert repack(checkpoint, target).kept == kept
    assert tree(target) == whole


def test_a_run_that_began_with_another_checkpoint(checkpoint, copy_of, tier, target, whole):
    other = copy_of(tier.name)
    for shard in CheckpointIndex.open(other).shards:
        flip(shard.path)
        flip(shard.path, read_header(shard.path).data_offset)
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(Stop):
        repack(other, target, stop_late)
    repack(checkpoint, target)
    assert tree(target) == whole


def test_two_processes(checkpoint, target, refused, whole):
    script = """
        import sys
        from edge0.checkpoint.repack import repack
        waited = []

        def wait_once(done, total):
            if not waited:
                waited.append(print("at work", flush=True))
                sys.stdin.readline()

        repack(sys.argv[1], sys.argv[2], wait_once)
    """
    process = child(script, checkpoint, target)
    assert process.stdout.readline() == "at work\n"
    refused(ErrorKind.OUTPUT_BUSY, lambda: repack(checkpoint, target), target)
    process.communicate("\n")
    assert process.returncode == 0 and tree(target) == whole and not lock(target).exists()


def test_a_lock_whose_file_was_removed_is_none(checkpoint, target, refused, monkeypatch):
    real = module.fcntl.flock

    def removed_meanwhile(file, operation):
        real(file, operation)
        lock(target).unlink()

    monkeypatch.setattr(module.fcntl, "flock", removed_meanwhile)
    refused(ErrorKind.OUTPUT_BUSY, lambda: repack(checkpoint, target), target)
    assert not has_records(target)
