"""Checkpoints that every test may read, private copies for tests that damage one, and the check of a refusal.

Everything runs on the CPU device, where equal routing means equal bits; there is no such promise on a GPU.
"""

import json
import shutil

import mlx.core as mx
import pytest
from hypothesis import settings
from safetensors import safe_open
from safetensors.numpy import save_file

from edge0 import Edge0Error, find_tier, synthesise

mx.set_default_device(mx.cpu)
settings.register_profile("edge0", deadline=None)  # a slow machine is no failure
settings.load_profile("edge0")

TIER_NAMES = ("unit-35b", "unit-8b")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Tier name -> directory. Shared by all tests: never write there."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: synthesise(find_tier(name), root / name) for name in TIER_NAMES}


@pytest.fixture(params=TIER_NAMES)
def tier(request):
    return find_tier(request.param)


@pytest.fixture
def checkpoint(tier, checkpoints):
    """The shared checkpoint of `tier`."""
    return checkpoints[tier.name]


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    """A factory: tier name -> a copy that the test may change."""

    def copy(name):
        return shutil.copytree(checkpoints[name], tmp_path / name)

    return copy


@pytest.fixture
def refused():
    """A check that a call fails with a kind, on one printable line that holds some parts."""

    def check(kind, call, *parts):
        with pytest.raises(Edge0Error) as caught:
            call()
        message = str(caught.value)
        assert caught.value.kind is kind, message
        assert message.isprintable(), repr(message)
        for part in parts:
            assert str(part) in message
        return caught.value

    return check


@pytest.fixture
def rewrite_adapter():
    """A function that writes an adapter file anew, with other fields (None: left out) or other arrays."""

    def rewrite(path, fields=None, arrays=None, metadata=None):
        with safe_open(path, "np") as file:
            present = json.loads(file.metadata()["__metadata__"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        merged = {key: value for key, value in (present | (fields or {})).items() if value is not None}
        tensors |= arrays or {}
        save_file(
            {name: array for name, array in tensors.items() if array is not None},
            path,
            metadata if metadata is not None else {"__metadata__": json.dumps(merged)},
        )

    return rewrite
