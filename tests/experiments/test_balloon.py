"""The balloon: memory that is really locked, limits that are respected, and an end with its context."""

import os
import resource
import sys
from pathlib import Path

import psutil
import pytest

from edge0.errors import Edge0Error, ErrorKind
from experiments.budgets import balloon
from experiments.budgets.balloon import Balloon, balloon_bytes, lock_limit_bytes

MIB = 1 << 20


@pytest.fixture
def nbytes():
    limit = lock_limit_bytes()
    if limit is not None and limit < MIB:
        pytest.skip(f"only {limit} bytes may be locked here")
    return MIB


def test_a_child_holds_locked_memory_until_the_context_ends(nbytes):
    with Balloon(nbytes) as held:
        child = psutil.Process(held._child.pid)
        if sys.platform == "linux":
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
            assert int(fields["VmLck"].split()[0]) * 1024 >= nbytes
        assert child.is_running()
    assert not psutil.pid_exists(child.pid)


def test_the_content_is_not_compressible():
    memory = balloon.lock(64 << 10)
    assert len(set(memory[:4096])) > 200


@pytest.mark.parametrize("asked", [0, -1, 2 * MIB])
def test_more_than_the_limit_is_refused_before_a_child_starts(monkeypatch, asked):
    monkeypatch.setattr(balloon, "lock_limit_bytes", lambda: MIB)
    monkeypatch.setattr(balloon.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a child was started"))
    with pytest.raises(Edge0Error) as caught, Balloon(asked):
        pass
    assert caught.value.kind is ErrorKind.PROBE_UNAVAILABLE
    assert str(MIB) in str(caught.value) and str(asked) in str(caught.value)


def test_a_child_that_cannot_lock_says_why(monkeypatch):
    monkeypatch.setattr(balloon, "lock_limit_bytes", lambda: None)
    with pytest.raises(Edge0Error) as caught, Balloon(1 << 62):
        pass
    assert caught.value.kind is ErrorKind.PROBE_UNAVAILABLE


def test_limits_are_read_from_the_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(balloon, "_sysctl", {"vm.user_wire_limit": 9, "vm.global_user_wire_limit": 7}.get)
    assert lock_limit_bytes() == 7
    monkeypatch.setattr(balloon, "_sysctl", lambda name: None)
    assert lock_limit_bytes() is None
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * MIB, 8 * MIB))
    assert lock_limit_bytes() == 8 * MIB
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert lock_limit_bytes() is None


def test_the_size_that_leaves_a_budget():
    available = psutil.virtual_memory().available
    assert 0 < balloon_bytes(available // 2) < available
    with pytest.raises(Edge0Error) as caught:
        balloon_bytes(1 << 60)
    assert caught.value.kind is ErrorKind.PROBE_UNAVAILABLE
