"""The levers from synthetic rows: ratios, verdicts, and what each lever moved."""

import pytest
from synthetic import make_session, void_run

from analysis import levers
from analysis.levers_figure import draw
from analysis.rows import load_session, pair_ratios
from analysis.tab3 import visible_effect

# Times as fast as the arm without it; the others as fast as theirs. Half a percent is less than the A/A pairs show.
SPEED = {"prerouter-layer": 1.2, "prerouter-groups1": 0.8, "prerouter-groups2": 1.005, "ondemand-hot-records": 1.1}


def session_of(folder, monkeypatch, *, change=None, arms=levers.ARMS, **options):
    def all_changes(frames, info):
        steps, loads, runs = frames["steps"], frames["loads"], frames["runs"]
        steps["read_calls"] = 9 * steps["loads"]
        early = loads["run_id"].str.contains("advise|prerouter")
        loads["purpose"] = early.map({True: "prefetch", False: "demand"})
        runs.loc[runs["role"] == "arm", "tok_s"] *= 1 + 0.001 * (runs["order"] % 7)  # no two ratios alike
        if change is not None:
            change(frames, info)

    monkeypatch.setattr("synthetic.BASE_TOK_S", {arm: 10 * SPEED.get(arm, 1.0) for arm in arms})
    monkeypatch.setattr("synthetic.WAIT_MS", dict.fromkeys(arms, 40.0))
    return make_session(folder, arms=arms, change=all_changes, **{"k_values": (8,), "rounds": 3} | options)


@pytest.fixture
def session(tmp_path, monkeypatch):
    return load_session(session_of(tmp_path / "s", monkeypatch))


def verdicts(session):
    ratios = pair_ratios(session, levers.PAIRS)
    effect = visible_effect(ratios)
    pairs = {(arm, base): ratio for (_, arm, base), ratio in ratios.items() if arm != base}
    return {pair: levers.verdict(ratio, session, effect) for pair, ratio in pairs.items()}


def test_a_lever_is_judged_against_the_same_arm_without_it(session):
    found = verdicts(session)
    assert set(found) == set(levers.PAIRS)
    assert found["prerouter-layer", "prerouter"] == levers.WINS
    assert found["prerouter-groups1", "prerouter"] == levers.LOSES
    assert found["ondemand-hot-records", "ondemand-hot"] == levers.WINS
    assert found["prerouter-records", "prerouter"] == levers.NOT_VISIBLE
    # Its interval lies above 1, and its size is far below what the A/A pairs could show.
    ratio = pair_ratios(session, levers.PAIRS)[8, "prerouter-groups2", "prerouter"]
    assert ratio.ci_low > 1 and found["prerouter-groups2", "prerouter"] == levers.NOT_VISIBLE


def test_every_lever_has_its_row_with_what_it_moved(session):
    text = levers.markdown(session, levers.summary(session), pair_ratios(session, levers.PAIRS))
    row = next(line for line in text.splitlines() if "| ondemand-hot-advise over ondemand-hot |" in line)
    # 80 reads of 9 calls a step in both arms; one of them early where there is advice.
    assert "| 80.0 | 0.0 -> 1.0 | 720 |" in row and f"| {16 * 8:.2f} |" in row
    assert all(f"| {lever.name} |" in text and f"- {lever.name}: " in text for lever in levers.LEVERS)


def test_a_drifted_session_and_a_lever_that_was_not_run_have_no_verdict(tmp_path, monkeypatch):
    def change(frames, info):
        frames["runs"].loc[frames["runs"]["role"] == "drift", "tok_s"] *= 3

    arms = ("ondemand-hot", "ondemand-hot-layer")
    session = load_session(session_of(tmp_path / "s", monkeypatch, change=change, arms=arms))
    assert verdicts(session)["ondemand-hot-layer", "ondemand-hot"].startswith("no verdict: drift")
    text = levers.markdown(session, levers.summary(session), pair_ratios(session, levers.PAIRS))
    assert text.count(f"| {levers.NOT_RUN} |") == len(levers.PAIRS) - 1
    assert levers.bars(session, pair_ratios(session, levers.PAIRS))[0][0] == "a layer's reads together"


def test_two_rounds_have_no_interval_and_so_no_verdict(tmp_path, monkeypatch):
    session = load_session(session_of(tmp_path / "s", monkeypatch, rounds=2))
    assert set(verdicts(session).values()) == {"no interval, n=2"}


def test_an_arm_that_is_no_levers_and_rows_without_calls_are_refused(tmp_path, monkeypatch):
    stranger = load_session(session_of(tmp_path / "a", monkeypatch, arms=("ondemand-hot", "prerouter-fill")))
    with pytest.raises(ValueError, match="prerouter-fill"):
        levers.summary(stranger)

    def drop(frames, info):
        frames["steps"] = frames["steps"].drop(columns="read_calls")

    with pytest.raises(ValueError, match="read_calls"):
        levers.summary(load_session(session_of(tmp_path / "b", monkeypatch, change=drop)))


def test_the_command_writes_all_or_nothing(tmp_path, monkeypatch, capsys):
    folder = session_of(tmp_path / "s", monkeypatch, change=void_run("arm-prerouter-groups5-k8-r1", "cold asked for"))
    assert levers.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"summary.csv", "pairs.csv", "table.md", "levers.svg", "levers.png"}
    assert "cold asked for" in capsys.readouterr().out
    assert levers.main([str(tmp_path), "--out", str(tmp_path / "none")]) == 2 and not (tmp_path / "none").exists()


def test_the_figure_shows_each_pair_and_its_verdict(session):
    bars = levers.bars(session, pair_ratios(session, levers.PAIRS))
    figure = draw(session, 8, bars)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert sum("wins" in word for word in words) == sum(bar[3] == "wins" for bar in bars) >= 2
    assert len(figure.axes[0].get_yticklabels()) == len(levers.PAIRS)
