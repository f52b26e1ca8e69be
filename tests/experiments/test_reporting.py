"""What the report asks of the workflow: headings, captions, and the same configuration."""

from __future__ import annotations

import json
from types import SimpleNamespace

import yaml

from experiments.config import CONFIG, Workflow
from experiments.reporting import captions, heading, labels, same_configuration


def test_the_configuration_survives_another_command_line():
    shipped = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | {"ks": [2, 8], "strict": True}
    parts = dict(part.split("=", 1) for part in same_configuration(shipped))
    assert parts["condition"] == "budget:0.5" and json.loads(parts["ks"]) == [2, 8] and parts["strict"] == "true"
    assert "model" not in parts and "machines" not in parts
    again = Workflow.of(shipped | {key: yaml.safe_load(value) for key, value in parts.items()})
    assert again.values == Workflow.of(shipped).values


def test_all_files_of_a_target_stand_under_one_heading_and_say_what_they_are():
    assert heading(SimpleNamespace(target="tab3")) == "Table 3"
    assert heading(SimpleNamespace(target="memory")) == "Memory"
    files = ("tab3.html", "tab3.svg", "pairs.csv")
    assert [labels(SimpleNamespace(file=file))["what"] for file in files] == ["table", "figure", "rows"]
    assert labels(SimpleNamespace(file="pairs.csv"))["file"] == "pairs.csv"


def test_captions_are_by_target(tmp_path):
    (tmp_path / "tab3.rst").write_text("Of Table 3.\n")
    assert captions(tmp_path) == {"tab3": "Of Table 3.\n"}
