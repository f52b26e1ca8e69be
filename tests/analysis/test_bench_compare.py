"""Two benchmarks side by side: by file or by commit, quotients, intervals apart, measures of one side only."""

import json
from dataclasses import replace

import pytest

from analysis import bench, bench_compare
from analysis.bench import Measure

SPEED = Measure("speed", 10.0, "tok/s", 9.0, 11.0, ">= 12", False, "aaa111", "s1")
SHARE = Measure("share", 0.5, "ratio", commit="aaa111", session="s2")


@pytest.fixture
def keep(tmp_path, capsys):
    """A call that records measures as a benchmark; returns the folder that keeps them."""

    def call(*measures):
        source = tmp_path / "measures.json"
        source.write_text(bench.to_json(measures))
        assert bench.main(["--out", str(tmp_path / "bench"), "--row-files", str(source)]) == 0
        capsys.readouterr()
        return tmp_path / "bench"

    return call


@pytest.fixture
def compared(keep, capsys):
    def call(*named):
        code = bench_compare.main([*named, "--bench", str(keep.folder)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    keep.folder = keep(SPEED, SHARE)
    return call


def line(text, name):
    return next(line for line in text.splitlines() if line.startswith(f"| {name} |"))


def test_each_commit_keeps_its_benchmark_and_the_newest_stands_beside(keep):
    keep(SPEED, SHARE)
    folder = keep(replace(SPEED, commit="bbb222", session="s3"))
    assert sorted(path.name for path in (folder / "commits").iterdir()) == ["aaa111.csv", "bbb222.csv"]
    assert (folder / "bench.csv").read_text() == (folder / "commits/bbb222.csv").read_text()


def test_what_was_recorded_in_several_commits_is_kept_under_the_newest_sessions(keep):
    folder = keep(replace(SPEED, commit="bbb222", session="s3"), SHARE)
    assert [path.name for path in (folder / "commits").iterdir()] == ["bbb222.csv"]


def test_two_commits_are_compared_measure_by_measure(keep, compared):
    faster = replace(SPEED, value=15.0, ci_low=14.0, ci_high=16.0, passed=True, commit="bbb222", session="s3")
    keep(faster, Measure("new", 3.0, "s", commit="bbb222", session="s3"))
    code, text, _ = compared("aaa", "bbb222")
    assert code == 0
    assert line(text, "speed") == (
        "| speed | 10 (9-11) | 15 (14-16) | 1.500 | yes | tok/s | >= 12 | missed then met |  |"
    )
    assert line(text, "share").startswith("| share | 0.5 | not there |  |  | ratio |")
    assert line(text, "new").startswith("| new | not there | 3 |")
    assert "A: " in text and "commit aaa111, sessions s1, s2" in text


def test_intervals_that_meet_are_not_apart_and_another_goal_is_told(keep, compared):
    keep(replace(SPEED, value=11.0, ci_low=10.0, ci_high=12.0, goal=">= 11", commit="bbb222"))
    text = compared("aaa111", "bbb")[1]
    assert "| 1.100 | no |" in line(text, "speed") and ">= 12, >= 11" in line(text, "speed")
    assert line(text, "speed").endswith("| goal |")


def test_a_file_of_anywhere_will_do_and_zero_has_no_quotient(tmp_path, compared, keep):
    file = keep.folder / "bench.csv"
    other = tmp_path / "other.csv"
    other.write_text(file.read_text().replace("10,", "0,").replace("s1", "s9"))
    code, text, _ = compared(str(file), str(other))
    assert code == 0 and "| 10 (9-11) | 0 (9-11) |  | no |" in line(text, "speed")


def test_a_row_that_both_recordings_hold_is_told_as_one_session(keep, compared):
    keep(SPEED, replace(SHARE, value=0.6, commit="bbb222", session="s3"))
    text = compared("aaa111", "bbb222")[1]
    assert "| 1.000 | one session |" in line(text, "speed") and "| 1.200 |  |" in line(text, "share")


def test_what_is_not_there_or_not_one_is_refused_in_one_line(tmp_path, compared, keep):
    keep(replace(SPEED, commit="aab333", session="s4"))
    for named, part in (("zzz", "neither a file nor a commit"), ("aa", "2 commits begin so"), ("", "nothing")):
        code, _, error = compared(named, "aaa")
        assert code == 2 and part in error and error.count("\n") == 1
    (tmp_path / "no.csv").write_text("measure,value\n")
    code, _, error = compared(str(tmp_path / "no.csv"), "aaa")
    assert code == 2 and "missing columns" in error
    (tmp_path / "no.csv").write_text(json.dumps([1]))
    assert compared(str(tmp_path / "no.csv"), "aaa")[0] == 2
