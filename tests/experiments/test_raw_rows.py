"""Real raw rows keep to the schema that analysis documents, column by column, both ways."""

from __future__ import annotations

from analysis.schema import FILES
from edge0 import find_tier
from edge0.checkpoint.repack import repack
from edge0.kernels.library import load
from experiments import kernel_cost, load_cost, read_cost, work_cost
from experiments.budgets import agreement as budget_agreement


def test_load_cost_columns_are_those_of_the_schema(unit_35b, tmp_path):
    records = repack(unit_35b, tmp_path / "records").directory
    rows, _ = load_cost.measure(unit_35b, records, 1, [0.0, 1.0], 0)
    assert FILES["load_cost"].problems(rows) == []


def test_columns_of_ways_to_compute_are_those_of_the_schema(unit_35b):
    ways = ["mlx", "int8"] if load().loaded else ["mlx"]
    rows = kernel_cost.measure(unit_35b, ways, 4, 1, 2, 2, 0)
    assert FILES["kernels"].problems(rows) == []
    assert (rows.groupby("kernels").step_ms.min() > 0).all() and (rows.attention_ms[rows.kernels == "mlx"] == 0).all()
    own = rows[rows.kernels != "mlx"]
    assert set(rows[rows.kernels == "mlx"].served) == {"engine"} and (rows.loads == 0).all()
    assert own.empty or sorted(set(own.served)) == ["engine", "engine-bare", "resident"] and (own.route_ms > 0).all()


def test_columns_of_the_cost_of_work_are_those_of_the_schema(tmp_path):
    shapes = [work_cost.Shape(2, 6, 16), work_cost.Shape(4, 6, 16), work_cost.Shape(2, 8, 32)]
    rows = work_cost.measure(find_tier("unit-35b"), tmp_path, "auto", 2, 2, 0, shapes)
    assert FILES["work"].problems(rows) == []
    assert sorted(zip(rows.k, rows.layers, rows.experts, rows["round"], strict=True)) == sorted(
        (shape.k, shape.layers, shape.experts, number) for shape in shapes for number in range(2)
    )
    assert (rows.loads == 0).all() and (rows.step_ms > 0).all()


def test_columns_of_a_budgets_loads_are_those_of_the_schema(unit_35b, monkeypatch):
    monkeypatch.setattr(budget_agreement, "available_ways", lambda path: {"eviction": ""})
    rows, _ = budget_agreement.measure(unit_35b, 0.5, 30, 60, 0, exponents=[0.0])
    assert FILES["agreement"].problems(rows) == []


def test_columns_of_cold_reads_are_those_of_the_schema(unit_35b):
    rows, _ = read_cost.measure(unit_35b, 2, 1, 1, 0)
    assert FILES["reads"].problems(rows) == []
