"""Memory from a synthetic session: counters, the paired price, what is held twice, and the figure's parts."""

import pandas as pd
import pytest
from released_counts import CLAIMS
from synthetic import MIB, make_session, void_run

from analysis import memory, memory_figure
from analysis.paper.claims import load_claims
from analysis.rows import load_session


def heads(frames, info):
    """With the prerouter 10 MiB more, and one more each round; 4 MiB less of the page cache; 5 MiB of free buffers."""
    runs = frames["runs"]
    mine = runs["arm"].str.startswith("prerouter")
    runs["alloc_cache_bytes"] = 5 * MIB
    runs.loc[mine, "alloc_active_bytes"] += (10 + runs.loc[mine, "round"]) * MIB
    runs.loc[mine, "cached_after_bytes"] -= 4 * MIB


@pytest.fixture
def session(tmp_path):
    return load_session(make_session(tmp_path / "s", change=heads))


def found(session):
    rows = {}
    for finding in memory.findings(session, load_claims(CLAIMS)):
        rows.setdefault(finding.claim.id, []).append(finding)
    return rows


def test_the_price_is_paired_within_rounds(session):
    table = memory.prices(session).set_index(["k", "arm", "part"])
    price = table.loc[(8, "prerouter", "allocator")]
    assert price["mean_mib"] == pytest.approx(11) and price["n"] == 3
    # t(0.975, 2) = 4.3027 times a standard deviation of 1 over the root of 3
    assert price["ci_high_mib"] - price["mean_mib"] == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    cached = table.loc[(8, "prerouter-mmap", "page cache")]
    assert cached[["mean_mib", "ci_low_mib", "ci_high_mib"]].tolist() == pytest.approx([-4, -4, -4])
    assert table.loc[(2, "prerouter", "RssAnon"), "mean_mib"] == 0


def test_a_round_that_is_void_on_one_side_is_no_pair(tmp_path):
    def change(frames, info):
        heads(frames, info)
        void_run("arm-ondemand-k8-r2", "swapped")(frames, info)

    table = memory.prices(load_session(make_session(tmp_path / "s", change=change))).set_index(["k", "arm", "part"])
    assert table.loc[(8, "prerouter", "allocator"), ["mean_mib", "n"]].tolist() == [10.5, 2]


def test_a_counter_that_was_not_kept_gives_no_price(tmp_path):
    """Without the allocator's free buffers its sum is unknown, not smaller."""
    table = memory.prices(load_session(make_session(tmp_path / "s")))
    assert set(table["part"]) == {"allocator peak", "RssAnon", "page cache"}
    assert memory.summary(load_session(tmp_path / "s"))["alloc_cache_mib"].isna().all()
    (first, second) = found(load_session(tmp_path / "s"))["mem.price_k8"]
    assert first.status == second.status == "not testable here" and "no valid round" in first.why


def test_what_is_held_twice_is_measured_beside_what_stacks_may_hold_by_design(tmp_path):
    """60 MiB of 120 slots: half a MiB each; three layers that load, eight experts: no more than 12 MiB of stacks."""

    def change(frames, info):
        heads(frames, info)
        frames["loads"]["layer"] = frames["loads"]["step"] + 5

    session = load_session(make_session(tmp_path / "s", change=change))
    assert memory.stack_bytes(session, "prerouter", 8) == 0
    assert (
        memory.stack_bytes(session, "prerouter-mmap", 8) == memory.stack_bytes(session, "ondemand-mmap", 8) == 12 * MIB
    )
    assert memory.stack_bytes(session, "ondemand-mmap", 2) == 3 * MIB
    assert memory.stack_bytes(session, "ondemand", 16) is None
    assert memory.above_end_bytes(session, "ondemand-mmap", 8).median == 13 * MIB  # 113 at the peak, 100 at the end
    assert memory.above_end_bytes(session, "prerouter", 8).low == (13 - 12) * MIB
    (finding,) = found(session)["mem.double_hold"]
    assert "0.42 GiB" in finding.why and "0.53 GiB" in finding.why and "0.453 GB" in finding.why
    assert finding.ours == (
        "measured, allocator peak less active: ondemand 13.0 MiB (stacks by design: none); prerouter 2.0 MiB (stacks "
        "by design: none); ondemand-mmap 13.0 MiB (stacks by design: at most 12.0 MiB); prerouter-mmap 2.0 MiB (stacks "
        "by design: at most 12.0 MiB)"
    )
    text = memory.markdown(session, [finding], load_claims(CLAIMS))
    assert "| 8 | ondemand-mmap | 3 | 13.0 (13.0-13.0) | at most 12.0 MiB |" in text
    assert "| 8 | ondemand | 3 | 13.0 (13.0-13.0) | none |" in text


def test_every_claim_stands_beside_ours_for_each_k_and_way_to_read(session):
    rows = found(session)
    assert set(rows) == {name for name in load_claims(CLAIMS).by_id if name.startswith("mem.")}
    places = [(finding.k, finding.arm, str(finding.paper)) for finding in rows["mem.mlx.prerouter"]]
    assert places[:3] == [("2", "prerouter", "2.33"), ("2", "prerouter-mmap", "2.33"), ("4", "prerouter", "2.60")]
    assert {str(finding.status) for findings in rows.values() for finding in findings} == {"not testable here"}
    assert rows["mem.rss.ondemand"][0].ours == f"{180 / 1024:.3g}"
    first = rows["mem.price_k8"][0]
    assert first.ours.startswith("+11.0 MiB (+8.5 to +13.5) allocator, -4.0 MiB") and "+8.5%" in first.why


def test_all_outputs_are_written_and_the_table_says_how_to_read_it(session, tmp_path, capsys):
    options = ["--claims", str(CLAIMS), "--out", str(tmp_path / "out")]
    assert memory.main([str(tmp_path / "s"), *options]) == 0
    text = capsys.readouterr().out
    assert "## The price of the prerouter" in text and "takes: seconds" in text and "## How to read" in text
    assert "| 8 | prerouter over ondemand | +11.0 (+8.5 to +13.5) |" in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"summary.csv", "price.csv", "compare.csv", "table.md", "memory.png", "memory.svg"}
    summary = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert list(summary["arm"][:4]) == ["ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap"]
    assert summary["alloc_peak_mib"].tolist()[-1] == 113


def test_no_session_no_output(tmp_path, capsys):
    assert memory.main([str(tmp_path), "--claims", str(CLAIMS), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_parts_of_a_bar_are_the_anonymous_memory_and_the_mapped_files():
    row = pd.Series(
        {
            "alloc_active_mib": 100.0,
            "resident_mib": 40.0,
            "bank_mib": 50.0,
            "alloc_cache_mib": 5.0,
            "rss_anon_mib": 150.0,
            "rss_file_mib": 20.0,
        }
    )
    assert memory_figure.parts(row) == [40, 50, 10, 5, 45, 20]
    assert sum(memory_figure.parts(row)) == 170
    row["bank_mib"], row["rss_file_mib"] = 90.0, None  # bundles that are not all there yet; a counter that is unknown
    assert memory_figure.parts(row) == [40, 60, 0, 5, 45, 0]
