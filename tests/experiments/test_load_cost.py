"""Loads with a set cold share: the order, the pages left cold, what a run writes, and refused checkpoints."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ByteRange, ExpertLayout
from edge0.checkpoint.repack import repack
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.telemetry.pagecache import PAGE_BYTES
from experiments import load_cost as module
from experiments.load_cost import LAYOUTS, WAYS, check_pair, complement, plan


@pytest.fixture(scope="module")
def records(unit_35b, tmp_path_factory):
    out = tmp_path_factory.mktemp("records") / "unit-35b"
    repack(unit_35b, out)
    return out


def layout_of(model: Path) -> ExpertLayout:
    return ExpertLayout.of(CheckpointIndex.open(model), read_config(model))


def test_the_plan_is_whole_seeded_and_mixed(unit_35b):
    layout = layout_of(unit_35b)
    units = plan(layout, 12, [0.0, 0.5, 1.0], seed=3)
    assert Counter((u.way, u.target_cold) for u in units) == {(w, c): 12 for w in WAYS for c in (0.0, 0.5, 1.0)}
    assert units == plan(layout, 12, [0.0, 0.5, 1.0], seed=3) != plan(layout, 12, [0.0, 0.5, 1.0], seed=4)
    assert {u.layouts for u in units} == {LAYOUTS, LAYOUTS[::-1]}
    half = Counter(u.way for u in units[: len(units) // 2])
    assert all(9 <= half[way] <= 27 for way in WAYS)  # no way has a half of its own


@given(share=st.floats(0, 1), place=st.floats(0, 1, exclude_max=True), pages=st.lists(st.integers(1, 9), min_size=1))
def test_one_run_of_pages_is_left_cold(share, place, pages):
    """Spans of whole pages, one page apart, the last one half a page short of its end."""
    spans, at = [], 0
    for count in pages:
        spans.append(ByteRange(Path("x"), at, count * PAGE_BYTES))
        at += (count + 1) * PAGE_BYTES
    spans[-1] = ByteRange(Path("x"), spans[-1].offset, spans[-1].nbytes - PAGE_BYTES // 2)
    warm, cold_bytes = complement(spans, share, place)
    every = [start for s in spans for start in range(s.offset, s.offset + s.nbytes, PAGE_BYTES)]
    kept = [start for s in warm for start in range(s.offset, s.offset + s.nbytes, PAGE_BYTES)]
    cold = sorted(set(every) - set(kept))
    assert len(cold) == round(share * len(every)) and len(kept) == len(set(kept))
    first = every.index(cold[0]) if cold else 0
    assert cold == every[first : first + len(cold)]
    assert cold_bytes + sum(s.nbytes for s in warm) == sum(s.nbytes for s in spans)


def test_a_run_in_small(unit_35b, records, tmp_path):
    command = [sys.executable, "-m", "experiments.load_cost", unit_35b, tmp_path / "out", "--records", records]
    done = subprocess.run([*command, "--loads", "3", "--levels", "1", "0", "0.5"], capture_output=True, text=True)
    if "PROBE_UNAVAILABLE" in done.stderr or "cannot be read" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    rows = pd.read_parquet(next((tmp_path / "out").glob("*Z")) / "loads.parquet")
    about = json.loads((next((tmp_path / "out").glob("*Z")) / "loads.json").read_text())
    assert about["levels"] == [0.0, 0.5, 1.0] and about["tier"] == unit_35b.name and about["session"]
    loads = rows[rows["role"] == "load"]
    assert set(loads.groupby(["way", "layout", "target_cold"]).size()) == {3} and len(loads) == 4 * 2 * 3 * 3
    assert rows["order"].tolist() == list(range(len(rows)))
    assert len(rows[rows["role"] == "reference"]) == 2
    pairs = loads.groupby(["way", "target_cold", "repetition"])
    assert (pairs["layout"].nunique() == 2).all() and (pairs["expert"].nunique() == 1).all()
    shares = loads["cold_page_bytes"] / loads.groupby("layout")["cold_page_bytes"].transform("max")
    assert ((shares - loads["target_cold"]).abs() < 0.15).all()  # whole pages of small experts
    warm, cold = loads[loads["target_cold"] == 0], loads[loads["target_cold"] == 1]
    assert (warm["cold_bytes"] == 0).all() and (cold["cold_bytes"] == cold["asked_bytes"]).all()
    assert (loads["ns"] == loads["advise_ns"] + loads["read_ns"]).all() and (loads["build_ns"] > 0).all()
    advised = loads[loads["way"] == "willneed"]
    assert advised["device_bytes"].sum() == pytest.approx(advised["cold_page_bytes"].sum(), rel=0.02)


def test_one_layout_alone(unit_35b, tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.load_cost",
        unit_35b,
        tmp_path / "out",
        "--loads",
        "1",
        "--levels",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot be read" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert set(pd.read_parquet(next((tmp_path / "out").glob("*Z")) / "loads.parquet")["layout"]) == {"stacked"}


def test_where_direct_reads_are_refused_the_reference_is_an_advised_read(unit_35b, records, monkeypatch, capsys):
    def refuse(paths):
        raise Edge0Error(ErrorKind.OPTION_INVALID, "the file system refuses direct reads")

    monkeypatch.setattr(module, "DirectSource", refuse)
    rows, _ = module.measure(unit_35b, records, 1, [1.0], 0)
    assert set(rows[rows["role"] == "load"]["way"]) == set(WAYS) - {"direct"}
    assert set(rows[rows["role"] == "reference"]["way"]) == {"willneed"}
    assert "the reference is willneed" in capsys.readouterr().err


def test_two_models_are_refused(unit_35b, checkpoints, records, refused):
    stacked, repacked, other = layout_of(unit_35b), layout_of(records), layout_of(checkpoints["unit-8b"])
    check_pair(stacked, repacked, records)
    for left, right in ((stacked, other), (repacked, repacked), (repacked, stacked)):
        refused(ErrorKind.OPTION_INVALID, lambda a=left, b=right: check_pair(a, b, records), "repacked copy", "stacked")


def test_wrong_options_end_at_once(unit_35b, tmp_path):
    for options in (["--loads", "0"], ["--levels", "1.5"]):
        command = [sys.executable, "-m", "experiments.load_cost", unit_35b, tmp_path / "out", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and "between 0 and 1" in done.stderr and not (tmp_path / "out").exists()
