"""A configuration key that nobody knows is named, with what was probably meant."""

from __future__ import annotations

import pytest
import yaml

from edge0.errors import Edge0Error, ErrorKind
from experiments.config import CONFIG, SCHEMA, Workflow

SHIPPED = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("key", "words"),
    [("round", "did you mean rounds"), ("timed_step", "did you mean timed_steps"), ("zzz", "the keys are tier, model")],
)
def test_an_unknown_key_is_named_with_those_near_it(key, words):
    with pytest.raises(Edge0Error) as caught:
        Workflow.of(SHIPPED | {key: 1})
    assert caught.value.kind is ErrorKind.OPTION_INVALID
    assert f"{key}" in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


def test_every_key_of_the_schema_is_in_the_shipped_file_and_so_explained():
    known = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))["properties"]
    assert set(SHIPPED) == set(known)


@pytest.mark.parametrize(("given", "kept"), [("true", True), ("false", False), (True, True)])
def test_strict_is_understood_from_the_command_line(given, kept):
    assert Workflow.of(SHIPPED | {"strict": given}).values["strict"] is kept


def test_a_machine_is_a_folders_name():
    assert Workflow.of(SHIPPED | {"machine": "node-a"}).values["machine"] == "node-a"
    assert Workflow.of(SHIPPED | {"machine": "null"}).values["machine"] is None
    with pytest.raises(Edge0Error, match="machine"):
        Workflow.of(SHIPPED | {"machine": "../elsewhere"})
