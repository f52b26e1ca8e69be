"""The ledger: one row per claim, how many findings become one, what strict refuses."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.paper import architecture, ledger, strict
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import COMPARE_COLUMNS, Finding, Status, absolute, compare_rows, exact

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
COLUMNS = "id,kind,status,paper,ours,unit,session,command,why"


@pytest.fixture(scope="module")
def claims() -> Claims:
    return load_claims(CLAIMS)


def put(claims: Claims, folder: Path, *findings: Finding, session: str = "s1") -> None:
    folder.mkdir(parents=True)
    rows = compare_rows(findings, claims, session, f"snakemake {folder.name}")
    rows.to_csv(folder / "compare.csv", index=False)


def beside(claim, ours: str, arm: str = "ondemand", **where) -> Finding:
    return absolute(claim, ours, "mini-35b here", machine="testbox", tier="mini-35b", arm=arm, **where)


def run(results: Path, out: Path, *more: str) -> int:
    return ledger.main([str(results), "--claims", str(CLAIMS), "--out", str(out), "--targets", "tab3", "appxb", *more])


def check(out: Path) -> int:
    return strict.main([str(out / "claims.csv")])


def rows_of(out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "claims.csv", dtype=str, keep_default_na=False).set_index("id")


def test_one_row_per_claim_in_the_papers_order(claims, tmp_path, capsys):
    (tmp_path / "box").mkdir()
    assert run(tmp_path / "box", tmp_path / "out") == 0
    assert (tmp_path / "out" / "claims.csv").read_text().splitlines()[0] == COLUMNS
    rows = rows_of(tmp_path / "out")
    assert list(rows.index) == list(claims.by_id)
    assert (tmp_path / "out" / "table.md").read_text() == capsys.readouterr().out.removesuffix("\n")
    # Without evidence: what to run, or why nothing can be.
    assert rows.loc["tab3.gain", "why"] == "not measured yet: run `snakemake tab3`"
    assert rows.loc["appxB.incr_stack", "why"] == "not measured yet: run `snakemake appxb`"
    assert rows.loc["train.order", "why"] == "no target of this release is named ladder"
    assert rows.loc["mem.double_hold", "why"].startswith("no target")
    # What the paper contradicts needs nothing of ours.
    assert rows.loc["tab4.loads.k8", "status"] == Status.CONTRADICTED
    assert rows.loc["tab4.loads.k8", "command"] == "python -m analysis.paper.source_checks"


def test_findings_of_several_tiers_and_places_become_one_row(claims, tmp_path):
    gain = claims.by_id["tab3.gain"]
    box = tmp_path / "box"
    put(
        claims,
        box / "mini-35b" / "tab3",
        Finding(gain, Status.HOLDS, "1.30x (1.13-1.47)", "above 1", k="8", arm="prerouter/ondemand"),
        Finding(gain, Status.NOT_TESTABLE, "1.11x (0.90-1.37)", "undecided", k="2", arm="prerouter/ondemand"),
        beside(claims.by_id["tab3.k8"], "7.2", k="8", arm="prerouter"),
    )
    put(
        claims,
        box / "mini-8b" / "tab3",
        Finding(gain, Status.HOLDS, "1.20x (1.10-1.30)", "above 1", k="8", arm="prerouter/ondemand"),
        session="s2",
    )
    assert run(box, tmp_path / "out") == 0
    row = rows_of(tmp_path / "out").loc["tab3.gain"]
    assert row["status"] == Status.HOLDS
    assert row["ours"] == (
        "mini-35b K=8 prerouter/ondemand: 1.30x (1.13-1.47); mini-35b K=2 prerouter/ondemand: 1.11x (0.90-1.37); "
        "mini-8b K=8 prerouter/ondemand: 1.20x (1.10-1.30)"
    )
    assert (row["paper"], row["session"], row["command"]) == ("1.80, 1.84", "s1; s2", "snakemake tab3")
    assert row["why"].startswith("relation holds in 2 of 3 places, not testable here in 1; ")
    value = rows_of(tmp_path / "out").loc["tab3.k8"]
    assert value["status"] == Status.NOT_TESTABLE and value["ours"] == "mini-35b K=8 prerouter: 7.2"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([Status.HOLDS, Status.FAILS, Status.NOT_TESTABLE], Status.FAILS),
        ([Status.HOLDS, Status.HOLDS], Status.HOLDS),
        ([Status.NOT_TESTABLE, Status.NOT_TESTABLE], Status.NOT_TESTABLE),
        ([Status.REPRODUCED, Status.WITHIN], Status.WITHIN),
        ([Status.REPRODUCED, Status.DIFFERS, Status.WITHIN], Status.DIFFERS),
        ([Status.HOLDS, Status.CONTRADICTED], Status.CONTRADICTED),
    ],
)
def test_the_worst_verdict_counts(claims, tmp_path, statuses, expected):
    claim = claims.by_id["tab3.order_k"]
    put(
        claims,
        tmp_path / "box" / "t" / "tab3",
        *(Finding(claim, s, "ours", f"reason {n}") for n, s in enumerate(statuses)),
    )
    assert run(tmp_path / "box", tmp_path / "out") == 0
    assert rows_of(tmp_path / "out").loc["tab3.order_k", "status"] == expected


def test_a_contradiction_of_the_source_wins_and_ours_stays(claims, tmp_path):
    put(
        claims,
        tmp_path / "box" / "mini-35b" / "tab4",
        beside(claims.by_id["tab4.loads.k8"], "71.4"),
        beside(claims.by_id["tab4.k8.ondemand"], "0.22, 0.8, 15.0"),
    )
    assert run(tmp_path / "box", tmp_path / "out") == 0
    found = rows_of(tmp_path / "out").loc["tab4.loads.k8"]
    assert found["status"] == Status.CONTRADICTED and "320 experts, if a load brings one" in found["why"]
    assert (found["ours"], found["session"], found["command"]) == (
        "mini-35b ondemand: 71.4",
        "s1",
        "snakemake tab4",
    )
    # Means that do not fit each other are noted, and stay what they are.
    noted = rows_of(tmp_path / "out").loc["tab4.k8.ondemand"]
    assert noted["status"] == Status.NOT_TESTABLE and noted["why"].startswith("a value of m2-16gb")
    assert "the paper's own numbers: ondemand at K=8" in noted["why"] and "may repair it" in noted["why"]
    assert "longer than the whole step" in rows_of(tmp_path / "out").loc["tab3.blocked.k8", "why"]


def exact_findings(claims: Claims, **wrong: float) -> list[Finding]:
    """Every exact claim as it is stated, but for those with a value of ours."""
    found = []
    for claim in claims.by_id.values():
        if claim.kind == "exact" and isinstance(claim.value, str):
            found.append(Finding(claim, Status.REPRODUCED, claim.value))
        elif claim.kind == "exact":
            found.append(exact(claim, wrong.get(claim.id.replace(".", "_"), float(claim.value))))
    return found


def test_strict_passes_when_every_exact_claim_came_out(claims, tmp_path, capsys):
    put(claims, tmp_path / "box" / "tab1", *exact_findings(claims))
    assert run(tmp_path / "box", tmp_path / "out") == 0
    capsys.readouterr()
    assert check(tmp_path / "out") == 0
    assert capsys.readouterr().out == "strict: 22 of 22 exact claims came out\n"
    rows = rows_of(tmp_path / "out")
    assert set(rows.loc[rows["kind"] == "exact", "status"]) == {Status.REPRODUCED}


def test_strict_names_each_exact_claim_that_differs_or_has_no_evidence(claims, tmp_path, capsys):
    found = exact_findings(claims, arch_35b_layers=41)
    put(claims, tmp_path / "box" / "tab1", *(f for f in found if f.claim.id != "arch.8b.heads"))
    nothing = Finding(claims.by_id["arch.8b.heads"], Status.NOT_TESTABLE, "", "the disk is full")
    put(claims, tmp_path / "box" / "mini-8b" / "tab1", nothing)
    assert run(tmp_path / "box", tmp_path / "out") == 0
    capsys.readouterr()
    assert check(tmp_path / "out") == strict.FAILED
    printed = capsys.readouterr()
    assert printed.out == "strict: 20 of 22 exact claims came out\n"
    assert printed.err.splitlines() == [
        "strict: exact claim arch.35b.layers differs: the paper has 40, ours is 41",
        "strict: exact claim arch.8b.heads has no evidence: the disk is full",
    ]


def test_one_good_place_does_not_hide_a_bad_one(claims, tmp_path, capsys):
    put(claims, tmp_path / "box" / "tab1", *exact_findings(claims))
    put(claims, tmp_path / "box" / "x" / "math", exact(claims.by_id["math.tolerance"], 0.02))
    assert run(tmp_path / "box", tmp_path / "out") == 0
    assert check(tmp_path / "out") == strict.FAILED
    assert "math.tolerance differs: the paper has 0.01, ours is 0.01; x: 0.02" in capsys.readouterr().err


def test_counts_of_shapes_are_taken_once_and_must_agree(claims, tmp_path, capsys):
    experts = claims.by_id["arch.35b.experts"]
    put(claims, tmp_path / "box" / "tab1", exact(experts, 256))
    put(claims, tmp_path / "box" / "x" / "tab1", exact(experts, 256), session="s2")
    assert run(tmp_path / "box", tmp_path / "out") == 0
    row = rows_of(tmp_path / "out").loc["arch.35b.experts"]
    assert (row["status"], row["ours"], row["session"], row["why"]) == (Status.REPRODUCED, "256", "s1", "")
    put(claims, tmp_path / "box" / "y" / "tab1", exact(experts, 255))
    assert run(tmp_path / "box", tmp_path / "again") == 2
    error = capsys.readouterr().err
    assert "claim arch.35b.experts is counted twice and differs" in error and error.count("\n") == 1
    for part in ("box/tab1/compare.csv has 256", "box/y/tab1/compare.csv has 255"):
        assert part in error
    assert not (tmp_path / "again").exists()


def test_counts_of_files_are_taken_before_counts_of_shapes(claims, tmp_path):
    """Headers make files larger than the tensors of their shapes: that is no contradiction."""
    disk = claims.by_id["arch.35b.disk"]
    shapes = Finding(disk, Status.WITHIN, "19.5088", "counted from edge0's shape constants")
    files = Finding(disk, Status.WITHIN, "19.509", "counted from the files of edge0-35b")
    put(claims, tmp_path / "box" / "a" / "tab1", shapes)
    put(claims, tmp_path / "box" / "b" / "tab1", files, session="s2")
    assert run(tmp_path / "box", tmp_path / "out") == 0
    row = rows_of(tmp_path / "out").loc["arch.35b.disk"]
    assert (row["ours"], row["session"]) == ("b: 19.509", "s2") and architecture.FROM_FILES in row["why"]


@pytest.mark.parametrize("text", [None, "id,kind\na,exact\n", COLUMNS + "\n"])
def test_strict_refuses_what_is_no_ledger(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "claims.csv").write_text(text)
    assert check(tmp_path) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "claims.csv") in error and error.count("\n") == 1


def test_the_counts_of_the_shapes_are_evidence(claims, tmp_path):
    counts = tmp_path / "counts.json"
    done = subprocess.run([sys.executable, "-m", "experiments.architecture", str(counts)], check=False)
    assert done.returncode == 0
    (tmp_path / "box").mkdir()
    assert run(tmp_path / "box", tmp_path / "out", "--counts", str(counts)) == 0
    rows = rows_of(tmp_path / "out")
    shapes = rows[rows.index.str.startswith("arch.")]
    assert set(shapes["status"]) <= {Status.REPRODUCED, Status.WITHIN} and set(shapes["command"]) == {ledger.COMMAND}
    assert rows.loc["staged.stack_tensors", "status"] == Status.REPRODUCED
    assert rows.loc["math.tolerance", "status"] == Status.NOT_TESTABLE


def test_a_file_that_is_no_comparison_is_named(claims, tmp_path, capsys):
    folder = tmp_path / "box" / "mini-35b" / "tab3"
    folder.mkdir(parents=True)
    (folder / "compare.csv").write_text("id,k\n")
    assert run(tmp_path / "box", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert str(folder / "compare.csv") in error and "`snakemake tab3 --config remeasure=false` writes it anew" in error
    row = dict.fromkeys(COMPARE_COLUMNS, "") | {"id": "tab9.x", "status": "differs"}
    pd.DataFrame([row]).to_csv(folder / "compare.csv", index=False)
    assert run(tmp_path / "box", tmp_path / "out") == 2
    assert "claim tab9.x is not in claims.yaml" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_many_reasons_are_cut(claims, tmp_path):
    claim = claims.by_id["tab3.order_k"]
    put(
        claims,
        tmp_path / "box" / "t" / "tab3",
        *(Finding(claim, Status.FAILS, "x", f"reason {n}", arm=str(n)) for n in range(5)),
    )
    assert run(tmp_path / "box", tmp_path / "out") == 0
    assert rows_of(tmp_path / "out").loc["tab3.order_k", "why"].endswith("t 2: reason 2; and 2 more")


def test_the_table_groups_by_status_with_counts(claims, tmp_path):
    put(claims, tmp_path / "box" / "tab1", *exact_findings(claims))
    assert run(tmp_path / "box", tmp_path / "out") == 0
    text = (tmp_path / "out" / "table.md").read_text()
    counts = [line for line in text.splitlines() if line.startswith("| reproduced |")]
    assert counts == ["| reproduced | 22 | 0 | 0 | 22 |"]
    assert text.index("## Contradicted by its own source (1)") < text.index("## Reproduced (22)")
    assert text.index("## Reproduced (22)") < text.index("## Not testable here (")
    assert "## The paper against itself" in text and "- machine: box" in text
    assert "## Differs" not in text
