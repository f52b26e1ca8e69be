"""What a machine file says, found out: machine, storage, page-cache probe, ways to limit the cache, heat and power.

Reads the experts of a checkpoint, or a scratch file, for some seconds. Judges nothing but what would spoil a
measurement (`warnings`). Does not know what a scratch file, just written, hides: see `experiments.host.storage`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from edge0 import blas, pages
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout, part_specs
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.kernels.library import describe
from edge0.telemetry.host import describe_host, filesystem_of
from edge0.telemetry.pagecache import MEMORY_FILESYSTEMS, ProbeReport, self_test
from edge0.tiers import find_tier
from experiments.budgets.methods import budget_methods
from experiments.host.machine_file import device_kind, without_paths
from experiments.host.storage import ADVISED, RandomReads, lower_cache, random_reads
from experiments.host.thermal import power_state, thermal_state

SCRATCH_BYTES = 256 << 20
DEFAULT_TIER = "shape-35b"  # whose expert size is read where no checkpoint says another

_MIB = 1 << 20
_CHUNK_BYTES = 4 << 20
_LARGE_READ_AHEAD_KB = 1024
_BUSY_SHARE = 0.5  # of the cores
_SWAP_USED_BYTES = 64 * _MIB
_FROM_DEVICE = 0.9

Report = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """What one token asks of the storage when none of its experts is in memory. Plain arithmetic, no measurement."""

    k: int
    layers: int
    step_bytes: int

    def cost_ms(self, mib_s: float) -> float:
        """Milliseconds at a measured rate: an upper bound, since caches, the bank and overlap only lower it."""
        return self.step_bytes / _MIB / mib_s * 1000


@dataclass(frozen=True)
class Subject:
    """What is read: files of a checkpoint, or a scratch file, and the bytes of one expert."""

    paths: tuple[Path, ...]
    kind: str  # "checkpoint" or "scratch"
    expert_bytes: int
    checkpoint_bytes: int | None = None
    steps: tuple[Step, ...] = ()


@contextmanager
def subject(checkpoint: Path | None, report: Report) -> Iterator[Subject]:
    """The files to read: those that hold the checkpoint's experts, or a scratch file in the current folder.

    Raises:
        Edge0Error: what a checkpoint is refused for; OUTPUT_UNWRITABLE when there is no room for the scratch file.
    """
    if checkpoint is None:
        tier = find_tier(DEFAULT_TIER)
        text = tier.text
        specs = part_specs(text["hidden_size"], text["moe_intermediate_size"])
        with _scratch_file(Path.cwd(), SCRATCH_BYTES, report) as path:
            yield Subject((path,), "scratch", sum(spec.nbytes for spec in specs))
        return
    config = read_config(checkpoint)
    layout = ExpertLayout.of(CheckpointIndex.open(checkpoint), config)
    ceiling = config.experts // config.groups * config.groups_kept
    steps = [
        Step(k, len(layout.layers), k * len(layout.layers) * layout.expert_bytes) for k in (2, 4, 8) if k <= ceiling
    ]
    nbytes = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    yield Subject(layout.paths, "checkpoint", layout.expert_bytes, nbytes, tuple(steps))


def examine(what: Subject, seconds: float, report: Report) -> dict[str, Any]:
    """Everything of a machine file, in its order. `seconds`: of each of the eight read measurements.

    Evicts the subject's files from the page cache where that works. Raises Edge0Error READ_FAILED, FILE_UNREADABLE.
    """
    path = max(what.paths, key=lambda one: one.stat().st_size)
    host = describe_host(path)
    report("page-cache probe")
    probe = self_test(path)
    report("budget methods")
    budgets = [
        {"method": method.name, "works": method.works, "reason": without_paths(method.reason, [path])}
        for method in budget_methods(path)
    ]
    report("cache below the page cache")
    below = lower_cache(path, host)
    storage = {
        "filesystem": host["filesystem"],
        "device": device_kind(host["device"]),
        **{key: host[key] for key in ("read_ahead_kb", "max_sectors_kb", "scheduler")},
        "guest": host["hypervisor"],
        "lower_cache": below.verdict,
        "lower_cache_reason": below.reason,
        "lower_cache_us": {key: value and round(value, 1) for key, value in below.times().items()},
        "read_file": what.kind,
        **_reads(what, probe, host["filesystem"], seconds, report),
    }
    values = {
        "id": host["machine_id"],
        "name": _name(host),
        "source": "measured",
        "created": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": host["git_commit"],
        "ram_bytes": host["ram_bytes"],
        "swap_bytes": host["swap_total_bytes"],
        **{key: host[key] for key in ("os", "kernel", "cpu_model", "cores_logical", "page_bytes")},
        "storage": storage,
        "probe": asdict(probe) | {"reason": without_paths(probe.reason, [path])},
        "budgets": budgets,
        "mlx": {"version": host["mlx_version"], "device": host["mlx_device"]},
        "kernels": describe(),
        "blas": blas.describe(),
        "memory_pages": pages.describe(),
        "thermal": thermal_state(),
        "power": power_state(),
    }
    return values | {"warnings": warnings(values, host, psutil.swap_memory().used)}


def warnings(values: Mapping[str, Any], host: Mapping[str, Any], swap_used_bytes: int) -> list[str]:
    """What may spoil a measurement here, each in plain words."""
    storage, thermal, power = values["storage"], values["thermal"], values["power"]
    found = []
    if storage["filesystem"] in MEMORY_FILESYSTEMS:
        found.append(f"The files lie on {storage['filesystem']}, which is memory: nothing here is ever cold.")
    if storage["guest"]:
        found.append(
            "This is a virtual machine: cold is cold for the guest only, its host may hold the file in memory."
        )
    elif storage["lower_cache"] == "suspected":
        found.append(
            "Something below the page cache seems to hold the file in memory: cold times are not the device's."
        )
    if (storage["read_ahead_kb"] or 0) > _LARGE_READ_AHEAD_KB:
        found.append(
            f"The read-ahead window is {storage['read_ahead_kb']} KiB (Linux default: 128): reading by page faults "
            "fetches many times what is asked for. Explicit reads are not affected."
        )
    if host["damon_schemes"]:
        found.append(
            f"The kernel reclaims idle file pages by itself (DAMON: {host['damon_schemes']}): "
            "what is warm fades within minutes. Sessions verify it again before and after each run."
        )
    if swap_used_bytes > _SWAP_USED_BYTES:
        found.append(f"{swap_used_bytes / _MIB:.0f} MiB of swap are in use: memory was short. Close other programs.")
    if host["load_1min"] > _BUSY_SHARE * (host["cores_logical"] or 1):
        found.append(
            f"The machine is busy: load average {host['load_1min']:.1f} on {host['cores_logical']} cores. "
            "Wait until it is quiet, then run this again."
        )
    if power["on_battery"]:
        found.append("It runs on battery: plug it in before measuring.")
    if power["low_power_mode"]:
        found.append("Low power mode is on: switch it off before measuring.")
    if power["governor"] in ("powersave", "conservative") and power["max_frequency_mhz"]:
        found.append(f"The CPU governor is {power['governor']}: clocks may rise late.")
    if thermal["limited"]:
        found.append("The machine is too hot and slows itself down: let it cool.")
    if values["probe"]["method"] == "unavailable":
        found.append("The page cache cannot be probed here: cold shares will be missing.")
    if not any(budget["works"] for budget in values["budgets"]):
        found.append("No way to limit the page cache works here: only whatever memory the machine has can be measured.")
    shares = [row["device_share"] for row in storage["random_reads"] if row["device_share"] is not None]
    if values["probe"]["counts_device_bytes"] and shares and min(shares) < _FROM_DEVICE:
        found.append(
            f"Only {min(shares):.0%} of the bytes of the random reads came from the device: they are too fast."
        )
    return found


def _reads(what: Subject, probe: ProbeReport, filesystem: str | None, seconds: float, report: Report) -> dict[str, Any]:
    if filesystem in MEMORY_FILESYSTEMS:
        return {"read_bytes": None, "read_way": None, "random_reads": []}
    reads = random_reads(what.paths, what.expert_bytes, seconds=seconds, report=report)
    found = {"read_bytes": reads.read_bytes, "read_way": reads.way, "random_reads": _rows(reads)}
    if probe.evicts:
        advised = random_reads(what.paths, what.expert_bytes, seconds=seconds, way=ADVISED, report=report)
        found["advised_reads"] = _rows(advised)
    return found


def _rows(reads: RandomReads) -> list[dict[str, Any]]:
    return [
        asdict(row)
        | {
            "mib_s": round(row.mib_s, 1),
            "median_ms": round(row.median_ms, 3),
            "device_share": None if row.device_share is None else round(row.device_share, 3),
        }
        for row in reads.rows
    ]


@contextmanager
def _scratch_file(folder: Path, nbytes: int, report: Report) -> Iterator[Path]:
    report(f"scratch file of {nbytes // _MIB} MiB")
    hint = "run this in a folder with room on the disk that will hold the checkpoint, or name a checkpoint"
    try:
        free = shutil.disk_usage(folder).free
        if filesystem_of(folder)[0] not in MEMORY_FILESYSTEMS and free < 2 * nbytes:
            detail = "too little room for a scratch file"
            expected, found = f">= {2 * nbytes // _MIB} MiB free", f"{free // _MIB} MiB"
            raise Edge0Error(
                ErrorKind.OUTPUT_UNWRITABLE, detail, path=folder, expected=expected, found=found, hint=hint
            )
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".edge0-doctor-") as scratch:
            for _ in range(nbytes // _CHUNK_BYTES):
                scratch.write(os.urandom(_CHUNK_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
            yield Path(scratch.name)
    except OSError as error:
        detail = f"no scratch file can be written ({error.strerror or error})"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=folder, hint=hint) from error


def _name(host: Mapping[str, Any]) -> str:
    model = host["hw_model"] or ("virtual machine" if host["hypervisor"] else None)
    parts = [model, host["cpu_model"], f"{host['cores_logical']} cores"]
    return ", ".join(part for part in parts if part)
