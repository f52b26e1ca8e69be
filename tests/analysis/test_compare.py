"""Machines side by side: every value from its own session, nothing divided across machines, nothing joined."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from analysis import compare
from analysis.compare import collect, markdown, result_lines
from analysis.compare_figure import draw
from analysis.machines import Machine
from analysis.paper.claims import load_claims
from analysis.style import RC

ROOT = Path(__file__).parents[2]
CLAIMS, FILES = ROOT / "results/paper/claims.yaml", ROOT / "experiments/machines"
REAL = "linux-x86_64-2c-24g-epyc"
ARMS = {"ondemand": 10.0, "prerouter": 15.0, "ondemand-mmap": 5.0, "prerouter-mmap": 6.0}
PAIRS = (("prerouter", "ondemand", 1.5), ("prerouter-mmap", "ondemand-mmap", 1.2), ("ondemand", "ondemand-mmap", 2.0))


@pytest.fixture(scope="module")
def claims():
    return load_claims(CLAIMS)


@pytest.fixture
def machine(tmp_path):
    """A function that writes a machine's finished Table 3, speeds scaled; returns its folder of results."""

    def make(name, tier="mini-35b", condition="budget:0.5", scale=1.0, ks=(2, 8), session="s1", note="", fit=False):
        folder = tmp_path / "results" / name / tier / "tab3"
        folder.mkdir(parents=True)
        about = {"condition": condition, "tier": tier, "machine": name, "session": session}
        speeds = [
            {"arm": arm, "k": k, "rounds": 3, **spread(speed * scale * 8 / k), **about}
            for k, (arm, speed) in itertools.product(ks, ARMS.items())
        ]
        pd.DataFrame(speeds).to_csv(folder / "summary.csv", index=False)
        shared = {"n": 3, "session": session, "note": note}
        pairs = [
            {"k": k, "arm": arm, "base": base, "ratio": ratio, "ci_low": ratio - 0.1, "ci_high": ratio + 0.1, **shared}
            for k, (arm, base, ratio) in itertools.product(ks, PAIRS)
        ]
        pd.DataFrame(pairs).to_csv(folder / "pairs.csv", index=False)
        if fit:
            place = folder.with_name("fit")
            place.mkdir()
            row = {"way": "willneed", "layout": "records", "a_ms": 0.5, "b_ms": 1.25, "r2": 0.99, "n": 300}
            pd.DataFrame([row | about]).to_csv(place / "summary.csv", index=False)
        return folder

    return make


def spread(median):
    return {"tok_s_median": median, "tok_s_min": median * 0.9, "tok_s_max": median * 1.1}


def gather(tmp_path, claims, *ids, here=None):
    return collect(ids, claims, tmp_path / "results", FILES, here)


def test_two_machines_stand_beside_each_other(machine, tmp_path, claims):
    machine("fast", scale=2), machine("slow")
    lines = gather(tmp_path, claims, "slow", "fast").lines
    assert [(line.k, line.reads, line.machine) for line in lines[:4]] == [
        (2, "explicit reads", "slow"),
        (2, "explicit reads", "fast"),
        (2, "page faults", "slow"),
        (2, "page faults", "fast"),
    ]
    slow, fast = lines[:2]
    assert (slow.ondemand_tok_s, slow.prerouter_tok_s) == (40, 60)
    assert (fast.ondemand_tok_s, fast.prerouter_tok_s) == (80, 120)
    assert slow.gain == fast.gain == 1.5 and (slow.gain_low, slow.rounds) == (1.4, 3)


def test_no_number_divides_two_machines(machine, tmp_path, claims):
    """Speeds 7 times apart: every factor in the table, the rows and the figure is a gain of one session."""
    machine("fast", scale=7), machine("slow")
    comparison = gather(tmp_path, claims, "slow", "fast", "m2-16gb")
    text = compare.write(comparison, tmp_path / "out")
    factors = {float(found) for found in re.findall(r"([\d.]+)x", text)}
    own = {1.5, 1.2} | {round(line.gain, 2) for line in comparison.lines if line.machine == "m2-16gb"}
    assert factors == own
    rows = pd.read_csv(tmp_path / "out/rows.csv")
    numbers = rows.select_dtypes("number").drop(columns="k").to_numpy().ravel()
    assert not any(abs(number - factor) < 1e-6 for number in numbers for factor in (7, 1 / 7))


def test_the_paper_is_a_line_without_an_interval(machine, tmp_path, claims):
    machine("box")
    comparison = gather(tmp_path, claims, "box", "m2-16gb", "m4pro-24gb")
    (line,) = [line for line in comparison.lines if line.machine == "m2-16gb" and line.k == 8]
    assert (line.ondemand_tok_s, line.prerouter_tok_s) == tuple(claims.by_id["tab3.k8"].value)
    assert line.gain == pytest.approx(3.3 / 1.8) and line.reads == "page faults"
    text = markdown(comparison)
    assert (
        "| 8 | m2-16gb | 35b as released | its 16 GiB of memory | page faults | 1.8 | 3.3 | 1.83x (no interval) |"
        in text
    )
    assert "m4pro-24gb: the paper states no Table 3 of this machine; what it states is another experiment" in text
    assert "| m2-16gb | 35b as released | mmap | stacked | 1.17 | 1.33 |" in text
    assert "| m4pro-24gb |" not in text  # its load cost is borrowed


def test_tiers_and_conditions_have_lines_of_their_own(machine, tmp_path, claims):
    machine("box"), machine("box", tier="shape-35b", condition="cold", session="s2")
    lines = gather(tmp_path, claims, "box").lines
    assert {(line.tier, line.condition, line.session) for line in lines} == {
        ("mini-35b", "budget:0.5", "s1"),
        ("shape-35b", "cold", "s2"),
    }
    assert len(lines) == 2 * 2 * 2  # tiers, K, ways


@pytest.mark.parametrize("column", ["tier", "condition", "session", "machine"])
def test_a_table_that_mixes_what_is_never_joined(machine, tmp_path, column):
    path = machine("box") / "summary.csv"
    rows = pd.read_csv(path)
    rows.loc[0, column] = "another"
    rows.to_csv(path, index=False)
    with pytest.raises(ValueError, match=rf"summary.csv: {column}: expected one value, found another, "):
        result_lines("box", tmp_path / "results")


def test_a_table_in_another_machines_folder(machine, tmp_path):
    folder = machine("box")
    shutil.copytree(folder.parents[1], tmp_path / "results" / "thief")
    with pytest.raises(ValueError, match="machine: expected thief, as its folder says; found box"):
        result_lines("thief", tmp_path / "results")
    folder.parent.rename(folder.parent.with_name("other"))
    with pytest.raises(ValueError, match="tier: expected other, as its folder says; found mini-35b"):
        result_lines("box", tmp_path / "results")


def test_pairs_of_another_session(machine, tmp_path):
    path = machine("box") / "pairs.csv"
    pd.read_csv(path).assign(session="s0").to_csv(path, index=False)
    with pytest.raises(ValueError, match="pairs.csv: session: expected s1.*found s0"):
        result_lines("box", tmp_path / "results")


def test_a_pair_whose_arm_has_no_row(machine, tmp_path):
    path = machine("box") / "summary.csv"
    rows = pd.read_csv(path)
    rows[rows["arm"] != "prerouter"].to_csv(path, index=False)
    with pytest.raises(ValueError, match="no row of arm prerouter at K=2"):
        result_lines("box", tmp_path / "results")


def test_a_machine_without_results_says_what_to_run(machine, tmp_path, claims):
    machine("box")
    text = markdown(gather(tmp_path, claims, "box", "new", here="new"))
    assert "- new: no Table 3 yet; run `snakemake tab3` there" in text
    assert "- new: no machine file; run `edge0 doctor` there" in text
    assert "run `snakemake fit` there" in text
    with pytest.raises(ValueError, match="nothing to compare: new: no Table 3 yet"):
        compare.write(gather(tmp_path, claims, "new", here="new"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_load_costs_by_way_and_layout(machine, tmp_path, claims):
    machine("box", fit=True)
    text = markdown(gather(tmp_path, claims, "box"))
    assert "| box | mini-35b | willneed | records | 0.500 | 1.250 | 0.990 | 300 | s1 |" in text


def test_cold_times_of_a_guest_are_labelled_beside_the_number(machine, tmp_path):
    machine("box", fit=True)
    guest = Machine("box", "box", "measured", {"storage": {"lower_cache": "suspected"}})
    (line,) = compare._costs("box", tmp_path / "results", guest)
    assert line[4:6] == ("0.500", "1.250 (guest-cold)")


def test_a_gain_without_an_interval_says_so_in_the_figure(machine, tmp_path, claims):
    machine("box")
    lines = gather(tmp_path, claims, "box", "m2-16gb").lines
    told = [text.get_text() for text in draw(lines).findobj(Text)]
    assert told.count("no interval") == 3  # the paper's three K, and none of ours


def test_a_session_without_a_verdict_says_so(machine, tmp_path, claims):
    machine("box", note="no verdict: drift")
    lines = gather(tmp_path, claims, "box").lines
    assert all(line.note == "no verdict: drift" for line in lines)
    assert "pale: no verdict" in "".join(text.get_text() for text in draw(lines).findobj(Text))


def test_a_machine_without_a_line_is_named_in_the_figure(machine, tmp_path, claims):
    machine("box")
    comparison = gather(tmp_path, claims, "box", "m4pro-24gb", "new", here="new")
    told = " ".join(text.get_text() for text in draw(comparison.lines, comparison.missing).findobj(Text))
    told = " ".join(told.split())
    assert "not here: m4pro-24gb: the paper states no Table 3 of this machine" in told and "tab1.35b" not in told
    assert "not here: new: no Table 3 yet" in told


def test_unknown_and_repeated_machines(machine, tmp_path, claims):
    machine("box")
    with pytest.raises(ValueError, match="nobox: neither a machine file nor results; known: box, .*m2-16gb"):
        collect(["nobox"], claims, tmp_path / "results", FILES)
    with pytest.raises(ValueError, match="box is named twice"):
        gather(tmp_path, claims, "box", "box")


def test_void_arms_and_single_rounds():
    line = compare.Line(2, "m", "t", "c", "r", *[float("nan")] * 6, *[float("nan")] * 3, 0, "s")
    assert compare.gain_text(replace(line, gain=1.5, rounds=1)) == "1.50x (no interval)"  # one round has none
    assert compare.gain_text(replace(line, gain=1.5, gain_low=1.2, gain_high=1.8, rounds=3)) == "1.50x (1.20-1.80)"
    assert compare.gain_text(line) == "void" and compare._span(*[float("nan")] * 3) == "void"


def test_the_command_on_the_real_session(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    assert compare.main([REAL, "m2-16gb", "--claims", str(CLAIMS), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["compare.png", "compare.svg", "rows.csv", "table.md"]
    table = (out / "table.md").read_text()
    assert capsys.readouterr().out.strip() == table.strip()
    ours = pd.read_csv(ROOT / f"results/{REAL}/mini-35b/tab3/summary.csv").query("k == 8 and arm == 'prerouter'")
    assert f"{ours['tok_s_median'].iloc[0]:.2f} (" in table
    assert compare.main(["nowhere", "--claims", str(CLAIMS), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("error: machines: nowhere")


@pytest.mark.parametrize("count", [1, 4])
def test_no_text_of_the_figure_lies_over_another_or_off_the_page(machine, tmp_path, claims, count):
    names = [f"linux-x86_64-{number}c-128g-with-a-long-name" for number in range(count)]
    for number, name in enumerate(names):
        machine(name, tier=("mini-35b", "shape-35b")[number % 2], scale=number + 1, ks=(2, 4, 8))
    lines = gather(tmp_path, claims, *names, "m2-16gb").lines
    with mpl.rc_context(RC):
        figure = draw(lines)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        drawn = [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip() and text not in beyond_the_axis(figure)
        ]
    words = {text for text, _ in drawn}
    assert {"K = 2", "K = 4", "K = 8", "hollow: on-demand"} <= words
    assert sum("explicit reads" in word for word in words) == count
    for text, box in drawn:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (text, box), (other, other_box) in itertools.combinations(drawn, 2):
        assert not box.overlaps(other_box), f"{text!r} lies over {other!r}"


def beyond_the_axis(figure) -> set[Text]:
    """Labels of ticks outside the axis limits: they exist, and are not drawn."""
    return {
        label
        for axes in figure.axes
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if not axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    }
