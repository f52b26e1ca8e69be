"""A session that was interrupted goes on where it was, with nothing else, and leaves no arm behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pandas as pd
import psutil
import pytest

from edge0.errors import EXIT_CODE, ErrorKind
from experiments import resume, session
from experiments.finished import point, reuse
from experiments.options import SessionOptions
from experiments.resume import SUFFIX, identity, sweep, working

PATIENCE_S = 120


class Said(list):
    def __call__(self, line):
        self.append(line)


@pytest.fixture
def say():
    return Said()


@pytest.fixture
def ticking(monkeypatch):
    """A clock that is a second later at every look: no session waits for a stamp of its own."""
    seconds = itertools.count()
    monkeypatch.setattr(resume, "_now", lambda: f"20260101T{next(seconds):06}Z")


def begun(root, found, say, fresh=False):
    """A session that began, and whose process is gone."""
    with working(root, found, fresh, say) as work:
        (work.folder / "000.json").write_text("{}")
        return work


def test_an_interrupted_session_of_the_same_identity_is_taken_up_and_keeps_its_stamp(tmp_path, say):
    first = begun(tmp_path, {"a": 1}, say)
    assert say == []
    with working(tmp_path, {"a": 1}, False, say) as work:
        assert work.session == first.session and (work.folder / "000.json").exists()
        assert len(work.resumed) == 1
    with working(tmp_path, {"a": 1}, False, say) as work:
        assert len(work.resumed) == 2 and work.session == first.session
    assert len(say) == 2 and first.session in say[0]


@pytest.mark.parametrize(("found", "fresh"), [({"a": 2}, False), ({}, False), ({"a": 1}, True)])
def test_another_identity_or_fresh_begins_anew_and_leaves_the_other_alone(tmp_path, ticking, say, found, fresh):
    first = begun(tmp_path, {"a": 1}, say)
    with working(tmp_path, found, fresh, say) as work:
        assert work.session != first.session and work.resumed == []
    assert first.folder.exists() and say == []


def test_a_session_that_is_being_written_is_never_taken_over(tmp_path, say):
    with working(tmp_path, {"a": 1}, False, say) as living:
        with working(tmp_path, {"a": 1}, False, say) as other:
            assert other.session != living.session
        os.utime(living.folder, (0, 0))
        for path in living.folder.iterdir():
            os.utime(path, (0, 0))
        sweep(tmp_path, say)
        assert living.folder.exists() and say == []


def test_a_folder_that_nobody_touched_for_a_week_is_swept_and_said(tmp_path, ticking, say):
    old, new = begun(tmp_path, {"a": 1}, say), begun(tmp_path, {"a": 2}, say)
    for path in (*old.folder.iterdir(), old.folder):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    sweep(tmp_path, say)
    assert not old.folder.exists() and new.folder.exists()
    assert len(say) == 1 and old.session in say[0]


def test_a_session_that_was_killed_before_it_was_announced_is_announced_and_not_measured_again(tmp_path, ticking, say):
    first = begun(tmp_path, {"a": 1}, say)
    (tmp_path / first.session).mkdir()
    with working(tmp_path, {"a": 1}, False, say) as work:
        assert work.published and work.session == first.session and work.resumed == []
        assert work.announce() == tmp_path / first.session
    assert len(say) == 1 and "complete" in say[0]
    assert json.loads((tmp_path / "latest.json").read_text()) == {"session": first.session}
    with working(tmp_path, {"a": 1}, False, say) as work:
        assert not work.published and work.session != first.session


@pytest.mark.parametrize(("found", "fresh"), [({"a": 2}, False), ({"a": 1}, True)])
def test_what_another_finished_session_left_over_is_swept(tmp_path, ticking, say, found, fresh):
    first = begun(tmp_path, {"a": 1}, say)
    (tmp_path / first.session).mkdir()
    with working(tmp_path, found, fresh, say) as work:
        assert work.session != first.session and not first.folder.exists()
    assert say == []


def test_a_root_that_cannot_be_written(tmp_path, say, refused):
    (tmp_path / "file").touch()
    (tmp_path / "latest.json").mkdir()
    for root in (tmp_path / "file", tmp_path):
        refused(ErrorKind.OUTPUT_UNWRITABLE, lambda root=root: working(root, {}, False, say).__enter__(), root)


def test_identity_knows_options_files_code_machine_and_boot(copy_of, monkeypatch):
    model = copy_of("unit-35b")
    options = SessionOptions(str(model), "unit-35b", ks=(4,))
    found = identity(options, "eviction")
    assert found == identity(options, "eviction") and json.loads(json.dumps(found)) == found
    assert identity(dataclasses.replace(options, rounds=9), "eviction") != found != identity(options, "cgroup")
    assert identity(dataclasses.replace(options, run_timeout_s=9), "eviction") == found
    host = resume.describe_host(model)
    for name in ("python_version", "mlx_version", "mlx_lm_version", "numpy_version"):
        with monkeypatch.context() as patch:
            patch.setattr(resume, "describe_host", lambda place, name=name: host | {name: "0"})
            assert identity(options, "eviction") != found
    for name, value in (("_code", "other"), ("_boot", "other"), ("machine_id", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(resume, name, lambda value=value: value)
            assert identity(options, "eviction") != found
    os.utime(next(model.glob("*.safetensors")), (1, 1))
    assert identity(options, "eviction") != found
    trace = model / "config.json"
    assert str(trace) in str(identity(dataclasses.replace(options, trace=str(trace)), "eviction")["checkpoint"])


def finished(root, stamp, **about):
    folder = root / stamp
    folder.mkdir()
    options = SessionOptions("m", "unit-35b", ks=(4,))
    (folder / "session.json").write_text(json.dumps(dataclasses.asdict(options) | about))
    return folder


def test_reuse_points_at_the_newest_finished_session_of_the_experiment_and_tier(tmp_path, refused):
    options = SessionOptions("elsewhere", "unit-35b", ks=(4,))
    refused(ErrorKind.FILE_MISSING, lambda: reuse(options, tmp_path), tmp_path, "no finished session of tab3")
    finished(tmp_path, "20260101T000000Z")
    newest = finished(tmp_path, "20260102T000000Z")
    finished(tmp_path, "20260103T000000Z", experiment="noise")
    finished(tmp_path, "20260104T000000Z", tier="unit-8b")
    (tmp_path / "20260105T000000Z").mkdir()  # without a session.json
    begun(tmp_path, {"a": 1}, print)
    assert reuse(options, tmp_path) == (newest, "")
    assert json.loads((tmp_path / "latest.json").read_text()) == {"session": newest.name}
    _, differs = reuse(dataclasses.replace(options, condition="warm", rounds=9), tmp_path)
    assert differs == "condition budget:0.5 and not warm, rounds 3 and not 9"


# --- for real --------------------------------------------------------------------------------------------------------


def command(model, root, *more):
    start = [
        sys.executable,
        "-m",
        "experiments.session",
        "--model",
        str(model),
        "--tier",
        "unit-35b",
        "--root",
        str(root),
    ]
    start += ["--rounds", "2", "--ks", "4", "--arms", "prerouter", "--timed-steps", "3"]
    return [*start, "--warmup-steps", "6", "--prompt-tokens", "5", "--bank", "0.5", *more]


def started_run(root, number, since_ns=0):
    """Wait until run `number` of the session has started; returns the work folder."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        found = list(root.glob(f".*{SUFFIX}/{number:03}-*.spec.json"))
        if found and found[0].stat().st_mtime_ns > since_ns:
            return found[0].parent
        time.sleep(0.02)
    raise AssertionError(f"run {number} did not start")


def arms_of(session):
    """The processes of a session's arm, which starts a moment after its spec is there."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        if arms := psutil.Process(session.pid).children():
            return arms
        time.sleep(0.01)
    raise AssertionError("no arm was started")


def test_an_interrupted_session_goes_on_without_running_finished_rounds_again(unit_35b, tmp_path):
    """Killed itself, then ended by its arm, then by Ctrl-C: two rounds of two runs, and the first run once more."""
    root = tmp_path / "sessions"
    killed = subprocess.Popen(command(unit_35b, root), stderr=subprocess.DEVNULL)
    folder = started_run(root, 3)  # in the second round, of which one run is finished
    arms = arms_of(killed)
    killed.kill()
    killed.wait()
    _, alive = psutil.wait_procs(arms, timeout=PATIENCE_S)
    assert not alive  # an arm ends with its session
    assert not (root / "latest.json").exists()
    rows = {path.name: json.loads(path.read_text()) for path in folder.glob("00[01]-*-r0.json")}
    assert len(rows) == 2 and len(list(folder.glob("002-*-r1.json"))) == 1

    orphaned = subprocess.Popen(command(unit_35b, root), stderr=subprocess.PIPE, text=True)
    assert started_run(root, 2, since_ns=time.time_ns()) == folder
    for arm in arms_of(orphaned):
        arm.kill()
    told = orphaned.communicate(timeout=PATIENCE_S)[1]
    assert orphaned.returncode == EXIT_CODE
    assert "1 of 2 rounds are kept" in told and "ended with exit code -9" in told.splitlines()[-1]

    listening = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell's `&` makes children deaf
    stopped = subprocess.Popen(command(unit_35b, root), stderr=subprocess.PIPE, text=True, preexec_fn=listening)
    assert started_run(root, 2, since_ns=time.time_ns()) == folder
    stopped.send_signal(signal.SIGINT)
    told = stopped.communicate(timeout=PATIENCE_S)[1]
    assert stopped.returncode == 130
    assert "1 of 2 rounds are kept" in told and "--fresh" in told
    assert "kept: 2 of 5 runs" in told and "001-" not in told

    done = subprocess.run(command(unit_35b, root, "--log", str(tmp_path / "log")), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stamp = folder.name.removeprefix(".").removesuffix(SUFFIX)
    assert f"going on with session {stamp}" in (tmp_path / "log").read_text()
    assert sorted(path.name for path in root.iterdir()) == [stamp, "latest.json"]
    assert len(json.loads((root / stamp / "session.json").read_text())["resumed"]) == 3
    runs = pd.read_parquet(root / stamp / "runs.parquet")
    assert len(runs) == runs.run_id.nunique() == 5 and set(runs.session) == {stamp}
    assert runs.role.tolist()[-1] == "drift" and runs.order.tolist() == list(range(5))
    assert runs.token_hash.nunique() == 1
    kept = runs[(runs["round"] == 0) & (runs.role != "drift")]
    assert kept.tok_s.tolist() == [rows[name]["tok_s"] for name in sorted(rows)]
    for kind in ("steps", "loads"):
        assert set(pd.read_parquet(root / stamp / f"{kind}.parquet").run_id) == set(runs.run_id)
    assert len(pd.read_parquet(root / stamp / "steps.parquet")) == 5 * 3


def test_a_session_that_cannot_go_on_when_nothing_was_finished_leaves_nothing(unit_35b, tmp_path):
    root = tmp_path / "sessions"
    going = subprocess.Popen(command(unit_35b, root), stderr=subprocess.PIPE, text=True)
    started_run(root, 0)
    going.terminate()
    told = going.communicate(timeout=PATIENCE_S)[1]
    assert going.returncode == 130 and "are kept" not in told
    assert list(root.iterdir()) == []


def test_reuse_measures_nothing(tmp_path, monkeypatch, capsys):
    def typed(*more):
        monkeypatch.setattr(sys, "argv", command("m", tmp_path, "--reuse", *more)[2:])
        return session.main(), capsys.readouterr().err

    monkeypatch.setattr(session.signal, "signal", lambda *_: None)
    finished(tmp_path, "20260101T000000Z")
    code, told = typed()
    assert code == 0 and len(told.strip().splitlines()) == 1
    assert "20260101T000000Z" in told and "rounds 3 and not 2" in told
    point(tmp_path, "x")
    code, told = typed("--experiment", "y")
    assert code == EXIT_CODE and "no finished session of y" in told
