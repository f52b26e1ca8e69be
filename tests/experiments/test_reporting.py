"""What the report asks of the workflow: only what exists, under the same configuration."""

from __future__ import annotations

import json
from types import SimpleNamespace

import yaml
from snakemake.io import flag

from experiments.config import CONFIG, Workflow
from experiments.reporting import heading, reportable, same_configuration


def rule(*outputs, wildcards=()):
    return SimpleNamespace(output=outputs, wildcard_names=set(wildcards))


def test_only_rules_whose_marked_files_are_all_there_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "plain"):
        (tmp_path / name).touch()
    marked = {name: flag(name, "report") for name in ("a", "b", "c", "absent")}
    rules = [
        rule(marked["a"], marked["b"], "plain"),
        rule(marked["c"], marked["absent"]),
        rule(marked["c"], wildcards=("tier",)),
        rule("plain"),
    ]
    assert reportable(rules) == ["a", "b"]


def test_the_configuration_survives_another_command_line():
    shipped = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | {"ks": [2, 8], "strict": True}
    parts = dict(part.split("=", 1) for part in same_configuration(shipped))
    assert parts["condition"] == "budget:0.5" and json.loads(parts["ks"]) == [2, 8] and parts["strict"] == "true"
    assert "model" not in parts and "machines" not in parts
    again = Workflow.of(shipped | {key: yaml.safe_load(value) for key, value in parts.items()})
    assert again.values == Workflow.of(shipped).values


def test_a_target_without_a_heading_has_its_own_name():
    assert heading(SimpleNamespace(target="tab3")) == "Table 3"
    assert heading(SimpleNamespace(target="memory")) == "Memory"
