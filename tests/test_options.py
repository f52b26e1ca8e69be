"""Options: each value that is refused, and the size of the bank."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0.errors import Edge0Error, ErrorKind
from edge0.options import EngineOptions


def test_defaults():
    options = EngineOptions()
    assert (options.prerouter, options.lora, options.io, options.assembly) == ("route", True, "pread", "bank")
    assert options.hidden_clip == 1000 and options.feature == "executed" and options.k is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.k = 3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("prerouter", "on", "route or advise or off"),
        ("prerouter", None, "route or advise or off"),
        ("feature", "student", "executed or teacher"),
        ("io", "odirect", "pread or mmap or direct"),
        ("assembly", "slots", "bank or stack or patch"),
        ("fill", "main", "readers or engine"),
        ("reads", "all", "expert or layer"),
        *[
            (name, value, "an integer >= 1")
            for name in ("k", "adapter_k", "bank_bytes", "reader_threads", "launch_groups", "prefill_chunk")
            for value in (0, -1, 1.5, "4", True)
        ],
        ("hidden_clip", 0, "a positive number"),
        ("hidden_clip", -1.0, "a positive number"),
        ("hidden_clip", float("nan"), "a positive number"),
    ],
)
def test_each_option_is_checked(refused, name, value, expected):
    refused(ErrorKind.OPTION_INVALID, lambda: EngineOptions(**{name: value}), f"option {name}", expected, repr(value))


@pytest.mark.parametrize("name", ["reader_threads", "launch_groups", "prefill_chunk"])
def test_options_that_must_have_a_value(refused, name):
    refused(ErrorKind.OPTION_INVALID, lambda: EngineOptions(**{name: None}), f"option {name}")


def test_page_faults_need_the_papers_stacks(refused):
    refused(
        ErrorKind.OPTION_INVALID, lambda: EngineOptions(io="mmap"), "assembly", "stack or patch with io=mmap", "bank"
    )
    assert EngineOptions(io="mmap", assembly="stack").io == "mmap"
    assert EngineOptions(assembly="stack").assembly == "stack"


@pytest.mark.parametrize("assembly", ["stack", "patch"])
def test_only_a_bank_is_filled_by_somebody(refused, assembly):
    refused(ErrorKind.OPTION_INVALID, lambda: EngineOptions(assembly=assembly, fill="engine"), "fill", "without a bank")
    assert EngineOptions(assembly=assembly, io="mmap").fill == "readers"
    assert EngineOptions(fill="engine").assembly == "bank"


@pytest.mark.parametrize("options", [{"assembly": "stack"}, {"fill": "engine"}])
def test_only_threads_read_a_layer_together(refused, options):
    refused(ErrorKind.OPTION_INVALID, lambda: EngineOptions(reads="layer", **options), "option reads", "layer")


def test_the_default_bank_is_twice_the_floor_and_no_more_than_all_experts():
    assert EngineOptions().bank_slots(slot_bytes=1000, floor=20, ceiling=100) == 40
    assert EngineOptions().bank_slots(slot_bytes=1000, floor=80, ceiling=100) == 100


def test_a_bank_below_its_floor_names_the_floor(refused):
    options = EngineOptions(bank_bytes=19_999)
    refused(
        ErrorKind.BANK_TOO_SMALL,
        lambda: options.bank_slots(slot_bytes=1000, floor=20, ceiling=100),
        "at least 20000 bytes (20 slots of 1000)",
        "19999 bytes (19 slots)",
    )


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 300), st.integers(1, 2_000_000))
def test_bank_slots(slot_bytes, floor, ceiling, bank_bytes):
    """As many slots as the bytes hold and there are experts; refused only below what is needed at the most."""
    needed = min(floor, ceiling)
    try:
        slots = EngineOptions(bank_bytes=bank_bytes).bank_slots(slot_bytes, floor, ceiling)
    except Edge0Error as error:
        assert error.kind is ErrorKind.BANK_TOO_SMALL and bank_bytes < needed * slot_bytes
        # What the line asks for is accepted, and one byte less is not: it is the floor.
        assert f"at least {needed * slot_bytes} bytes ({needed} slots" in str(error)
        assert EngineOptions(bank_bytes=needed * slot_bytes).bank_slots(slot_bytes, floor, ceiling) == needed
    else:
        assert slots == min(bank_bytes // slot_bytes, ceiling) >= needed
