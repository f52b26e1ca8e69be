"""The workflow's configuration: the shipped one is valid, and each wrong one is refused in one line."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
import yaml

from edge0.errors import Edge0Error, ErrorKind
from edge0.trace import generate
from experiments.config import CONFIG, Workflow
from experiments.options import SessionOptions, parse
from experiments.preflight import preflight

SHIPPED = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))


def test_shipped_configuration_is_valid_and_fits_the_session():
    workflow = Workflow.of(SHIPPED)
    assert (workflow.name, workflow.model, workflow.synthesised) == ("mini-35b", "models/mini-35b", True)
    command = parse(["--model", "m", "--tier", "t", "--root", "r", *shlex.split(workflow.session_arguments())])
    options = command.options
    assert (options.ks, options.rounds, options.condition) == ((2, 4, 8), 5, "budget:0.5")
    assert (options.budget_by, options.trace, options.memory_limit_bytes) == ("eviction", None, None)
    assert (str(command.root), command.log, command.fresh, command.reuse) == ("r", None, False, False)


def test_without_measuring_a_session_is_reused_and_any_place_may_have_spaces(tmp_path):
    routes = str(tmp_path / "my routes")
    generate(range(12), 64, 8, 2, 0, 0, 0).save(routes)
    arguments = Workflow.of(SHIPPED | {"remeasure": "false", "trace": routes}).session_arguments(experiment="x y")
    command = parse(["--model", "m", "--tier", "t", "--root", "r", *shlex.split(arguments)])
    assert command.reuse and (command.options.trace, command.options.experiment) == (routes, "x y")
    with pytest.raises(Edge0Error) as caught:
        parse(["--model", "m", "--tier", "t", "--root", "r", "--reuse", "--fresh"])
    assert caught.value.kind is ErrorKind.OPTION_INVALID


def test_every_option_of_a_session_is_explained(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = capsys.readouterr().out
    for field in dataclasses.fields(SessionOptions):
        assert f"--{field.name.replace('_', '-')}" in told
        assert field.name in ("model", "tier") or field.metadata["help"]


def test_command_line_forms_of_ks_are_understood():
    assert Workflow.of(SHIPPED | {"ks": 8}).values["ks"] == [8]
    assert Workflow.of(SHIPPED | {"ks": ["2", "8"]}).values["ks"] == [2, 8]
    assert Workflow.of(SHIPPED | {"prefill_tokens": ["27", 64]}).values["prefill_tokens"] == [27, 64]
    assert Workflow.of(SHIPPED | {"prefill_tokens": 27}).values["prefill_tokens"] == [27]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"tier": "maxi-35b"}, ErrorKind.TIER_UNKNOWN),
        ({"condition": "lukewarm"}, ErrorKind.CONDITION_UNKNOWN),
        ({"condition": "budget:2"}, ErrorKind.OPTION_INVALID),
        ({"rounds": 0}, ErrorKind.OPTION_INVALID),
        ({"rounds": "many"}, ErrorKind.OPTION_INVALID),
        ({"tempo": 3}, ErrorKind.OPTION_INVALID),
        ({"ks": []}, ErrorKind.OPTION_INVALID),
        ({"ks": [3]}, ErrorKind.ADAPTER_MISSING),
        ({"ks": [3], "adapter_k": 5}, ErrorKind.ADAPTER_MISSING),
        ({"ks": [65], "adapter_k": 4}, ErrorKind.K_INVALID),
        ({"tier": "unit-35b"}, ErrorKind.BANK_TOO_SMALL),
        ({"results": "../with space"}, ErrorKind.OPTION_INVALID),
        ({"prefill_tokens": [1]}, ErrorKind.OPTION_INVALID),
        ({"bank": 1.5}, ErrorKind.OPTION_INVALID),
        ({"budget_by": "hand"}, ErrorKind.OPTION_INVALID),
        ({"trace": "no/such.trace"}, ErrorKind.FILE_MISSING),
        ({"trace": 5}, ErrorKind.OPTION_INVALID),
        ({"noise_rounds": 1}, ErrorKind.OPTION_INVALID),
        ({"tab1_tiers": ["mini-35b", "unit-35b"]}, ErrorKind.OPTION_INVALID),
        ({"peers_limits": [0.5]}, ErrorKind.OPTION_INVALID),
        ({"peers_limit_ks": [8, 65]}, ErrorKind.K_INVALID),
        ({"records": "no/such/copy"}, ErrorKind.FILE_MISSING),
        ({"full_direct": "null"}, ErrorKind.OPTION_INVALID),
        ({"tab1_tiers": ["mini-35b", "unit-8b"]}, ErrorKind.OPTION_INVALID),
        ({"model": "no/such/place"}, ErrorKind.FILE_MISSING),
    ],
)
def test_each_wrong_value_is_refused_in_one_line(changes, kind):
    with pytest.raises(Edge0Error) as caught:
        Workflow.of(SHIPPED | changes)
    assert caught.value.kind is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"ks": [2, 3]}, ("--config: ks:", "expected 2, 4, 8, found 3")),
        ({"tier": "unit-35b"}, ("--config: bank:", "expected a share of at least 0.4375, found 0.25")),
        ({"peers_limit_ks": [65, 4]}, ("--config: peers_limit_ks:", "found 65")),
        ({"records": "models/mini-35b"}, ("--config: records:", "edge0 repack MODEL models/mini-35b writes one")),
    ],
)
def test_what_a_tier_cannot_serve_names_the_key_and_what_is_needed(changes, parts):
    with pytest.raises(Edge0Error) as caught:
        Workflow.of(SHIPPED | changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["unit-35b", "unit-8b"])
def test_the_bank_that_is_named_as_needed_is_the_smallest_that_a_session_accepts(name, checkpoints):
    with pytest.raises(Edge0Error) as caught:
        Workflow.of(SHIPPED | {"tier": name})
    needed = float(caught.value.expected.split()[-1])
    assert Workflow.of(SHIPPED | {"tier": name, "bank": needed}).values["bank"] == needed
    options = SessionOptions(str(checkpoints[name]), name, arms=("prerouter",), ks=(8,), condition="warm", bank=needed)
    preflight(options)
    with pytest.raises(Edge0Error) as caught:
        preflight(dataclasses.replace(options, bank=needed - 0.01))
    assert caught.value.kind is ErrorKind.BANK_TOO_SMALL


def test_own_checkpoint_names_its_results(unit_35b):
    workflow = Workflow.of(SHIPPED | {"model": str(unit_35b)})
    assert (workflow.name, workflow.synthesised) == (unit_35b.name, False)
    assert Workflow.of(SHIPPED | {"model": str(unit_35b), "tier": "mine"}).name == "mine"
    with pytest.raises(Edge0Error) as caught:
        Workflow.of(SHIPPED | {"model": str(unit_35b), "ks": [64]})
    assert caught.value.kind is ErrorKind.K_INVALID
