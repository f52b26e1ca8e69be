"""Appendix B from synthetic rows: the split of a step, reading shares, ratios, and what is said of the claims."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import MIB, make_session, tok_s, void_run

from analysis import appxb
from analysis.appxb_figure import draw
from analysis.paper.claims import load_claims
from analysis.paper.findings import LEDGER_COLUMNS, Status, read_compare
from analysis.rows import load_session, pair_ratios

CLAIMS = Path(__file__).parents[2] / "results/paper/claims.yaml"
ARMS = tuple(appxb.ARMS)
# Times faster than the first arm of all, and of a step 40 ms waiting and 10 ms for each other part.
SPEED = {arm: 1.0 + 0.1 * number for number, arm in enumerate(ARMS)}
SPLIT = {"wait": 40.0, "route": 10.0, "build": 10.0, "launch": 10.0, "evaluate": 10.0, "sample": 10.0}


def as_appendix(frames, info):
    """Rows of the form that tab3's synthetic session has, with what appendix B needs."""
    runs, steps, loads = frames["runs"], frames["steps"], frames["loads"]
    runs["launch_groups"] = [5 if arm.endswith("groups5") else 3 if arm == "prerouter" else 1 for arm in runs["arm"]]
    factor = steps["step"].map({0: 50.0, 1: 0.9, 2: 1.1})
    for part, ms in SPLIT.items():
        steps[f"{part}_ms"] = ms * factor
    steps["step_ms"] = sum(SPLIT.values()) * factor
    steps["cpu_ms"] = 1.5 * steps["step_ms"]
    steps["device_bytes"] = (3 * MIB * factor).astype(int)
    loads["calls"] = [9 if "-stack" in run or "-patch" in run else 1 for run in loads["run_id"]]


def session_of(folder, monkeypatch, *, change=None, arms=ARMS, **options):
    def all_changes(frames, info):
        as_appendix(frames, info)
        if change is not None:
            change(frames, info)

    base = {arm: 10.0 * SPEED[arm] for arm in arms}
    monkeypatch.setattr("synthetic.BASE_TOK_S", base)
    monkeypatch.setattr("synthetic.WAIT_MS", dict.fromkeys(arms, 40.0))
    options = {"k_values": (8,), "rounds": 3} | options
    return make_session(folder, arms=arms, change=all_changes, **options)


@pytest.fixture
def session(tmp_path, monkeypatch):
    return load_session(session_of(tmp_path / "s", monkeypatch))


@pytest.fixture(scope="module")
def claims():
    return load_claims(CLAIMS)


def found(session, claims):
    table, ratios = appxb.summary(session), pair_ratios(session, appxb.PAIRS)
    return {(one.claim.id, one.arm): one for one in appxb.findings(session, table, ratios, claims)}


def test_the_summary_splits_a_step_and_nothing_is_counted_twice(session):
    table = appxb.summary(session)
    assert list(table["arm"]) == list(ARMS) and list(table.columns) == appxb.SUMMARY_COLUMNS
    row = table.set_index("arm").loc["prerouter-patch"]
    assert row["step_ms"] == pytest.approx(90) and row["wait_ms"] == pytest.approx(40)
    assert row["wait_share"] == pytest.approx(4 / 9) and row["build_share"] == pytest.approx(1 / 9)
    assert sum(row[f"{part}_ms"] for part in appxb.PARTS) == pytest.approx(row["step_ms"])
    assert row["busy_cores"] == pytest.approx(1.5) and row["device_mib_per_step"] == pytest.approx(3, rel=1e-6)
    # One read of 3 ms in each of two timed steps of 90 ms on average; that of the warm-up does not count.
    assert row["reading_share"] == pytest.approx(6 / 180) == row["device_share"]
    assert row["tok_s_median"] == pytest.approx(np.median([tok_s("prerouter-patch", 8, n) for n in range(3)]))


def test_reads_from_memory_are_reading_but_not_by_the_device(tmp_path, monkeypatch):
    def change(frames, info):
        frames["loads"]["device_bytes"] = 0

    table = appxb.summary(load_session(session_of(tmp_path / "s", monkeypatch, change=change)))
    assert (table["reading_share"] > 0).all() and (table["device_share"] == 0).all()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=0, max_size=12))
def test_covered_time_is_that_of_a_plain_set_of_nanoseconds(reads):
    rows = pd.DataFrame([(start, start + length) for start, length in reads], columns=["start_ns", "end_ns"])
    assert appxb.covered_ns(rows) == len({ns for start, length in reads for ns in range(start, start + length)})


def test_pairs_are_ratios_of_the_same_rounds(session):
    ratios = pair_ratios(session, appxb.PAIRS)
    assert set(ratios) == {(8, *pair) for pair in appxb.PAIRS} | {(8, ARMS[0], ARMS[0])}
    for (_, arm, base), ratio in ratios.items():
        assert ratio.n == 3
        assert ratio.ratio == pytest.approx(1.005 if arm == base else SPEED[arm] / SPEED[base])


@pytest.mark.parametrize(
    ("patch", "status", "words"),
    [
        (1.34, Status.HOLDS, "its interval meets the paper's 1.34"),
        (2.0, Status.DIFFERS, "its size is above the paper's 1.34"),
        (1.1, Status.DIFFERS, "its size is below the paper's 1.34"),
        (1.01, Status.NOT_TESTABLE, "spans 1"),
        (0.5, Status.FAILS, "at 97.5% for 2 places"),
    ],
)
def test_the_incremental_stack_is_judged_by_its_interval(tmp_path, monkeypatch, claims, patch, status, words):
    def change(frames, info):
        runs = frames["runs"]
        runs["tok_s"] = 10.0
        mine = runs["arm"].str.endswith("-patch")
        runs.loc[mine, "tok_s"] = patch * 10.0 * runs["round"].map({0: 0.98, 1: 1.0, 2: 1 / 0.98})[mine]

    session = load_session(session_of(tmp_path / "s", monkeypatch, change=change))
    one = found(session, claims)["appxB.incr_stack", "ondemand-patch/ondemand-stack"]
    assert one.status is status and words in one.why and one.ours.startswith(f"{patch:.2f}x (")


def test_one_round_and_a_drifted_session_decide_nothing(tmp_path, monkeypatch, claims):
    single = load_session(session_of(tmp_path / "one", monkeypatch, rounds=1))
    one = found(single, claims)["appxB.incr_stack", "prerouter-patch/prerouter-stack"]
    assert one.status is Status.NOT_TESTABLE and "no interval" in one.why

    def drift(frames, info):
        frames["runs"].loc[frames["runs"]["role"] == "drift", "tok_s"] *= 3

    drifted = load_session(session_of(tmp_path / "drift", monkeypatch, change=drift))
    one = found(drifted, claims)["appxB.incr_stack", "prerouter-patch/prerouter-stack"]
    assert one.status is Status.NOT_TESTABLE and "drift" in one.why


def test_every_claim_of_the_appendix_has_a_finding_and_absolute_ones_are_not_judged(session, claims):
    results = found(session, claims)
    expected = {claim.id for claim in claims.by_id.values() if claim.experiment == "appxB"}
    assert {claim for claim, _ in results} == expected and len(expected) >= 8
    for (claim, arm), one in results.items():
        if one.claim.kind == "absolute":
            assert one.status is Status.NOT_TESTABLE and one.why
            assert bool(arm) == bool(one.ours), claim
    assert results["step.gpu_busy", ""].ours == ""
    assert results["step.graph_floor", "prerouter"].ours == "10 ms"
    assert results["step.incremental_fill", "prerouter-fill"].ours == "40 ms"
    assert results["step.cpu_cores", "prerouter-patch"].ours == "1.50 cores"
    assert results["appxB.pipeline_k8", "prerouter"].ours.endswith("tok/s")


def test_speeds_of_another_k_do_not_stand_beside_the_claim_for_8(tmp_path, monkeypatch, claims):
    session = load_session(session_of(tmp_path / "s", monkeypatch, k_values=(4,)))
    one = found(session, claims)["appxB.pipeline_k8", ""]
    assert one.status is Status.NOT_TESTABLE and "K=4" in one.why


@pytest.mark.parametrize(("calls", "status"), [(9, Status.REPRODUCED), (8, Status.DIFFERS), ((9, 3), Status.DIFFERS)])
def test_stacked_tensors_are_counted_in_the_reads(tmp_path, monkeypatch, claims, calls, status):
    def change(frames, info):
        mine = frames["loads"]["calls"] == 9
        several = calls if isinstance(calls, tuple) else (calls,)
        frames["loads"].loc[mine, "calls"] = np.resize(several, mine.sum())

    one = found(load_session(session_of(tmp_path / "s", monkeypatch, change=change)), claims)
    assert one["staged.stack_tensors", ""].status is status


def test_a_void_arm_keeps_its_row(tmp_path, monkeypatch, claims):
    change = void_run("arm-prerouter-fill-k8-r0", "the machine swapped")
    folder = session_of(tmp_path / "s", monkeypatch, rounds=1, change=change)
    session = load_session(folder)
    table = appxb.summary(session).set_index("arm")
    assert table.loc["prerouter-fill", ["rounds", "void_runs"]].tolist() == [0, 1]
    assert ("step.incremental_fill", "prerouter-fill") not in found(session, claims)
    text = appxb.write(session, claims, tmp_path / "out")
    assert "9999" not in text and "| void |" in text and "swapped" in text


def test_refusals_name_what_is_wrong(tmp_path, monkeypatch, capsys):
    def old(frames, info):
        frames["steps"] = frames["steps"].drop(columns=["cpu_ms", "route_ms"])

    def run(name, **options):
        folder = session_of(tmp_path / name, monkeypatch, **options)
        out = tmp_path / f"{name}-out"
        code = appxb.main([str(folder), "--claims", str(CLAIMS), "--out", str(out)])
        assert code == 2 and not out.exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    monkeypatch.setitem(SPEED, "ondemand-mmap", 1.0)
    assert "lacks route_ms, cpu_ms" in run("old", change=old)
    assert "expected one K, found 2, 8" in run("ks", k_values=(2, 8))
    assert "arm 'ondemand-mmap' is not one of" in run("arm", arms=("ondemand", "ondemand-mmap"))


def test_all_outputs_are_written_or_none(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    folder = session_of(tmp_path / "s", monkeypatch)
    assert appxb.main([str(folder), "--claims", str(CLAIMS), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    names = {"summary.csv", "pairs.csv", "compare.csv", "table.md", "appxB.png", "appxB.svg"}
    assert {path.name for path in out.iterdir()} == names
    assert printed.rstrip("\n") == (out / "table.md").read_text().rstrip("\n")
    for words in ("machine: testbox", "tier: mini-35b", "condition: budget:0.25", "session: s1", "takes: about"):
        assert words in printed
    assert "3 groups as configured" in printed and "## The paper beside ours" in printed and "## How to read" in printed
    rows = read_compare(out / "compare.csv")
    assert set(LEDGER_COLUMNS) <= set(rows.columns) and set(rows["command"]) == {"snakemake appxB"}


def test_no_label_of_the_figure_is_cut_or_covers_another(session):
    table = appxb.summary(session)
    figure = draw(session, table, [f"{arm}\n{appxb.arm_words(session, arm)}" for arm in table["arm"]])
    figure.canvas.draw()
    (axes,) = figure.axes
    frame = figure.bbox
    texts = [text for text in (*axes.get_yticklabels(), *axes.texts, *figure.texts) if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1, text
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :]), texts[number]
    assert figure.legends[0].get_window_extent().x1 <= frame.x1
