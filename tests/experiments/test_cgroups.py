"""Memory groups: parsing and commands on a made-up tree, and the real thing where this process may make groups."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge0.errors import Edge0Error, ErrorKind
from experiments.budgets import cgroups
from experiments.budgets.cgroups import SCOPE, V1, V2, Cgroupfs, Group, limited_command, own_group, sweep

MIB = 1 << 20
REPO = Path(__file__).parents[2]


def refused(action, *words):
    with pytest.raises(Edge0Error) as caught:
        action()
    assert caught.value.kind is ErrorKind.PROBE_UNAVAILABLE
    for word in words:
        assert str(word) in str(caught.value)


def places(tmp_path, membership, *folders, **files):
    """A made-up cgroup tree: `files` are contents by path, with __ for /."""
    root = tmp_path / "cgroup"
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_of_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return Cgroupfs(root, tmp_path / "membership")


def test_the_group_of_a_process_in_each_version(tmp_path):
    v1 = places(tmp_path / "1", "9:name=systemd:/\n4:memory:/a/b\n0::/\n", "memory/a/b")
    assert v1.own() == (V1, v1.root / "memory/a/b")
    inside = places(tmp_path / "2", "4:cpu,memory:/host/path/not/seen/here\n", "memory")
    assert inside.own() == (V1, inside.root / "memory")
    v2 = places(
        tmp_path / "3", "0::/user.slice/x.scope\n", **{"user_of_slice__x_of_scope__cgroup_of_controllers": "cpu memory"}
    )
    assert v2.own() == (V2, v2.root / "user.slice/x.scope")
    refused(places(tmp_path / "4", "0::/x\n", "x", x__cgroup_of_controllers="cpu pids").own, "memory controller")
    refused(Cgroupfs(tmp_path, tmp_path / "none").own, "none", "No such file")


V1_STAT = "cache 9000000\nrss 5000000\nshmem 1000000\ninactive_file 1\n"
V2_STAT = "anon 5000000\nfile 9000000\nkernel 700\nshmem 1000000\n"


@pytest.mark.parametrize(
    "version, files",
    [
        (
            V1,
            {
                "memory.stat": V1_STAT,
                "memory.usage_in_bytes": "16000000",
                "memory.oom_control": "under_oom 0\noom_kill 2",
            },
        ),
        (V2, {"memory.stat": V2_STAT, "memory.current": "16000000", "memory.events": "low 0\noom_kill 2\n"}),
    ],
)
def test_usage_leaves_shared_memory_out_of_the_cache(tmp_path, version, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    usage = Group(version, tmp_path).usage()
    assert (usage.file_bytes, usage.other_bytes, usage.oom_kills) == (8000000, 8000000, 2)
    (tmp_path / "memory.stat").unlink()
    refused(Group(version, tmp_path).usage, tmp_path)


def test_limits_are_written_and_read_back(tmp_path):
    v1, v2 = Group(V1, tmp_path), Group(V2, tmp_path)
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712")
    (tmp_path / "memory.current").write_text("300")
    (tmp_path / "memory.reclaim").write_text("")
    assert v1.limit_bytes() is None
    assert v1.set_limit(8 * MIB) == 8 * MIB
    assert (tmp_path / "memory.limit_in_bytes").read_text() == str(8 * MIB)
    assert v2.set_limit(200) == 200
    assert (tmp_path / "memory.reclaim").read_text() == "100"  # what has to go before the limit is set
    assert v2.set_limit(None) is None
    assert (tmp_path / "memory.max").read_text() == "max"


def test_a_limit_that_is_not_taken_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "_WAIT_S", 0.0)
    refused(lambda: Group(V1, tmp_path / "gone").set_limit(MIB), "memory.limit_in_bytes", "No such file")
    (tmp_path / "memory.limit_in_bytes").write_text("5")
    monkeypatch.setattr(Path, "write_text", lambda self, text: len(text))
    refused(lambda: Group(V1, tmp_path).set_limit(MIB), "not taken", MIB, 5)


def test_v2_makes_a_group_beside_ours_where_it_is_delegated(tmp_path, monkeypatch):
    here = places(
        tmp_path,
        "0::/top/mine\n",
        cgroup_of_subtree_control="memory",
        top__cgroup_of_subtree_control="cpu memory",
        top__cgroup_of_procs="",
        top__mine__cgroup_of_controllers="memory",
    )
    removed = []
    monkeypatch.setattr(Group, "remove", lambda self: removed.append(self.folder))
    with limited_command(None, here) as limited:
        assert limited.method == V2 and limited.group.folder.parent == here.root / "top"
        assert limited.prefix[-1] == str(limited.group.folder / "cgroup.procs")
        assert (limited.group.folder / "memory.swap.max").read_text() == "0"
        done = subprocess.run(
            [*limited.prefix, sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
        )
        assert done.returncode == 0
        assert (limited.group.folder / "cgroup.procs").read_bytes() == done.stdout  # it had moved before it began
    assert removed == [limited.group.folder]


def scope_places(tmp_path, user):
    manager = f"user_of_slice__user-{user}_of_slice__user@{user}_of_service__cgroup_of_controllers"
    files = {"top__mine__cgroup_of_controllers": "memory", "top__cgroup_of_subtree_control": "", manager: "memory pids"}
    return places(tmp_path, "0::/top/mine\n", **files)


def answer(returncode, stderr=""):
    return subprocess.CompletedProcess([], returncode, "", stderr)


@pytest.mark.parametrize(
    "user, limit, expected", [(1000, 14 << 30, "15032385536"), (1000, None, "infinity"), (0, 5, "5")]
)
def test_else_the_service_manager_is_asked_for_a_scope(tmp_path, monkeypatch, user, limit, expected):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(cgroups.shutil, "which", lambda name: f"/usr/bin/{name}")
    tried = []
    monkeypatch.setattr(cgroups.subprocess, "run", lambda command, **how: tried.append(command) or answer(0))
    with limited_command(limit, scope_places(tmp_path, user)) as limited:
        words = list(limited.prefix)
        (command,) = tried
        assert command[-2:] == ["--", "true"] and [word for word in command if word not in words] == [
            next(word for word in command if word.startswith("--unit=")),
            "true",
        ]
        assert limited.method == SCOPE and limited.group is None
        assert words[0] == "systemd-run" and words[-1] == "--" and "--scope" in words
        assert ("--user" in words) == (user != 0)
        assert [words[at + 1] for at, word in enumerate(words) if word == "-p"] == [
            f"MemoryMax={expected}",
            "MemorySwapMax=0",
            "Delegate=yes",
        ]
        unit = next(word for word in words if word.startswith("--unit=")).removeprefix("--unit=")
        assert cgroups._NAME.fullmatch(unit)
        assert limited.killed(-signal.SIGKILL) == (limit is not None) and not limited.killed(1)


def test_without_any_way_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cgroups.shutil, "which", lambda name: None)
    refused(limited_command(None, scope_places(tmp_path / "1", 1000)).__enter__, "systemd-run")
    monkeypatch.setattr(cgroups.shutil, "which", lambda name: name)
    refused(limited_command(None, scope_places(tmp_path / "2", 999)).__enter__, "service manager", "1000")
    none = places(tmp_path / "3", "4:memory:/a\n", "memory/a")
    monkeypatch.setattr(Path, "mkdir", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    refused(limited_command(None, none).__enter__, "Permission denied")


def test_a_scope_that_the_service_manager_refuses_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cgroups.shutil, "which", lambda name: name)
    enter = limited_command(1 << 30, scope_places(tmp_path, 1000)).__enter__
    monkeypatch.setattr(cgroups.subprocess, "run", lambda command, **how: answer(1, "warning\nFailed to connect\n"))
    refused(enter, "makes no scope", "Failed to connect")

    def late(command, timeout, **how):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cgroups.subprocess, "run", late)
    refused(limited_command(None, scope_places(tmp_path, 1000)).__enter__, "makes no scope", "timed out")


def test_a_group_of_others_is_not_ours_to_limit(tmp_path):
    refused(lambda: own_group(places(tmp_path / "1", "4:memory:/session\n", "memory/session")), "session")
    name = f"{cgroups._stamp(os.getpid())}-0"
    here = places(tmp_path / "2", f"4:memory:/a/{name}\n", f"memory/a/{name}")
    assert own_group(here).folder.name == name


def test_groups_of_ended_processes_are_swept_out_by_name(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    mine = cgroups._stamp(os.getpid())
    kept = [f"{mine}-0", "edge0-notes", "system.slice", f"edge0-{os.getpid()}"]
    stale = [f"edge0-{ended.pid}-123-0", f"edge0-{os.getpid()}-1-0"]  # the second: a number used again
    for name in (*kept, *stale):
        (tmp_path / name).mkdir()
    assert sweep(tmp_path, V1) == sorted(stale)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def stale_group(tmp_path, pids):
    """A made-up group whose maker is not to be found here, in a tree that lets it go only when it is empty."""
    folder = tmp_path / "edge0-999999999-123-0"
    folder.mkdir()
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return folder


def test_a_group_with_a_process_of_another_namespace_is_not_swept(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    folder = stale_group(tmp_path, [0, 4242])
    assert sweep(tmp_path, V1) == [] and folder.is_dir() and killed == []


def test_removing_never_signals_our_own_process_group_nor_ends_at_a_process_of_others(tmp_path, monkeypatch):
    asked = []

    def kill(pid, number):
        asked.append(pid)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(cgroups, "_EMPTY_TRIES", 2)
    refused(Group(V1, stale_group(tmp_path, [0, 4242])).remove, "cannot be removed", "4242")
    assert asked == [4242, 4242]
    (tmp_path / "edge0-999999999-123-0/cgroup.procs").write_text("4242\n")
    assert sweep(tmp_path, V1) == []  # what cannot be removed keeps nobody from working


@pytest.fixture
def possible():
    try:
        with limited_command() as limited:
            if limited.group is None:
                pytest.skip("only a scope of the service manager is possible here")
    except Edge0Error as error:
        pytest.skip(f"no group can be made here: {error}")


CHILD = """
import json
from experiments.budgets.cgroups import own_group
group = own_group()
before = group.limit_bytes()
group.set_limit(64 << 20)
held = bytearray(24 << 20)
usage = group.usage()
print(json.dumps([before, group.limit_bytes(), usage.other_bytes, str(group.folder)]))
"""


def test_a_child_limits_the_group_that_it_was_started_in(possible):
    with limited_command() as limited:
        done = subprocess.run(
            [*limited.prefix, sys.executable, "-c", CHILD], capture_output=True, text=True, cwd=REPO, check=True
        )
        before, limit, other, folder = json.loads(done.stdout)
        assert (before, limit, folder) == (None, 64 * MIB, str(limited.group.folder))
        assert 24 * MIB <= other < 64 * MIB
        assert limited.group.limit_bytes() == 64 * MIB  # the parent sees what the child has set
        assert not limited.killed(done.returncode)
    assert not limited.group.folder.exists()


def test_the_limit_ends_a_child_that_asks_for_more(possible):
    with limited_command(48 * MIB) as limited:
        assert limited.group.limit_bytes() == 48 * MIB
        done = subprocess.run([*limited.prefix, sys.executable, "-c", "bytearray(256 << 20)"], check=False)
        assert done.returncode == -signal.SIGKILL and limited.killed(done.returncode)
    assert not limited.group.folder.exists()


def test_nothing_is_left_behind_whatever_happens_to_a_child(possible):
    with limited_command() as limited:
        child = subprocess.Popen([*limited.prefix, "sleep", "60"])
        while child.pid not in limited.group.pids():
            time.sleep(0.01)
    assert child.wait() == -signal.SIGKILL and not limited.group.folder.exists()
    with pytest.raises(ZeroDivisionError), limited_command() as limited:
        child = subprocess.Popen([*limited.prefix, "sleep", "60"])
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        raise ZeroDivisionError
    assert not limited.group.folder.exists()


def test_the_group_of_a_killed_maker_is_swept_by_the_next(possible):
    program = "from experiments.budgets.cgroups import limited_command\nimport time\n" + (
        "with limited_command() as limited:\n    print(limited.group.folder, flush=True)\n    time.sleep(60)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPO)
    folder = Path(maker.stdout.readline().strip())
    with limited_command():
        assert folder.is_dir()  # its maker lives
    maker.kill()
    maker.communicate()
    assert folder.is_dir()
    with limited_command():
        assert not folder.exists()
