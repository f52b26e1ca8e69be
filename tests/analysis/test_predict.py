"""The prediction as a command: a machine calibrated and predicted, the paper's machines, and what is refused."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from safetensors.numpy import save_file

from analysis.machines import load_machine
from analysis.paper.claims import load_claims
from analysis.paper.findings import read_compare
from analysis.prediction.command import main
from analysis.prediction.figure import draw_predict
from analysis.prediction.gains import gains_here, gains_paper
from analysis.prediction.here import COLUMNS, calibrate, read_evidence, rows_here, workload
from analysis.prediction.paper import compute_times, implications, paper_row, rows_paper, unexplained
from analysis.prediction.serving_model import LoadCost
from analysis.prediction.table import parse_size
from analysis.prediction.text import headline, parts_line
from analysis.style import RC
from analysis.traces import load_trace
from tests.analysis.synthetic import make_session, row

ROOT = Path(__file__).parents[2]
CLAIMS, MACHINES = ROOT / "results/paper/claims.yaml", ROOT / "experiments/machines"
PROMPT, WARM_UP, TIMED, LAYERS, EXPERTS = 2, 1, 2, 4, 16
SETTINGS = {"prompt_tokens": PROMPT, "warmup_steps": WARM_UP, "timed_steps": TIMED}
SETTINGS |= {"reader_threads": 2, "launch_groups": 1, "trace": None}


def write_trace(path, tokens, k, layers=LAYERS, experts=EXPERTS, seed=0, predicted=(1, 2), **about):
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :k].astype(np.uint16)
    about = {"k": str(k), "predicted": json.dumps(predicted), "expert_bytes": str(1769472)} | about
    fields = {"format": "edge0-route-trace", "version": "1", "layers": json.dumps(list(range(layers)))}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"routes": routes}, path, fields | {"experts": str(experts), "about": json.dumps(about)})
    return path


def session(root, name, loads_per_step, host_ms=0.0, load_ms=3.0, condition="warm", cold=0.1, warm_ups=1):
    """Synthetic runs that load so often, whose steps take 40 ms and `host_ms` for each load besides."""

    def change(frames, info):
        info |= SETTINGS
        steps, loads = frames["steps"], frames["loads"]
        steps["loads"] = loads_per_step
        steps["step_ms"] = steps["wait_ms"] + 40.0 + host_ms * loads_per_step
        loads["end_ns"] = loads["start_ns"] + int(load_ms * 1e6)
        loads["cold_bytes"] = (cold * loads["asked_bytes"]).astype(int)
        frames["runs"]["bank_slots"] = 2 * LAYERS
        frames["runs"]["warmup_steps"] = warm_ups * WARM_UP

    make_session(root / name, name=name, k_values=(4,), condition=condition, change=change)
    (root / "latest.json").write_text(json.dumps({"session": name}))


@pytest.fixture
def folder(tmp_path):
    """results/testbox/mini-35b with everything that a prediction reads."""
    home = tmp_path / "results/testbox/mini-35b"
    session(home / "predict/sessions/target", "target", 5, condition="budget:0.25")
    own = home / "predict/sessions"
    session(own / "compute", "compute", 1, host_ms=0.5)
    session(own / "loads", "loads", 11, host_ms=0.5)
    session(own / "cold", "cold", 11, load_ms=5, condition="cold", cold=0.8)
    write_trace(own / "traces/ondemand-k4.safetensors", PROMPT - 1 + WARM_UP + TIMED, 4, source="recorded",
                prerouter="off", prompt_tokens="1")  # fmt: skip
    write_trace(own / "traces/prerouter-k4.safetensors", WARM_UP + TIMED, 4, source="recorded", prerouter="route",
                prompt_tokens=str(PROMPT), seed=1)  # fmt: skip
    (home / "fit").mkdir()
    lines = [(way, "stacked", 1.0, 2.0, 0.25) for way in ("mmap", "willneed")]
    pd.DataFrame(lines, columns=["way", "layout", "a_ms", "b_ms", "build_ms"]).to_csv(home / "fit/summary.csv")
    return home


def run(folder, *more, machine=("testbox",)):
    return main(["--machine", *machine, "--results", str(folder.parents[1]), "--claims", str(CLAIMS),
                 "--machines", str(MACHINES), *map(str, more)])  # fmt: skip


# --- a machine that measured ---------------------------------------------------------------------------------------


def test_calibration_by_hand(folder):
    evidence = read_evidence(folder)
    found = calibrate(evidence, "ondemand", 4)
    assert (found.compute.step_ms, found.compute.load_ms) == (pytest.approx(40), pytest.approx(0.5))
    # 2 ms more in a session whose loads were 0.8 cold where those of the warm one were 0.1: a line through both.
    assert (found.cost.a_ms, found.cost.b_ms) == (pytest.approx(3 - 0.1 * 2 / 0.7), pytest.approx(2 / 0.7))
    assert found.fitted == LoadCost(1.0, 2.0, 1.0)
    faults = calibrate(evidence, "ondemand-mmap", 4)
    assert faults.fitted == LoadCost(1.25, 2.0)  # with the building of a bundle
    # Stacking is in the waiting of 60 ms at K=4: what 3 loads of 3 ms in 2 steps do not explain belongs to the step.
    assert faults.compute.step_ms == pytest.approx(40 + 60 - 3 * 3 / 2)
    shutil.rmtree(folder / "predict/sessions/cold")
    assert calibrate(read_evidence(folder), "ondemand", 4).cost == found.fitted


def test_sessions_that_are_equally_cold_do_not_say_what_cold_costs(folder, capsys):
    session(folder / "predict/sessions/cold", "cold", 11, load_ms=5, condition="cold", cold=0.3)
    said = refused(folder, capsys)
    assert "expected cold shares 0.5 apart or more, found 0.100 and 0.300" in said


def test_the_warm_up_is_repeated_as_often_as_the_session_did(folder):
    assert workload(read_evidence(folder), "prerouter-mmap", 4).repeats == 1
    session(folder / "predict/sessions/target", "target", 5, condition="budget:0.25", warm_ups=4)
    assert workload(read_evidence(folder), "ondemand", 4).repeats == 4


def test_the_header_tells_drift_of_every_session_and_what_lies_below_the_cache(folder, capsys):
    for name in ("target", "cold"):
        place = folder / "predict/sessions" / name / name
        info = json.loads((place / "session.json").read_text()) | {"lower_cache": "suspected"}
        (place / "session.json").write_text(json.dumps(info))
    runs = pd.read_parquet(place / "runs.parquet")
    runs.loc[runs["role"] == "drift", "tok_s"] *= 2
    runs.to_parquet(place / "runs.parquet")
    assert run(folder) == 0
    text = capsys.readouterr().out
    assert "guest-cold" in text and text.count("calibrated in: ") == 3
    assert "Session cold has no verdict: the machine drifted" in text
    assert "aim 10%: no verdict: the session drifted" in text


def test_every_arm_is_predicted_and_set_beside_its_session(folder):
    table = pd.DataFrame(rows_here(read_evidence(folder)))
    assert set(table.columns) == set(COLUMNS) and len(table) == 4
    assert (table["error"] == table["tok_s"] / table["measured_tok_s"] - 1).all()
    assert row(table, arm="ondemand")["measured_tok_s"] == 20.0 and (table["rounds"] == 3).all()
    assert (table["tok_s"] <= 1e3 / table["compute_ms"]).all() and (table["loads"] > 0).all()
    worst, middle = table["error"].abs().max(), table["error"].abs().median()
    assert f"median {middle:.1%}, largest {worst:.1%} over 4 arms; aim 10%: missed by the median" in headline(table)


def test_errors_of_waiting_and_of_cold_share_by_hand(folder):
    """Of page faults the time in loads is what is predicted: measured waiting holds stacking as well."""
    table = pd.DataFrame(rows_here(read_evidence(folder)))
    faults, demand = row(table, arm="ondemand-mmap"), row(table, arm="ondemand")
    assert faults["measured_wait_ms"] == pytest.approx(3 * 3 / 2) and demand["measured_wait_ms"] == 30.0
    assert (table["wait_error"] == table["wait_ms"] / table["measured_wait_ms"] - 1).all()
    assert (table["cold_share_error"] == table["cold_share"] / table["measured_cold_share"] - 1).all()
    share, probed = demand["measured_cold_share"], 3  # loads that each of the rounds saw
    assert demand["cold_share_margin"] == pytest.approx(1.96 * math.sqrt(share * (1 - share) / probed))


def test_the_parts_are_told_with_the_speed():
    rows = {"rounds": 3, "wait_error": [0.5, -0.05], "cold_share_error": [0.2, 0.1], "cold_share": [0.6, 0.55]}
    rows |= {
        "measured_cold_share": 0.5,
        "cold_share_margin": 0.07,
        "wait_ms": [15.0, 19.0],
        "measured_wait_ms": [10, 20],
    }
    (line,) = parts_line(pd.DataFrame(rows | {"step_ms": [50.0, 38.0], "measured_step_ms": [50.0, 40.0]}))
    assert "waiting for loads: median 27.5%, largest 50.0%, within 10% in 1 of 2 arms" in line
    assert "cold share: median 15.0%, largest 20.0%, within 10% in 1 of 2 arms (1 within the sampling" in line
    assert "In 1 of 2 arms the error of waiting" in line  # 5 ms more waiting in a step that is right; both 1 ms short


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ([0.1, -0.1], "met by the median, met by the largest"),
        ([0.01, 0.01, 0.5], "met by the median, missed by the largest"),
        ([0.2, 0.3], "missed by the median, missed by the largest"),
    ],
)
def test_the_verdict(errors, verdict):
    table = pd.DataFrame({"error": errors, "fit_error": errors, "rounds": 3})
    assert f"aim 10%: {verdict} (by" in headline(table)
    assert "aim 10%: no verdict: the session drifted (by" in headline(table, drifted=True)


def test_everything_is_written_or_nothing(folder, tmp_path, capsys):
    traces = [write_trace(tmp_path / f"k{k}.safetensors", 70, k, source="generated", reuse="0.25", zipf="1")
              for k in (2, 4)]  # fmt: skip
    out = tmp_path / "out"
    assert run(folder, "--trace", *traces, "--out", out, machine=("testbox", "m2-16gb", "m4pro-24gb")) == 0
    text = (out / "table.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert text.startswith("# Predicted decode speed\n\nprediction error on this machine: median ")
    assert "## The paper beside ours" in text and "## How to read" in text and "no speed is predicted" in text
    table = pd.read_csv(out / "summary.csv")
    assert set(table["machine"]) == {"testbox", "m2-16gb", "m4pro-24gb"} and list(table.columns) == list(COLUMNS)
    assert read_compare(out / "compare.csv").empty
    assert sorted(path.name for path in out.iterdir()) == [
        "compare.csv", "gain.csv", "predict.png", "predict.svg", "summary.csv", "table.md",
    ]  # fmt: skip
    (tmp_path / "none").mkdir()
    shutil.rmtree(folder / "fit")
    assert run(folder, "--out", tmp_path / "none") == 2 and not list((tmp_path / "none").iterdir())


def test_no_text_of_the_figure_lies_over_another(folder):
    """Arms that are as fast as each other, and names of both panels."""
    here = pd.DataFrame(rows_here(read_evidence(folder))).assign(tok_s=10.0)
    here = pd.concat([here.assign(k=k) for k in (2, 4, 8)])
    paper = here[here["arm"].str.endswith("-mmap")].assign(machine="m2-16gb", note="lends")
    gains = pd.DataFrame(gains_here(read_evidence(folder), here[here["k"] == 4]))
    gains = pd.concat([gains, gains.assign(machine="m2-16gb"), gains.assign(machine="m4pro-24gb")])
    with mpl.rc_context(RC):
        lines = [headline(here), *parts_line(here)]
        figure = draw_predict(pd.concat([here, paper]), gains, lines, ["m2-16gb", "m4pro-24gb"])
        FigureCanvasAgg(figure).draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    shown = {text.get_text() for text in texts}
    assert {"K = 2", "K = 8", "prerouter-mmap *", "here", "M2", "M4 Pro", "K = 4 -mmap", "error of waiting"} <= shown
    boxes = {text: text.get_window_extent() for text in texts}
    for one, other in itertools.combinations(texts, 2):
        assert not boxes[one].overlaps(boxes[other]), f"{one.get_text()!r} over {other.get_text()!r}"
    groups = [box for text, box in boxes.items() if text.get_text().startswith("K = ") and text.get_weight() == "bold"]
    assert not any(box.overlaps(axes.get_window_extent()) for box in groups for axes in figure.axes)
    assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1) for box in boxes.values())


def refused(folder, capsys, *more, **machine):
    assert run(folder, *more, **machine) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_refusals_name_what_is_missing(folder, capsys):
    own = folder / "predict/sessions"
    shutil.move(own / "traces/prerouter-k4.safetensors", folder / "kept")
    assert "no trace of route prerouter at K=4" in refused(folder, capsys)
    write_trace(own / "traces/prerouter-k4.safetensors", 9, 4, source="recorded", prerouter="route", prompt_tokens="2")
    assert "expected 3 steps, as the session has; found 9" in refused(folder, capsys)
    assert "--reserve: expected a size" in refused(folder, capsys, "--reserve", "lots")
    for size in ("20GiB", "16GiB"):
        said = refused(folder, capsys, "--reserve", "6GiB", size, machine=("m4pro-24gb", "m2-16gb"))
        assert f"--reserve: m2-16gb: expected less than its memory of 16 GiB, found {size[:-3]} GiB" in said
    assert "no machine of that id" in refused(folder, capsys, machine=("m9",))
    assert "nothing measured yet" in refused(folder, capsys, "--tier", "other")
    (own / "compute/latest.json").unlink()
    assert "run `snakemake predict`" in refused(folder, capsys)


def test_a_session_does_not_predict_itself(folder, capsys):
    own = folder / "predict/sessions/loads"
    shutil.rmtree(own)
    shutil.copytree(folder / "predict/sessions/target", own)
    assert "it is the one to be predicted" in refused(folder, capsys)


# --- the paper's machines --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A short trace of the released shape at K=8."""
    path = tmp_path_factory.mktemp("trace") / "k8.safetensors"
    return load_trace(write_trace(path, 72, 8, 40, 256, predicted=tuple(range(7, 39)), source="generated"))


def test_the_paper_way_on_its_own_machine(released):
    claims, machine = load_claims(CLAIMS), load_machine("m2-16gb", MACHINES)
    table = pd.DataFrame(rows_paper(machine, [released], [6 << 30, 12 << 30], claims))
    assert len(table) == 8 and (table["k"] == 8).all()
    demand = table[table["arm"] == "ondemand-mmap"]
    assert (demand["loads"] == 320).all() and (demand["measured_tok_s"] == 1.8).all()  # 64 bundles find nothing again
    assert demand["cold_share"].is_monotonic_decreasing and demand["tok_s"].is_monotonic_increasing
    line = demand.iloc[0]
    assert line["wait_ms"] == pytest.approx(320 * (1.17 + 1.33 * line["cold_share"]))
    assert line["step_ms"] == pytest.approx(91.4 + line["wait_ms"])
    assert table.loc[~table["arm"].str.endswith("-mmap"), "measured_tok_s"].isna().all()
    lends = table[table["arm"] == "prerouter-mmap"]  # its compute time comes from the very row
    assert (lends["error"] == lends["tok_s"] / 3.3 - 1).all() and lends["note"].str.contains("waiting alone").all()
    assert (lends["wait_error"] == lends["wait_ms"] / 211.6 - 1).all()
    assert demand["error"].notna().all() and (demand["note"] == "").all()


def test_more_experts_do_not_compute_for_less_time():
    """The machine file's 69.8 ms at K=2 and 54.3 at K=4 made the prerouter faster at the larger K."""
    machine = load_machine("m2-16gb", MACHINES)
    assert compute_times(machine) == {2: pytest.approx(62.05), 4: pytest.approx(62.05), 8: pytest.approx(91.4)}
    assert compute_times(load_machine("m4pro-24gb", MACHINES)) == {}
    told = unexplained(machine, load_claims(CLAIMS))
    (line,) = (line for line in told if line.startswith("prerouter: the step"))
    assert "leaves 69.1 to 70.5 ms for computing at K=2 and 53.1 to 55.6 ms at K=4" in line


def test_page_caches_are_ordered_by_size(released):
    machine, claims = load_machine("m2-16gb", MACHINES), load_claims(CLAIMS)
    rows = rows_paper(machine, [released], [6 << 30, 8 << 30, 4 << 30], claims)
    assert [row["cache_mib"] / 1024 for row in rows[:3]] == [8, 10, 12]


def test_the_gain_beside_the_paper(released, tmp_path):
    claims, machine = load_claims(CLAIMS), load_machine("m2-16gb", MACHINES)
    table = pd.DataFrame(rows_paper(machine, [released], [4 << 30, 8 << 30], claims))
    gains = pd.DataFrame(gains_paper(machine, [released], [4 << 30, 8 << 30], table, claims))
    faults, reads = row(gains, arm="prerouter-mmap"), row(gains, arm="prerouter")
    speeds = table.set_index("arm")["tok_s"]
    found = speeds["prerouter-mmap"].to_numpy() / speeds["ondemand-mmap"].to_numpy()
    assert (faults["gain_low"], faults["gain_high"]) == (min(found), max(found))
    assert faults["measured_gain"] == 3.3 / 1.8 and faults["measured_low"] == pytest.approx(3.25 / 1.85)
    assert faults["difference_low"] == min(found) - 3.3 / 1.8 and math.isnan(reads["measured_gain"])


def test_the_gain_of_a_machine_without_compute_time_is_a_range(tmp_path):
    """By hand: all is cached, so that a load takes 1.17 ms, and a step from 0 to 1000 / 20.4 ms besides."""
    claims, machine = load_claims(CLAIMS), load_machine("m4pro-24gb", MACHINES)
    four = load_trace(write_trace(tmp_path / "k4", 72, 4, 40, 256, predicted=tuple(range(7, 39)), source="generated"))
    table = pd.DataFrame(rows_paper(machine, [four], [0], claims))
    found = row(pd.DataFrame(gains_paper(machine, [four], [0], table, claims)), arm="prerouter-mmap")
    slow, fast = (row(table, arm=f"{name}-mmap")["wait_ms"] for name in ("ondemand", "prerouter"))
    assert found["gain_high"] == pytest.approx(slow / fast)
    assert found["gain_low"] == pytest.approx((slow + 1e3 / 20.4) / (fast + 1e3 / 20.4))
    assert found["measured_gain"] == 20.4 / 19.9


def test_rows_that_no_cache_explains():
    claims, machine = load_claims(CLAIMS), load_machine("m2-16gb", MACHINES)
    told = unexplained(machine, claims)
    assert any("ondemand at K=8" in line and "no more than 320 experts" in line for line in told)
    assert any("a wait of 574.95 to 575.05 ms is longer than the whole step of" in line for line in told)
    # By hand, K=2: 80 x (1.175 + 1.335 x 0.205 + 0.135) = 126.7 ms, and 154.85 takes a cold share of 0.47.
    (two,) = (line for line in told if line.startswith("ondemand at K=2: all 80 loads"))
    assert "wait 127 ms" in two and "0.47 at the least" in two
    # K=4: 160 x (1.175 + 1.335 x 0.175 + 0.135) = 247 ms is more than 244: the stated residual explains it.
    assert not any(line.startswith("ondemand at K=4: all") for line in told)
    banks = implications(machine, claims)
    assert len(banks) == 3 and "28% to 28% of the 320 experts" in banks[2] and "share of 0.25" in banks[2]
    assert not any("prerouter at" in line for line in told)


def test_what_a_bank_has_to_find_names_the_claim_and_no_number_of_its_own():
    claims, machine = load_claims(CLAIMS), load_machine("m2-16gb", MACHINES)
    other = replace(claims.by_id["reuse.adjacent"], value=0.5)
    claims = replace(claims, by_id=claims.by_id | {"reuse.adjacent": other})
    assert all("share of 0.5 by the paper" in line for line in implications(machine, claims))


def test_a_machine_without_compute_time_gets_no_speed(released, tmp_path):
    claims, machine = load_claims(CLAIMS), load_machine("m4pro-24gb", MACHINES)
    four = load_trace(write_trace(tmp_path / "k4", 72, 4, 40, 256, predicted=tuple(range(7, 39)), source="generated"))
    table = pd.DataFrame(rows_paper(machine, [four, released], [6 << 30], claims))
    assert table["tok_s"].isna().all() and table["wait_ms"].notna().all()
    assert paper_row(machine, claims, "prerouter-mmap", 4)["tok_s"] == 20.4
    assert math.isnan(paper_row(machine, claims, "prerouter-mmap", 8)["tok_s"])
    # 160 x (1.165 - 0.135), against a step of 1000 / 19.9
    assert "160 loads, all from the page cache, wait 165 ms or more" in unexplained(machine, claims)[0]
    assert implications(machine, claims) == []


@pytest.mark.parametrize(("changes", "word"), [({"tokens": 64}, "64 tokens"), ({"predicted": ()}, "predicted layers")])
def test_traces_that_do_not_serve(tmp_path, changes, word):
    trace = load_trace(write_trace(tmp_path / "t", **{"tokens": 70, "k": 2, "source": "generated"} | changes))
    with pytest.raises(ValueError, match=word):
        rows_paper(load_machine("m2-16gb", MACHINES), [trace], [0], load_claims(CLAIMS))


def test_sizes():
    assert (parse_size("6GiB"), parse_size("1.5MiB")) == (6 << 30, 3 << 19)
