"""Measure files: made from rows, with a goal each, and read back by the benchmark."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis.bench import read_measures
from analysis.measures import main


def write_reads(folder, fault_ns, pread_ns):
    rows = [
        {"pair": pair, "way": way, "layer": 1, "experts": 8, "cold_share": 1.0, "ns": ns}
        for pair, times in enumerate(zip(fault_ns, pread_ns, strict=True))
        for way, ns in zip(("mmap", "pread"), times, strict=True)
    ]
    pd.DataFrame(rows).to_parquet(folder / "reads.parquet")
    about = {"session": "s", "commit": "c", "fault_window": "as-is", "threads": 2, "k": 8}
    (folder / "reads.json").write_text(json.dumps(about))
    return folder / "reads.json"


@pytest.mark.parametrize(("fault_ns", "passed"), [([30e6, 36e6, 33e6], True), ([20e6, 21e6, 19e6], False)])
def test_reads_are_paired_and_judged(tmp_path, fault_ns, passed):
    out = tmp_path / "measures" / "reads.json"
    assert main(["reads", str(write_reads(tmp_path, fault_ns, [10e6, 12e6, 11e6])), str(out)]) == 0
    (measure,) = read_measures(out)
    assert (measure.measure, measure.passed, measure.goal) == ("reads.fault_ratio", passed, ">= 2.50")
    assert measure.ci_low <= measure.value <= measure.ci_high
    assert "n=3 pairs" in measure.note


def test_missing_rows_are_one_line(tmp_path, capsys):
    assert main(["reads", str(tmp_path / "reads.json"), str(tmp_path / "out.json")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()
