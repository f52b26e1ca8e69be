"""What a session refuses before anything is measured."""

from __future__ import annotations

import pytest

from edge0.checkpoint.repack import repack
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.trace import generate
from experiments import preflight as module
from experiments.arms import ARMS
from experiments.budgets.cgroup_budget import MIN_BUDGET_BYTES
from experiments.budgets.methods import MethodReport
from experiments.options import SessionOptions
from experiments.preflight import bank_slots, preflight


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"condition": "hot"}, ErrorKind.CONDITION_UNKNOWN),
        ({"arms": ("ondemand", "magic")}, ErrorKind.OPTION_INVALID),
        ({"rounds": 0}, ErrorKind.OPTION_INVALID),
        ({"run_timeout_s": 0}, ErrorKind.OPTION_INVALID),
        ({"bank": 0.0}, ErrorKind.OPTION_INVALID),
        ({"ks": ()}, ErrorKind.OPTION_INVALID),
        ({"ks": (33,)}, ErrorKind.K_INVALID),
        ({"ks": (3,)}, ErrorKind.ADAPTER_MISSING),
        ({"bank": 0.01, "ks": (8,)}, ErrorKind.BANK_TOO_SMALL),
        ({"launch_groups": 99}, ErrorKind.OPTION_INVALID),
        ({"reader_threads": 0}, ErrorKind.OPTION_INVALID),
        ({"budget_by": "magic"}, ErrorKind.OPTION_INVALID),
        (
            {"budget_by": "cgroup", "ks": (4,), "bank": 0.5},
            ErrorKind.OPTION_INVALID,
        ),  # 2 MiB are below what a cgroup can keep
        ({"memory_limit_bytes": 5, "ks": (4,), "bank": 0.5}, ErrorKind.OPTION_INVALID),
        ({"trace": "no/such/trace", "bank": 0.01, "ks": (8,)}, ErrorKind.FILE_MISSING),  # sooner than the bank
    ],
)
def test_preflight_refuses_before_anything_is_measured(unit_35b, changes, kind):
    with pytest.raises(Edge0Error) as caught:
        preflight(SessionOptions(**({"model": str(unit_35b), "tier": "unit-35b"} | changes)))
    assert caught.value.kind is kind


RECORDS = ("ondemand", "ondemand-records")


def with_records(model, records, **changes):
    options = {"tier": "unit-35b", "arms": RECORDS, "ks": (4,)} | changes
    return SessionOptions(model=str(model), records=str(records), **options)


def test_preflight_takes_records_of_the_same_model(unit_35b, tmp_path):
    records = repack(unit_35b, tmp_path / "records").directory
    ready = preflight(with_records(unit_35b, records))
    assert ready.layout.stacked and ready.config.layers and ready.budget_by == "eviction"


def test_preflight_refuses_records_that_are_not_those_of_the_model(unit_35b, checkpoints, tmp_path, refused):
    def check(kind, records, *parts):
        refused(kind, lambda: preflight(with_records(unit_35b, records)), records, *parts)

    check(ErrorKind.FILE_MISSING, tmp_path / "absent")
    check(ErrorKind.OPTION_INVALID, unit_35b, "option records", "stacks of")
    other = repack(checkpoints["unit-8b"], tmp_path / "other").directory
    check(ErrorKind.OPTION_INVALID, other, "option records", "records of")
    records = repack(unit_35b, tmp_path / "records").directory
    (records / "artifacts" / "k4").rename(records / "artifacts" / "k3")
    check(ErrorKind.ADAPTER_MISSING, records)


def test_an_arm_with_a_bank_of_its_own_has_that_one(unit_35b):
    options = SessionOptions(model=str(unit_35b), tier="unit-35b", ks=(4,), bank=0.5)
    layout = preflight(options).layout
    experts = len(layout.records())
    assert bank_slots(options, layout, "ondemand") == experts // 2
    assert bank_slots(options, layout, "ondemand-large") == round(ARMS["ondemand-large"].bank * experts)


def test_stacks_are_a_second_copy_and_may_have_a_smaller_bank(unit_35b):
    options = SessionOptions(model=str(unit_35b), tier="unit-35b", ks=(4,), bank=0.5, stack_bank=0.25)
    layout = preflight(options).layout
    experts = len(layout.records())
    assert bank_slots(options, layout, "ondemand") == experts // 2
    assert bank_slots(options, layout, "ondemand-mmap") == experts // 4


@pytest.fixture
def trace(unit_35b, tmp_path):
    config = read_config(unit_35b)
    path = tmp_path / "routes.safetensors"
    generate(config.moe_layers, config.experts, 4, 10, 0.5, 1.0, 0).save(path)
    return path


def with_trace(model, trace, **changes):
    options = {"ks": (4,), "arms": ("ondemand", "prerouter"), "warmup_steps": 6, "timed_steps": 3} | changes
    return SessionOptions(model=str(model), tier="unit-35b", trace=str(trace), bank=1.0, **options)


def test_a_trace_must_fit_the_model_every_k_every_arm_and_the_length_of_a_run(unit_35b, checkpoints, trace, refused):
    def check(kind, options, *parts):
        refused(kind, lambda: preflight(options), *parts)

    assert preflight(with_trace(unit_35b, trace)).config.experts
    check(ErrorKind.TRACE_INVALID, with_trace(unit_35b, trace, ks=(4, 8)), trace, "K", "expected 8", "found 4")
    check(ErrorKind.TRACE_INVALID, with_trace(checkpoints["unit-8b"], trace), trace)
    # Without the token after the last step its heads would have nothing to predict.
    check(ErrorKind.TRACE_INVALID, with_trace(unit_35b, trace, timed_steps=4), trace, "expected 11 tokens", "found 10")
    for arm in ("resident", "ondemand-hot-advise"):
        check(ErrorKind.OPTION_INVALID, with_trace(unit_35b, trace, arms=("ondemand", arm)), arm)


def reports(**works):
    return lambda path: [MethodReport(name, works[name.replace("-", "_")], "a reason") for name in METHODS]


METHODS = ("eviction", "cgroup-v1", "cgroup-v2", "balloon")


def test_the_budget_is_kept_by_what_works_here(unit_35b, monkeypatch, refused):
    def way(by, **works):
        monkeypatch.setattr(module, "budget_methods", reports(**works))
        condition = f"budget:{MIN_BUDGET_BYTES}B"
        return preflight(
            SessionOptions(str(unit_35b), "unit-35b", ks=(4,), condition=condition, budget_by=by)
        ).budget_by

    all_work = {"eviction": True, "cgroup_v1": False, "cgroup_v2": True, "balloon": True}
    assert way("auto", **all_work) == "eviction"
    assert way("cgroup", **all_work) == "cgroup"
    assert way("auto", **all_work | {"eviction": False}) == "cgroup"
    none = dict.fromkeys(all_work, False)
    refused(ErrorKind.PROBE_UNAVAILABLE, lambda: way("auto", **none), "eviction: a reason", "cgroup-v2: a reason")
    refused(ErrorKind.PROBE_UNAVAILABLE, lambda: way("cgroup", **none), "expected cgroup")


@pytest.mark.parametrize(("condition", "needed"), [("cold", True), ("budget:0.5", True), ("warm", False)])
def test_eviction_is_tried_before_a_condition_that_needs_it(unit_35b, monkeypatch, refused, condition, needed):
    monkeypatch.setattr(module, "eviction_method", lambda path: MethodReport("eviction", False, "a reason"))
    options = SessionOptions(str(unit_35b), "unit-35b", ks=(4,), condition=condition)
    if needed:
        refused(ErrorKind.PROBE_UNAVAILABLE, lambda: preflight(options), condition, "eviction: a reason")
    else:
        assert preflight(options).budget_by == "eviction"


def test_preflight_puts_back_what_a_killed_session_left_behind(unit_35b, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "put_back", seen.append)
    layout = preflight(SessionOptions(str(unit_35b), "unit-35b", ks=(4,), condition="warm")).layout
    assert seen == [layout.paths]


def test_a_limit_and_a_budget_by_cgroup_exclude_each_other(unit_35b, monkeypatch, refused):
    monkeypatch.setattr(module, "budget_methods", reports(eviction=True, cgroup_v1=True, cgroup_v2=True, balloon=True))
    options = SessionOptions(
        str(unit_35b), "unit-35b", ks=(4,), condition="budget:8MiB", budget_by="cgroup", memory_limit_bytes=1 << 30
    )
    refused(ErrorKind.OPTION_INVALID, lambda: preflight(options), "memory_limit_bytes")
