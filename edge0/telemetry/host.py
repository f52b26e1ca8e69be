"""What a measurement ran on: one flat description of machine, storage and software, and a short machine id.

Everything that was found to move a result is named (read-ahead window, swap, page reclaim, hypervisor, load). Unknown
is None. Does not know what storage lies below a virtual disk; records no host name, user, path or serial number.
"""

from __future__ import annotations

import glob
import importlib.metadata
import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

_GIB = 1 << 30
# What a measurement depends on; its own results are tracked too, and so are the descriptions of machines.
_CODE = (
    *(":/edge0", ":/experiments", ":/analysis", ":/Snakefile", ":/profiles", ":/pyproject.toml"),
    ":(top,exclude)experiments/machines",
)
_GENERATION = ", family "
_VENDOR_WORDS = {"intel", "amd", "apple", "cpu", "processor", "genuine", "virtual", "common", "kvm"}


def machine_id() -> str:
    """Name of this kind of machine, safe as a folder name: system, architecture, logical cores, RAM (GiB), CPU word."""
    system = {"linux": "linux", "darwin": "macos"}.get(sys.platform, re.sub(r"[^a-z0-9]", "", sys.platform.lower()))
    ram_gib = round(psutil.virtual_memory().total / _GIB)
    arch = re.sub(r"[^a-z0-9_]", "", platform.machine().lower())
    return f"{system}-{arch}-{os.cpu_count() or 0}c-{ram_gib}g-{cpu_word(cpu_model())}"


def cpu_word(model: str | None) -> str:
    """One lower-case word for a CPU model, with family and model where `cpu_model` gives them; Apple names keep all
    their words (m2-pro). "cpu" if there is none."""
    name, _, generation = (model or "").lower().partition(_GENERATION)
    text = re.sub(r"\((r|tm|c)\)|@.*", " ", name)
    words = [word for word in re.findall(r"[a-z0-9]+", text) if word not in _VENDOR_WORDS]
    words = words if name.startswith("apple") else words[:1]
    return "-".join([*(words or ["cpu"]), *re.findall(r"\d+", generation)])


def cpu_model() -> str | None:
    """CPU model as the system spells it. A hypervisor may hide all but the brand, under which it moves a guest from one
    generation of processors to another: then their family and model follow."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    text = _text("/proc/cpuinfo") or ""

    def value(key: str) -> str | None:
        found = re.search(rf"^(?:{key})\s*:\s*(.+)$", text, re.MULTILINE)
        return found.group(1).strip() if found else None

    name, family, model = value("model name|Model|cpu model"), value("cpu family"), value("model")
    if name is None or re.search(r"\d", name) or family is None or model is None:
        return name
    return f"{name}{_GENERATION}{family} model {model}"


def filesystem_of(path: os.PathLike[str] | str) -> tuple[str | None, str | None]:
    """(filesystem type, device) of the mount that holds `path`, by longest mount point; (None, None) if unknown."""
    real = Path(os.path.realpath(path))
    best: tuple[int, str | None, str | None] = (-1, None, None)
    for mount in psutil.disk_partitions(all=True):
        depth = len(Path(mount.mountpoint).parts)
        if depth >= best[0] and real.is_relative_to(mount.mountpoint):  # of two mounts on one point the later shows
            best = (depth, mount.fstype or None, mount.device or None)
    return best[1], best[2]


def disk_of(path: os.PathLike[str] | str) -> str | None:
    """The whole disk below `path`, as `psutil.disk_io_counters` names it; None off Linux or off a disk."""
    device = filesystem_of(path)[1] if sys.platform == "linux" else None
    for number in _device_numbers(path, device):
        node = Path(f"/sys/dev/block/{number}").resolve()
        if node.is_dir():
            disk = node.parent if (node / "partition").exists() else node
            return disk.name.replace("!", "/")  # which a file's name cannot have
    return None


class StolenTime:
    """What a hypervisor gave to others of this machine's processors, from now on."""

    def __init__(self) -> None:
        self._begun = _processor_times()

    def share(self) -> float | None:
        """Of the time of all processors since then; None off Linux, or before the clock has moved on."""
        if self._begun is None:
            return None
        stolen, whole = (now - before for now, before in zip(_processor_times(), self._begun, strict=True))
        return stolen / whole if whole > 0 else None


def _processor_times() -> tuple[float, float] | None:
    """Seconds since boot, of all processors together: stolen, and in all. Guests' are part of the user's."""
    times = psutil.cpu_times()
    if not hasattr(times, "steal"):
        return None
    return times.steal, sum(times) - times.guest - times.guest_nice


def describe_host(checkpoint_dir: os.PathLike[str] | str) -> dict[str, Any]:
    """Flat, JSON-able facts about this machine and the storage of `checkpoint_dir`; sizes in the unit of their name."""
    filesystem, device = filesystem_of(checkpoint_dir)
    load = os.getloadavg()
    return {
        "machine_id": machine_id(),
        "os": platform.system(),
        "kernel": platform.release(),
        "kernel_build": platform.version(),
        "arch": platform.machine(),
        "hw_model": _sysctl("hw.model"),
        "kern_osversion": _sysctl("kern.osversion"),
        "cpu_model": cpu_model(),
        "cores_logical": os.cpu_count(),
        "cores_physical": psutil.cpu_count(logical=False),
        "ram_bytes": psutil.virtual_memory().total,
        "swap_total_bytes": psutil.swap_memory().total,
        "page_bytes": mmap.PAGESIZE,
        "hypervisor": _hypervisor(),
        "filesystem": filesystem,
        "device": Path(device).name if device else None,
        **_block_device(checkpoint_dir, device),
        "damon_schemes": _damon_schemes(),
        "mglru_enabled": _mglru_enabled(),
        "python_version": platform.python_version(),
        "mlx_version": _version("mlx"),
        "mlx_lm_version": _version("mlx-lm"),
        "numpy_version": _version("numpy"),
        "mlx_device": mx.default_device().type.name,
        "metal_available": mx.metal.is_available(),
        **_git(),
        "load_1min": load[0],
        "load_5min": load[1],
        "load_15min": load[2],
    }


def _block_device(path: os.PathLike[str] | str, device: str | None) -> dict[str, Any]:
    """Read-ahead window, largest request and scheduler of the disk below `path`; all None off Linux or off a disk."""
    facts: dict[str, Any] = {"read_ahead_kb": None, "max_sectors_kb": None, "scheduler": None}
    for name in _device_numbers(path, device):
        node = Path(f"/sys/dev/block/{name}").resolve()
        queue = next((at / "queue" for at in (node, node.parent) if (at / "queue").is_dir()), None)  # partition: parent
        if queue is None:
            continue
        window = _text(f"/sys/class/bdi/{name}/read_ahead_kb") or _text(queue / "read_ahead_kb")
        request = _text(queue / "max_sectors_kb")
        scheduler = re.search(r"\[(.+?)\]", _text(queue / "scheduler") or "")
        facts["read_ahead_kb"] = int(window) if window else None
        facts["max_sectors_kb"] = int(request) if request else None
        facts["scheduler"] = scheduler.group(1) if scheduler else None
        break
    return facts


def _device_numbers(path: os.PathLike[str] | str, device: str | None) -> list[str]:
    """`major:minor` of what may be the disk below `path`, which `device` is mounted for; none off Linux."""
    if sys.platform != "linux":
        return []
    numbers = [os.stat(path).st_dev]
    if device and Path(device).is_block_device():  # filesystems with anonymous device numbers, such as btrfs
        numbers.append(os.stat(device).st_rdev)
    return [f"{os.major(number)}:{os.minor(number)}" for number in numbers]


def _hypervisor() -> bool | None:
    """Whether the system says that it is a guest; None on CPUs that have no such flag."""
    if sys.platform == "darwin":
        present = _sysctl("kern.hv_vmm_present")
        return None if present is None else present == "1"
    flags = re.search(r"^flags\s*:(.*)$", _text("/proc/cpuinfo") or "", re.MULTILINE)
    return "hypervisor" in flags.group(1).split() if flags else None


def _damon_schemes() -> str | None:
    """Actions of the DAMON schemes set up on this kernel, comma-separated ("" = none): they may evict a warm file."""
    if sys.platform != "linux":
        return None
    actions = glob.glob("/sys/kernel/mm/damon/admin/kdamonds/*/contexts/*/schemes/*/action")
    found = [text for text in map(_text, sorted(actions)) if text]
    if _text("/sys/module/damon_reclaim/parameters/enabled") == "Y":
        found.append("damon_reclaim")
    return ",".join(found)


def _mglru_enabled() -> bool | None:
    if sys.platform != "linux":
        return None
    mask = _text("/sys/kernel/mm/lru_gen/enabled")  # absent: a kernel without it
    return bool(int(mask, 16)) if mask else False


def _git() -> dict[str, Any]:
    """Commit of the checkout that tracks this very file, and whether tracked code differs from it."""
    here = Path(__file__).resolve()
    if _run("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return {"git_commit": None, "git_dirty": None}
    commit = _run("git", "-C", str(here.parent), "rev-parse", "--verify", "HEAD")
    changed = _run("git", "-C", str(here.parent), "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return {"git_commit": commit, "git_dirty": None if commit is None or changed is None else changed != ""}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sysctl(name: str) -> str | None:
    return _run("sysctl", "-n", name) if sys.platform == "darwin" else None


def _run(*command: str) -> str | None:
    """Standard output of a command, stripped; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _text(path: os.PathLike[str] | str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None
