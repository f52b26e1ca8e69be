"""Stock mlx-lm beside the engine: with and without a limit, killed by it, not enforceable, undecided."""

import json

import pandas as pd
import pytest
from released_counts import CLAIMS
from synthetic import make_session

from analysis import resident
from analysis.paper.claims import load_claims
from analysis.resident_figure import draw_resident
from analysis.rows import load_session

KILLED = "arm resident at K=8 was killed by its limit of 300 bytes (out of memory in its group, exit by SIGKILL)"
LIMIT = {
    "limit_bytes": 300 << 20,
    "share": 0.6,
    "checkpoint_bytes": 400 << 20,
    "base_bytes": 60 << 20,
    "enforced": True,
    "method": "cgroup-v1",
    "reason": "",
}


def make(folder, change=None, name="s1", **options):
    """Arms ondemand, prerouter and resident, the last with the speed of ondemand-mmap: 5 tok/s of 10 and 18."""

    def arms(frames, info):
        runs = frames["runs"]
        runs["arm"] = runs["arm"].replace({"ondemand-mmap": "resident"})
        if change is not None:
            change(runs)

    arms_run = ("ondemand", "prerouter", "ondemand-mmap")
    return make_session(folder, arms=arms_run, k_values=(8,), name=name, change=arms, **options)


def void(runs, arm, reason):
    runs.loc[runs["arm"] == arm, ["void", "void_reason", "tok_s"]] = [True, reason, None]


@pytest.fixture
def run(tmp_path, capsys):
    """A call with a change of the limited session's runs; returns (text, findings by claim and arm)."""

    def call(change=None, limit=LIMIT):
        free, limited = make(tmp_path / "free"), make(tmp_path / "limited", change, name="s2")
        (tmp_path / "limit.json").write_text(json.dumps(limit))
        options = ["--limited", str(limited), "--limit", str(tmp_path / "limit.json"), "--claims", str(CLAIMS)]
        code = resident.main([str(free), *options, "--out", str(tmp_path / "out")])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        compare = pd.read_csv(tmp_path / "out" / "compare.csv", keep_default_na=False)
        return printed.out, {(row.id, row.arm): row for row in compare.itertuples()}

    return call


LIMITED = ("resident.ratio", "prerouter/resident, limited")


def test_where_both_run_under_the_limit_the_ratio_decides(run):
    text, found = run()
    row = found[LIMITED]
    assert row.status == "differs" and row.ours.startswith("3.64x") and row.session == "s2"
    assert "the sign holds: 3.64x" in row.why and "its size is below the paper's 5.0" in row.why
    free = found["resident.ratio", "prerouter/resident"]
    assert free.status == "not testable here" and "outside the claim's regime" in free.why and free.session == "s1"
    assert "limit: 300 MiB for the whole process: 60% of the checkpoint's 400 MiB and 60 MiB" in text
    assert found["resident.decode", "resident"].ours == "5"
    assert set(id_ for id_, _ in found) == {name for name in load_claims(CLAIMS).by_id if name.startswith("resident.")}


def test_a_slower_engine_fails_the_relation(run):
    def change(runs):
        runs.loc[runs["arm"] == "resident", "tok_s"] *= 10

    assert run(change)[1][LIMITED].status == "relation fails"


def test_an_interval_that_spans_1_is_undecided(run):
    def change(runs):
        runs.loc[runs["arm"] == "resident", "tok_s"] = [10.0, 40.0, 20.0]

    row = run(change)[1][LIMITED]
    assert row.status == "not testable here" and row.why.startswith("undecided: ") and "spans 1" in row.why


def test_stock_that_its_limit_kills_is_told_and_has_no_speed(run):
    text, found = run(lambda runs: void(runs, "resident", KILLED))
    row = found[LIMITED]
    assert row.status == "not testable here" and "killed by the limit in 3 of 3 rounds" in row.ours
    assert "killed by construction (3 of 3 rounds)" in row.why and "x (" not in row.ours
    speed = next(line for line in text.splitlines() if line.startswith("| resident | "))
    assert speed == "| resident | 5 tok/s (4.9-5.1), n=3 |  | killed by the limit in 3 of 3 rounds |  |"


def test_another_reason_to_be_void_is_no_verdict(run):
    row = run(lambda runs: void(runs, "resident", "the machine swapped"))[1][LIMITED]
    assert row.status == "not testable here" and "void: the machine swapped" in row.ours


def test_an_engine_that_is_killed_too_holds_nothing(run):
    def change(runs):
        void(runs, "resident", KILLED)
        void(runs, "prerouter", KILLED)

    assert run(change)[1][LIMITED].status == "not testable here"


def test_a_limit_that_cannot_be_enforced_is_told_with_its_reason(run):
    text, found = run(limit=LIMIT | {"enforced": False, "reason": "no cgroup here"})
    row = found[LIMITED]
    assert row.status == "not testable here" and "no cgroup here" in row.why and row.session == ""
    assert "limit cannot be enforced" in text and "## Memory with the limit" not in text


def test_a_drifted_session_has_no_verdict(run):
    def change(runs):
        runs.loc[runs["role"] == "drift", "tok_s"] *= 2

    assert run(change)[1][LIMITED].why == "no verdict: the session drifted"


@pytest.mark.parametrize(("limit", "reason"), [({}, "does not say limit_bytes"), ([], "does not say limit_bytes")])
def test_a_bad_limit_is_refused_in_one_line(tmp_path, capsys, limit, reason):
    (tmp_path / "limit.json").write_text(json.dumps(limit))
    free = make(tmp_path / "free")
    options = ["--limited", str(free), "--limit", str(tmp_path / "limit.json"), "--claims", str(CLAIMS)]
    assert resident.main([str(free), *options, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_drifted_session_says_so_in_its_panel_and_below(tmp_path):
    def change(runs):
        runs.loc[runs["role"] == "drift", "tok_s"] *= 1.5

    free = load_session(make(tmp_path / "free"))
    limited = resident.Limited(LIMIT, load_session(make(tmp_path / "limited", change, name="s2")))
    figure = draw_resident(resident.panels(free, limited))
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "tokens per second",
        "tokens per second; no verdict: drift 1.50x",
    ]
    assert "no verdict: drift 1.50x (session s2)" in [text.get_text() for text in figure.texts]


def test_drift_is_looked_at_before_everything_else(run):
    def change(runs):
        void(runs, "resident", KILLED)
        runs.loc[runs["role"] == "drift", "tok_s"] *= 2

    row = run(change, LIMIT | {"checkpoint_bytes": 300 << 20})[1][LIMITED]
    assert row.status == "not testable here" and row.why == "no verdict: the session drifted"


def test_a_limit_that_holds_the_whole_checkpoint_is_outside_the_regime(run):
    """Of a tiny checkpoint the interpreter's part of the limit is larger than what the share takes away."""
    row = run(limit=LIMIT | {"checkpoint_bytes": 300 << 20})[1][LIMITED]
    assert row.status == "not testable here" and "no larger than the limit" in row.why
