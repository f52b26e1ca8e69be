"""What stands above tables: the same facts, the label of cold times, and that a session that drifted has no verdict."""

import json
import re

import pandas as pd
import pytest
from released_counts import CLAIMS
from synthetic import make_session
from synthetic_loads import make_loads

from analysis import memory, tab3, tab4
from analysis.fit import regress
from analysis.fit import table as fit
from analysis.heading import GUEST_COLD, guest_cold, heading
from analysis.rows import load_session, named

FACTS = ("machine", "tier", "condition", "session", "takes")


def drift(frames, info):
    frames["runs"].loc[frames["runs"]["role"] == "drift", "tok_s"] *= 2


def test_each_session_that_drifted_is_named_and_no_other(tmp_path):
    steady, drifted = (
        load_session(make_session(tmp_path / name, name=name, change=change))
        for name, change in (("s1", None), ("s2", drift))
    )
    facts, *lines = heading(["machine: a", "tier: b"], steady, drifted)
    assert facts == "- machine: a\n- tier: b" and len(lines) == 1 and "Session s2 has no verdict" in lines[0]


def test_own_kernels_are_a_fact_of_whatever_was_computed_by_them(tmp_path):
    def own(frames, info):
        frames["runs"]["kernels"] = ["int8-avx2"] + ["mlx"] * (len(frames["runs"]) - 1)

    plain, other = (
        load_session(make_session(tmp_path / name, name=name, change=change))
        for name, change in (("s1", None), ("s2", own))
    )
    assert heading(["tier: b"], plain, other) == ["- tier: b\n- kernels: int8-avx2, in place of MLX's operations"]
    assert heading(["tier: b"], plain) == ["- tier: b"]


@pytest.mark.parametrize("table", [tab3, tab4, memory])
def test_tables_of_a_session_say_the_same_facts_and_that_it_drifted(table, tmp_path, capsys):
    session = make_session(tmp_path / "session", change=drift)
    assert table.main([str(session), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert all(re.search(f"^- {fact}: ", text, re.MULTILINE) for fact in FACTS)
    assert text.count("**Session s1 has no verdict") == 1


def test_cold_times_of_a_guest_are_labelled(tmp_path, capsys):
    assert guest_cold("suspected") == [GUEST_COLD] and guest_cold("none") == guest_cold(None) == []
    rows = make_loads(tmp_path / "rows")
    about = json.loads((rows / "loads.json").read_text())
    (rows / "loads.json").write_text(json.dumps(about | {"lower_cache": "suspected"}))
    assert fit.main([str(rows), "--claims", str(CLAIMS), "--out", str(tmp_path / "fit")]) == 0
    assert regress.main([str(rows / "loads.parquet"), "--out", str(tmp_path / "regress")]) == 0
    assert capsys.readouterr().out.count(GUEST_COLD) == 2


def test_a_pointer_names_the_file_in_its_folder_and_another_path_itself(tmp_path):
    pointer = tmp_path / "latest.json"
    pointer.write_text('{"session": "s1"}')
    assert named(pointer, "loads.json") == tmp_path / "s1" / "loads.json"
    assert named(tmp_path / "mine.json", "loads.json") == tmp_path / "mine.json"
    pointer.write_text("{}")
    with pytest.raises(ValueError, match=r"latest\.json: names no session"):
        named(pointer, "loads.json")


def test_a_session_is_read_by_its_folder_its_document_or_the_pointer(tmp_path):
    make_session(tmp_path / "s1")
    (tmp_path / "latest.json").write_text('{"session": "s1"}')
    found = [load_session(tmp_path / path) for path in ("s1", "s1/session.json", "latest.json")]
    for one in found[1:]:
        pd.testing.assert_frame_equal(one.all_runs, found[0].all_runs)
