"""Verdicts of budget agreement on made-up rows, and what is written when a way does not work."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import agreement
from analysis.agreement import SUMMARY_COLUMNS, read_agreement, summary
from analysis.paper.findings import read_compare

MIB = 1 << 20
CLAIMS = Path(__file__).parents[2] / "results/paper/claims.yaml"
RECORD, PAGES = 1000, 1096  # bytes of a record, and of its pages


def rows_of(way, exponent, cold, device_over_cold=1.0, seed=0):
    """Loads of 20 records of which a share is cold; the budget holds 5 records at the start."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"phase": ["start"] * 5 + ["warm-up"] * 10 + ["measured"] * 200})
    frame["record"] = [*range(5), *rng.integers(0, 20, 210)]
    is_cold = np.arange(len(frame)) % 100 < round(100 * cold)
    frame["asked_bytes"] = RECORD
    frame["cold_bytes"] = np.where(is_cold, RECORD, 0)
    frame["cold_page_bytes"] = np.where(is_cold, PAGES, 0)
    frame["device_bytes"] = frame["cold_page_bytes"] * device_over_cold
    return frame.assign(inflight_bytes=0, by=way, exponent=exponent)


def written(folder, frames, *, steady=True, expert_bytes=400 * MIB, exponents=(0.0,), unavailable=None, drop=None):
    runs = [
        {
            "by": frame["by"].iloc[0],
            "exponent": float(frame["exponent"].iloc[0]),
            "steady": steady,
            "warm_up_loads": 10,
            "cached_low_bytes": MIB,
            "cached_mean_bytes": 2 * MIB,
            "cached_high_bytes": 3 * MIB,
            "charged_bytes": 2 * MIB if frame["by"].iloc[0] == "cgroup" else None,
            "record_bytes": RECORD,
        }
        for frame in frames
    ]
    about = {
        "session": "20260101T000000Z",
        "machine": "m",
        "tier": "t",
        "commit": "c",
        "budget_bytes": 2 * MIB,
        "expert_bytes": expert_bytes,
        "exponents": list(exponents),
        "unavailable": unavailable or {},
        "runs": runs,
    }
    about.pop(drop, None)
    folder.mkdir(exist_ok=True)
    pd.concat(frames).to_parquet(folder / "agreement.parquet")
    (folder / "agreement.json").write_text(json.dumps(about))
    return folder / "agreement.json"


def summarised(path):
    table = summary(read_agreement(path))
    assert list(table.columns) == SUMMARY_COLUMNS
    return table.set_index(["stream", "by"])


@pytest.mark.parametrize(
    "other, expert_bytes, verdict",
    [
        (0.51, 400 * MIB, "pass"),
        (0.53, 400 * MIB, "undecided"),  # the mean is within, its interval is not
        (0.54, 400 * MIB, "FAIL"),
        (0.46, 400 * MIB, "FAIL"),
        (0.54, 96 * MIB, "FAIL"),
    ],
)
def test_the_difference_must_lie_within_the_tolerance(tmp_path, other, expert_bytes, verdict):
    frames = [rows_of("eviction", 0.0, 0.5), rows_of("cgroup", 0.0, other)]
    table = summarised(written(tmp_path / "in", frames, expert_bytes=expert_bytes))
    row = table.loc[("uniform", "cgroup")]
    assert row["difference"] == pytest.approx(other - 0.5) and row["agrees"] == verdict
    assert row["difference_low"] < row["difference"] < row["difference_high"]
    assert row["charged_mib"] == 2 and pd.isna(table.loc[("uniform", "eviction")]["charged_mib"])
    assert pd.isna(table.loc[("uniform", "eviction")]["agrees"])


def test_a_small_set_of_experts_is_judged_by_the_same_bound_and_says_so(tmp_path, capsys):
    frames = [rows_of("eviction", 0.0, 0.5), rows_of("cgroup", 0.0, 0.5)]
    for size, said in ((96 * MIB, True), (400 * MIB, False)):
        path = written(tmp_path / "in", frames, expert_bytes=size)
        assert agreement.main([str(path), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")]) == 0
        text = capsys.readouterr().out
        assert "cold shares agree within 0.03, interval and all: 1 of 1" in text
        assert ("the bound was meant for 300 MiB" in text) is said


def test_loads_that_follow_each_other_do_not_count_as_many(tmp_path):
    """A cache that differs for the whole first half of a run: its interval is far wider than that of single loads."""
    base, other = rows_of("eviction", 0.0, 0.0), rows_of("cgroup", 0.0, 0.0)
    other.loc[other.index[15:19], "cold_bytes"] = RECORD  # 4 of 200 loads, all in one batch
    row = summarised(written(tmp_path / "in", [base, other])).loc[("uniform", "cgroup")]
    assert row["difference"] == pytest.approx(0.02) and row["agrees"] == "undecided"


@pytest.mark.parametrize("ratio, verdict", [(1.0, "pass"), (1.019, "pass"), (1.03, "FAIL"), (0.97, "FAIL")])
def test_device_bytes_must_match_cold_bytes(tmp_path, ratio, verdict):
    table = summarised(written(tmp_path / "in", [rows_of("eviction", 0.0, 0.5, ratio)]))
    row = table.loc[("uniform", "eviction")]
    assert row["device_over_cold"] == pytest.approx(ratio) and row["device_agrees"] == verdict


def test_without_a_steady_state_there_is_no_verdict(tmp_path):
    frames = [rows_of("eviction", 0.8, 0.5), rows_of("cgroup", 0.8, 0.5)]
    row = summarised(written(tmp_path / "in", frames, steady=False, exponents=(0.8,))).loc[("Zipf 0.8", "cgroup")]
    assert row["status"] == row["agrees"] == row["device_agrees"] == "no steady state"


def test_the_simulated_cache_holds_what_the_budget_began_with(tmp_path):
    frame = rows_of("eviction", 0.0, 0.5)
    share = summarised(written(tmp_path / "in", [frame])).loc[("uniform", "eviction")]["lru_cold_share"]
    kept, cold = list(range(5)), []
    for record in frame["record"].tolist()[5:]:
        cold.append(record not in kept)
        kept = [*(other for other in kept if other != record), record][-5:]
    assert share == pytest.approx(np.mean(cold[10:]))


def test_every_output_is_written_and_says_what_is_unavailable(tmp_path, capsys):
    frames = [rows_of("eviction", exponent, 0.5) for exponent in (0.0, 1.1)]
    path = written(tmp_path / "in", frames, exponents=(0.0, 1.1), unavailable={"cgroup": "cgroup-v1: no rights"})
    out = tmp_path / "out"
    assert agreement.main([str(path), "--claims", str(CLAIMS), "--out", str(out)]) == 0
    names = {"table.md", "summary.csv", "compare.csv", "agreement.png", "agreement.svg"}
    assert {each.name for each in out.iterdir()} == names
    text = (out / "table.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert text.count("unavailable (cgroup-v1: no rights)") == 2 and "20260101T000000Z" in text
    assert re.search(r"device bytes match cold bytes within 2%: 2 of 2", text)
    assert read_compare(out / "compare.csv").empty


def test_no_way_at_all_still_makes_a_table(tmp_path):
    frames = [rows_of("eviction", 0.0, 0.5)]
    path = written(tmp_path / "in", frames, unavailable={"eviction": "cold fraction unavailable"})
    about = json.loads(path.read_text()) | {"runs": []}
    path.write_text(json.dumps(about))
    assert agreement.main([str(path), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")]) == 0


def test_bad_inputs_are_told_in_one_line(tmp_path, capsys):
    def said(path):
        assert agreement.main([str(path), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")]) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line and not (tmp_path / "out").exists()
        return line

    assert "nothing.json" in said(tmp_path / "nothing.json")
    frame = rows_of("eviction", 0.0, 0.5)
    assert "missing keys: runs" in said(written(tmp_path / "1", [frame], drop="runs"))
    assert "missing columns: cold_bytes" in said(written(tmp_path / "2", [frame.drop(columns="cold_bytes")]))
    no_loads = frame[frame["phase"] != "measured"]
    assert "no measured loads of eviction" in said(written(tmp_path / "3", [no_loads]))
    others = [frame, rows_of("cgroup", 0.0, 0.5, seed=1)]
    assert "did not load the same experts" in said(written(tmp_path / "4", others))
