"""The session's plan and bookkeeping, and one whole small session through the command line to the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.checkpoint.repack import repack
from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from experiments.arms import ARMS
from experiments.run_arm import RunSpec, failed, measure
from experiments.session import (
    SessionOptions,
    plan,
    preflight,
    sweep_partials,
    text_health,
    void_where_outputs_differ,
)

arms = st.lists(st.sampled_from(sorted(ARMS)), min_size=1, max_size=5, unique=True).map(tuple)
ks = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4, unique=True).map(tuple)


@given(arms, ks, st.integers(1, 6))
def test_plan_runs_every_cell_once_per_round_with_an_aa_twin_and_a_drift_run(arms, ks, rounds):
    runs = plan(SessionOptions(model="m", tier="t", arms=arms, ks=ks, rounds=rounds))
    cells = Counter((run.arm, run.k, run.round) for run in runs if run.role == "arm")
    assert cells == Counter({(arm, k, number): 1 for arm in arms for k in ks for number in range(rounds)})
    twins = [run for run in runs if run.role == "aa"]
    assert [(run.arm, run.k) for run in twins] == [(arms[0], max(ks))] * rounds
    assert [run.round for run in runs[:-1]] == sorted(run.round for run in runs[:-1])
    assert (runs[-1].role, runs[-1].arm, runs[-1].k) == ("drift", runs[0].arm, runs[0].k)
    for twin in twins:  # an A/A pair is neighbours, so that it shares the machine's mood
        places = [n for n, run in enumerate(runs[:-1]) if (run.arm, run.k, run.round) == (twin.arm, twin.k, twin.round)]
        assert places[1] - places[0] == 1


def test_order_rotates_and_the_aa_twin_goes_first_in_turn():
    runs = plan(SessionOptions(model="m", tier="t", arms=("ondemand", "prerouter"), ks=(8,), rounds=2))
    assert [(run.role, run.arm, run.round) for run in runs] == [
        ("arm", "ondemand", 0),
        ("aa", "ondemand", 0),
        ("arm", "prerouter", 0),
        ("arm", "prerouter", 1),
        ("aa", "ondemand", 1),
        ("arm", "ondemand", 1),
        ("drift", "ondemand", 0),
    ]


@given(ks, st.integers(2, 6))
def test_no_arm_of_a_pair_is_always_the_later_one_and_pairs_are_near(ks, rounds):
    names = ("ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap")
    runs = plan(SessionOptions(model="m", tier="t", arms=names, ks=ks, rounds=rounds))
    place = {(run.arm, run.k, run.round): n for n, run in enumerate(runs) if run.role == "arm"}
    for arm, base in (("prerouter", "ondemand"), ("prerouter-mmap", "ondemand-mmap"), ("ondemand", "ondemand-mmap")):
        for k in ks:
            distances = [place[arm, k, number] - place[base, k, number] for number in range(rounds)]
            assert min(distances) < 0 < max(distances)
            assert max(map(abs, distances)) <= len(names)  # within one K of one round


def test_outputs_that_differ_between_alike_arms_make_a_run_void():
    def row(arm, output):
        return {"arm": arm, "k": 8, "output_hash": output, "void": False, "void_reason": ""}

    rows = [row("ondemand", "a"), row("ondemand-mmap", "a"), row("prerouter", "b"), row("prerouter-mmap", "c")]
    void_where_outputs_differ(rows)
    assert [r["void"] for r in rows] == [False, False, False, True]
    assert "prerouter" in rows[3]["void_reason"]


def test_text_health_finds_the_period_of_a_loop():
    assert text_health([1, 2, 3, 4, 5])["longest_repeat_tokens"] == 0
    looped = text_health([9, 8, *[1, 2, 3] * 5])
    assert (looped["repeat_period"], looped["longest_repeat_tokens"]) == (3, 15)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"condition": "hot"}, ErrorKind.CONDITION_UNKNOWN),
        ({"arms": ("ondemand", "magic")}, ErrorKind.OPTION_INVALID),
        ({"rounds": 0}, ErrorKind.OPTION_INVALID),
        ({"bank": 0.0}, ErrorKind.OPTION_INVALID),
        ({"ks": ()}, ErrorKind.OPTION_INVALID),
        ({"ks": (33,)}, ErrorKind.K_INVALID),
        ({"ks": (3,)}, ErrorKind.ADAPTER_MISSING),
        ({"bank": 0.01, "ks": (8,)}, ErrorKind.BANK_TOO_SMALL),
        ({"launch_groups": 99}, ErrorKind.OPTION_INVALID),
        ({"reader_threads": 0}, ErrorKind.OPTION_INVALID),
    ],
)
def test_preflight_refuses_before_anything_is_measured(unit_35b, changes, kind):
    with pytest.raises(Edge0Error) as caught:
        preflight(SessionOptions(**({"model": str(unit_35b), "tier": "unit-35b"} | changes)))
    assert caught.value.kind is kind


RECORDS = ("ondemand", "ondemand-records")


def with_records(model, records, **changes):
    options = {"tier": "unit-35b", "arms": RECORDS, "ks": (4,)} | changes
    return SessionOptions(model=str(model), records=str(records), **options)


def test_preflight_takes_records_of_the_same_model(unit_35b, tmp_path):
    records = repack(unit_35b, tmp_path / "records").directory
    config, layout = preflight(with_records(unit_35b, records))
    assert layout.stacked and config.layers


def test_preflight_refuses_records_that_are_not_those_of_the_model(unit_35b, checkpoints, tmp_path, refused):
    def check(kind, records, *parts):
        refused(kind, lambda: preflight(with_records(unit_35b, records)), records, *parts)

    check(ErrorKind.FILE_MISSING, tmp_path / "absent")
    check(ErrorKind.OPTION_INVALID, unit_35b, "option records", "stacks of")
    other = repack(checkpoints["unit-8b"], tmp_path / "other").directory
    check(ErrorKind.OPTION_INVALID, other, "option records", "records of")
    records = repack(unit_35b, tmp_path / "records").directory
    (records / "artifacts" / "k4").rename(records / "artifacts" / "k3")
    check(ErrorKind.ADAPTER_MISSING, records)


@pytest.fixture(scope="module")
def session(unit_35b, tmp_path_factory):
    root = tmp_path_factory.mktemp("sessions")
    command = [sys.executable, "-m", "experiments.session", "--model", str(unit_35b), "--tier", "unit-35b"]
    command += ["--root", str(root), "--rounds", "2", "--ks", "4", "--timed-steps", "4", "--warmup-steps", "6"]
    command += ["--prompt-tokens", "5", "--condition", "budget:0.5", "--bank", "0.5", "--log", str(root / "log.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def test_session_keeps_raw_rows_of_every_run_step_and_load(session):
    name = json.loads((session / "latest.json").read_text())["session"]
    folder = session / name
    assert sorted(path.name for path in folder.iterdir()) == [
        "loads.parquet",
        "runs.parquet",
        "session.json",
        "steps.parquet",
        "tokens.json",
    ]
    runs, steps, loads = (pd.read_parquet(folder / f"{kind}.parquet") for kind in ("runs", "steps", "loads"))
    assert Counter(runs.role) == {"arm": 8, "aa": 2, "drift": 1}
    assert (runs.dropped == 0).all() and runs.token_hash.nunique() == 1
    for route in ("ondemand", "prerouter"):
        assert runs[runs.arm.str.startswith(route)].output_hash.nunique() == 1
    assert len(steps) == 4 * len(runs)
    timed = loads[loads.step >= 0]
    probed = timed[timed.cold_bytes >= 0]
    assert 0 < len(probed) < len(timed)  # every n-th load is looked at while steps are timed, all of them before
    assert (probed.cold_bytes + probed.inflight_bytes <= probed.asked_bytes).all()
    assert (loads.end_ns >= loads.start_ns).all() and (loads.start_ns >= loads.submit_ns).all()
    per_step = timed.groupby(["run_id", "step"]).size()
    counted = steps.set_index(["run_id", "step"]).loads
    assert (per_step == counted[counted > 0]).all()
    assert json.loads((folder / "session.json").read_text())["host"]["os"]


def test_session_becomes_a_table(session, tmp_path):
    command = [sys.executable, "-m", "analysis.tab3", str(session / "latest.json")]
    command += ["--claims", "results/paper/claims.yaml", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert sorted(summary.arm) == sorted(["ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap"])
    assert (summary.dropped == 0).all()
    assert "prerouter" in (tmp_path / "table.md").read_text()


def test_session_that_cannot_start_is_one_line_and_leaves_nothing(unit_35b, tmp_path):
    command = [sys.executable, "-m", "experiments.session", "--model", str(unit_35b), "--tier", "unit-35b"]
    done = subprocess.run(
        [*command, "--root", str(tmp_path / "r"), "--condition", "tepid"], capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_CODE
    assert done.stderr.startswith("edge0: ") and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()


def test_session_whose_results_cannot_be_written_says_so(unit_35b, tmp_path):
    (tmp_path / "file").write_text("in the way")
    command = [sys.executable, "-m", "experiments.session", "--model", str(unit_35b), "--tier", "unit-35b", "--ks", "4"]
    done = subprocess.run([*command, "--root", str(tmp_path / "file")], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_CODE and str(tmp_path / "file") in done.stderr


def test_a_run_that_fails_is_void_with_its_reason(copy_of):
    """A failed run has the rows of a good one, without numbers."""
    model = copy_of("unit-35b")
    spec = RunSpec(
        run_id="x",
        arm="ondemand",
        k=4,
        model=str(model),
        condition="budget:0.5",
        prompt=[1, 2, 3],
        warmup_tokens=[4, 5, 6],
        timed_tokens=[7, 8],
        bank_slots=64,
        lora=True,
        adapter_k=None,
        launch_groups=1,
        reader_threads=1,
        probe_every=1,
        seed=0,
    )
    row = failed(spec, Edge0Error(ErrorKind.READ_FAILED, "the disk said no", path=model))
    assert row["void"] and "the disk said no" in row["void_reason"] and row["tok_s"] is None
    rows = [row | {"role": "arm", "round": 0, "order": 0}]
    void_where_outputs_differ(rows)
    good, steps, loads = measure(spec)
    assert set(row) == set(good) and not good["void"]
    assert len(steps) == 2 and len(loads)


def test_leftovers_of_killed_sessions_are_swept_and_those_of_living_ones_are_not(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, living = tmp_path / f".a.partial-{gone.pid}", tmp_path / f".b.partial-{os.getpid()}"
    dead.mkdir()
    living.mkdir()
    sweep_partials(tmp_path)
    assert not dead.exists() and living.exists()
