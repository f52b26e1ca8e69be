"""Real raw rows keep to the schema that analysis documents, column by column, both ways."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

from analysis.schema import FILES
from edge0.checkpoint.repack import repack
from experiments.load_cost import measure


@pytest.fixture(scope="module")
def session(unit_35b, tmp_path_factory):
    root = tmp_path_factory.mktemp("sessions")
    command = [sys.executable, "-m", "experiments.session", "--model", str(unit_35b), "--tier", "unit-35b"]
    command += ["--root", str(root), "--rounds", "1", "--ks", "4", "--timed-steps", "2", "--warmup-steps", "3"]
    command += ["--prompt-tokens", "4", "--bank", "0.5", "--arms", "ondemand"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / json.loads((root / "latest.json").read_text())["session"]


@pytest.mark.parametrize("kind", ["runs", "steps", "loads"])
def test_a_sessions_columns_are_those_of_the_schema(session, kind):
    rows = pd.read_parquet(session / f"{kind}.parquet")
    assert len(rows) and FILES[kind].problems(rows) == []


def test_load_cost_columns_are_those_of_the_schema(unit_35b, tmp_path):
    records = repack(unit_35b, tmp_path / "records").directory
    rows, _ = measure(unit_35b, records, 1, [0.0, 1.0], 0)
    assert FILES["load_cost"].problems(rows) == []
