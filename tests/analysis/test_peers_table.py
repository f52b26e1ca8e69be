"""Other engines beside ours: ratios within each session, goals, an engine that is killed or was never built."""

import json

import pandas as pd
import pytest
from synthetic import ARMS, make_session

from analysis import peers
from analysis.resident_figure import LOOKS

LIBRARY = {"built": True, "reason": "", "versions": {"llama-cpp-python": "0.3.36"}, "system": "AVX2 = 1"}
ACTIVE = {"checkpoint": {"fixed": 20 << 20, "expert": 5 << 20}, "gguf": {"fixed": 21 << 20, "expert": 5 << 20}}
FILE = {"gguf": "q4_0.gguf", "reason": "", "active": ACTIVE}
ONE = {
    "kind": "q4_1",
    "tokens": 64,
    "relative_error": [0.01, 0.02],
    "median_relative_error": 0.01,
    "median_correlation": 0.9999,
    "same_choice": 0.97,
}
CHECK = {"checks": [ONE, {"kind": "f32", "reason": "too large"}]}
KILLED = "arm llama-cpp-repacked at K=8 was killed by its limit of 300 bytes (out of memory in its group)"


def limit(share):
    checkpoint, base = 400 << 20, 128 << 20
    about = {"share": share, "checkpoint_bytes": checkpoint, "base_bytes": base, "limit_bytes": int(share * checkpoint)}
    return about | {"enforced": True, "method": "cgroup-v1", "reason": ""}


LIMITS = (limit(0.5), limit(0.25))


def make(folder, name, change=None, condition="limit", arms_run=ARMS):
    """ondemand 10 tok/s, ondemand-mmap 5, llama-cpp and llama-cpp-repacked as the two prerouters: 18 and 6."""

    def arms(frames, info):
        renamed = {"prerouter": "llama-cpp-repacked", "prerouter-mmap": "llama-cpp"}
        frames["runs"]["arm"] = frames["runs"]["arm"].replace(renamed)
        if change is not None:
            change(frames["runs"])

    return make_session(folder, arms=arms_run, k_values=(8,), name=name, condition=condition, change=arms)


def void(arm, reason):
    def change(runs):
        runs.loc[runs["arm"] == arm, ["void", "void_reason", "tok_s"]] = [True, reason, None]

    return change


@pytest.fixture
def run(tmp_path, capsys):
    """A call; returns (text, goals by name, folder of outputs)."""

    def call(half=None, quarter=None, limits=LIMITS, library=LIBRARY, file=FILE, check=CHECK):
        arms = ARMS if library["built"] else ("ondemand", "ondemand-mmap")
        warm = make(tmp_path / "warm", "s1", condition="warm", arms_run=arms)
        changes = ((2, half), (3, quarter))
        parts = [make(tmp_path / f"l{at}", f"s{at}", change, arms_run=arms) for at, change in changes]
        documents = {"limit0": limits[0], "limit1": limits[1], "library": library, "file": file, "check": check}
        for name, document in documents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(document))
        code = peers.main(
            [
                *(str(warm), "--limited", *map(str, parts)),
                *("--limits", *(str(tmp_path / f"limit{number}.json") for number in (0, 1))),
                *(
                    part
                    for name in ("library", "file", "check")
                    for part in (f"--{name}", str(tmp_path / f"{name}.json"))
                ),
                *("--out", str(tmp_path / "out")),
            ]
        )
        printed = capsys.readouterr()
        assert code == 0, printed.err
        goals = pd.read_csv(tmp_path / "out/goals.csv", dtype={"pass": str}, keep_default_na=False)
        return printed.out, {row.measure: row for row in goals.itertuples()}, tmp_path / "out"

    return call


def test_every_goal_is_judged_by_the_ratio_of_its_own_session(run):
    text, goals, out = run()
    assert {path.name for path in out.iterdir()} == {
        *("summary.csv", "ratios.csv", "goals.csv", "table.md", "peers.png", "peers.svg")
    }
    warm = goals["peers.warm.ondemand_over_llama-cpp-repacked"]
    assert float(warm.value) == pytest.approx(10 / 18 / 1.01, rel=0.01) and warm._7 == "false" and warm.session == "s1"
    half = goals["peers.50%.ondemand_over_llama-cpp"]
    assert float(half.value) == pytest.approx(10 / 6, rel=0.03) and half._7 == "false" and half.session == "s2"
    assert goals["peers.50%.ondemand_over_ondemand-mmap"]._7 == "true"
    assert goals["peers.25%.ondemand_over_llama-cpp"].goal == ">= 5.0"
    ratios = pd.read_csv(out / "ratios.csv").set_index(["memory", "arm", "base"])
    assert ratios.loc[("25%", "ondemand", "ondemand-mmap"), "ratio"] == pytest.approx(2)


def test_bytes_a_token_needs_and_the_check_stand_above(run):
    text, _, out = run()
    assert "active bytes: 60.0 MiB a token of the checkpoint at K=8, 61.0 MiB of the GGUF file (+1.7%)" in text
    assert "same model: not checked on F32: too large" in text
    assert "on equal weights (Q4_1) llama.cpp's logits lie 1.00%" in text and "largest 2.00%" in text
    summary = pd.read_csv(out / "summary.csv").set_index(["memory", "arm"])
    assert summary.loc[("warm", "ondemand"), "active_gb_s"] == pytest.approx(10 * 60 * 2**20 / 1e9, rel=1e-4)


def test_an_engine_that_its_limit_kills_is_told_and_has_no_ratio(run):
    text, goals, _ = run(half=void("llama-cpp-repacked", KILLED), quarter=void("llama-cpp", KILLED))
    row = next(line for line in text.splitlines() if line.startswith("| llama-cpp-repacked | "))
    assert "killed by the limit in 3 of 3 rounds" in row
    goal = goals["peers.25%.ondemand_over_llama-cpp"]
    assert goal.value == "" and goal._7 == "" and "killed by the limit in 3 of 3 rounds" in goal.note


def test_a_library_that_was_not_built_is_a_reason_in_every_place(run):
    reason = "pip could not build it: no compiler"
    library = {"built": False, "reason": reason}
    file = {"gguf": None, "reason": "no gguf"}
    text, goals, _ = run(library=library, file=file, check={"checks": []})
    assert f"llama.cpp: not measured: {reason}" in text
    assert reason in goals["peers.50%.ondemand_over_llama-cpp"].note


def test_a_limit_that_cannot_be_enforced_leaves_the_warm_session(run):
    cannot = limit(0.5) | {"enforced": False, "reason": "no cgroup here"}
    text, goals, _ = run(limits=(cannot, limit(0.25)))
    assert "no limit can be enforced here: no cgroup here" in goals["peers.50%.ondemand_over_llama-cpp"].note
    assert "50%: no limit can be enforced on this machine (no cgroup here)" in text


def test_a_drifted_session_judges_no_goal(run):
    def drift(runs):
        runs.loc[runs["role"] == "drift", "tok_s"] *= 2

    text, goals, _ = run(half=drift)
    assert goals["peers.50%.ondemand_over_ondemand-mmap"]._7 == ""
    assert "the session drifted" in goals["peers.50%.ondemand_over_ondemand-mmap"].note
    assert goals["peers.25%.ondemand_over_llama-cpp"]._7 == "false"


def test_a_document_that_says_nothing_is_refused_in_one_line(tmp_path, capsys):
    session = make(tmp_path / "s", "s1", condition="warm")
    (tmp_path / "x.json").write_text("[]")
    places = [part for name in ("library", "file", "check") for part in (f"--{name}", str(tmp_path / "x.json"))]
    assert peers.main([str(session), *places, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "does not say built" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_every_arm_has_a_look_in_the_figure():
    """The arms of direct reads once had none: a session of nine minutes ended in a KeyError."""
    assert set(peers.ARMS) <= set(LOOKS)
