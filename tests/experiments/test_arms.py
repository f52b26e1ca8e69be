"""The arms: options that the engine takes, names that say how they route, and groups that the model has layers for."""

import dataclasses

import pytest

from edge0.errors import ErrorKind
from edge0.options import EngineOptions
from experiments import preflight as module
from experiments.arms import ARMS, find_arm
from experiments.options import SessionOptions


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_one_way_to_serve(name):
    arm = find_arm(name)
    assert arm.meaning and "\n" not in arm.meaning
    if not (arm.resident or arm.peer):
        prerouter = EngineOptions(**arm.options).prerouter
        by, _, without = arm.route.partition(" ")
        assert (prerouter == "route") == (by == "prerouter") and by in ("prerouter", "ondemand")
        assert (without == "without LoRA") == (arm.options.get("lora") is False)


def test_no_two_arms_are_the_same_or_say_the_same():
    ways = [
        (tuple(sorted(arm.options.items())), arm.resident, arm.records, arm.bank, arm.peer, arm.large_pages)
        for arm in ARMS.values()
    ]
    assert len(set(ways)) == len(ways) == len({arm.meaning for arm in ARMS.values()})


def test_more_groups_than_predicted_layers_are_refused_before_anything_runs(checkpoint, monkeypatch, refused):
    arm = ARMS["prerouter-groups5"]
    options = SessionOptions(model=str(checkpoint), tier="unit", ks=(8,), bank=1.0, arms=("prerouter", arm.name))
    module.preflight(options)
    monkeypatch.setitem(ARMS, arm.name, dataclasses.replace(arm, options=arm.options | {"launch_groups": 40}))
    refused(ErrorKind.OPTION_INVALID, lambda: module.preflight(options), "launch groups", "predicted layers", "40")
