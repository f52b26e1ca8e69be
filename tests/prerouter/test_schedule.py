"""Groups of a step: they cover the model in order, and each head runs in one group, before what it predicts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.checkpoint.synth import released_config
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import parse_config
from edge0.prerouter.schedule import Schedule, predicted_layers
from edge0.tiers import TIERS, find_tier

FIELDS = {"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 64, "vocab_size": 8}


def config_of(family, layers, dense=1):
    raw = released_config(find_tier(f"unit-{family}"))
    text = raw.get("text_config", raw)
    text |= FIELDS | {"num_hidden_layers": layers}
    if family == "8b":
        text |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": dense}
    return parse_config(raw, Path("config.json"))


@st.composite
def cases(draw):
    """(config, owners, launch groups), all valid."""
    family = draw(st.sampled_from(["35b", "8b"]))
    dense = draw(st.integers(1, 3)) if family == "8b" else 0
    layers = draw(st.integers(dense + 3, 48))
    config = config_of(family, layers, dense)
    first = draw(st.integers(dense, layers - 3))
    last = draw(st.integers(first, layers - 1))
    owners = list(range(first, last + 1))
    count = len(predicted_layers(config, owners))
    return config, draw(st.permutations(owners)), draw(st.integers(1, count))


@given(cases())
def test_groups_partition_the_layers_and_heads_come_before_their_consumers(case):
    config, owners, launch_groups = case
    schedule = Schedule.of(config, owners, launch_groups)

    assert [layer for group in schedule.groups for layer in group.layers] == list(range(config.layers))
    assert all(len(group.layers) for group in schedule.groups)
    top = config.layers if config.family.tag == "8b" else config.layers - 1
    assert schedule.predicted == tuple(sorted(owner + 1 for owner in owners if owner + 1 < top))

    place = {layer: number for number, group in enumerate(schedule.groups) for layer in group.layers}
    heads = [owner for group in schedule.groups for owner in group.owners]
    assert sorted(owner + 1 for owner in heads) == list(schedule.predicted)
    assert len(set(heads)) == len(heads)
    for number, group in enumerate(schedule.groups):
        for owner in group.owners:
            assert owner in group.layers
            assert number <= place[owner + 1]
    staged = {place[layer] for layer in schedule.predicted}
    assert len(staged) == launch_groups
    assert all(layer in schedule.predicted for number in staged for layer in schedule.groups[number].layers)
    sizes = [len(schedule.groups[number].layers) for number in staged]
    assert max(sizes) - min(sizes) <= 1
    assert schedule.owner_groups == tuple(group.owners for group in schedule.groups if group.owners)


@given(cases(), st.integers(1, 8))
def test_floor_is_one_tokens_experts_and_the_prefetch_for_the_next(case, k):
    config, owners, launch_groups = case
    schedule = Schedule.of(config, owners, launch_groups)
    assert schedule.floor_slots(config, k) == k * len(config.moe_layers) + k * len(schedule.predicted)
    assert Schedule.without_heads(config).floor_slots(config, k) == k * len(config.moe_layers)


@pytest.mark.parametrize(
    ("family", "layers", "owners", "predicted"),
    [("35b", 40, range(6, 39), range(7, 39)), ("8b", 24, range(7, 23), range(8, 24))],
)
def test_released_models(family, layers, owners, predicted):
    """What the released adapters own, and the layers that consume it: 32 on 35b, 16 on 8b."""
    config = config_of(family, layers)
    assert predicted_layers(config, owners) == tuple(predicted)
    for launch_groups in (1, 3, len(predicted)):
        schedule = Schedule.of(config, owners, launch_groups)
        assert schedule.predicted == tuple(predicted)
        assert schedule.groups[0].layers == range(predicted[0])
        assert schedule.groups[0].owners == (predicted[0] - 1,)
        assert schedule.groups[-1].layers.stop == layers


@pytest.mark.parametrize("name", sorted(TIERS))
def test_tiers_keep_gate_layers_on_both_sides_as_the_released_models_do(name):
    tier = TIERS[name]
    config = parse_config(released_config(tier), Path("config.json"))
    predicted = predicted_layers(config, tier.owners)
    assert predicted[0] > config.dense_layers
    assert (predicted[-1] == config.layers - 1) == tier.family.last_layer_predicted


def test_without_heads_there_is_one_group():
    config = config_of("35b", 40)
    schedule = Schedule.without_heads(config)
    assert [group.layers for group in schedule.groups] == [range(40)]
    assert schedule.predicted == () and schedule.owner_groups == ()


@pytest.mark.parametrize("launch_groups", [0, 33, 1000])
def test_launch_groups_out_of_range(refused, launch_groups):
    config = config_of("35b", 40)
    refused(ErrorKind.OPTION_INVALID, lambda: Schedule.of(config, range(6, 39), launch_groups), "1 to 32")


@pytest.mark.parametrize(
    ("family", "owners"),
    [
        ("35b", []),
        ("35b", [39]),
        ("35b", [38, 39]),
        ("35b", [6, 8]),
        ("35b", [6, 6, 7]),
        ("35b", [-1, 0, 1]),
        ("8b", [0, 1, 2]),
        ("8b", [23]),
    ],
)
def test_owners_that_are_not_one_run_of_expert_layers(family, owners):
    config = config_of(family, 40 if family == "35b" else 24)
    with pytest.raises(Edge0Error) as caught:
        Schedule.of(config, owners, 1)
    assert caught.value.kind is ErrorKind.ADAPTER_MISMATCH
