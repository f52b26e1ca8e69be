"""The schema of raw rows: kinds and refusals, and that results/SCHEMA.md is what it prints."""

from pathlib import Path

import pandas as pd
import pytest

from analysis import schema
from analysis.schema import FILES, Column

SCHEMA = Path(__file__).parents[2] / "results" / "SCHEMA.md"


def test_the_kept_page_is_current(capsys):
    assert schema.main() == 0
    assert capsys.readouterr().out == SCHEMA.read_text(encoding="utf-8")


def test_no_column_is_described_twice():
    for file in FILES.values():
        names = [column.name for column in file.columns]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("text", ["a", ""], [1, 2]),
        ("integer", [1, 2], [1.5, 2.0]),
        ("integer?", [1, None], [1.5, None]),
        ("integer?", [None, None], ["a", None]),
        ("number", [1.5, 2.0], ["a", "b"]),
        ("number", [1.5, 2.0], [1.5, None]),
        ("flag", [True, False], [1, 0]),
        ("flag?", [True, None], ["yes", None]),
        ("integer", [0, 1], [True, False]),
    ],
)
def test_kinds(kind, good, bad):
    column = Column.parse(f"x {kind} ms: A number.")
    assert column.problem(pd.Series(good)) == ""
    assert column.problem(pd.Series(bad)).startswith("column x ")


def test_missing_and_strange_columns_are_named():
    file = schema.File.parse("p", "A row.", "a integer -: One.\nb text -: Two.")
    assert file.problems(pd.DataFrame({"a": [1], "b": ["x"]})) == []
    assert file.problems(pd.DataFrame({"a": [1], "c": [2]})) == ["column b is missing", "column c is not in the schema"]


@pytest.mark.parametrize("line", ["x colour -: A sentence.", "x text -: no sentence"])
def test_a_malformed_description_is_refused(line):
    with pytest.raises(ValueError, match="column x"):
        Column.parse(line)
