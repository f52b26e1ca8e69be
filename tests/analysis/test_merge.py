"""The merge study from synthetic rows: what is summarised over what, the cost of a session, and what is said."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic import make_session, row, tok_s, void_run

from analysis.merge import table as merge
from analysis.merge.claims import findings
from analysis.merge.figure import draw
from analysis.merge.rows import Study
from analysis.paper.claims import load_claims
from analysis.rows import load_session

CLAIMS = Path(__file__).parents[2] / "results/paper/claims.yaml"
ARMS = (merge.WITH, merge.WITHOUT)


def weight_rows(sets, survival, delta=0.002, step=0.01):
    """A target of each kind in each of four layers; `survival`: kind to its value in layer 0, 0.01 more in the next."""
    return pd.DataFrame(
        {
            "adapters": name,
            "target": f"layers.{layer}.{kind}",
            "layer": layer,
            "kind": kind,
            "projection": "q_proj",
            "bits": 4,
            "weights": 64,
            "survival": value + 0.01 * layer + 0.1 * number,
            "survival_same_grid": value / 2,
            "delta_rms": delta * (1 + 0.1 * layer),
            "step_median": step,
            "delta_over_step": delta * (1 + 0.1 * layer) / step,
            "requantised_rms": step / 10,
            "codes_changed": 0.25,
        }
        for number, name in enumerate(sets)
        for kind, value in survival.items()
        for layer in range(4)
    )


def logit_rows(sets, survival):
    """Five prompts of two positions, whose medians are 0.01 apart."""
    return pd.DataFrame(
        {
            "adapters": name,
            "prompt": prompt,
            "task": "addition",
            "position": position,
            "change": 1.0,
            "error": 1 - survival,
            "survival": survival + 0.01 * prompt + (0.3 if position else -0.3),
        }
        for name in sets
        for prompt in range(5)
        for position in range(2)
    )


@pytest.fixture
def study(tmp_path):
    """A function that writes a study's three files; returns the document's path."""

    def make(survival, logits=0.2, tier="tiny-35b", source="edge0 train lora", sets=("one",), name="a", **more):
        folder = tmp_path / name
        folder.mkdir()
        sizes = {key: more.pop(key) for key in ("delta", "step") if key in more}
        weight_rows(sets, survival, **sizes).to_parquet(folder / "merge.parquet")
        positions = logit_rows(sets, logits) if logits is not None else logit_rows(sets, 0.0).iloc[:0]
        positions.to_parquet(folder / "logits.parquet")
        about = {"tier": tier, "k": 4, "adapters": dict.fromkeys(sets, source), "prompts": "held-out problems"}
        about |= {"logits_refused": "", "prerouter": True, "session": f"s-{name}", "machine": "box"}
        (folder / "merge.json").write_text(json.dumps(about | more))
        return folder / "merge.json"

    return make


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A function that writes a session of the two arms, of which the one with the LoRA is 0.8 times as fast."""
    monkeypatch.setattr("synthetic.BASE_TOK_S", {merge.WITH: 8.0, merge.WITHOUT: 10.0})
    monkeypatch.setattr("synthetic.WAIT_MS", dict.fromkeys(ARMS, 40.0))
    options = {"arms": ARMS, "k_values": (8,)}
    return lambda **more: make_session(tmp_path / "session", **options | more)


@pytest.fixture(scope="module")
def claims():
    return load_claims(CLAIMS)


@pytest.fixture
def found(claims):
    return lambda path: {one.claim.id: one for one in findings(Study.load(path), claims)}


KINDS = {"attention": 0.3, "shared expert": 0.1}


def test_survival_is_of_layers_and_prompts_with_one_set_and_of_sets_with_three(study):
    one = merge.summary([Study.load(study(KINDS))])
    attention, logits = row(one, kind="attention"), row(one, kind="logits")
    assert attention["survival"] == pytest.approx(0.315) and (attention["units"], attention["unit"]) == (4, "layers")
    half = 3.1824 * np.std([0, 0.01, 0.02, 0.03], ddof=1) / 2  # Student's t of three degrees of freedom
    assert attention["ci_high"] == pytest.approx(0.315 + half, abs=1e-5)
    assert (attention["survival_min"], attention["survival_max"]) == pytest.approx((0.3, 0.33))
    assert attention["base_alone_over_step"] == pytest.approx(0.1) and attention["delta_over_step"] == pytest.approx(
        0.23
    )
    assert logits["survival"] == pytest.approx(0.22) and (logits["units"], logits["unit"]) == (5, "prompts")
    assert logits["n"] == 10 and logits["survival_max"] == pytest.approx(0.54) and np.isnan(logits["delta_rms"])
    three = merge.summary([Study.load(study(KINDS, sets=("0", "1", "2"), name="b"))])
    attention = row(three, kind="attention")
    assert (attention["units"], attention["unit"], attention["n"]) == (3, "adapter sets", 12)
    assert attention["survival"] == pytest.approx(0.415) and attention["ci_low"] < 0.3


def test_targets_without_a_correction_are_counted_and_not_averaged(study):
    path = study(KINDS)
    rows = pd.read_parquet(path.with_suffix(".parquet"))
    rows.loc[(rows["kind"] == "attention") & (rows["layer"] > 0), "survival"] = math.nan
    rows.to_parquet(path.with_suffix(".parquet"))
    attention = row(merge.summary([Study.load(path)]), kind="attention")
    assert (attention["n"], attention["untouched"]) == (1, 3) and attention["survival"] == pytest.approx(0.3)


def test_trained_adapters_are_judged_by_order_and_step_and_their_sizes_set_beside(study, found):
    here = found(study(KINDS))
    assert here["lora.survival_attention"].status == "relation holds"
    assert here["lora.survival_attention"].ours.startswith("0.31 (0.29-0.34), n=4, in shared expert 0.12")
    assert (
        here["lora.delta_rms"].status == "relation holds" and "0.0023, of a step of 0.01" in here["lora.delta_rms"].ours
    )
    for claim in ("lora.survival_dense", "lora.survival_logits"):
        assert here[claim].status == "not testable here" and "delta over step, 0.23 here" in here[claim].why
    assert all("not the released adapter: tiny-35b" in one.why and one.arm == "tiny-35b" for one in here.values())
    turned = found(study({"attention": 0.1, "dense": 0.3}, delta=0.02, name="b"))
    assert turned["lora.survival_attention"].status == "relation fails"
    assert turned["lora.delta_rms"].status == "relation fails"


def test_an_order_of_one_layer_is_undecided(study, found):
    path = study({"attention": 0.3, "dense": 0.1})
    rows = pd.read_parquet(path.with_suffix(".parquet"))
    rows[(rows["kind"] == "attention") | (rows["layer"] == 0)].to_parquet(path.with_suffix(".parquet"))
    one = found(path)["lora.survival_attention"]
    assert one.status == "not testable here" and one.why.startswith("undecided") and "n=1" in one.why


def test_adapters_that_a_ladder_trained_are_judged_as_trained_ones(study, found):
    assert found(study(KINDS, source="edge0 ladder"))["lora.survival_attention"].status == "relation holds"


def test_no_claim_speaks_of_random_adapters(study, found):
    here = found(study(KINDS, tier="unit-35b", source="edge0 synth unit-35b"))
    assert {one.status for one in here.values()} == {"not testable here"} and all(one.ours for one in here.values())


@pytest.mark.parametrize(
    ("dense", "logits", "status"),
    [(0.005, 0.15, "relation holds"), (0.2, 0.25, "differs"), (0.7, 0.8, "relation fails")],
)
def test_a_released_checkpoint_is_judged_by_size_too(study, found, dense, logits, status):
    path = study({"attention": 0.9, "shared expert": dense}, logits, tier="edge0-35b", source="Edge0")
    here = found(path)
    assert here["lora.survival_dense"].status == here["lora.survival_logits"].status == status
    assert "not the released" not in here["lora.survival_dense"].why


def test_logits_that_were_not_computed_say_why(study, found, claims, tmp_path):
    path = study(KINDS, None, logits_refused="in fp32 the model needs 9 MiB of memory, 1 are free")
    assert found(path)["lora.survival_logits"].why == "in fp32 the model needs 9 MiB of memory, 1 are free"
    assert "logits of tiny-35b: not computed, in fp32" in merge.write([path], [], claims, tmp_path / "out")


def test_the_cost_is_paired_by_round_within_the_session(session):
    found = merge.cost(load_session(session(rounds=4)))
    own = np.array([tok_s(merge.WITH, 8, n) / tok_s(merge.WITHOUT, 8, n) for n in range(4)])
    assert found["ratio"] == pytest.approx(np.exp(np.log(own).mean())) and found["n"] == 4
    assert found["ci_low"] < found["ratio"] < found["ci_high"]
    assert found["lora_loads_per_step"] == found["bare_loads_per_step"] > 0
    assert found["lora_tok_s"] == pytest.approx(np.median([tok_s(merge.WITH, 8, n) for n in range(4)]))


def test_all_files_and_the_table_come_of_one_call(study, session, tmp_path, capsys):
    arguments = [str(study(KINDS)), str(study({"linear attention": 0.3, "dense": 0.2}, tier="tiny-8b", name="b"))]
    folder = session(change=void_run("arm-prerouter-bare-k8-r1", "the machine swapped"))
    out = tmp_path / "out"
    code = merge.main([*arguments, "--sessions", str(folder), "--claims", str(CLAIMS), "--out", str(out)])
    text, error = capsys.readouterr()
    assert code == 0, error
    names = {"table.md", "summary.csv", "cost.csv", "compare.csv", "merge.png", "merge.svg"}
    assert {path.name for path in out.iterdir()} == names
    compared = pd.read_csv(out / "compare.csv", dtype=str, keep_default_na=False)
    assert (
        len(compared) == 8
        and set(compared["session"]) == {"s-a", "s-b"}
        and set(compared["arm"]) == {"tiny-35b", "tiny-8b"}
    )
    assert "not the released adapter: tiny-8b, its LoRA made by edge0 train lora" in text
    assert "## What the unmerged path costs at decode" in text and "the machine swapped" in text and "9999" not in text


def test_a_session_without_the_two_arms_and_other_files_are_refused_in_one_line(study, session, tmp_path, capsys):
    def refused(path, *more):
        code = merge.main([str(path), *map(str, more), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")])
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1 and not (tmp_path / "out").exists()
        return error

    good = study(KINDS)
    assert "expected arms prerouter and prerouter-bare" in refused(good, "--sessions", session(arms=(merge.WITH,)))
    assert "expected targets of attention" in refused(study({"router": 0.1}, name="b"))
    missing = study(KINDS, name="c")
    about = json.loads(missing.read_text())
    missing.write_text(json.dumps({key: value for key, value in about.items() if key != "prompts"}))
    assert "missing keys: prompts" in refused(missing)
    (good.parent / "logits.parquet").unlink()
    assert "logits.parquet: no such file" in refused(good)


def test_the_figure_shows_every_target_and_the_papers_values(study, claims):
    survival, steps = draw([Study.load(study(KINDS))], claims).axes
    drawn = sorted(x for line in survival.lines if len(line.get_xdata()) == 4 for x in line.get_xdata())
    assert drawn == pytest.approx([0.1, 0.11, 0.12, 0.13, 0.3, 0.31, 0.32, 0.33])
    paper = {float(line.get_xdata()[0]) for line in survival.lines if line.get_marker() == "D"}
    assert paper == {0.34, 0.02, 0.18}
    (points,) = (line for line in steps.lines if line.get_marker() == "o")
    expected = [(0.01, 0.002 * (1 + 0.1 * layer)) for layer in range(4)]
    np.testing.assert_allclose(points.get_xydata(), expected)


def outside(texts, figure):
    """Texts of which a part lies beyond the figure, or beside which another one begins."""
    boxes = [(text, text.get_window_extent()) for text in texts if text.get_text() and text.get_visible()]
    cut = [text.get_text() for text, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.x1 or box.y0 < 0]
    return cut + [one.get_text() for n, (one, box) in enumerate(boxes) for _, other in boxes[:n] if box.overlaps(other)]


@pytest.mark.parametrize("step", [0.0032, 0.01, 0.19])
def test_ticks_are_there_apart_and_whole_and_no_legend_lies_on_a_panel(study, claims, step):
    paths = [study(KINDS, step=step, name="a"), study({"dense": 0.2}, tier="tiny-8b", delta=0.3 * step, name="b")]
    figure = draw([Study.load(path) for path in paths], claims)
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        assert axes.get_legend() is None
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            assert len(ticks) >= 2 and outside([tick.label1 for tick in ticks], figure) == []
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:3] == ["attention", "shared expert", "dense"]
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)


def test_prompts_far_below_are_counted_at_the_edge_and_not_drawn_there(study, claims):
    survival, _ = draw([Study.load(study(KINDS, -1.27))], claims).axes
    (logits,) = (line for line in survival.lines if line.get_marker() == "v")
    assert sorted(logits.get_xdata()) == []
    assert "◂ 5 of 5 below -1, mean -1.2" in [text.get_text() for text in survival.texts]
    survival, _ = draw([Study.load(study(KINDS, -1.07, name="b"))], claims).axes  # -1.07 to -1.03 lie on the margin
    (logits,) = (line for line in survival.lines if line.get_marker() == "v")
    assert len(logits.get_xdata()) == 3 and "◂ 2 of 5 below -1" in [text.get_text() for text in survival.texts]


def test_the_table_says_in_one_line_how_it_pools(study, claims, tmp_path):
    text = merge.write([study(KINDS)], [], claims, tmp_path / "out")
    (line,) = (line for line in text.splitlines() if line.startswith("Pooled: "))
    assert "all projections of a kind" in line and "3 sets or more" in line and "one layer or prompt of one set" in line
