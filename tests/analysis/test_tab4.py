"""Table 4 from synthetic sessions: exact numbers, the relation part by part, the paper's contradiction, refusals."""

from pathlib import Path

import pandas as pd
import pytest
from synthetic import MIB, make_session, void_run

from analysis import tab3, tab4, tab4_claims
from analysis.paper.claims import load_claims
from analysis.paper.findings import Status, read_compare
from analysis.rows import load_session
from analysis.tab4 import device_verdicts, summary
from analysis.tab4_claims import findings

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
FILES = {"summary.csv", "compare.csv", "table.md", "tab4.png", "tab4.svg"}


def run(session: Path, out: Path) -> int:
    return tab4.main([str(session), "--claims", str(CLAIMS), "--out", str(out)])


def found(session, claim):
    table = summary(session)
    return [f for f in findings(session, table, load_claims(CLAIMS)) if f.claim.id == claim]


def as_the_paper(frames, info):
    """Prerouter arms: a quarter of the loads, four times as cold, at equal bytes from the device, 16% more at K=4."""
    runs = frames["runs"].set_index("run_id")
    steps = frames["steps"]
    ours = steps["run_id"].map(runs["arm"]).str.startswith("prerouter")
    more = ours & (steps["run_id"].map(runs["k"]) == 4)
    for column in ("loads", "asked_bytes"):
        steps[column] = steps[column].where(~ours, steps[column] / 4)
    steps["device_bytes"] = (0.2 * 20 * MIB * steps["run_id"].map(runs["k"])).where(~more, 0.2 * 20 * MIB * 4 * 1.16)


def test_the_command_writes_the_contract_and_prints_the_table(tmp_path, capsys):
    assert run(make_session(tmp_path / "s"), tmp_path / "out") == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == FILES
    assert (out / "table.md").read_text() == capsys.readouterr().out.removesuffix("\n")
    compared = read_compare(out / "compare.csv")
    claims = load_claims(CLAIMS).by_id.values()
    assert set(compared["id"]) == {claim.id for claim in claims if claim.experiment == "tab4"}
    assert set(compared["command"]) == {"snakemake tab4"} and set(compared["session"]) == {"s1"}


def test_summary_by_hand(tmp_path):
    """K=4: 40 loads a step that ask for 80 MiB and get 64 from the device; every probed load is 2 MiB, 1 cold, 3 ms."""
    table = summary(load_session(make_session(tmp_path / "s"))).set_index(["arm", "k"])
    row = table.loc[("ondemand", 4)]
    expected = {
        "rounds": 3,
        "asked_mib_per_load": 2.0,
        "device_mib_per_load": 1.6,
        "cold_share": 0.8,
        "cold_share_probed": 0.5,
        "loads_all_cold": 0.0,
        "loads_all_warm": 0.0,
        "loads_partial": 1.0,
        "asked_mib_per_step": 80.0,
        "device_mib_per_step": 64.0,
        "loads_per_step": 40.0,
        "hits_per_step": 8.0,
        "ms_per_load": 3.0,
        "wait_ms_per_step": 30.0,
        "device_over_cold": 1.0,
        "n": 9,
    }
    for column, value in expected.items():
        assert row[column] == pytest.approx(value), column
    assert [arm for arm, k in table.index if k == 2] == ["ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap"]


def test_the_probed_share_has_an_interval_of_its_places(tmp_path, capsys):
    """Ten places, half of them cold in every round: rounds add nothing, so the interval is that of ten draws."""

    def half(frames, info):
        loads = frames["loads"][frames["loads"]["step"] == 1]
        places = [loads.assign(expert=n, cold_bytes=loads["asked_bytes"] * (n % 2)) for n in range(10)]
        frames["loads"] = pd.concat(places, ignore_index=True)

    session = make_session(tmp_path / "s", change=half, k_values=(8,))
    row = summary(load_session(session)).set_index("arm").loc["ondemand"]
    assert (row.cold_share_probed, row.n) == (0.5, 30)
    assert 0.1 <= row.cold_share_probed_low <= 0.25 and 0.75 <= row.cold_share_probed_high <= 0.9
    assert run(session, tmp_path / "out") == 0
    assert "| 0.500 (0.20-0.80) |" in capsys.readouterr().out


def test_the_papers_shape_holds_where_it_is_made(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=as_the_paper))
    shape = found(session, "tab4.shape")
    assert len(shape) == 2 * 3 * 4
    open_ = [f for f in shape if f.status is not Status.HOLDS]
    assert {(f.status, f.arm, f.why) for f in open_} == {
        (Status.NOT_TESTABLE, "prerouter-mmap/ondemand-mmap", tab4_claims.UNSEEN)
    }
    assert len(open_) == 3
    (exception,) = [f for f in shape if f.k == "4" and f.arm == "prerouter/ondemand" and "bytes, +16%" in f.why]
    assert "its interval meets the paper's 1.16" in exception.why


def test_equal_loads_fail_the_parts_and_say_why(tmp_path):
    shape = found(load_session(make_session(tmp_path / "s")), "tab4.shape")
    parts = {f.why.partition(":")[0]: f for f in shape if f.k == "8" and f.arm == "prerouter/ondemand"}
    assert [f.status for f in parts.values()] == [Status.FAILS] * 3 + [Status.HOLDS]
    assert "fewer loads per step" in parts and "larger loads (device MiB per load)" in parts
    assert "the paper's rows give 0.22 to 0.23x" in parts["fewer loads per step"].why
    assert parts["bytes within 5%"].ours.startswith("1.00x")
    (exception,) = [
        f for f in shape if f.k == "4" and f.arm == "prerouter/ondemand" and "bytes" in f.why.split(":")[0]
    ][-1:]
    assert exception.status is Status.DIFFERS and "excludes it" in exception.why


@pytest.mark.parametrize(
    ("sizes", "status"),
    [
        ((1.16, 1.16, 1.16), Status.HOLDS),
        ((1.14, 1.16, 1.18), Status.HOLDS),
        ((1.08, 1.08, 1.08), Status.DIFFERS),
        ((0.9, 0.9, 0.9), Status.DIFFERS),
        ((0.9, 1.16, 1.4), Status.NOT_TESTABLE),
    ],
)
def test_the_bytes_at_the_papers_exception(tmp_path, sizes, status):
    def change(frames, info):
        runs, steps = frames["runs"].set_index("run_id"), frames["steps"]
        ours = steps["run_id"].map(runs["arm"]) == "prerouter"
        factor = steps["run_id"].map(runs["round"]).map(dict(enumerate(sizes)))
        steps["device_bytes"] = steps["device_bytes"].where(~ours, steps["device_bytes"] * factor)

    session = load_session(make_session(tmp_path / "s", change=change, k_values=(4,)))
    bytes_ = [f for f in found(session, "tab4.shape") if f.why.startswith("bytes") and f.arm == "prerouter/ondemand"]
    assert [f.status for f in bytes_] == [status]


def test_the_aggregator_is_table_3s(tmp_path):
    """Rounds that read 1, 5 and 100 times as much: the median over rounds, in both tables."""

    def change(frames, info):
        steps = frames["steps"]
        for round_, factor in enumerate((1.0, 5.0, 100.0)):
            mine = steps["run_id"] == f"arm-ondemand-k8-r{round_}"
            steps.loc[mine, "device_bytes"] *= factor

    session = load_session(make_session(tmp_path / "s", change=change))
    tables = [module.summary(session).set_index(["arm", "k"]) for module in (tab3, tab4)]
    for column in ("device_mib_per_step", "asked_mib_per_step", "loads_per_step", "wait_ms_per_step"):
        assert tables[0][column].to_dict() == tables[1][column].to_dict()
    assert tables[1].loc[("ondemand", 8), "device_mib_per_step"] == pytest.approx(5 * 128)


def test_a_drifted_session_decides_nothing(tmp_path):
    def slow_end(frames, info):
        frames["runs"].loc[frames["runs"]["role"] == "drift", "tok_s"] /= 3

    shape = found(load_session(make_session(tmp_path / "s", change=slow_end)), "tab4.shape")
    assert {f.status for f in shape} == {Status.NOT_TESTABLE} and all("drifted" in f.why for f in shape)


def test_one_round_decides_nothing(tmp_path):
    shape = found(load_session(make_session(tmp_path / "s", rounds=1, change=as_the_paper)), "tab4.shape")
    assert {f.status for f in shape} == {Status.NOT_TESTABLE} and all("undecided" in f.why for f in shape)


def test_absolute_rows_stand_beside_and_are_not_judged(tmp_path):
    session = load_session(make_session(tmp_path / "s", k_values=(8,)))
    row = found(session, "tab4.k8.prerouter")
    assert [(f.arm, f.k, f.ours) for f in row] == [
        ("prerouter", "8", "1.60, 0.80, 128.0"),
        ("prerouter-mmap", "8", "1.60, 0.50 (probed), 128.0"),
    ]
    assert {f.status for f in row} == {Status.NOT_TESTABLE} and "m2-16gb" in row[0].why
    assert found(session, "tab4.k2.prerouter")[0].why == "not run at this K in this session"
    blocked = found(session, "tab3.blocked.k8")
    assert [(f.arm, f.paper, f.ours) for f in blocked] == [
        ("ondemand", 575.0, "60.0"),
        ("ondemand-mmap", 575.0, "120.0"),
        ("prerouter", 211.6, "10.0"),
        ("prerouter-mmap", 211.6, "90.0"),
    ]


def test_the_papers_loads_contradict_its_model(tmp_path):
    (loads,) = found(load_session(make_session(tmp_path / "s")), "tab4.loads.k8")
    assert loads.status is Status.CONTRADICTED
    assert "397 loads per step" in loads.why and "at most 320" in loads.why and "80.0 (ondemand)" in loads.ours
    assert "if a load brings one routed expert, once" in loads.why


def test_device_bytes_are_judged_in_pages_only(tmp_path):
    session = load_session(make_session(tmp_path / "a"))
    lines = device_verdicts(session, summary(session))
    assert "no verdict: these rows count cold bytes inside the ranges" in lines[0]
    assert "page faults read around" in lines[2]
    for device, verdict in ((1.0, "pass"), (1.03, "FAIL")):

        def in_pages(frames, info, device=device):
            frames["loads"]["cold_page_bytes"] = frames["loads"]["cold_bytes"] + 4096
            frames["loads"]["device_bytes"] = (device * frames["loads"]["cold_page_bytes"]).astype(int)

        session = load_session(make_session(tmp_path / str(device), change=in_pages))
        lines = device_verdicts(session, summary(session))
        assert f": {verdict} (tolerance 2%)" in lines[0] and f": {verdict} (tolerance 2%)" in lines[1]


def test_unprobed_loads_have_no_cold_share(tmp_path):
    def unprobed(frames, info):
        frames["loads"]["cold_bytes"] = -1

    session = make_session(tmp_path / "s", change=unprobed)
    assert run(session, tmp_path / "out") == 0
    table = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert table["cold_share_probed"].isna().all() and (table["n"] == 0).all()
    assert table["cold_share"].notna().tolist() == [True, True, False, False] * 3
    assert table["device_mib_per_step"].iloc[0] * MIB > 0


def test_void_runs_are_not_counted(tmp_path):
    change = void_run("arm-ondemand-k8-r1", "swapped")
    table = summary(load_session(make_session(tmp_path / "s", change=change))).set_index(["arm", "k"])
    assert table.loc[("ondemand", 8), "rounds"] == 2 and table.loc[("prerouter", 8), "rounds"] == 3


def test_other_arms_are_refused_in_one_line(tmp_path, capsys):
    def renamed(frames, info):
        frames["runs"]["arm"] = "resident"

    assert run(make_session(tmp_path / "s", arms=("ondemand",), change=renamed), tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "none of the arms ondemand" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
