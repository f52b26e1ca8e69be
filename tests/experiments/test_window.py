"""The fault window: read-around is left alone, lowered and put back, or reported as out of reach."""

from __future__ import annotations

import pytest

from experiments import window
from experiments.window import fault_window, put_back


@pytest.fixture
def knob(tmp_path, monkeypatch):
    path = tmp_path / "254:0" / "read_ahead_kb"
    path.parent.mkdir()
    monkeypatch.setattr(window, "_knob", lambda checkpoint: path)
    monkeypatch.setattr(window, "NOTES", tmp_path)
    return path


def noted(knob):
    return [path for path in knob.parent.parent.iterdir() if path.is_file()]


def test_a_small_window_is_left_alone(knob):
    knob.write_text("128\n")
    with fault_window([knob]) as way:
        assert way == "as-is" and knob.read_text() == "128\n"


def test_a_wide_window_is_lowered_and_put_back_even_after_an_error(knob):
    knob.write_text("8192\n")
    with pytest.raises(RuntimeError), fault_window([knob]) as way:
        assert way == "lowered" and knob.read_text() == "128" and len(noted(knob)) == 1
        raise RuntimeError
    assert knob.read_text() == "8192\n" and noted(knob) == []


def test_what_a_killed_process_left_lowered_is_put_back_by_whoever_comes_next(knob):
    def killed():
        knob.write_text("8192\n")
        left = fault_window([knob])
        left.__enter__()
        assert knob.read_text() == "128"
        return left

    left = killed()
    put_back([knob])
    assert knob.read_text() == "8192\n" and noted(knob) == []
    left = [left, killed()]  # kept, or it would tidy up
    with fault_window([knob]) as way:
        assert way == "lowered"
    assert knob.read_text() == "8192\n" and noted(knob) == []
    left.append(killed())
    knob.write_text("4096")  # somebody has decided otherwise meanwhile
    put_back([knob])
    assert knob.read_text() == "4096" and noted(knob) == []


def test_a_wide_window_that_may_not_be_changed_is_reported(knob, monkeypatch):
    knob.write_text("8192\n")

    def refuse(self, text):
        raise PermissionError("no")

    monkeypatch.setattr(type(knob), "write_text", refuse)
    with fault_window([knob]) as way:
        assert way == "random"
    assert knob.read_text() == "8192\n"


def test_no_knob_is_as_is(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "_knob", lambda checkpoint: None)
    with fault_window([tmp_path]) as way:
        assert way == "as-is"
