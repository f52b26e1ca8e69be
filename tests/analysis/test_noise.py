"""Noise: the measures by hand from a session of pairs, other sessions beside it, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from synthetic import make_session, void_run

from analysis import noise
from analysis.noise import Cell, across_sessions
from analysis.rows import load_session
from analysis.statistics import rounds_needed, smallest_visible_effect

CLAIMS = "results/paper/claims.yaml"
# Twin over run in five rounds, and the rounds' own speeds: geometric means 1 and 10.
RATIOS = (1.1, 1 / 1.1, 1.2, 1 / 1.2, 1.0)


def pairs(ratios=RATIOS, speed=10.0, growth=1.0):
    """A change that sets the A/A pairs of a session: ratio twin over run, and growth of speed from round to round."""

    def change(frames, info):
        runs = frames["runs"]
        for round_, ratio in enumerate(ratios):
            for role, factor in (("arm", ratio**-0.5), ("aa", ratio**0.5)):
                mine = (runs["round"] == round_) & (runs["role"] == role)
                runs.loc[mine, "tok_s"] = speed * growth**round_ * factor

    return change


def session_of(folder, change=None, **more):
    return load_session(
        make_session(folder, arms=("ondemand",), k_values=(8,), rounds=5, change=change or pairs(), **more)
    )


def measures(session, roots=()):
    table = noise.summary(session, Cell.of(session), across_sessions(session, roots))
    assert table["measure"].is_unique
    return {row.measure: row for row in table.itertuples()}


def test_measures_of_pairs_by_hand(tmp_path):
    found = measures(session_of(tmp_path / "s"))
    sd = np.std(np.log(RATIOS), ddof=1)
    ratio = found["A/A ratio"]
    assert (ratio.value, ratio.n, ratio.verdict) == (pytest.approx(1), 5, "pass: contains 1.00")
    assert ratio.ci_low * ratio.ci_high == pytest.approx(1)
    assert found["spread of a pair's ratio"].value == pytest.approx(sd)
    speeds = 10 * np.array([*np.power(RATIOS, 0.5), *np.power(RATIOS, -0.5)])
    assert found["CV of single runs"].value == pytest.approx(speeds.std(ddof=1) / speeds.mean())
    assert found["range of single runs"].value == pytest.approx((speeds.max() - speeds.min()) / 10)
    assert found["smallest visible effect"].value == pytest.approx(smallest_visible_effect(5, sd))
    assert found["rounds needed for 1%"].value == rounds_needed(1.01, sd)
    assert found["rounds needed for 5%"].value == rounds_needed(1.05, sd) < found["rounds needed for 1%"].value
    assert 0 <= found["false positives of 3 rounds"].value < 0.2
    assert found["drift per round"].value == pytest.approx(0, abs=1e-9) and found["drift per round"].n == 5


def test_pairs_that_differ_to_one_side_fail(tmp_path):
    ratio = measures(session_of(tmp_path / "s", pairs((1.2, 1.21, 1.19, 1.2, 1.22))))["A/A ratio"]
    assert ratio.verdict == "FAIL: does not contain 1.00" and ratio.ci_low > 1


def test_drift_is_seen_and_does_not_enter_the_ratio(tmp_path):
    found = measures(session_of(tmp_path / "s", pairs(growth=1.03)))
    drift = found["drift per round"]
    assert drift.value == pytest.approx(0.03) and drift.ci_low > 0 and drift.verdict == "drifts"
    assert found["A/A ratio"].value == pytest.approx(1)


def test_one_pair_says_little_and_says_so(tmp_path):
    change = pairs()

    def only_one(frames, info):
        change(frames, info)
        for round_ in range(1, 5):
            void_run(f"aa-ondemand-k8-r{round_}", "it was void")(frames, info)

    found = measures(session_of(tmp_path / "s", only_one))
    assert (found["A/A ratio"].n, found["A/A ratio"].verdict) == (1, "")
    assert found["A/A ratio"].note == "one or two pairs have no interval"
    for name in ("smallest visible effect", "rounds needed for 5%", "false positives of 3 rounds"):
        assert math.isnan(found[name].value) and found[name].verdict == ""


def test_two_pairs_show_no_smallest_effect_and_say_so(tmp_path, capsys):
    """Student's t of two pairs would call 60% the smallest effect that shows, of noise of a few per cent."""
    session = make_session(tmp_path / "s", arms=("ondemand",), k_values=(8,), rounds=2)
    assert noise.main([str(session), "--claims", CLAIMS, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "against itself): 1.00x (no interval), n=2; smallest effect visible: not estimable with n=2" in told
    assert "| smallest visible effect | not estimable with n=2 |  | 2 |" in told


def test_a_spread_says_which_runs_it_is_of(tmp_path, capsys):
    """The list above the table leaves repeats out, the measure takes them in: two numbers, each with its name."""
    session = make_session(tmp_path / "s", arms=("ondemand",), k_values=(8,), rounds=5, change=pairs())
    assert noise.main([str(session), "--claims", CLAIMS, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    alone = np.power(RATIOS, -0.5)
    cv = f"{alone.std(ddof=1) / alone.mean():.1%}"
    assert f"(CV of each arm's runs, A/A repeats left out): median {cv}, largest {cv}" in told
    assert f"runs and their repeats; of the 5 runs without repeats {cv}" in told


def test_a_session_without_pairs_is_refused(tmp_path):
    def no_pair(frames, info):
        runs = frames["runs"]
        gone = set(runs.loc[runs["role"] == "aa", "run_id"])
        for name, frame in frames.items():
            frames[name] = frame[~frame["run_id"].isin(gone)].reset_index(drop=True)

    with pytest.raises(ValueError, match="A/A"):
        Cell.of(session_of(tmp_path / "s", no_pair))
    with pytest.raises(ValueError, match="no A/A pair is valid"):
        change = pairs()

        def all_void(frames, info):
            change(frames, info)
            for round_ in range(5):
                void_run(f"aa-ondemand-k8-r{round_}", "it was void")(frames, info)

        Cell.of(session_of(tmp_path / "t", all_void))


def test_sessions_are_set_beside_each_other_only_where_they_ran_alike(tmp_path):
    root, other = tmp_path / "noise", tmp_path / "tab3"
    own = session_of(root / "s1", name="s1")
    assert math.isnan(across_sessions(own, [root, other]).ratio)
    session_of(root / "s2", pairs(speed=20.0), name="s2")
    session_of(other / "s3", pairs(speed=5.0), name="s3")
    session_of(other / "s4", pairs(speed=99.0), name="s4", condition="warm")

    def of_another_machine(frames, info):
        pairs(speed=99.0)(frames, info)
        info["machine"] = "elsewhere"

    session_of(other / "s5", of_another_machine, name="s5")
    (other / "s6").mkdir()
    (other / "s6" / "session.json").write_text("{}")
    (other / ".s7").mkdir()
    found = across_sessions(own, [root, other])
    assert sorted(found.medians) == ["s1", "s2", "s3"]
    assert found.ratio == pytest.approx(4) and str(found).startswith("4.00x between 3 sessions of 1 commit")


def test_outputs_and_the_paper_beside_ours(tmp_path, capsys):
    root = tmp_path / "sessions"
    session_of(root / "s1", name="s1")
    (root / "latest.json").write_text(json.dumps({"session": "s1"}))
    call = [str(root / "latest.json"), "--sessions", str(root), str(tmp_path / "absent"), "--claims", CLAIMS]
    assert noise.main([*call, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert told.strip() == (tmp_path / "out" / "table.md").read_text().strip()
    assert "holds 1" in told and "| 5 | pass: contains 1.00 | passes when" in told and "about 5 minutes" in told
    names = ["compare.csv", "noise.png", "noise.svg", "summary.csv", "table.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    compared = pd.read_csv(tmp_path / "out" / "compare.csv", keep_default_na=False).set_index("id")
    assert set(compared["status"]) == {"not testable here"} and set(compared["command"]) == {"snakemake noise"}
    assert compared.loc["noise.run_to_run", "ours"].startswith("0.18 (10 runs")
    assert "fewer than two sessions" in compared.loc["noise.cross_session", "why"]
    session_of(root / "s2", pairs(speed=15.0), name="s2")
    assert noise.main([*call, "--out", str(tmp_path / "out")]) == 0
    compared = pd.read_csv(tmp_path / "out" / "compare.csv", keep_default_na=False).set_index("id")
    assert compared.loc["noise.cross_session", "ours"].startswith("1.50x between 2 sessions")


def test_a_refusal_is_one_line_and_leaves_nothing(tmp_path, capsys):
    call = [str(tmp_path / "absent"), "--claims", CLAIMS, "--out", str(tmp_path / "out")]
    assert noise.main(call) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not (tmp_path / "out").exists()
