"""Real raw rows keep to the schema that analysis documents, column by column, both ways."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

from analysis.schema import FILES
from edge0.checkpoint.repack import repack
from experiments import endurance, kernel_cost, load_cost, read_cost
from experiments.budgets import agreement as budget_agreement


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
    rows, _ = load_cost.measure(unit_35b, records, 1, [0.0, 1.0], 0)
    assert FILES["load_cost"].problems(rows) == []


def test_prompts_columns_are_those_of_the_schema(unit_35b, tmp_path):
    command = [sys.executable, "-m", "experiments.prefill_cost", str(unit_35b), str(tmp_path), "--lengths", "5"]
    command += ["--rounds", "1", "--k", "2", "--ways", "auto", "--conditions", "warm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/prefill.parquet")
    assert FILES["prefill"].problems(pd.read_parquet(path)) == []


def test_columns_of_ways_to_compute_are_those_of_the_schema(unit_35b):
    rows = kernel_cost.measure(unit_35b, ["mlx", "auto"], 4, 1, 2, 2, 0)
    assert FILES["kernels"].problems(rows) == []
    assert (rows.groupby("kernels").step_ms.min() > 0).all() and (rows.attention_ms[rows.kernels == "mlx"] == 0).all()


def test_columns_of_a_budgets_loads_are_those_of_the_schema(unit_35b, monkeypatch):
    monkeypatch.setattr(budget_agreement, "available_ways", lambda path: {"eviction": ""})
    rows, _ = budget_agreement.measure(unit_35b, 0.5, 30, 60, 0, exponents=[0.0])
    assert FILES["agreement"].problems(rows) == []


def test_columns_of_cold_reads_are_those_of_the_schema(unit_35b):
    rows, _ = read_cost.measure(unit_35b, 2, 1, 1, 0)
    assert FILES["reads"].problems(rows) == []


def test_columns_of_a_long_life_are_those_of_the_schema(unit_35b, monkeypatch):
    monkeypatch.setattr(endurance, "EVERY_TOKENS", 2)
    assert FILES["endurance"].problems(endurance.measure(unit_35b, 2, 4, 2)) == []
