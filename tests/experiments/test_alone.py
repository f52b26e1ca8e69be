"""Two measurements of one machine are never beside each other, and a killed one stands in nobody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from edge0.errors import EXIT_CODE, ErrorKind
from experiments.alone import NAME, alone

HOLD = (
    "import sys; from experiments.alone import alone\nwith alone('a fit'): print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def other():
    """Another process that measures."""
    start = [sys.executable, "-c", HOLD]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_measurement_is_refused_until_the_first_is_gone_however_it_went(other, refused):
    refused(ErrorKind.MACHINE_BUSY, lambda: alone("noise").__enter__(), "a fit", f"kill {other.pid}", os.getcwd())
    other.kill()
    other.wait()
    with alone("noise"):
        pass
    with alone("noise"):
        pass


def test_a_process_that_the_measuring_one_started_does_not_hold_the_place():
    with alone("fit"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with alone("fit"):
        pass
    child.kill()
    child.wait()
    child.stdin.close()


def test_a_place_that_cannot_be_opened_is_named(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Path(tmp_path, NAME).mkdir()
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: alone("fit").__enter__(), tmp_path / NAME)


MODEL = "no-such-model"


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiments.session", "--model", MODEL, "--tier", "t", "--root", "r"),
        ("experiments.load_cost", MODEL, "out"),
        ("experiments.read_cost", MODEL, "out"),
        ("experiments.endurance", MODEL, "out"),
        ("experiments.prefill_cost", MODEL, "out"),
        ("experiments.budgets.agreement", MODEL, "out"),
    ],
)
def test_everything_that_measures_asks_first(arguments, other, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == EXIT_CODE and len(done.stderr.strip().splitlines()) == 1
    assert "another measurement runs on this machine" in done.stderr and str(other.pid) in done.stderr
    assert list(tmp_path.iterdir()) == []
