"""Anybody's rows: a CSV, load_cost's rows, a session's; and what is said of rows that cannot be understood."""

import numpy as np
import pandas as pd
import pytest
from synthetic import make_session
from synthetic_loads import make_loads

from analysis.fit import regress
from analysis.fit.regress import Columns, read_rows

FILES = {"summary.csv", "residuals.csv", "table.md", "regress.png", "regress.svg"}


def table(path, n=200, **columns):
    rng = np.random.default_rng(0)
    cold = np.concatenate([np.zeros(n // 2), np.ones(n // 4), rng.uniform(0.01, 0.99, n - n // 2 - n // 4)])
    frame = pd.DataFrame({"cold_share": cold, "ms": 1.17 + 1.33 * cold + rng.normal(0, 0.02, n)} | columns)
    frame.to_csv(path, index=False)
    return path


def run(*arguments) -> int:
    return regress.main([str(argument) for argument in arguments])


def test_a_csv_of_cold_reads(tmp_path, capsys):
    assert run(table(tmp_path / "mine.csv", asked_bytes=1 << 20), "--out", tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    found = pd.read_csv(tmp_path / "out" / "summary.csv").iloc[0]
    assert (found.a_ms, found.b_ms) == pytest.approx((1.17, 1.33), abs=0.03)
    assert (found.group, found.n, found.bins, found.mib_per_load) == ("all reads", 200, 3, 1.0)
    assert "n: 200 reads, of mine.csv" in capsys.readouterr().out


def test_other_column_names_and_groups(tmp_path):
    path = tmp_path / "mine.csv"
    frame = pd.read_csv(table(path)).rename(columns={"cold_share": "c", "ms": "t"})
    frame["disk"] = np.where(np.arange(len(frame)) % 2, "a", "b")
    frame.to_csv(path, index=False)
    options = ["--cold-column", "c", "--ms-column", "t", "--group-column", "disk", "--least", "10"]
    assert run(path, *options, "--out", tmp_path / "out") == 0
    assert pd.read_csv(tmp_path / "out" / "summary.csv")["group"].tolist() == ["a", "b"]


def test_rows_of_load_cost_are_understood(tmp_path):
    rows = read_rows(make_loads(tmp_path) / "loads.parquet", Columns())
    assert len(rows) == 4 * 2 * 6 * 30 and rows["group"].nunique() == 8  # without the reference loads
    assert rows.groupby("group")["cold"].nunique().eq(6).all()


def test_rows_of_a_session_are_understood(tmp_path):
    """Timed loads of valid runs, by arm and K; one prefill step and one void run are not among them."""

    def change(frames, info):
        frames["loads"].loc[frames["loads"]["step"] == 0, "step"] = -1
        frames["runs"].loc[frames["runs"]["run_id"] == "arm-ondemand-k8-r0", ["void", "void_reason"]] = [True, "x"]

    folder = make_session(tmp_path / "s", change=change)
    rows = read_rows(folder / "loads.parquet", Columns())
    assert set(rows["group"]) >= {"ondemand, 8", "prerouter-mmap, 2"}
    # Neither the A/A runs of ondemand at K=8 (two of its three rounds are valid) nor the drift run at K=2.
    assert (rows["group"] == "ondemand, 8").sum() == 2 * 2 and (rows["group"] == "ondemand, 2").sum() == 3 * 2
    assert (rows["group"] == "ondemand, 4").sum() == 3 * 2 and (rows["group"] == "prerouter, 8").sum() == 3 * 2
    assert set(rows["cold"]) == {0.5} and set(rows["ms"]) == {3.0}


def test_a_group_without_a_line_is_named(tmp_path, capsys):
    frame = pd.read_csv(table(tmp_path / "mine.csv"))
    frame["way"] = np.where(frame.index < 195, "many", "few")
    frame.to_csv(tmp_path / "mine.csv", index=False)
    assert run(tmp_path / "mine.csv", "--group-column", "way", "--out", tmp_path / "out") == 0
    assert "no line for few: a line needs 2 bins" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows, options, parts",
    [
        ({"cold": [0, 1], "time": [1, 2]}, [], ["missing column: ms", "it has cold, time", "--ms-column"]),
        ({"share": [0, 1], "ms": [1, 2]}, [], ["missing column: cold_share", "it has share, ms", "--cold-column"]),
        ({"cold": [0, 1], "ms": [1, 2]}, ["--ms-column", "t"], ["missing columns: t; it has cold, ms"]),
        ({"cold": [0, 100], "ms": [1, 2]}, [], ["cold: expected a cold share of 0 to 1", "found 100", "in per cent?"]),
        ({"cold": [-0.5, 1], "ms": [1, 2]}, [], ["found -0.5 in row 1 (1 of 2 rows"]),
        ({"cold": [0, 1], "ms": [1, -2]}, [], ["ms: expected a time of 0 or more in every row, found -2 in row 2"]),
        ({"cold": [0, 1], "ms": [1, "fast"]}, [], ["ms: expected a number in every row, found fast in row 2 ("]),
        ({"cold": [0, None], "ms": [1, 2]}, [], ["cold: expected a number in every row, found nothing in row 2 ("]),
        ({"cold": [0, 1, 1], "ms": [1, np.inf, 2]}, [], ["found inf in row 2 (1 of 3 rows"]),
        ({"cold_bytes": [1, 1], "asked_bytes": [2, 0], "ms": [1, 2]}, [], ["asked_bytes: expected above 0", "row 2 ("]),
        (
            {"cold_bytes": ["a", 1], "asked_bytes": [2, 1], "ms": [1, 2]},
            [],
            ["cold_bytes: expected a number", "row 1 ("],
        ),
        ({"cold": [0, 1], "ms": [1, 2], "asked_bytes": [1, "x"]}, [], ["asked_bytes: expected a number", "found x"]),
        ({"cold": [0, 1], "ns": [1, "x"]}, [], ["ns: expected a number", "found x in row 2 ("]),
        (
            {"cold": [0, 1], "ms": [1, 2], "g": ["a", None]},
            ["--group-column", "g"],
            ["g: expected the name of a group"],
        ),
        ({"cold": [0, 1], "ms": [1, 2]}, [], ["no line to be drawn", "a bin takes 30"]),
        ({"cold": [], "ms": []}, [], ["no row of a single read"]),
    ],
)
def test_bad_rows_are_one_line_and_leave_nothing(tmp_path, capsys, rows, options, parts):
    pd.DataFrame(rows).to_csv(tmp_path / "bad.csv", index=False)
    assert run(tmp_path / "bad.csv", *options, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'bad.csv'}: ") and error.count("\n") == 1
    assert all(part in error for part in parts) and not (tmp_path / "out").exists()


def test_rows_without_a_number_are_counted_and_the_first_are_named(tmp_path, capsys):
    """By their place in the file, whatever else was left out of it."""
    frame = pd.read_csv(table(tmp_path / "mine.csv")).assign(role="load")
    frame.loc[0, "role"] = "reference"
    frame.loc[[3, 9, 50, 60, 70, 80], "ms"] = np.nan
    frame.to_csv(tmp_path / "mine.csv", index=False)
    assert run(tmp_path / "mine.csv", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "ms: " in error and "found nothing in row 4 (6 of 199 rows are not so: 4, 10, 51, 61, 71, ...)" in error
    assert "np." not in error


def test_no_rows_no_file_no_table(tmp_path, capsys):
    assert run("--out", tmp_path / "out") == 2 and "--config rows=PATH" in capsys.readouterr().err
    least = (table(tmp_path / "mine.csv"), "--least", "0", "--out", tmp_path / "out")
    assert run(*least) == 2 and "--least: expected 1" in capsys.readouterr().err
    assert run(tmp_path / "none.csv", "--out", tmp_path / "out") == 2 and "no such file" in capsys.readouterr().err
    (tmp_path / "rows.txt").write_text("x")
    assert run(tmp_path / "rows.txt", "--out", tmp_path / "out") == 2 and ".parquet or .csv" in capsys.readouterr().err
    (tmp_path / "bad.parquet").write_text("x")
    assert run(tmp_path / "bad.parquet", "--out", tmp_path / "out") == 2
    assert "not a readable table" in capsys.readouterr().err
