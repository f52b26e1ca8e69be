"""What a repack takes along and what it leaves behind, and that all folders on the way outlast a power cut."""

import os
import stat

from edge0.checkpoint.header import INDEX_NAME, CheckpointIndex
from edge0.checkpoint.output import make_folders
from edge0.checkpoint.repack import repack


def files(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_shards_of_any_name_stay_behind(copy_of, checkpoints, tmp_path):
    """The index says which files are shards; their bytes must not be there twice."""
    source = copy_of("unit-35b")
    text = (source / INDEX_NAME).read_text()
    for shard in CheckpointIndex.open(source).shards:
        shard.path.rename(source / f"weights-{shard.path.name}")
        text = text.replace(shard.path.name, f"weights-{shard.path.name}")
    (source / INDEX_NAME).write_text(text)
    assert len([name for name in files(source) if name.startswith("weights-")]) == 4
    target = repack(source, tmp_path / "out").directory
    assert files(target) == files(repack(checkpoints["unit-35b"], tmp_path / "usual").directory)


def test_what_is_hidden_stays_behind(copy_of, tmp_path):
    source = copy_of("unit-8b")
    expected = files(repack(source, tmp_path / "plain").directory)
    hidden = (".gitattributes", ".git/objects/pack", ".cache/download/lock", "artifacts/.cache/lock", "artifacts/.note")
    for name in hidden:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / "artifacts" / "notes.txt").touch()
    assert files(repack(source, tmp_path / "out").directory) == expected | {"artifacts/notes.txt"}


def identity(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino


def recording(monkeypatch):
    """The folders that were synced, as they come."""
    real, synced = os.fsync, []

    def fsync(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            synced.append((status.st_dev, status.st_ino))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


def test_every_folder_that_was_made_and_every_folder_above_one_is_synced(checkpoint, tmp_path, monkeypatch):
    synced = recording(monkeypatch)
    target = repack(checkpoint, tmp_path / "new" / "deep" / "out").directory
    folders = [target, *(path for path in target.rglob("*") if path.is_dir())]
    assert {"artifacts", "k4", "experts"} < {path.name for path in folders}
    for folder in (*folders, tmp_path / "new" / "deep", tmp_path / "new", tmp_path):
        assert identity(folder) in synced, folder


def test_a_folder_is_synced_into_the_one_above_when_it_is_made_and_not_again(tmp_path, monkeypatch):
    synced = recording(monkeypatch)
    make_folders(tmp_path / "a" / "b")
    assert synced == [identity(tmp_path), identity(tmp_path / "a")]
    make_folders(tmp_path / "a" / "b")
    assert len(synced) == 2
