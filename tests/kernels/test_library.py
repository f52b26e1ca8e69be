"""The library is optional: what is said where it is, and where it is not."""

import logging
import sys

from edge0.kernels import library


def test_a_missing_library_gives_one_warning_and_a_reason(tmp_path, caplog):
    library.load.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [library.load(tmp_path) for _ in range(3)]
    assert all(one.loaded is None and "not built" in one.reason for one in found)
    assert len(caplog.records) == 1 and "no CPU kernels" in caplog.text


def test_a_file_that_is_no_library_is_not_loaded(tmp_path, caplog):
    (tmp_path / "_cpu.so").write_text("nothing")
    found = library.load(tmp_path)
    assert found.loaded is None and "install again" in found.reason


def test_other_systems_are_told_why_and_not_warned(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    found = library._load(tmp_path)
    assert found.loaded is None and "darwin" in found.reason and not caplog.records


def test_what_runs_is_described(monkeypatch):
    for found in (library.Library(None, "none", "so it is"), library.Library(object(), "avx2", "so it is")):
        monkeypatch.setattr(library, "load", lambda found=found: found)
        assert library.describe().endswith("so it is")
        assert ("MLX's own" in library.describe()) == (found.loaded is None)
