"""What small experiments leave behind, and what becomes of them where they cannot go on."""

import json

import numpy as np
import pandas as pd
import pytest

from edge0.checkpoint.header import CheckpointIndex
from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.telemetry.pagecache import UNAVAILABLE, ProbeReport
from experiments import endurance, prefill_cost, publish, read_cost

ROWS = pd.DataFrame({"pair": [0, 1], "ns": np.array([5, 6])})


def test_rows_and_what_is_to_be_known_of_them(unit_35b, tmp_path):
    publish.publish(tmp_path / "a" / "b", "reads", ROWS, unit_35b, {"k": 4, "window": "none"})
    pointer = tmp_path / "a" / "b" / "latest.json"
    folder = pointer.parent / json.loads(pointer.read_text())["session"]
    assert sorted(path.name for path in folder.iterdir()) == ["reads.json", "reads.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "reads.parquet"), ROWS)
    about = json.loads((folder / "reads.json").read_text())
    assert list(about) == ["session", "machine", "commit", "lower_cache", "k", "window", "host"]
    assert about["session"] == folder.name and about["lower_cache"] in ("none", "suspected", "unknown")
    assert (about["k"], about["window"]) == (4, "none") and about["host"]["os"]


def test_a_new_measurement_leaves_the_old_rows_where_they_are(unit_35b, tmp_path):
    for value in (1, 2):
        publish.publish(tmp_path, "reads", ROWS.assign(ns=value), unit_35b, {})
    first, second = sorted(tmp_path.glob("*Z"))
    assert [pd.read_parquet(folder / "reads.parquet").ns.iloc[0] for folder in (first, second)] == [1, 2]
    assert json.loads((tmp_path / "latest.json").read_text()) == {"session": second.name}


def test_a_folder_that_cannot_be_made(unit_35b, tmp_path, refused):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: publish.publish(out, "x", ROWS, unit_35b, {}), out)


def test_a_command_ends_in_one_line_and_only_where_the_failure_was_expected(capsys):
    def fail(error):
        raise error

    assert publish.run_command(lambda: None) == 0
    assert publish.run_command(lambda: fail(Edge0Error(ErrorKind.NUMERIC, "no number"))) == EXIT_CODE
    assert capsys.readouterr().err == "edge0: no number\n"
    with pytest.raises(KeyError):
        publish.run_command(lambda: fail(KeyError("a bug")))


@pytest.mark.parametrize(
    "measure",
    [
        lambda model: endurance.measure(model, 2, 1, 1),
        lambda model: read_cost.measure(model, 2, 1, 1, 0),
        lambda model: prefill_cost.measure(prefill_cost.Sample(str(model), 2, "auto", "warm", 9)),
    ],
    ids=["endurance", "read_cost", "prefill_cost"],
)
def test_without_a_probe_nothing_is_measured_and_the_reason_is_told(unit_35b, monkeypatch, refused, measure):
    monkeypatch.setattr(
        publish, "self_test", lambda path: ProbeReport(UNAVAILABLE, False, False, "a reason of its own")
    )
    refused(ErrorKind.PROBE_UNAVAILABLE, lambda: measure(unit_35b), "a reason of its own")


def test_pages_of_each_file_are_open_until_the_end(unit_35b):
    paths = [shard.path for shard in CheckpointIndex.open(unit_35b).shards]
    with publish.open_pages(paths) as files:
        assert list(files) == paths
        assert all(pages.file_bytes == path.stat().st_size for path, pages in files.items())
