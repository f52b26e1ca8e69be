"""The library is optional: what is said where it is, and where it is not."""

import logging
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from edge0.errors import ErrorKind
from edge0.kernels import choice, library


def test_a_missing_library_gives_one_warning_where_it_was_not_asked_for_by_name(tmp_path, caplog, monkeypatch, refused):
    missing = library.load(tmp_path)
    assert missing.loaded is None and "not built" in missing.reason
    monkeypatch.setattr(choice, "load", lambda: missing)
    choice._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        refused(ErrorKind.OPTION_INVALID, lambda: choice.resolve("int8"), "not built")
        assert not caplog.records
        assert [choice.resolve("auto") for _ in range(3)] == ["mlx"] * 3
    assert len(caplog.records) == 1 and "no CPU kernels" in caplog.text


def test_a_file_that_is_no_library_is_not_loaded(tmp_path, caplog):
    (tmp_path / "_cpu.so").write_text("nothing")
    found = library.load(tmp_path)
    assert found.loaded is None and "install again" in found.reason


@pytest.mark.skipif(library.load().loaded is None, reason=library.load().reason)
def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    found = library.load(Path(library.__file__).parent)
    assert found.loaded is None and f"version {library.ABI - 1} and not {library.ABI}" in found.reason
    assert "install again" in found.reason


@pytest.mark.skipif(library.load().loaded is None, reason=library.load().reason)
def test_of_several_builds_the_one_of_this_interpreter_is_taken(tmp_path):
    (built,) = Path(library.__file__).parent.glob(f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}")
    shutil.copy(built, tmp_path)
    (tmp_path / "_cpu.aaa.so").write_text("another")
    assert library.load(tmp_path).loaded is not None
    (tmp_path / built.name).rename(tmp_path / "_cpu.other.so")
    (tmp_path / "_cpu.aaa.so").unlink()
    assert library.load(tmp_path).loaded is not None


def test_other_systems_are_told_why_and_not_warned(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    found = library.load(tmp_path)
    assert found.loaded is None and "darwin" in found.reason and not caplog.records


def test_what_runs_is_described(monkeypatch):
    for found in (library.Library(None, "none", "so it is"), library.Library(object(), "avx2", "so it is")):
        monkeypatch.setattr(library, "load", lambda found=found: found)
        assert library.describe().endswith("so it is")
        assert ("MLX's own" in library.describe()) == (found.loaded is None)
