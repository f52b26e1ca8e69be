"""The ladder from synthetic rows: pairs and intervals by hand, the three relations, the claims as found, refusals."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy import stats
from synthetic import row

from analysis.ladder import table as ladder
from analysis.ladder.claims import findings, must_show
from analysis.ladder.figure import draw
from analysis.ladder.orders import orders
from analysis.ladder.pairs import loss, mean, pairs, points, recalled, share
from analysis.ladder.rows import RUNGS, Side, load_ladder
from analysis.paper.claims import load_claims
from analysis.paper.findings import read_compare

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
FILES = {"summary.csv", "pairs.csv", "compare.csv", "table.md", "ladder.png", "ladder.svg"}
TASKS, N = ("addition", "copy", "chain"), 60
# Right answers of 60 at K=4, and of the untrained rungs at K=8. The first so many problems are right.
RIGHT = {"fp": 57, "int4": 56, "untrained-heads": 40, "phase1": 50, "phase2": 54, "final": 56}
RIGHT_CONTROLS = {
    **{"advisory": 56, "base-features": 49, "own-features": 50, "lora-native-path": 45, "sft-first": 46},
    **{"joint": 53, "distil-alone": 50, "full-k-set": 51},
}
TRAINED = set(RIGHT) - {"fp", "int4", "untrained-heads"} | set(RIGHT_CONTROLS) - {"advisory"}
SECONDS = {"corpus": 60.0, "score fp K=8": 4.5, "score fp K=4": 4.0, "train phase1": 121.2, "train phase2": 365.3}
SECONDS |= {"train phase3": 53.8, "score deployed": 85.9}
CONTROL_SECONDS = {"score advisory K=4": 7.0, "train sft-first": 300.0, "train sft-first-heads": 100.0}
STEPS = {"phase1": 250, "phase2": 500, "phase3": 40}
BATCHES = {"phase1": 60, "phase2": 50, "phase3": 32}
RECALL = {"untrained-heads": 0.2, "phase1": 0.6, "phase2": 0.55, "final": 0.55, "joint": 0.22, "sft-first": 0.5}


def cell(rung, k, seed, right, entropy, loops):
    return [
        {
            "rung": rung,
            "k": k,
            "seed": seed,
            "task": TASKS[number * len(TASKS) // N],
            "problem": number,
            "exact": number < right,
            "cross_entropy": entropy + 0.001 * (number % 3),
            "answer": "no no no no no no" if number >= N - loops else f"{number}" if number < right else "wrong",
        }
        for number in range(N)
    ]


@pytest.fixture
def run(tmp_path):
    """A function that writes one seed's two files; a trained rung gains a problem with each seed."""

    def make(seed=0, controls=True, change=None, rights=None, loops=None, recall=None, name=None, **about):
        rows, recalls = [], []
        for rung, right in ({**RIGHT, **(RIGHT_CONTROLS if controls else {})} | (rights or {})).items():
            gain = seed if rung in TRAINED else 0
            ks = (8, 4) if rung in ("fp", "int4", "full-k-set") else (4,)
            for k in ks:
                good = right + gain + (2 if k == 8 else 0)
                rows += cell(rung, k, seed, good, (N - good) / N, (loops or {}).get(rung, 0))
                if rung not in ("fp", "int4"):
                    values = (recall or {}).get(rung, RECALL.get(rung, 0.5))
                    recalls += [
                        {"rung": rung, "k": k, "seed": seed, "layer": layer, "recall": values + 0.1 * (layer - 3)}
                        for layer in (2, 3, 4)
                    ]
            if rung == "final":
                rows += [r | {"rung": "deployed", "cross_entropy": math.nan} for r in rows[-N:]]
        frame = pd.DataFrame(rows)
        if change is not None:
            frame = change(frame)
        folder = tmp_path / (name or f"seed{seed}")
        folder.mkdir()
        frame.to_parquet(folder / "ladder.parquet")
        options = {"tier": "tiny-35b", "k": 4, "seed": seed, "held": 20, "controls": controls}
        options |= {"phase1": 300, "phase2": 500, "phase3": 40}
        document = {"tier": "tiny-35b", "machine": "box", "session": f"s{seed}", "commit": "abc", "options": options}
        document |= {"recall": recalls, "seconds": SECONDS | (CONTROL_SECONDS if controls else {}), "blas": "openblas"}
        document |= {"steps": STEPS | ({"sft-first": 500, "sft-first-heads": 200} if controls else {})}
        document |= {"batches": BATCHES, "corpus": {"samples": 3000, "sha256": "x"}}
        document |= {"host": {"cores_logical": 2, "load_1min": 1.5, "git_dirty": False}}
        (folder / "ladder.json").write_text(json.dumps(document | about))
        return folder / "ladder.json"

    return make


@pytest.fixture(scope="module")
def claims():
    return load_claims(CLAIMS)


def judged(path, claims):
    return {(one.claim.id, one.arm): one for one in findings(load_ladder([path]), claims)}


def test_one_seed_pairs_by_problem_and_mcnemar_by_hand(run):
    table = pairs(load_ladder([run()]))
    lost = row(table, rung="untrained-heads", base="int4")
    assert lost["points"] == pytest.approx(-100 * 16 / N) and (lost["gained"], lost["lost"]) == (0, 16)
    assert lost["mcnemar_p"] == pytest.approx(2 / 2**16) and (lost["over"], lost["n"], lost["seeds"]) == (
        "problems",
        N,
        "0",
    )
    steps = np.array([-100.0] * 16 + [0.0] * 44)
    half = stats.t.ppf(0.975, N - 1) * steps.std(ddof=1) / math.sqrt(N)
    assert (lost["ci_low"], lost["ci_high"]) == pytest.approx((steps.mean() - half, steps.mean() + half))
    assert lost["ce"] == pytest.approx(16 / N)
    assert set(table["seed"]) == {"all"}
    engine = row(table, rung="deployed", base="final")
    assert engine["points"] == 0 and math.isnan(engine["ce"])
    swapped = row(table, rung="full-k-set", k=4, base="phase2")
    assert swapped["points"] == pytest.approx(-5) and swapped["base_k"] == 4


def test_seeds_give_students_interval_over_their_means_where_it_is_the_wider(run):
    found = load_ladder([run(seed, rights={"final": 36 + 7 * seed}) for seed in (2, 0, 1)])
    assert found.seeds == [0, 1, 2]
    wide = points(found, {Side("final", 4): 1.0, Side("int4", 4): -1.0})
    by_seed = 100 * (np.array([36, 44, 52]) - 56) / N
    half = stats.t.ppf(0.975, 2) * by_seed.std(ddof=1) / math.sqrt(3)
    assert (wide.value, wide.high - wide.value) == pytest.approx((by_seed.mean(), half))
    assert (wide.over, wide.seeds, wide.n) == ("seeds", (0, 1, 2), N)
    table = pairs(found)
    alone = row(table, rung="final", base="int4", seed=1)
    assert alone["points"] == pytest.approx(by_seed[1]) and alone["over"] == "problems" and alone["mcnemar_p"] < 0.01
    whole = row(table, rung="final", base="int4", seed="all")
    assert math.isnan(whole["mcnemar_p"]) and whole["lost"] == 20 + 12 + 4


def test_rungs_that_no_seed_changes_keep_the_interval_of_the_problems(run):
    one = load_ladder([run()])
    three = load_ladder([run(seed, name=f"again{seed}") for seed in (0, 1, 2)])
    weights = {Side("untrained-heads", 4): 1.0, Side("int4", 4): -1.0}
    assert points(three, weights).over == "problems"
    assert (points(three, weights).low, points(three, weights).high) == pytest.approx(
        (points(one, weights).low, points(one, weights).high)
    )


def test_two_seeds_or_two_problems_give_no_interval_of_their_own():
    values = np.array([[0.0, 100.0, 100.0, 100.0], [0.0, 0.0, 0.0, 0.0]])
    assert mean(values, (0, 1)).over == "problems"
    assert math.isnan(mean(values[:, :2], (0, 1)).low) and mean(values[:, :2], (0, 1)).value == 25


def test_a_share_has_wilsons_interval_and_stays_within_bounds():
    whole = share(np.ones((1, 20)), (0,))
    interval = stats.binomtest(20, 20).proportion_ci(0.95, method="wilson")
    assert (whole.value, whole.high) == (100, 100) and whole.low == pytest.approx(100 * interval.low)
    assert share(np.array([[1.0] * 4, [1.0] * 4, [0.0] * 4]), (0, 1, 2)).high == 100


def test_the_interval_of_a_cross_entropy_stays_above_0(run):
    values = np.zeros((3, 30))
    values[0, 0] = 3.0  # one answer of one seed that was a surprise
    assert mean(values, (0, 1, 2)).low < 0 < loss(values, (0, 1, 2)).low
    found = load_ladder([run()])
    tame = loss(found.values("cross_entropy", {Side("phase1", 4): 1.0}), (0,))
    assert tame.value == pytest.approx(10 / N + 0.001) and 0 < tame.low < tame.value < tame.high
    assert math.isnan(loss(found.values("cross_entropy", {Side("deployed", 4): 1.0}), (0,)).value)


def test_recall_has_an_interval_over_layers_or_seeds(run):
    one = recalled(load_ladder([run()]), Side("phase1", 4))
    half = stats.t.ppf(0.975, 2) * 10 / math.sqrt(3)  # layers of 50, 60 and 70
    assert (one.value, one.high, one.over, one.n) == (pytest.approx(60), pytest.approx(60 + half), "layers", 3)
    several = load_ladder([run(seed, recall={"phase1": 0.2 + 0.3 * seed}, name=f"s{seed}") for seed in (0, 1, 2)])
    wide = recalled(several, Side("phase1", 4))
    assert (wide.over, wide.low, wide.high) == ("seeds", 0, 100) and wide.value == pytest.approx(50)
    assert recalled(several, Side("phase1", 4), [2]).value == pytest.approx(80)
    assert math.isnan(recalled(several, Side("int4", 4)).value)


def test_the_summary_has_shares_and_a_row_per_rung_k_and_seed(run):
    table = ladder.summary(load_ladder([run(0), run(1, controls=False)]))
    assert list(table.columns)[:8] == "rung k seed exact_match ci_low ci_high ce recall".split()
    assert len(table) == 9 + 9 + 9
    first = row(table, rung="phase1", k=4, seed=1)
    assert first["exact_match"] == pytest.approx(51 / N) and first["ci_low"] < 51 / N < first["ci_high"] < 1
    assert first["recall"] == pytest.approx(0.6) and first["ce"] == pytest.approx(9 / N + 0.001)
    assert math.isnan(row(table, rung="int4", k=8, seed=0)["recall"])
    assert math.isnan(row(table, rung="deployed", k=4, seed=0)["ce"])
    assert list(table["rung"])[:4] == ["fp", "fp", "fp", "fp"] and table["k"].iloc[0] == 8


def test_the_three_relations_are_said_plainly(run):
    loss, half, end = must_show(load_ladder([run()]))
    assert loss.value.value == pytest.approx(100 * 16 / N) and loss.verdict == "holds"
    assert half.figures.startswith("62% of the loss regained") and half.verdict.startswith("holds as measured")
    assert end.value.value == 0 and end.verdict == "holds"
    bad = {"untrained-heads": 56, "phase1": 58, "final": 40}
    loss, half, end = must_show(load_ladder([run(rights=bad, name="bad")]))
    assert loss.verdict == "**fails**" and end.verdict == "**fails**"
    assert half.verdict == "**not shown**: nothing was lost"
    near = must_show(load_ladder([run(rights={"final": 55, "untrained-heads": 51}, name="near")]))
    assert near[0].verdict == "**fails** as measured; its interval leaves both open" == near[2].verdict


def test_order_is_decided_by_exact_match_then_by_entropy_and_names_the_recall(run, claims):
    found = judged(run(rights={"sft-first": 40, "joint": 54}), claims)
    first = found["train.order", "phase2/sft-first"]
    assert first.status == "relation holds" and first.why.startswith("heads first is better, by exact match")
    assert "recall: phase2 0.55, sft-first 0.50, untrained-heads 0.20" in first.why
    assert "tiny-35b stands for the method" in first.why and first.ours.startswith("+23.3 (")
    even = found["train.order", "phase2/joint"]
    assert even.status == "not testable here" and even.why.startswith("undecided")

    def entropy(rows):
        rows.loc[rows["rung"] == "joint", "cross_entropy"] -= 0.05
        return rows

    worse = judged(run(rights={"joint": 54}, change=entropy, name="b"), claims)["train.order", "phase2/joint"]
    assert worse.status == "relation fails" and worse.why.startswith("heads first is worse, by cross-entropy")


@pytest.mark.parametrize(
    ("loops", "status"),
    [({}, "not testable here"), ({"distil-alone": 30}, "relation holds"), ({"distil-alone": 2}, "not testable here")],
)
def test_a_collapse_needs_more_repetitive_answers_than_chance(run, claims, loops, status):
    found = judged(run(loops=loops), claims)["tab2.distill_only_collapses", "distil-alone/final"]
    assert found.status == status
    assert f"{100 * loops.get('distil-alone', 0) / N:.1f} (" in found.ours and "distil-alone" in found.ours


def test_no_repetition_in_many_problems_is_no_collapse(run, claims):
    def many(rows):
        more = [rows.assign(problem=rows["problem"] + N * part) for part in range(4)]
        return pd.concat(more, ignore_index=True)

    found = judged(run(change=many), claims)["tab2.distill_only_collapses", "distil-alone/final"]
    assert found.status == "relation fails" and found.why.startswith("no collapse")


def test_without_controls_claims_say_what_was_not_run_and_rows_stand_beside(run, claims):
    found = judged(run(controls=False), claims)
    assert {one.status for one in found.values()} == {"not testable here"} and len(found) == 5
    assert "control joint was not run" in found["train.order", "phase2/joint"].why
    assert found["train.phase2_rows", ""].ours == "25,000 rows trained on, of 3,000 answers of the teacher"
    assert found["train.phase3_rows", ""].ours == "1,280 rows trained on, of the student's own answers"
    older = judged(run(controls=False, name="older", steps=None), claims)
    assert older["train.phase3_rows", ""].ours == "unknown: steps run of phase3 are not recorded"


def test_order_compares_the_recall_of_the_seeds_that_ran_both(run, claims):
    runs = [run(seed, controls=seed == 0, recall=RECALL | {"phase2": 0.4 + 0.1 * seed}) for seed in (0, 1)]
    found = {(one.claim.id, one.arm): one for one in findings(load_ladder(runs), claims)}
    assert "n=60, seed 0, interval" in found["train.order", "phase2/joint"].why
    assert "recall: phase2 0.40, joint 0.22" in found["train.order", "phase2/joint"].why


def test_each_ordering_claim_has_a_line_with_an_interval_as_found(run, claims, tmp_path):
    found = {one.arm or one.what: one for one in orders(load_ladder([run(0), run(1, controls=False)]))}
    assert len(found) == 9 and all("(" in one.measured for one in found.values())
    assert found["phase2/full-k-set"].measured.startswith("+5.0 (")
    assert found["phase1/own-features"].said.startswith("undecided") and "seed 0," in found["phase2/joint"].of
    assert found["advisory/phase1"].said == "advisory is better, by exact match"
    saved = found["waits of predicted layers saved as advice"]
    assert saved.measured.startswith("untrained-heads 20 (0-45)%, phase2 55 (30-80)%") and "seeds 0, 1" in saved.of
    text = ladder.write([run(controls=False, name="main")], claims, tmp_path / "out")
    section = text.partition("as found\n")[2].partition("##")[0]
    assert section.count("was not run: run the ladder with --controls") == 8
    judged = ladder.write([run(rights={"sft-first": 40}, name="judged")], claims, tmp_path / "out")
    line = next(line for line in judged.splitlines() if line.startswith("| heads first") and "sft-first" in line)
    assert line.endswith("| relation holds: heads first is better, by exact match at 98.75% |")


def test_steps_rows_and_wall_seconds_are_those_of_the_run_and_add_up(run, claims, tmp_path):
    runs = [run(0), run(1, controls=False, steps=STEPS | {"phase1": 300})]
    text = ladder.write(runs, claims, tmp_path / "out")
    table = text.partition("## What the training took")[2].partition("##")[0]
    assert "| the teacher's answers | 3,000 rows, 60.0 s | 3,000 rows, 60.0 s |" in table
    assert "| phase1 | 250 of 300 steps, 15,000 rows, 121.2 s | 300 of 300 steps, 18,000 rows, 121.2 s |" in table
    assert "| phase3 | 40 of 40 steps, 1,280 rows, 53.8 s |" in table
    assert "| sft-first-heads | 200 of 300 steps, 12,000 rows, 100.0 s |  |" in table
    assert "| scoring the rungs | 8.5 s | 8.5 s |" in table and "| scoring the controls | 7.0 s |  |" in table
    whole = sum(SECONDS.values())
    assert f"| total | {whole + sum(CONTROL_SECONDS.values()):.1f} s | {whole:.1f} s |" in table
    assert "takes: 12 minutes for each seed without controls; wall time, 2 cores, BLAS openblas" in text
    older = ladder.write([run(name="older", steps=None)], claims, tmp_path / "out")
    assert "| phase1 | unknown of 300 steps, 121.2 s |" in older


def test_the_tables_name_the_problems_and_seeds_of_each_row(run, claims, tmp_path):
    text = ladder.write([run(0), run(1, controls=False)], claims, tmp_path / "out")
    assert "n: 60 held-out problems of 3 tasks; rungs of seeds 0, 1, controls of seed 0" in text
    rows = [line for line in text.splitlines() if line.startswith(("| phase2 | 4", "| joint | 4"))]
    assert [line.split(" | ")[-2:] for line in rows] == [["60", "0, 1 |"], ["60", "0 |"]]
    (pair,) = (line for line in text.splitlines() if line.startswith("| joint - phase2"))
    assert pair.endswith("| 60 | 0 |")


def test_answers_that_differ_from_final_are_named(run, tmp_path, claims):
    def change(rows):
        rows.loc[(rows["rung"] == "deployed") & (rows["problem"] == 7), "answer"] = "a`b\n"
        rows.loc[(rows["rung"] == "advisory") & (rows["problem"] == 0), "exact"] = False
        return rows

    text = ladder.write([run(change=change), run(1)], claims, tmp_path / "out")
    line = "seed 0: 59 of 60 answers of `deployed` are those of `final`, item by item; **1 differs**, first"
    assert f"{line} problem 7 (addition): `a'b\\n` against `7`" in text
    assert "seed 1: 60 of 60 answers of `deployed` are those of `final`" in text
    assert "seed 0: 59 of 60 answers of `advisory` are those of `int4`" in text


def test_all_files_come_of_one_call_through_pointers(run, tmp_path, capsys):
    files = [run(seed, controls=seed == 0, name=f"run{seed}") for seed in (0, 1, 2)]
    for file in files:
        (file.parent / "latest.json").write_text(json.dumps({"session": "."}))
    out = tmp_path / "out"
    code = ladder.main([*(str(f.parent / "latest.json") for f in files), "--claims", str(CLAIMS), "--out", str(out)])
    text, error = capsys.readouterr()
    assert code == 0, error
    assert {path.name for path in out.iterdir()} == FILES
    compared = read_compare(out / "compare.csv")
    assert set(compared["session"]) == {"s0, s1, s2"} and len(compared) == 5 and set(compared["k"]) == {"4"}
    assert pd.read_csv(out / "summary.csv")["seed"].nunique() == 3
    assert "| phase1 | 60 (35-85) | 50-70 | 40 (15-65) | 100% |" in text
    assert "| advisory | 50 (25-75) | 40-60 | 50 (25-75) |  | not followed | 0 |" in text
    assert "| addition | 20 | 100 | 100 |" in text
    before = (out / "table.md").read_text()
    assert ladder.main([str(files[0]), str(files[0]), "--claims", str(CLAIMS), "--out", str(out)]) == 2
    assert (out / "table.md").read_text() == before


def test_the_figure_has_a_row_per_rung_and_marks_each_seed(run):
    found = load_ladder([run(0), run(1)])
    exact, entropy, recall = draw(found).axes
    assert [label.get_text() for label in exact.get_yticklabels()][:4] == [
        "fp, K=8",
        "fp, K=4",
        "int4, K=8",
        "int4, K=4",
    ]
    means = [line.get_xdata()[0] for line in exact.lines if line.get_marker() == "o"]
    assert len(means) == 9 and means[4] == pytest.approx(100 * 40 / N)
    assert len([line for line in entropy.lines if line.get_marker() == "o"]) == 8  # not of the engine
    assert len([line for line in recall.lines if line.get_marker() == "o"]) == 4
    seeds = [line.get_xdata() for line in exact.lines if line.get_marker() == "|"]
    assert len(seeds) == 18 and list(seeds[5]) == pytest.approx([100 * 50 / N, 100 * 51 / N])


def test_the_figure_says_whose_controls_it_shows_and_no_names_overlap(run):
    figure = draw(load_ladder([run(0), run(1, controls=False)]))
    FigureCanvasAgg(figure).draw()
    (caption,) = (text.get_text() for text in figure.texts)
    assert "rungs: seeds 0, 1 · controls: seed 0" in caption
    names = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == 18 and not any(one.overlaps(two) for one, two in pairwise(names))
    assert min(box.x0 for box in names) > 0
    legend = figure.axes[0].get_legend().get_window_extent()
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[rows["rung"] != "phase2"], "no row of phase2 at K=4"),
        (lambda rows: rows.replace({"rung": {"joint": "both"}}), "unknown rung 'both'"),
        (lambda rows: rows.assign(exact=rows["exact"].astype(float)), "column exact must be boolean"),
        (lambda rows: rows.drop(columns="answer"), "missing columns: answer"),
        (lambda rows: rows.drop(index=rows.index[-1]), "other problems than the rest, or one twice"),
        (lambda rows: pd.concat([rows, rows.tail(1)]), "other problems than the rest, or one twice"),
        (lambda rows: rows.assign(seed=3), "rows of seed 3, expected 0"),
        (lambda rows: rows.assign(cross_entropy=math.inf), "cross_entropy must be finite"),
    ],
)
def test_broken_rows_are_refused_in_one_line(run, tmp_path, capsys, change, message):
    code = ladder.main([str(run(change=change)), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_runs_that_differ_in_more_than_their_seed_are_refused(run):
    first = run()
    for other, message in (
        (run(1, tier="tiny-8b", name="tier"), "tier tiny-8b, but tiny-35b"),
        (run(1, machine="other", name="machine"), "machine other, but box"),
        (run(0, name="twice"), "seed 0 is also that of"),
        (run(1, change=lambda rows: rows.assign(problem=rows["problem"] + 1), name="problems"), "other problems than"),
    ):
        with pytest.raises(ValueError, match=message):
            load_ladder([first, other])
    about = json.loads(run(1, name="plan").read_text())
    plan = first.parents[1] / "plan" / "ladder.json"
    plan.write_text(json.dumps(about | {"options": about["options"] | {"phase3": 10}}))
    with pytest.raises(ValueError, match="option phase3 10, but 40 in"):
        load_ladder([first, plan])
    plan.write_text(json.dumps({key: value for key, value in about.items() if key != "recall"}))
    with pytest.raises(ValueError, match="missing keys: recall"):
        load_ladder([plan])


def test_a_claim_that_nothing_answers_is_refused(run, claims):
    strange = replace(claims.by_id["train.order"], id="train.new")
    with pytest.raises(ValueError, match=r"claim train\.new: the ladder does not answer it"):
        findings(load_ladder([run()]), replace(claims, by_id={strange.id: strange}))


def test_the_ladder_of_the_full_k_compares_no_rung_with_itself(run):
    def only_full(rows):
        return rows[rows["k"] == 4].assign(k=8)

    path = run(change=only_full)
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"options": about["options"] | {"k": 8}, "recall": []}))
    table = pairs(load_ladder([path]))
    assert set(RUNGS) <= set(table["rung"]) | set(table["base"])
    assert not ((table["rung"] == table["base"]) & (table["k"] == table["base_k"])).any()
    assert not table.duplicated(["rung", "k", "base", "base_k"]).any()
