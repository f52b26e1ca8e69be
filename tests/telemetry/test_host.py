"""The description is complete, JSON-able, free of names of people and machines, and agrees with the kernel's files."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from edge0.telemetry import host
from edge0.telemetry.host import StolenTime, cpu_model, cpu_word, describe_host, filesystem_of, machine_id


def test_description_is_flat_json_and_names_what_moves_results(tmp_path):
    facts = describe_host(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    assert all(value is None or isinstance(value, str | int | float | bool) for value in facts.values())
    assert facts["numpy_version"] == np.__version__
    assert facts["python_version"] == sys.version.split()[0]
    assert facts["ram_bytes"] == psutil.virtual_memory().total
    assert facts["page_bytes"] == os.sysconf("SC_PAGE_SIZE")
    assert facts["mlx_device"] in ("cpu", "gpu")
    for key in ("hypervisor", "read_ahead_kb", "max_sectors_kb", "scheduler", "damon_schemes", "mglru_enabled"):
        assert key in facts
    assert {"git_commit", "git_dirty", "load_1min", "mlx_lm_version", "filesystem", "swap_total_bytes"} <= set(facts)


def test_description_holds_no_host_or_folder_name(tmp_path):
    text = json.dumps({key: value for key, value in describe_host(tmp_path).items() if key != "kernel"})
    assert str(tmp_path) not in text and str(Path.home()) + os.sep not in text


def test_machine_id_is_a_stable_folder_name():
    name = machine_id()
    assert name == machine_id()
    assert re.fullmatch(r"[a-z0-9]+-[a-z0-9_]+-\d+c-\d+g-[a-z0-9-]+", name)
    assert f"-{os.cpu_count()}c-" in name
    assert socket.gethostname().lower() not in name.split("-")


def test_machine_id_is_built_from_system_architecture_cores_memory_and_cpu(monkeypatch):
    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(host.os, "cpu_count", lambda: 12)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 16 << 30}))
    monkeypatch.setattr(host, "_sysctl", lambda name: {"machdep.cpu.brand_string": "Apple M2 Pro"}[name])
    assert machine_id() == "macos-arm64-12c-16g-m2-pro"


@pytest.mark.parametrize(
    "model, word",
    [
        ("AMD EPYC", "epyc"),
        ("AMD EPYC, family 25 model 1", "epyc-25-1"),
        ("AMD EPYC 7B13 64-Core Processor", "epyc"),
        ("Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", "xeon"),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "core"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "ryzen"),
        ("Apple M2 Pro", "m2-pro"),
        ("Raspberry Pi 5 Model B Rev 1.0", "raspberry"),
        ("", "cpu"),
        (None, "cpu"),
    ],
)
def test_cpu_word(model, word):
    assert cpu_word(model) == word


@pytest.mark.parametrize(
    "name, told",
    [
        ("AMD EPYC", "AMD EPYC, family 25 model 17"),
        ("AMD EPYC 9B14 96-Core Processor", "AMD EPYC 9B14 96-Core Processor"),
    ],
)
def test_generations_of_processors_under_one_brand_are_two_machines(monkeypatch, name, told):
    """Found when a guest with AVX-512 came back without it, under the same name."""
    if sys.platform != "linux":
        pytest.skip("reads the kernel's list of processors")
    lines = f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {name}\nstepping\t: 1\n"
    monkeypatch.setattr(host, "_text", lambda path: lines)
    assert cpu_model() == told
    monkeypatch.setattr(host, "_text", lambda path: lines.replace("cpu family\t: 25\n", ""))
    assert cpu_model() == name


def test_filesystem_is_that_of_the_longest_mount_point(monkeypatch, tmp_path):
    def mount(point, kind, device):
        return type("Part", (), {"mountpoint": str(point), "fstype": kind, "device": device})

    deep = tmp_path / "data"
    (deep / "model").mkdir(parents=True)
    (tmp_path / "database").mkdir()
    table = [mount(deep, "ext4", "hidden"), mount("/", "btrfs", "root"), mount(deep, "xfs", "disk")]
    monkeypatch.setattr(host.psutil, "disk_partitions", lambda all: table)
    assert filesystem_of(deep / "model") == ("xfs", "disk")
    assert filesystem_of(tmp_path / "database") == ("btrfs", "root")
    monkeypatch.setattr(host.psutil, "disk_partitions", lambda all: [])
    assert filesystem_of(deep) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's block-device files")
def test_block_facts_are_those_of_the_disk_below(tmp_path):
    number = os.stat(tmp_path).st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    queue = next((at / "queue" for at in (node, node.parent) if (at / "queue").is_dir()), None)
    if queue is None:
        pytest.skip("the temporary folder is not on a block device")
    facts = describe_host(tmp_path)
    assert facts["max_sectors_kb"] == int((queue / "max_sectors_kb").read_text())
    assert facts["read_ahead_kb"] > 0 or (queue / "read_ahead_kb").read_text().strip() == "0"
    assert f"[{facts['scheduler']}]" in (queue / "scheduler").read_text()
    assert facts["hypervisor"] is None or facts["hypervisor"] == ("hypervisor" in Path("/proc/cpuinfo").read_text())


def test_unknown_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_text", lambda path: None)
    monkeypatch.setattr(host, "_run", lambda *command: None)
    facts = describe_host(tmp_path)
    unknown = ("cpu_model", "hw_model", "git_commit", "git_dirty", "scheduler", "read_ahead_kb", "hypervisor")
    assert [facts[key] for key in unknown] == [None] * len(unknown)


def test_git_facts_tell_a_clean_from_a_changed_checkout(monkeypatch):
    answers = {"ls-files": "host.py", "rev-parse": "a" * 40, "status": ""}
    monkeypatch.setattr(host, "_run", lambda *command: answers[command[3]])
    assert host._git() == {"git_commit": "a" * 40, "git_dirty": False}
    asked = []
    monkeypatch.setattr(host, "_run", lambda *command: asked.append(command) or answers[command[3]])
    answers["status"] = " M edge0/engine.py"
    assert host._git()["git_dirty"] is True
    assert ":/edge0" in asked[-1] and not any("results" in word for word in asked[-1])
    answers["ls-files"] = None  # installed elsewhere: some other repository may surround it
    assert host._git() == {"git_commit": None, "git_dirty": None}


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        ("edge0/telemetry/host.py", True),
        ("Snakefile", True),
        ("results/m/table.md", False),
        ("experiments/machines/m.yaml", False),
    ],
)
def test_only_changed_code_makes_a_checkout_dirty(monkeypatch, tmp_path, changed, dirty):
    for name in ("edge0/telemetry/host.py", "Snakefile", "results/m/table.md", "experiments/machines/m.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as committed")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(host, "__file__", str(tmp_path / "edge0/telemetry/host.py"))
    assert host._git()["git_dirty"] is False
    (tmp_path / changed).write_text("changed")
    assert host._git()["git_dirty"] is dirty


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's block-device files")
def test_a_disk_is_named_as_psutil_names_it_or_not_at_all(tmp_path, monkeypatch):
    disk = host.disk_of(tmp_path)
    assert disk is None or disk in psutil.disk_io_counters(perdisk=True, nowrap=False)
    monkeypatch.setattr(host, "_device_numbers", lambda path, device: ["0:0"])
    assert host.disk_of(tmp_path) is None


def test_a_partition_counts_as_its_disk(tmp_path, monkeypatch):
    part = tmp_path / "cciss!c0d0" / "cciss!c0d0p1"
    part.mkdir(parents=True)
    monkeypatch.setattr(host, "_device_numbers", lambda path, device: ["8:1"])
    monkeypatch.setattr(host, "Path", lambda *parts: part if "8:1" in str(parts[0]) else Path(*parts))
    assert host.disk_of(tmp_path) == "cciss/c0d0p1"  # a device of its own, as a logical volume is
    (part / "partition").touch()
    assert host.disk_of(tmp_path) == "cciss/c0d0"


def test_the_share_of_the_processors_time_that_a_hypervisor_took(monkeypatch):
    def times(user, idle, steal, guest=0.0):
        found = SimpleNamespace(user=user, idle=idle, steal=steal, guest=guest, guest_nice=0.0)
        return type("Times", (), {"__iter__": lambda _: iter(vars(found).values()), **vars(found)})()

    seen = iter([times(10, 5, 1), times(17, 6, 3, guest=4), times(17, 6, 3, guest=4)])
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: next(seen))
    stolen = StolenTime()
    assert stolen.share() == pytest.approx(0.2)  # a guest's time is in the user's already
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: times(10, 5, 1))
    assert StolenTime().share() is None  # no time has passed
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: SimpleNamespace(user=1.0, idle=1.0))  # macOS
    assert StolenTime().share() is None
