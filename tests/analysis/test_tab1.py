"""Table 1 from synthetic sessions, prompts and counts: what is judged, what only stands beside, what is refused."""

import json

import pandas as pd
import pytest
from released_counts import CLAIMS, write_counts
from synthetic import make_session

from analysis import tab1

RENAMED = {"ondemand-mmap": "ondemand-large", "prerouter-mmap": "prerouter-large"}


def make_tier(folder, family, k, change=None):
    """A session of Table 1's arms and prompts of 100 tokens: 4 and 5 s cold, 2 and 2.5 s warm."""

    def arms(frames, info):
        runs = frames["runs"]
        runs["arm"] = runs["arm"].replace(RENAMED)
        runs["tier"] = info["tier"] = f"mini-{family}"
        info["family"] = {"35b": "qwen", "8b": "ling"}[family]
        if change is not None:
            change(frames, info)

    session = make_session(folder / "session", k_values=(k,), name=f"s-{family}", condition="warm", change=arms)
    rows = [
        {"role": "arm", "round": n, "condition": c, "tokens": 100, "ttft_ms": ms, "device_bytes": 0}
        for c, times in (("cold", (4000, 5000)), ("warm", (2000, 2500)))
        for n, ms in enumerate(times)
    ]
    pd.DataFrame(rows).to_parquet(folder / "prefill.parquet")
    about = {"family": family, "tier": f"mini-{family}", "session": f"p-{family}", "k": k}
    (folder / "prefill.json").write_text(json.dumps(about))
    return session, folder / "prefill.json"


@pytest.fixture
def run(tmp_path, capsys):
    """A call of the command with some tiers; returns (exit code, stdout, stderr, the output folder)."""

    def call(*tiers):
        counts = write_counts(tmp_path / "counts.json")
        sessions, prefills = ([str(path) for path in paths] for paths in zip(*tiers, strict=True))
        options = ["--sessions", *sessions, "--prefills", *prefills, "--claims", str(CLAIMS)]
        code = tab1.main([str(counts), *options, "--out", str(tmp_path / "out")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err, tmp_path / "out"

    return call


def test_both_tiers_stand_in_one_table_beside_the_paper(tmp_path, run):
    code, text, _, out = run(make_tier(tmp_path / "a", "35b", 4), make_tier(tmp_path / "b", "8b", 8))
    assert code == 0
    lines = text.splitlines()
    # K=4 doubles the synthetic speeds: 36 tok/s with the prerouter, 20 on demand, 12 and 10 with the large bank.
    decode = "| decode, prerouter, small bank (tok/s) | 20.4 | 36 (35.99-37.09) | 28.0 | 18 (17.99-18.54) |"
    assert decode in lines
    assert "| prefill, cold (tok/s) | 113 | 22.5 (20-25) | 500 | 22.5 (20-25) |" in lines
    assert "| prefill, warm (tok/s) | 140 | 45 (40-50) | 1102 | 45 (40-50) |" in lines
    assert any(line.startswith("| prerouter over ondemand | 1.82x") for line in lines)
    # Two prompts of each condition, twice as fast warm in both rounds.
    assert "| prompts, warm over cold | 2.00x (no interval), n=2 | 2.00x (no interval), n=2 |" in lines
    assert lines[0] == "# Table 1: mini-35b and mini-8b, beside the paper's"
    assert "| released 35b | 19,508,787,456 | 42,332,160 |" in text and "| mini-35b | 363,575,040 |" in text
    assert "takes: about 50 minutes" in text and text.count("machine: testbox") == 1
    assert {path.name for path in out.iterdir()} == {
        "table.md",
        "tab1.png",
        "tab1.svg",
        "summary.csv",
        "prefill.csv",
        "sizes.csv",
        "compare.csv",
    }


def test_every_claim_of_table_1_is_answered_once_from_its_own_session(tmp_path, run):
    *_, out = run(make_tier(tmp_path / "a", "35b", 4), make_tier(tmp_path / "b", "8b", 8))
    compare = pd.read_csv(out / "compare.csv", keep_default_na=False).set_index("id")
    assert compare.index.is_unique
    measured = compare[compare.index.str.startswith("tab1.")]
    assert set(measured["status"]) == {"not testable here"} and (measured["ours"] != "").all()
    assert compare.loc["tab1.35b.decode", "session"] == "s-35b"
    assert compare.loc["tab1.8b.prefill_warm", "session"] == "p-8b"
    assert compare.loc["arch.8b.layers", ["session", "status"]].tolist() == ["counted", "reproduced"]
    assert "960 further bundles are 1.19 GiB" in compare.loc["tab1.8b.decode_lru1024", "why"]
    assert compare.loc["tab1.35b.peak", "ours"] == f"{109 / 1024:.3g}"  # the synthetic run at K=4 has 109 MiB


def test_one_tier_alone_leaves_the_other_untested(tmp_path, run):
    code, text, _, out = run(make_tier(tmp_path / "b", "8b", 8))
    assert code == 0
    compare = pd.read_csv(out / "compare.csv", keep_default_na=False).set_index("id")
    assert compare.loc["tab1.35b.decode", "why"] == "no tier of the 35b family was measured"
    assert "ours, not measured" in text and text.startswith("# Table 1: mini-8b, beside the paper's\n")


def test_an_arm_without_a_valid_run_is_told(tmp_path, run):
    def change(frames, info):
        mine = frames["runs"]["arm"] == "prerouter-large"
        frames["runs"].loc[mine, ["void", "void_reason"]] = [True, "swapped"]

    code, text, _, out = run(make_tier(tmp_path / "b", "8b", 8, change))
    assert code == 0 and "no shared round" in text
    compare = pd.read_csv(out / "compare.csv", keep_default_na=False).set_index("id")
    assert compare.loc["tab1.8b.decode_lru1024", ["ours", "why"]].tolist() == ["", "no valid run of it"]


def test_rows_that_do_not_belong_together_are_refused_in_one_line(tmp_path, run):
    first = make_tier(tmp_path / "a", "35b", 4)
    assert "a second session of 35b" in run(first, make_tier(tmp_path / "b", "35b", 4))[2]
    other = make_tier(tmp_path / "c", "8b", 8)
    assert "no prompts of 35b beside it" in run((first[0], other[1]))[2]
    about = json.loads(other[1].read_text())
    other[1].write_text(json.dumps(about | {"tier": "another"}))
    code, _, error, out = run(other)
    assert (code, error.count("\n")) == (2, 1) and "prompts of another" in error and not out.exists()
    other[1].write_text(json.dumps({"family": "8b"}))
    assert "does not say its tier" in run(other)[2]
