"""The claims of the 1% contract: the bound from the worst path, the paper's residual only where it can be compared."""

import json

import pandas as pd
import pytest
from released_counts import CLAIMS

from analysis import math_residual

PATH = {"path": "exact", "k": 4, "dtype": "float32", "outputs": 10, "predicted": 0, "bf16_overall": 0.004}


@pytest.fixture
def run(tmp_path, capsys):
    """A call with documents of one tier each; returns (exit code, stdout, stderr, findings by claim)."""

    def call(*documents):
        files = []
        for number, paths in enumerate(documents):
            files.append(tmp_path / f"{number}.json")
            files[-1].write_text(json.dumps({"session": f"s{number}", "tier": f"unit-{number}", "paths": paths}))
        out = tmp_path / "out"
        code = math_residual.main([*map(str, files), "--claims", str(CLAIMS), "--out", str(out)])
        printed = capsys.readouterr()
        rows = pd.read_csv(out / "compare.csv", dtype=str, keep_default_na=False).set_index("id") if code == 0 else None
        return code, printed.out, printed.err, rows

    return call


def test_the_worst_path_of_all_tiers_decides_the_bound(run):
    good, bad = PATH | {"worst": 2e-6, "overall": 1e-6}, PATH | {"path": "hot", "worst": 0.011, "overall": 1e-6}
    _, text, _, found = run([good], [good])
    assert found.loc["math.tolerance", ["status", "ours"]].tolist() == ["reproduced", "2e-06"]
    assert found.loc["math.tolerance", "session"] == "s0+s1" and "takes: about half a minute" in text
    found = run([good], [good, bad])[3]
    assert found.loc["math.tolerance", "status"] == "differs" and "hot of unit-1" in found.loc["math.tolerance", "why"]


def test_the_papers_residual_is_judged_in_its_own_precision_only(run):
    row = PATH | {"worst": 2e-6, "overall": 1e-6}
    found = run([row])[3]
    assert found.loc["math.residual", "status"] == "not testable here"
    assert "bf16 alone costs 0.0040" in found.loc["math.residual", "why"]
    for overall, status in ((0.0023, "relation holds"), (0.0025, "relation fails")):
        found = run([row | {"dtype": "bfloat16", "overall": overall, "worst": 0.004}])[3]
        assert found.loc["math.residual", "status"] == status


def test_a_path_that_the_machine_refuses_is_named(run):
    refused = {"path": "staged, direct reads", "refused": "no direct reads"}
    _, text, _, found = run([PATH | {"worst": 1e-6, "overall": 1e-6}, refused])
    assert found.loc["math.tolerance", "why"].endswith("not measured: staged, direct reads")
    assert "staged, direct reads: refused (no direct reads)" in text


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ([], "expected the residuals"),
        ([PATH], "a path without worst"),
        ([{"path": "a", "refused": "b"}], "no path of it was measured"),
    ],
)
def test_other_files_are_refused_in_one_line(run, paths, reason):
    code, _, error, _ = run(paths)
    assert code == 2 and reason in error and "0.json" in error and error.count("\n") == 1
