"""Table 3 from synthetic sessions: exact numbers, void runs, refusals, the file contract, atomic output."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import ARMS, change_info, make_session, row, set_runs, tok_s, void_run

from analysis import tab3
from analysis.heading import GUEST_COLD
from analysis.paper.claims import load_claims
from analysis.rows import DIRECT_ARMS, load_session, pair_ratios, publishing

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
CONTRACT = "arm,k,rounds,tok_s_median,tok_s_min,tok_s_max,wait_ms_per_step,loads_per_step,device_mib_per_step,dropped"
PAIR_CONTRACT = "k,arm,base,ratio,ci_low,ci_high,n"
FILES = {"summary.csv", "pairs.csv", "compare.csv", "table.md", "tab3.png", "tab3.svg"}


def run(session: Path, out: Path) -> int:
    return tab3.main([str(session), "--claims", str(CLAIMS), "--out", str(out)])


def test_the_command_writes_the_contract_and_prints_the_table(tmp_path, capsys):
    assert run(make_session(tmp_path / "s"), tmp_path / "deep" / "out") == 0
    out = tmp_path / "deep" / "out"
    assert {path.name for path in out.iterdir()} == FILES
    header = (out / "summary.csv").read_text().splitlines()[0]
    assert header.startswith(CONTRACT + ",")
    assert (out / "pairs.csv").read_text().splitlines()[0].startswith(PAIR_CONTRACT + ",")
    summary = pd.read_csv(out / "summary.csv")
    assert list(zip(summary["k"], summary["arm"], strict=True)) == [(k, arm) for k in (2, 4, 8) for arm in ARMS]
    assert (out / "table.md").read_text() == capsys.readouterr().out.removesuffix("\n")


def test_summary_by_hand(tmp_path):
    """ondemand at K=4: rounds at 20, 20.4 and 19.6 tok/s; timed steps of 27 and 33 ms waiting, warm-up not counted."""
    table = tab3.summary(load_session(make_session(tmp_path / "s")))
    found = row(table, arm="ondemand", k=4)
    expected = {
        "rounds": 3,
        "tok_s_median": 20.0,
        "tok_s_min": 19.6,
        "tok_s_max": 20.4,
        "wait_ms_per_step": 30.0,
        "wait_predicted_ms_per_step": 24.0,
        "wait_gate_ms_per_step": 6.0,
        "compute_ms_per_step": 40.0,
        "loads_per_step": 40.0,
        "hits_per_step": 8.0,
        "asked_mib_per_step": 80.0,
        "device_mib_per_step": 64.0,
        "cold_share": 0.75,
        "alloc_peak_mib": 109.0,
        "rss_anon_mib": 150.0,
        "dropped": 0,
        "void_runs": 0,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    texts = {"condition": "budget:0.25", "tier": "mini-35b", "machine": "testbox", "session": "s1"}
    assert {key: found[key] for key in texts} == texts


def test_wait_is_the_median_over_rounds_of_means_over_steps(tmp_path):
    def change(frames, info):
        steps = frames["steps"]
        for round_, wait in enumerate((1.0, 5.0, 100.0)):
            mine = (steps["run_id"] == f"arm-ondemand-k8-r{round_}") & steps["timed"]
            steps.loc[mine, "wait_ms"] = [0.0, 2 * wait]

    table = tab3.summary(load_session(make_session(tmp_path / "s", change=change)))
    assert row(table, arm="ondemand", k=8)["wait_ms_per_step"] == 5.0


def test_pairs_by_hand(tmp_path):
    """The prerouter's rounds gain 0, 1 and 2%: logs of mean ln1.8 + ln1.01 and sd ln1.01; t(2) = 4.302653."""
    session = load_session(make_session(tmp_path / "s"))
    table = tab3.pairs(session, pair_ratios(session))
    found = row(table, k=8, arm="prerouter", base="ondemand")
    half_width = 4.302652729696142 * math.log(1.01) / math.sqrt(3)
    assert found["ratio"] == pytest.approx(1.8 * 1.01)
    assert found["ci_low"] == pytest.approx(1.8 * 1.01 * math.exp(-half_width))
    assert found["ci_high"] == pytest.approx(1.8 * 1.01 * math.exp(half_width))
    assert (found["n"], found["session"], found["note"]) == (3, "s1", "")
    assert row(table, k=2, arm="prerouter-mmap", base="ondemand-mmap")["ratio"] == pytest.approx(1.2 * 1.01)
    assert row(table, k=2, arm="ondemand", base="ondemand-mmap")["ratio"] == pytest.approx(2.0)
    assert row(table, k=2, arm="prerouter", base="prerouter-mmap")["ratio"] == pytest.approx(3.0)
    assert len(table) == 3 * 4 + 1


def test_the_a_a_row_repeats_the_first_arm_at_the_largest_k(tmp_path):
    session = load_session(make_session(tmp_path / "s"))
    found = row(tab3.pairs(session, pair_ratios(session)), note="A/A")
    assert (found["arm"], found["base"], found["k"], found["n"]) == ("ondemand", "ondemand", 8, 3)
    assert found["ratio"] == pytest.approx(1.005)


def test_a_void_run_is_listed_and_gives_no_number(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=void_run("arm-prerouter-k8-r1", "swapped 3 MiB")))
    table, ratios = tab3.summary(session), pair_ratios(session)
    found = row(table, arm="prerouter", k=8)
    assert (found["rounds"], found["void_runs"]) == (2, 1)
    assert found["tok_s_max"] == pytest.approx(max(tok_s("prerouter", 8, 0), tok_s("prerouter", 8, 2)))
    assert ratios[8, "prerouter", "ondemand"].n == 2
    assert ratios[8, "prerouter", "ondemand"].ratio == pytest.approx(1.8 * 1.01)
    text = tab3.markdown(session, table, ratios, load_claims(CLAIMS))
    assert "void runs: 1" in text
    assert "arm-prerouter-k8-r1 (arm prerouter, K=8, round 1): swapped 3 MiB" in text
    assert "9999" not in text


def test_void_runs_of_an_arm_for_one_reason_share_a_line(tmp_path):
    def change(frames, info):
        for round_, reason in enumerate(("killed", "killed", "swapped")):
            void_run(f"arm-prerouter-k8-r{round_}", reason)(frames, info)

    session = load_session(make_session(tmp_path / "s", change=change))
    lines = [line for line in tab3.header_lines(session, "long") if line.startswith("void")]
    assert lines == [
        "void runs: 3",
        "void: 2 runs (arm prerouter, K=8, rounds 0, 1): killed",
        "void: arm-prerouter-k8-r2 (arm prerouter, K=8, round 2): swapped",
    ]


def test_arms_that_read_past_the_page_cache_stand_beside_and_the_papers_claims_leave_them_out(tmp_path, capsys):
    arms = (*ARMS, *DIRECT_ARMS)
    assert run(make_session(tmp_path / "s", arms=arms, k_values=(4,)), tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "| 4 | prerouter-direct | 3 | 40.00 (39.99-41.21) | 2.02x (1.97-2.07), n=3 |" in text
    assert "| prerouter-direct over prerouter | 1.11x" in text and "`-direct` reads" in text
    assert not any("direct" in arm for arm in pd.read_csv(tmp_path / "out" / "compare.csv")["arm"].fillna(""))
    assert run(make_session(tmp_path / "t"), tmp_path / "out") == 0
    assert "-direct" not in capsys.readouterr().out


def test_an_arm_with_only_void_runs_keeps_an_empty_row(tmp_path):
    def change(frames, info):
        set_runs("void", True, arm="prerouter", k=8)(frames, info)
        set_runs("void_reason", "dropped an expert", arm="prerouter", k=8)(frames, info)
        set_runs("dropped", 2, run_id="arm-prerouter-k8-r0")(frames, info)

    folder = make_session(tmp_path / "s", change=change)
    session = load_session(folder)
    found = row(tab3.summary(session), arm="prerouter", k=8)
    assert (found["rounds"], found["void_runs"], found["dropped"]) == (0, 3, 2)
    assert math.isnan(found["tok_s_median"])
    pair = row(tab3.pairs(session, pair_ratios(session)), k=8, arm="prerouter", base="ondemand")
    assert pair["n"] == 0 and math.isnan(pair["ratio"])
    assert run(folder, tmp_path / "out") == 0
    assert "| 8 | prerouter | 0 | void | no shared round |" in (tmp_path / "out" / "table.md").read_text()


def test_a_drop_that_only_the_steps_saw_counts(tmp_path):
    def change(frames, info):
        frames["steps"].loc[frames["steps"]["run_id"] == "arm-ondemand-k2-r0", "dropped"] = 1

    table = tab3.summary(load_session(make_session(tmp_path / "s", change=change)))
    assert row(table, arm="ondemand", k=2)["dropped"] == 3
    assert row(table, arm="prerouter", k=2)["dropped"] == 0


def drop_column(frame, column):
    def change(frames, info):
        del frames[frame][column]

    return change


def repeat_first_run(frames, info):
    extra = frames["runs"].iloc[[0]].assign(run_id="again", order=999)
    frames["runs"] = pd.concat([frames["runs"], extra], ignore_index=True)


def forget_timed(frames, info):
    frames["steps"].loc[frames["steps"]["run_id"] == "arm-ondemand-k2-r0", "timed"] = False


def all_void(frames, info):
    frames["runs"]["void"] = frames["runs"]["role"] == "arm"
    frames["runs"]["void_reason"] = "swapped"


def void_as_text(frames, info):
    frames["runs"]["void"] = "False"


REFUSALS = [
    (set_runs("session", "s2", order=3), "runs.parquet: mixed sessions (s1, s2)"),
    (change_info("session", "s0"), "runs.parquet: mixed sessions (s0, s1)"),
    (set_runs("condition", "warm", order=3), "mixed conditions (budget:0.25, warm)"),
    (set_runs("tier", "mini-8b", order=3), "mixed tiers (mini-35b, mini-8b)"),
    (set_runs("run_id", "stranger", order=3), "mixed sessions?"),
    (set_runs("role", "warmup", order=3), "role 'warmup' is not one of arm, aa, drift"),
    (set_runs("arm", "resident", order=3), "arm 'resident' is not one of ondemand"),
    (drop_column("runs", "tok_s"), "runs.parquet: missing columns: tok_s"),
    (drop_column("steps", "wait_gate_ms"), "steps.parquet: missing columns: wait_gate_ms"),
    (drop_column("loads", "inflight_bytes"), "loads.parquet: missing columns: inflight_bytes"),
    (repeat_first_run, "two runs with the same role arm, arm ondemand, k 2, round 0"),
    (forget_timed, "expected 2 timed steps of run arm-ondemand-k2-r0, found 0"),
    (all_void, "no valid run of an arm; first reason: swapped"),
    (void_as_text, "column void must be boolean"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
def test_bad_sessions_are_refused_in_one_line(tmp_path, capsys, change, reason):
    assert run(make_session(tmp_path / "s", change=change), tmp_path / "out") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ") and reason in printed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["session.json", "runs.parquet", "steps.parquet", "loads.parquet"])
@pytest.mark.parametrize("harm", ["absent", "garbage"])
def test_a_missing_or_broken_file_is_named(tmp_path, capsys, name, harm):
    folder = make_session(tmp_path / "s", arms=("ondemand",), k_values=(2,), rounds=1)
    if harm == "absent":
        (folder / name).unlink()
    else:
        (folder / name).write_text("{ not a file of this kind")
    assert run(folder, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert str(folder / name) in error and error.count("\n") == 1


def test_session_json_may_lack_everything(tmp_path):
    folder = make_session(
        tmp_path / "s", arms=("ondemand", "prerouter"), k_values=(2, 4), change=lambda _, info: info.clear()
    )
    assert run(folder, tmp_path / "out") == 0
    text = (tmp_path / "out" / "table.md").read_text()
    assert "machine: not named" in text and "session: s1, commit unknown" in text
    assert pd.read_csv(tmp_path / "out" / "pairs.csv")["session"].unique().tolist() == ["s1"]


def test_the_header_says_what_the_host_may_hold_and_that_a_session_was_resumed(tmp_path):
    def change(frames, info):
        info |= {"lower_cache": "suspected", "resumed": ["2026-01-02"]}

    lines = tab3.header_lines(load_session(make_session(tmp_path / "s", change=change)), "about a minute")
    by_name = dict(line.split(": ", 1) for line in lines)
    assert by_name["condition"].endswith(GUEST_COLD)
    assert by_name["session"].endswith("killed and taken up again")
    assert by_name["rounds"] == "3 valid per arm and K" and by_name["takes"] == "about a minute"
    plain = "\n".join(tab3.header_lines(load_session(make_session(tmp_path / "t")), "about a minute"))
    assert "guest" not in plain and "taken up again" not in plain


def test_the_header_says_uncommitted_changes_and_a_busy_machine(tmp_path):
    def lines(name, **host):
        change = change_info("host", {"cores_logical": 2} | host)
        return "\n".join(tab3.header_lines(load_session(make_session(tmp_path / name, change=change)), "a minute"))

    text = lines("a", git_dirty=True, load_1min=1.01)
    assert "commit abc123 + uncommitted changes, made" in text and "load average 1.01 on 2 cores" in text
    text = lines("b", git_dirty=False, load_1min=1.0)
    assert "uncommitted" not in text and "busy" not in text


@pytest.mark.parametrize("most", [0.019, 0.021])
def test_the_header_says_what_a_hypervisor_took(tmp_path, most):
    def change(frames, info):
        shares = [most if arm == "prerouter" else None for arm in frames["runs"]["arm"]]
        frames["runs"] = frames["runs"].assign(stolen_share=shares)

    lines = tab3.header_lines(load_session(make_session(tmp_path / "s", change=change)), "a minute")
    told = [line for line in lines if line.startswith("stolen: ")]
    assert len(told) == (most >= 0.02)
    assert not told or told[0].endswith("(median of the runs; largest 2%; most of prerouter's, 2%)")


def test_an_effect_below_what_the_session_could_show_is_marked(tmp_path):
    """A/A logs of 0, 0.1 and -0.1 at n=3: the smallest visible effect is 1.36x, so 1.21x is marked and 1.82x is not."""

    def change(frames, info):
        runs = frames["runs"]
        for round_, log in enumerate((0.0, 0.1, -0.1)):
            first = runs.loc[runs["run_id"] == f"arm-ondemand-k8-r{round_}", "tok_s"].iloc[0]
            runs.loc[runs["run_id"] == f"aa-ondemand-k8-r{round_}", "tok_s"] = first * math.exp(log)

    session = load_session(make_session(tmp_path / "s", change=change))
    table, ratios = tab3.summary(session), pair_ratios(session)
    assert tab3.visible_effect(ratios) == pytest.approx(math.exp(0.1 * (4.302653 + 1.060660) / math.sqrt(3)), rel=1e-5)
    text = tab3.markdown(session, table, ratios, load_claims(CLAIMS))
    assert f"{ratios[8, 'prerouter-mmap', 'ondemand-mmap']}{tab3.MARK} |" in text
    assert f"{ratios[8, 'prerouter', 'ondemand']} |" in text and f"{ratios[8, 'ondemand', 'ondemand']} |" in text
    assert f"smallest effect ({tab3.visible_effect(ratios):.2f}x)" in text


def test_a_session_that_drifted_has_no_verdict(tmp_path):
    calm = load_session(make_session(tmp_path / "calm"))
    assert calm.drift().ratio == pytest.approx(1.0) and not calm.drift().void_verdict
    folder = make_session(tmp_path / "drifted", change=set_runs("tok_s", 0.85 * tok_s("ondemand", 2, 0), role="drift"))
    drift = load_session(folder).drift()
    assert drift.ratio == pytest.approx(0.85) and drift.void_verdict
    assert run(folder, tmp_path / "out") == 0
    assert "0.85x, drifted, so the session has no verdict" in (tmp_path / "out" / "table.md").read_text()


def test_the_limit_of_drift_follows_the_noise_of_the_sessions_own_twins(tmp_path):
    def noisy(frames, info):
        runs = frames["runs"]
        twin = (runs["role"] == "aa") & (runs["round"] == 1)
        runs.loc[twin, "tok_s"] *= 1.06
        runs.loc[runs["role"] == "drift", "tok_s"] *= 0.90

    session = load_session(make_session(tmp_path / "s", k_values=(4,), change=noisy))
    pairs = [math.log(1.06), 0.0, 0.0]
    noise = np.std(pairs, ddof=1) / math.sqrt(2) * stats.t.ppf(0.975, 2)
    limit = math.exp(noise * math.sqrt(1 + 1 / 2))
    assert 1.10 < 1 / 0.90 < limit < 1.25
    assert not session.drift().void_verdict and f"limit {limit:.2f}x" in session.drift().text


def test_a_void_drift_run_leaves_the_session_without_verdict(tmp_path):
    drift = load_session(make_session(tmp_path / "s", change=void_run("drift-ondemand-k2-r2", "swapped"))).drift()
    assert drift.void_verdict and math.isnan(drift.ratio) and "swapped" in drift.text


def test_the_table_names_condition_noise_and_the_papers_machine(tmp_path):
    assert run(make_session(tmp_path / "s"), tmp_path / "out") == 0
    text = (tmp_path / "out" / "table.md").read_text()
    assert "may keep 100 MiB of expert pages" in text
    assert "0 to 0 MiB cached before, 90 to 92 MiB cached after" in text
    assert "A/A (ondemand at K=8 against itself): 1.00x" in text
    assert "| 4 | ondemand | 3 | 20.00 (19.60-20.40) |  | 30.0 | 64.0 | 40.0 | 0 |" in text
    assert "| 8 | paper: MacBook M2, 16 GB (secondary source) | 1.8 | 3.3 | 1.76-1.91x by the digits |" in text
    assert "| 8 | ours: testbox, explicit reads | 10.00 |" in text
    assert "## How to read" in text


def test_a_failed_write_leaves_the_old_files_and_no_partial_one(tmp_path, capsys, monkeypatch):
    session, out = make_session(tmp_path / "s"), tmp_path / "out"
    out.mkdir()
    (out / "summary.csv").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device", "tab3.png")

    monkeypatch.setattr(tab3, "save_tab3_figure", full)
    assert run(session, out) == 2
    assert "tab3.png: cannot be written (No space left on device)" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["summary.csv"]
    assert (out / "summary.csv").read_text() == "old"


def test_an_output_path_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "out").write_text("in the way")
    assert run(make_session(tmp_path / "s"), tmp_path / "out") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "in the way"


def test_publishing_replaces_whole_files_and_removes_a_folder_that_it_made(tmp_path):
    with publishing(tmp_path / "new") as scratch:
        (scratch / "a").write_text("1")
        assert not (tmp_path / "new" / "a").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]
    with pytest.raises(RuntimeError), publishing(tmp_path / "other") as scratch:
        (scratch / "a").write_text("half")
        raise RuntimeError("stop")
    assert not (tmp_path / "other").exists()
