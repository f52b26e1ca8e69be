"""Reuse of experts: counts that can be checked by hand, bounds that must hold, and files that are no traces."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from analysis.paper.claims import load_claims
from analysis.paper.findings import read_compare
from analysis.reuse import SUMMARY_COLUMNS, adjacent, hit_rates, main, mean_interval, working_set
from analysis.traces import Trace, load_trace, stream

CLAIMS = str(Path(__file__).parents[2] / "results/paper/claims.yaml")
ROUTES = np.array([[[1, 0], [2, 3]], [[4, 1], [3, 2]], [[5, 4], [0, 1]], [[1, 0], [2, 3]]])
ABOUT = {"source": "recorded", "model": "mini", "machine": "testbox", "commit": "abc"}


def write(path, routes=ROUTES, tensors=None, **metadata):
    fields = {"format": "edge0-route-trace", "version": "1", "layers": "[2, 3]", "experts": "6"}
    fields |= {"about": json.dumps(ABOUT)} | metadata
    save_file({"routes": routes.astype(np.uint16)} if tensors is None else tensors, path, fields)
    return path


def trace_of(routes, experts=6):
    return Trace(routes, tuple(range(routes.shape[1])), experts, ABOUT, "0" * 12)


def blind(tokens, layers, experts, k, seed=0):
    rng = np.random.default_rng(seed)
    return trace_of(np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :k], experts)


def test_by_hand():
    trace = trace_of(ROUTES)
    assert adjacent(trace).tolist() == [[0.5, 1.0], [0.5, 0.0], [0.0, 0.0]]
    assert mean_interval(adjacent(trace)).mean == pytest.approx(1 / 3)
    touched = working_set(trace).set_index("tokens")
    # Windows of two: layer 0 {0,1,4} {0,1,4,5}, layer 1 {2,3} {0,1,2,3}; of four: {0,1,4,5} and {0,1,2,3}.
    assert touched["experts"].to_dict() == {1: 2.0, 2: 3.25, 4: 4.0}
    assert touched["by_chance"].tolist() == pytest.approx([2, 6 * (1 - (2 / 3) ** 2), 6 * (1 - (2 / 3) ** 4)])
    assert stream(trace.routes, 6)[:8].tolist() == [1, 0, 8, 9, 1, 4, 9, 8]
    hits = hit_rates(trace)
    assert hits["slots"].iloc[[0, -1]].tolist() == [4, 12]
    # Four slots hold exactly the step before: LRU finds what neighbours repeat, and that is four of sixteen.
    assert hits["lru"].iloc[0] == pytest.approx(4 / 16)
    full = hits.iloc[-1]
    assert full["lru"] == full["best"] == full["popular"] == (16 - 8) / 16


@given(st.integers(0, 1000), st.integers(2, 30), st.integers(1, 3), st.integers(2, 12), st.data())
def test_bounds(seed, tokens, layers, experts, data):
    trace = blind(tokens, layers, experts, data.draw(st.integers(1, experts)), seed)
    hits, touched = hit_rates(trace), working_set(trace)
    assert (hits["best"] >= hits["lru"]).all()
    for column in ("lru", "best", "popular", "by_chance"):
        assert hits[column].is_monotonic_increasing and hits[column].between(0, 1).all()
    asked = tokens * layers * trace.k
    assert hits["lru"].iloc[-1] == pytest.approx(1 - len(np.unique(stream(trace.routes, experts))) / asked)
    assert touched["experts"].between(trace.k, np.minimum(touched["tokens"] * trace.k, experts)).all()
    interval = mean_interval(adjacent(trace))
    assert 0 <= interval.mean <= 1 and not interval.ci_low > interval.mean


def test_blind_routes_are_what_chance_gives():
    trace = blind(1500, 3, 40, 8)
    interval = mean_interval(adjacent(trace))
    assert abs(interval.mean - trace.chance) < 2 * (interval.ci_high - interval.ci_low)
    assert (interval.ci_high - interval.ci_low) < 0.02
    touched = working_set(trace)
    assert touched["experts"].to_numpy() == pytest.approx(touched["by_chance"].to_numpy(), rel=0.02)
    hits = hit_rates(trace)
    assert hits["lru"].to_numpy() == pytest.approx(hits["by_chance"].to_numpy(), abs=0.01)


def test_every_output_is_written_and_nothing_is_judged(tmp_path, capsys):
    path, out = write(tmp_path / "trace.safetensors"), tmp_path / "out"
    assert main([str(path), "--claims", CLAIMS, "--out", str(out)]) == 0
    files = {"table.md", "summary.csv", "compare.csv", "reuse.png", "reuse.svg"}
    assert {entry.name for entry in out.iterdir()} == files
    text = (out / "table.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    for part in ("machine: testbox", "tier: mini", "n: 4 tokens, K=2", "takes: ", "commit abc", "## How to read"):
        assert part in text
    assert "random routers" in text and f"trace {load_trace(path).name}" in text
    rows = read_compare(out / "compare.csv")
    assert rows[["id", "status", "paper", "command"]].to_numpy().tolist() == [
        ["reuse.adjacent", "not testable here", "0.25", "snakemake reuse"]
    ]
    assert rows["ours"][0].startswith("0.333 (no interval)") and "by chance 0.333" in rows["ours"][0]
    summary = pd.read_csv(out / "summary.csv")
    assert list(summary.columns) == SUMMARY_COLUMNS
    assert set(summary["part"]) == {"adjacent", "working_set", "hit_rate"}
    assert summary[(summary["part"] == "adjacent") & (summary["series"] == "ours")]["x"].tolist() == [2, 3]
    svg = (out / "reuse.svg").read_text()
    assert all(word in svg for word in ("Repeated by the next token", "Working set", "Hits of a bank", "testbox"))


def test_the_interval_does_not_count_neighbours_as_independent():
    """Half of a text stays with its experts, half never does: two things were seen, not a thousand."""
    stays, leaves = np.tile([[[0, 1]]], (500, 1, 1)), np.tile([[[0, 1]], [[2, 3]]], (250, 1, 1))
    repeated = adjacent(trace_of(np.concatenate([stays, leaves])))
    found, single = mean_interval(repeated), 1.96 * repeated.std() / len(repeated) ** 0.5
    assert found.n == 20 and found.ci_low < found.mean < found.ci_high
    assert found.ci_high - found.mean > 4 * single


def test_every_claim_of_the_experiment_has_a_row(tmp_path, capsys):
    path, out = write(tmp_path / "trace.safetensors"), tmp_path / "out"
    assert main([str(path), "--claims", CLAIMS, "--out", str(out)]) == 0
    stated = {claim.id for claim in load_claims(Path(CLAIMS)).by_id.values() if claim.experiment == "reuse"}
    assert set(read_compare(out / "compare.csv")["id"]) == stated


def test_a_generated_trace_says_so(tmp_path, capsys):
    about = json.dumps({"source": "generated", "reuse": "0.25", "zipf": "1", "seed": "0", "k": "2"})
    path, out = write(tmp_path / "trace.safetensors", about=about), tmp_path / "out"
    assert main([str(path), "--claims", CLAIMS, "--out", str(out)]) == 0
    assert "generated (reuse 0.25, zipf 1, seed 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "edge0-route-trace"),
        ({"version": "2"}, "version"),
        ({"layers": "3"}, "layers: expected a JSON list"),
        ({"experts": "many"}, "experts: expected a JSON int"),
        ({"about": "[]"}, "about: expected a JSON dict"),
        ({"experts": "5"}, "distinct experts below 5"),
        ({"layers": "[1]"}, "[tokens, 1 layers, K]"),
        ({"routes": ROUTES * 0}, "distinct experts"),
        ({"routes": ROUTES[0]}, "[2, 2]"),
        ({"tensors": {"routes": ROUTES}}, "int64"),
        ({"tensors": {"other": ROUTES}}, "expected a file"),
        ({"routes": ROUTES[:1]}, "two tokens"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, capsys, changes, words):
    path, out = write(tmp_path / "trace.safetensors", **changes), tmp_path / "out"
    assert main([str(path), "--claims", CLAIMS, "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 1 and not out.exists()


@pytest.mark.parametrize("content", [None, b"", b"not a safetensors file at all"])
def test_what_is_no_file_is_refused_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "trace.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path), "--claims", CLAIMS, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert str(path) in error and len(error.splitlines()) == 1
