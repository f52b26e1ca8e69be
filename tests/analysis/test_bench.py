"""The benchmark: measures from a session by hand, both regimes of the overlap goal, and the collected file."""

import json
import math

import pandas as pd
import pytest
from synthetic import make_session, void_run

from analysis import bench
from analysis.bench import Measure
from analysis.rows import load_session


def by_name(measures: list[Measure]) -> dict[str, Measure]:
    assert len({measure.measure for measure in measures}) == len(measures)
    return {measure.measure: measure for measure in measures}


def set_steps(arm: str, **values):
    """A change that sets columns of every step of an arm."""

    def change(frames, info):
        mine = frames["steps"]["run_id"].str.contains(f"-{arm}-k")
        assert mine.any()
        for column, value in values.items():
            frames["steps"].loc[mine, column] = value

    return change


def test_overlap_when_compute_covers_load(tmp_path):
    """Compute 40 ms, load 30 ms; wait in predicted layers 8 ms against 48 ms: a share of 1/6."""
    found = by_name(bench.overlap(load_session(make_session(tmp_path / "s")), 8))
    assert found["overlap.k8.compute_ms"].value == pytest.approx(40)
    assert found["overlap.k8.load_ms"].value == pytest.approx(30)
    assert found["overlap.k8.wait_ms"].value == pytest.approx(8)
    assert found["overlap.k8.load_rows_ms"].value == pytest.approx(3)
    share = found["overlap.k8.wait_share"]
    assert share.value == pytest.approx(1 / 6) and share.goal == "<= 0.25" and share.passed is True
    assert share.ci_low == pytest.approx(1 / 6) and (share.session, share.commit) == ("s1", "abc123")
    assert "condition budget:0.25" in share.note
    assert "overlap.k8.exposed_wait" not in found


def test_overlap_that_misses_its_goal_is_recorded_as_such(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=set_steps("prerouter", wait_predicted_ms=24.0)))
    share = by_name(bench.overlap(session, 8))["overlap.k8.wait_share"]
    assert share.value == pytest.approx(0.5) and share.passed is False


@pytest.mark.parametrize(("wait", "passed"), [(22.9, True), (23.1, False)])
def test_overlap_when_load_exceeds_compute(tmp_path, wait, passed):
    """Compute 40 ms, load 60 ms: 20 ms cannot hide, so up to 23 ms of waiting may stand exposed."""
    change = set_steps("prerouter", load_busy_predicted_ms=60.0, wait_predicted_ms=wait)
    found = by_name(bench.overlap(load_session(make_session(tmp_path / "s", change=change)), 8))
    exposed = found["overlap.k8.exposed_wait"]
    assert exposed.value == pytest.approx(wait / 20) and exposed.goal == "<= 1.15" and exposed.passed is passed
    assert found["overlap.k8.wait_share"].goal == "" and found["overlap.k8.wait_share"].passed is None


def test_overlap_with_no_waiting_at_all_passes_without_an_interval(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=set_steps("prerouter", wait_predicted_ms=0.0)))
    share = by_name(bench.overlap(session, 8))["overlap.k8.wait_share"]
    assert share.value == 0 and share.passed is True and math.isnan(share.ci_low)


def test_overlap_cannot_be_judged_where_on_demand_does_not_wait(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=set_steps("ondemand", wait_predicted_ms=0.0)))
    share = by_name(bench.overlap(session, 8))["overlap.k8.wait_share"]
    assert math.isnan(share.value) and share.passed is None


def test_overlap_uses_the_rounds_valid_in_both_arms(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=void_run("arm-ondemand-k8-r2", "swapped")))
    assert "n=2" in by_name(bench.overlap(session, 8))["overlap.k8.wait_share"].note
    with pytest.raises(ValueError, match="share no valid round at K=3"):
        bench.overlap(session, 3)


def test_busy_time_of_the_load_rows_is_a_union(tmp_path):
    """Per timed step: 0-4, 1-2 (inside), 3-6 and 8-9 ms are 7 ms busy; a gate layer's read and a warm-up count not."""

    def change(frames, info):
        one = frames["loads"].iloc[0].to_dict() | {"run_id": "arm-prerouter-k8-r0"}
        rows = []
        for step in (0, 1, 2):
            for start, end, predicted in ((0, 4, True), (1, 2, True), (3, 6, True), (8, 9, True), (20, 40, False)):
                times = {"start_ns": int((100 * step + start) * 1e6), "end_ns": int((100 * step + end) * 1e6)}
                rows.append(one | times | {"step": step, "predicted_layer": predicted})
        others = frames["loads"][frames["loads"]["run_id"] != one["run_id"]]
        frames["loads"] = pd.concat([others, pd.DataFrame(rows)], ignore_index=True)

    session = load_session(make_session(tmp_path / "s", rounds=1, change=change))
    assert by_name(bench.overlap(session, 8))["overlap.k8.load_rows_ms"].value == pytest.approx(7)


def test_a_run_without_reads_was_busy_for_no_time(tmp_path):
    def change(frames, info):
        frames["loads"] = frames["loads"].iloc[:0]

    session = load_session(make_session(tmp_path / "s", change=change))
    assert by_name(bench.overlap(session, 8))["overlap.k8.load_rows_ms"].value == 0


def test_aa_ratio_must_hold_one(tmp_path):
    """The synthetic A/A pair is 1.005 in each round, with no noise: its interval does not hold 1."""
    (measure,) = bench.aa_ratio(load_session(make_session(tmp_path / "s")))
    assert measure.measure == "aa.ondemand.k8" and measure.value == pytest.approx(1.005)
    assert measure.passed is False

    def noisy(frames, info):
        runs = frames["runs"]
        runs.loc[runs["role"] == "aa", "tok_s"] *= [1.02, 0.98, 1.0]

    (measure,) = bench.aa_ratio(load_session(make_session(tmp_path / "noisy", change=noisy)))
    assert measure.passed is True and measure.ci_low < 1 < measure.ci_high
    (measure,) = bench.aa_ratio(load_session(make_session(tmp_path / "single", rounds=1)))
    assert measure.passed is None


def test_aa_ratio_needs_an_a_a_run(tmp_path):
    def without(frames, info):
        for name in ("steps", "loads", "runs"):
            frames[name] = frames[name][~frames[name]["run_id"].str.startswith("aa-")]

    with pytest.raises(ValueError, match="no A/A run"):
        bench.aa_ratio(load_session(make_session(tmp_path / "s", change=without)))


def test_memory_peak_takes_the_worst_explicit_run(tmp_path):
    """Resident 40 and bank 60 MiB: the worst is K=8 with 113 MiB; a page-fault arm's 500 MiB is not asked."""

    def change(frames, info):
        runs = frames["runs"]
        runs.loc[runs["arm"] == "ondemand-mmap", "alloc_peak_bytes"] = 500 * 2**20

    found = by_name(bench.memory_peak(load_session(make_session(tmp_path / "s", change=change))))
    peak = found["memory.alloc_peak"]
    assert peak.value == pytest.approx(1.13) and peak.passed is True and "K=8" in peak.note
    assert found["memory.rss_anon"].value == 150 and found["memory.rss_anon"].passed is None

    def larger(frames, info):
        frames["runs"].loc[frames["runs"]["run_id"] == "arm-prerouter-k2-r1", "alloc_peak_bytes"] = 116 * 2**20

    found = by_name(bench.memory_peak(load_session(make_session(tmp_path / "larger", change=larger))))
    assert found["memory.alloc_peak"].passed is False and "prerouter at K=2" in found["memory.alloc_peak"].note


def test_memory_peak_refuses_to_guess(tmp_path):
    def change(frames, info):
        frames["runs"]["alloc_peak_bytes"] = frames["runs"]["alloc_peak_bytes"].astype(float)
        frames["runs"].loc[0, "alloc_peak_bytes"] = math.nan

    with pytest.raises(ValueError, match="no allocator peak"):
        bench.memory_peak(load_session(make_session(tmp_path / "s", change=change)))


def test_dropped_counts_void_runs_too(tmp_path):
    (clean,) = bench.dropped(load_session(make_session(tmp_path / "s")))
    assert clean.value == 0 and clean.passed is True

    def change(frames, info):
        void_run("arm-ondemand-k2-r0", "dropped an expert")(frames, info)
        frames["runs"].loc[0, "dropped"] = 2

    (found,) = bench.dropped(load_session(make_session(tmp_path / "void", change=change)))
    assert found.value == 2 and found.passed is False


def test_measures_survive_their_file_and_reach_bench_csv(tmp_path, capsys):
    session = load_session(make_session(tmp_path / "s"))
    measures = [*bench.overlap(session, 8), *bench.dropped(session)]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(bench.to_json(measures))
    second.write_text(
        json.dumps([{"measure": "warm.speed", "value": 0.9, "unit": "ratio", "pass": False, "note": "a|b"}])
    )
    assert [one.to_row() for one in bench.read_measures(first)] == [one.to_row() for one in measures]
    assert bench.main(["--out", str(tmp_path / "out"), "--row-files", str(first), str(second)]) == 0
    table = pd.read_csv(tmp_path / "out" / "bench.csv", dtype={"pass": str})
    assert ",".join(table.columns) == "measure,value,unit,ci_low,ci_high,goal,pass,commit,session,note"
    assert table["measure"].tolist() == [one.measure for one in measures] + ["warm.speed"]
    passes = dict(zip(table["measure"], table["pass"], strict=True))
    assert (passes["dropped"], passes["warm.speed"]) == ("true", "false")
    assert pd.isna(passes["overlap.k8.load_ms"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# Benchmark" and f"- machine: {tmp_path.name}" in printed
    assert "| measure | value | unit | 95% interval | goal | pass | session | note |" in printed
    assert "| dropped | 0 | experts |  | 0 | yes | s1 | 40 runs |" in printed
    assert "| warm.speed | 0.9 | ratio |  |  | no |  | a\\|b |" in printed


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("nonsense", "not JSON"),
        ("{}", "expected a list of measures"),
        ("[1]", "measure 1: expected an object"),
        ('[{"measure": "a", "unit": "x"}]', "measure 1: missing value"),
        ('[{"measure": "a", "unit": "x", "value": 1, "colour": 2}]', "unknown key colour"),
        ('[{"measure": "a", "unit": "x", "value": "1"}]', "value must be a number or null"),
        ('[{"measure": "a", "unit": "x", "value": 1, "pass": "yes"}]', "pass must be true, false or null"),
        ('[{"measure": "a", "unit": "x", "value": 1}, {"measure": "a", "unit": "x", "value": 2}]', "is also in"),
    ],
)
def test_bad_measure_files_are_refused_in_one_line(tmp_path, capsys, document, reason):
    path = tmp_path / "a.json"
    path.write_text(document)
    assert bench.main(["--out", str(tmp_path / "out"), "--row-files", str(path)]) == 2
    error = capsys.readouterr().err
    assert reason in error and str(path) in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_measure_file_is_named(tmp_path, capsys):
    assert bench.main(["--out", str(tmp_path), "--row-files", str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
