"""Table 2 from synthetic answers: McNemar and intervals by hand, stand-ins never judged, the relation, refusals."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.paper.claims import load_claims
from analysis.paper.findings import Status, read_compare
from analysis.quality import table as tab2
from analysis.quality.claims import LARGEST, findings, largest_share, paper_mean, paper_rows
from analysis.quality.rows import BENCHMARKS, load_qualities
from analysis.quality.scores import drawn, resampled, score

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
FILES = {"summary.csv", "questions.csv", "compare.csv", "table.md", "fig2.png", "fig2.svg"}
N = 40
# Questions that int4 loses and gains; the first 30 of 40 are right in fp.
LOST = {"aime2026": (7, 1), "humaneval": (2, 0), "gpqa-diamond": (1, 1), "mmlu-pro": (0, 0), "ifbench": (0, 2)}


def make_quality(folder, tier="tiny-35b", flips=LOST, n=N, change=None, **about):
    """A document and its rows: in each benchmark three of four questions right in fp, of which int4 flips some."""
    rows = []
    for benchmark, (lost, gained) in flips.items():
        right = 3 * n // 4
        for number in range(n):
            fp = number < right
            int4 = lost <= number < right + gained
            for arm, good in (("fp", fp), ("int4", int4)):
                rows.append(
                    {
                        "benchmark": benchmark,
                        "arm": arm,
                        "k": 4,
                        "question": f"q{number:04}",
                        "category": "",
                        "score": float(good),
                        "answer": f"so it is {number}" if good else "no no no no no",
                        "prompt_tokens": 20 + number,
                        "answer_tokens": 5,
                        "stop": "end" if good or arm == "fp" else "length",
                        "stand_in": tier.startswith("tiny"),
                    }
                )
    rows = pd.DataFrame(rows)
    if change is not None:
        rows = change(rows)
    folder.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(folder / "quality.parquet")
    document = {"tier": tier, "machine": "m", "model": tier.split("-")[-1], "session": "s1", "opencompass": "0.5.4"}
    path = folder / "quality.json"
    path.write_text(json.dumps(document | about))
    return path


def scored(path):
    (quality,) = load_qualities([path])
    return score(quality)


def judged(path, claim, places=1):
    return next(f for f in findings(scored(path), load_claims(CLAIMS), places) if f.claim.id == claim)


@pytest.fixture
def run(tmp_path, capsys):
    """A call of the command with some documents; returns (exit code, stdout, stderr, the output folder)."""

    def call(*paths, out="out"):
        code = tab2.main([*map(str, paths), "--claims", str(CLAIMS), "--out", str(tmp_path / out)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err, tmp_path / out

    return call


def test_the_command_writes_the_contract_twice_alike(tmp_path, run):
    path = make_quality(tmp_path / "a")
    code, text, _, out = run(path)
    assert code == 0 and {file.name for file in out.iterdir()} == FILES
    assert (out / "table.md").read_text() == text.removesuffix("\n")
    again = run(path, out="again")[3]
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in FILES)


def test_every_claim_of_table_2_is_in_compare(tmp_path, run):
    out = run(make_quality(tmp_path / "a"))[3]
    rows = read_compare(out / "compare.csv")
    assert set(rows["id"]) == {c.id for c in load_claims(CLAIMS).by_id.values() if c.experiment == "tab2"}
    assert set(rows["command"]) == {"snakemake tab2"}
    other = rows[rows["id"].str.startswith("tab2.8b.")]
    assert set(other["why"]) == {"no tier of the 8b family was measured"}


def test_scores_by_hand(tmp_path):
    scores = scored(make_quality(tmp_path / "a"))
    aime = scores.rows[0]
    assert (aime.n, aime.score["fp"].value, aime.score["int4"].value) == (40, 75, 60)
    assert aime.difference.value == -15 and aime.difference.low < -15 < aime.difference.high < 0
    # 7 lost and 1 gained: of 8 fair tosses, 0, 1, 7 or 8 of a kind come with 2 * (1 + 8) / 2^8.
    assert (aime.flips.gained, aime.flips.lost, aime.flips.p) == (1, 7, pytest.approx(18 / 256))
    unchanged = scores.rows[3]
    assert unchanged.flips.p == 1 and not unchanged.has_interval and np.isnan(unchanged.difference.low)
    assert unchanged.difference.text("+.1f") == "+0.0 (no interval)"
    mean = (-15 - 5 + 0 + 0 + 5) / 5
    assert scores.difference.value == pytest.approx(mean) and scores.mean["fp"].value == 75
    assert [aime.health[arm].cut for arm in ("fp", "int4")] == [0, 16 / 40]
    assert aime.health["int4"].repetitive == 16 / 40


def test_a_score_between_0_and_1_has_no_mcnemar(tmp_path, run):
    def halves(rows):
        rows.loc[rows["benchmark"] == "ifbench", "score"] *= 0.5
        return rows

    path = make_quality(tmp_path / "a", change=halves)
    row = scored(path).rows[4]
    assert row.flips is None and row.score["fp"].value == 37.5 and row.score["fp"].low < 37.5 < row.score["fp"].high
    assert "| not 0/1 |" in run(path)[1]


def test_drawn_questions_cover_the_true_difference():
    random = np.random.default_rng(3)
    chances, steps = (0.15, 0.75, 0.10), np.array((-100, 0, 100))
    truth, hits = float(np.dot(chances, steps)), 0
    for _ in range(200):
        sample = random.choice(steps, size=80, p=chances).astype(float)
        interval = drawn(float(sample.mean()), resampled(sample, random))
        hits += interval.low <= truth <= interval.high
    assert 0.90 <= hits / 200 <= 0.99


def test_counts_drawn_are_questions_drawn():
    values = np.array([-100.0, 0, 0, 0, 50, 100])
    draws = resampled(values, np.random.default_rng(0))
    assert draws.mean() == pytest.approx(values.mean(), abs=2) and draws.std() == pytest.approx(
        values.std() / 6**0.5, rel=0.05
    )


def test_the_papers_rows_have_their_own_intervals_and_are_counted_in_questions():
    rows = {row.benchmark.id: row for row in paper_rows(load_claims(CLAIMS), "35b")}
    aime = rows["aime2026"]
    assert aime.difference.value == pytest.approx(-6.1) and aime.difference.low < -20 and aime.difference.high > 10
    assert aime.questions == pytest.approx(-1.83) and aime.least_p == 0.5
    assert aime.words().startswith("AIME 2026: 6.1 points of 30 questions = two questions (1.8);")
    assert aime.words().endswith("86.6 and 92.7 cannot be rounded from whole questions right out of 30")
    assert "cannot" not in rows["humaneval"].words()  # 149 and 156 of 164
    assert paper_mean(list(rows.values()))[1].value == pytest.approx(-3.94)
    eight = {row.benchmark.id: row for row in paper_rows(load_claims(CLAIMS), "8b")}
    assert "517 questions to int4's favour" in eight["mmlu-pro"].words()
    assert "cannot" not in eight["aime2026"].words()  # 19 and 22 of 30


def test_stand_ins_are_labelled_everywhere_and_not_judged(tmp_path, run):
    _, text, _, out = run(make_quality(tmp_path / "a"))
    assert text.splitlines()[0].endswith("tiny-35b (synthetic stand-in)")
    assert "synthetic stand-in</text>" in (out / "fig2.svg").read_text()
    assert "| AIME 2026 (synthetic stand-in) | 40 |" in text
    rows = read_compare(out / "compare.csv")
    own = rows[rows["id"].str.startswith("tab2.35b.")]
    assert len(own) == 6 and set(own["status"]) == {"not testable here"}
    assert own["why"].str.startswith("stand-ins: ").all() and (own["ours"] != "").all()


def test_a_released_model_is_judged_by_digits_and_intervals(tmp_path, run):
    path = make_quality(tmp_path / "a", tier="edge0-35b", n=1000)
    assert "stand-in" not in run(path)[1]
    differs = judged(path, "tab2.35b.mmlu_pro")
    assert differs.status == Status.DIFFERS and "-3.6 (-4.6 to -2.6) points, unpaired" in differs.why
    small = make_quality(tmp_path / "b", tier="edge0-35b", n=12)
    assert judged(small, "tab2.35b.gpqa_diamond").status == Status.WITHIN
    flips = LOST | {"humaneval": (42, 0)}

    def as_the_paper(rows):  # 951 and 909 of 1000
        more = (rows["benchmark"] == "humaneval") & rows["question"].between("q0750", "q0950")
        rows.loc[more, "score"] = 1.0
        return rows

    exact = make_quality(tmp_path / "c", tier="edge0-35b", n=1000, flips=flips, change=as_the_paper)
    assert judged(exact, "tab2.35b.humaneval").status == Status.REPRODUCED


@pytest.mark.parametrize(
    ("flips", "status", "words"),
    [
        ({"aime2026": (90, 0)}, Status.HOLDS, "AIME 2026's gap +45.0 (+36"),
        ({"humaneval": (90, 0), "aime2026": (2, 0)}, Status.FAILS, "AIME 2026's gap -44.0 ("),
        ({"aime2026": (8, 0), "humaneval": (7, 0)}, Status.NOT_TESTABLE, "undecided: AIME 2026's gap"),
        ({"aime2026": (0, 0)}, Status.NOT_TESTABLE, "AIME 2026 (synthetic stand-in)'s gap has no interval"),
        ({"aime2026": (0, 60), "ifbench": (0, 150)}, Status.FAILS, "points over no loss"),
    ],
)
def test_the_largest_gap_needs_every_interval(tmp_path, flips, status, words):
    base = dict.fromkeys(LOST, (0, 0)) | {"gpqa-diamond": (3, 2)}
    found = judged(make_quality(tmp_path / "a", flips=base | flips, n=200), LARGEST)
    assert found.status == status and found.why.startswith("on synthetic stand-ins: ")
    assert words in found.why
    assert found.why.endswith("it is +1.9 (-16.0 to +20.0) points ahead of HumanEval, from their n")


def test_the_share_of_draws_is_that_of_the_largest_gap(tmp_path):
    sure = scored(make_quality(tmp_path / "a", flips=LOST | {"aime2026": (25, 0)}))
    even = scored(make_quality(tmp_path / "b", flips=LOST | {"humaneval": (7, 1)}))
    assert largest_share(sure) > 0.999 and 0.35 < largest_share(even) < 0.5  # ties are nobody's


def test_both_tiers_stand_in_one_table(tmp_path, run):
    first = make_quality(tmp_path / "a")
    second = make_quality(tmp_path / "b", tier="tiny-8b", session="s2")
    code, text, _, out = run(first, second)
    assert code == 0 and "## Scores: tiny-8b" in text
    summary = pd.read_csv(out / "summary.csv")
    assert list(summary["benchmark"]) == 2 * [*(benchmark.id for benchmark in BENCHMARKS), "mean"]
    assert len(pd.read_csv(out / "questions.csv")) == 2 * 5 * N
    rows = read_compare(out / "compare.csv")
    assert list(rows.loc[rows["id"] == LARGEST, "session"]) == ["s1", "s2"]
    assert list(rows.loc[rows["id"] == LARGEST, "arm"]) == ["tiny-35b int4/fp", "tiny-8b int4/fp"]


def without(**where):
    def change(rows):
        hit = np.logical_and.reduce([rows[column] == value for column, value in where.items()])
        return rows[~hit]

    return change


def with_(column, value, **where):
    def change(rows):
        hit = np.logical_and.reduce([rows[name] == found for name, found in where.items()])
        rows.loc[hit, column] = value
        return rows

    return change


def twice(rows):
    return pd.concat([rows, rows.iloc[[3]]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(benchmark="ifbench"), "no answer of arm fp to benchmark ifbench; both arms need all five"),
        (without(arm="int4"), "no answer of arm int4 to benchmark aime2026; both arms need all five"),
        (without(arm="int4", benchmark="humaneval"), "no answer of arm int4 to benchmark humaneval"),
        (twice, "question q0001 of aime2026, arm int4, is there twice"),
        (without(arm="int4", question="q0002", benchmark="ifbench"), "question q0002 of ifbench is answered by arm fp"),
        (with_("score", 61.0, question="q0002", arm="fp"), "question q0002 of aime2026, arm fp, has score 61.0"),
        (with_("score", np.nan, question="q0002", arm="fp"), "arm fp, has score nan, expected 0 to 1"),
        (with_("stop", "stop", question="q0002"), "stop 'stop' is not one of end, length"),
        (with_("arm", "fp16", arm="fp"), "arm 'fp16' is not one of fp, int4"),
        (with_("k", 8, benchmark="ifbench"), "arm fp has rows of K 4, 8, not one"),
        (with_("prompt_tokens", 7, question="q0001", arm="fp"), "has prompts of 7 and 21 tokens in the arms"),
        (with_("stand_in", False, question="q0001"), "benchmark aime2026 mixes real and stand-in questions"),
        (lambda rows: rows.drop(columns="stop"), "missing columns: stop"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(tmp_path, run, change, words):
    code, _, error, out = run(make_quality(tmp_path / "a", change=change))
    assert code == 2 and words in error and error.count("\n") == 1 and "quality.parquet" in error
    assert not out.exists()


def test_documents_that_do_not_belong_together_are_refused(tmp_path, run):
    first = make_quality(tmp_path / "a")
    assert "a second document of tiny-35b" in run(first, first)[2]
    other = make_quality(tmp_path / "b", tier="tiny-8b", machine="other")
    assert "machine other, but m before it; expected one" in run(first, other)[2]
    (tmp_path / "a" / "quality.json").write_text("{}")
    assert "missing keys: tier, machine, session" in run(first)[2]


def test_what_the_document_says_stands_above_the_table(tmp_path, run):
    arms = {"fp": {"k": 4, "what": "bf16 as trained"}, "int4": {"k": 4, "what": "int4 as served"}}
    check = {"benchmark": "ifbench", "route": "the server", "equal": 40}
    data = {"aime2026": "ab" * 32, "ifbench": "cd" * 32}
    about = {"arms": arms, "limits": {"aime2026": 64}, "data": data, "cross_check": check, "commit": "f00"}
    text = run(make_quality(tmp_path / "a", **about, host={"git_dirty": True}))[1]
    assert "- tier: tiny-35b, K=4, standing where the paper has 35b\n" in text
    assert "- session: s1, commit f00 + uncommitted changes, OpenCompass 0.5.4\n" in text
    assert "- arm fp: bf16 as trained\n- arm int4: int4 as served\n" in text
    assert (
        "- answers are cut at (tokens): aime2026: 64\n- data: aime2026: abababababab; ifbench: cdcdcdcdcdcd\n" in text
    )
    assert "- cross-check: 40 answers to ifbench are the same from the server\n" in text


def test_the_newest_document_is_found_and_arms_may_differ_in_k(tmp_path, run):
    make_quality(tmp_path / "s1", change=with_("k", 8, arm="fp"))
    (tmp_path / "latest.json").write_text('{"session": "s1"}')
    code, text, _, out = run(tmp_path / "latest.json")
    assert code == 0 and "- tier: tiny-35b, K=fp 8, int4 4, standing" in text
    assert set(read_compare(out / "compare.csv").query("ours != ''")["k"]) == {"fp 8, int4 4"}
