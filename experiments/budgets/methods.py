"""Which ways of keeping a page-cache budget work on this machine, for this checkpoint: tried out, not assumed.

Each is tried for about 0.1 s on a scratch file beside the checkpoint and, without changing more than a megabyte of its
cache, on the checkpoint itself. One that fails is reported with the reason, and is not to be used: better no number
than a cold share that nobody brought about.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.pagecache import UNAVAILABLE, FilePages, ProbeReport, self_test
from experiments.budgets.balloon import Balloon, only_on_macos
from experiments.budgets.cgroups import SCOPE, V1, V2, Cgroupfs, limited_command

_SCRATCH_BYTES, _LIMIT_BYTES, _PLACE_BYTES, _BALLOON_BYTES = 8 << 20, 4 << 20, 1 << 20, 1 << 20
_NEAR_BYTES = 512 << 10  # the kernel charges in batches and reclaims in pieces
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class MethodReport:
    """One way, whether it `works` here, and one sentence that says what was seen or what it lacks."""

    name: str  # "eviction", "cgroup-v1", "cgroup-v2" or "balloon"
    works: bool
    reason: str


def budget_methods(path: os.PathLike[str] | str, places: Cgroupfs | None = None) -> list[MethodReport]:
    """Try every way on the file `path`, which is one of the checkpoint's, and on a scratch file beside it.

    Raises Edge0Error FILE_MISSING, FILE_UNREADABLE.
    """
    path, places = Path(path), places or Cgroupfs()
    probe = self_test(path)
    if probe.method == UNAVAILABLE:
        why = f"cold fraction unavailable: {probe.reason}"
        return [MethodReport(name, False, why) for name in ("eviction", V1, V2, "balloon")]
    return [
        _tried("eviction", lambda: _try_eviction(path, probe)),
        *(_tried(name, lambda name=name: _try_cgroup(name, path, probe, places)) for name in (V1, V2)),
        _tried("balloon", _try_balloon),
    ]


def eviction_method(path: os.PathLike[str] | str) -> MethodReport:
    """Try eviction alone, as `budget_methods` does; raises as it does."""
    path = Path(path)
    return _tried("eviction", lambda: _try_eviction(path, self_test(path)))


def _tried(name: str, attempt: Callable[[], str]) -> MethodReport:
    """`attempt` returns what it saw, or raises what is missing."""
    try:
        return MethodReport(name, True, attempt())
    except (Edge0Error, OSError, subprocess.SubprocessError) as error:
        return MethodReport(name, False, str(error))


def _try_eviction(path: Path, probe: ProbeReport) -> str:
    if not probe.evicts:
        raise _failed("a scratch file could not be evicted", probe.reason)
    with FilePages(path, probe.method) as pages:
        place = [(0, min(_PLACE_BYTES, pages.file_bytes))]
        pages.evict(place)
        cold = pages.residency(place).cold_bytes
        pages.warm(place)
        if cold < place[0][1]:
            raise _failed(f"{path.name} could not be evicted", f"{cold} of {place[0][1]} bytes were cold")
    return f"a scratch file and the first {place[0][1]} bytes of {path.name} could be evicted"


def _try_cgroup(name: str, path: Path, probe: ProbeReport, places: Cgroupfs) -> str:
    version, _ = places.own()
    if version != name:
        raise _failed("not here", f"the memory controller is that of {version}")
    with limited_command(places=places) as limited:
        if limited.method == SCOPE:
            return "systemd-run makes a scope with a limit of its own, which each run reads back"

        def charged(file: Path, nbytes: int) -> int:
            """Bytes that the group is charged for more when a child in it reads the start of a file that is cold."""
            with FilePages(file, probe.method) as pages:
                pages.evict([(0, min(nbytes, pages.file_bytes))])
                before = limited.group.usage().file_bytes
                child = [*limited.prefix, "head", "-c", str(nbytes), str(file)]
                subprocess.run(child, stdout=subprocess.DEVNULL, check=True, timeout=_TIMEOUT_S)
                return limited.group.usage().file_bytes - before

        with _scratch(path.parent) as scratch, FilePages(scratch, probe.method) as pages:
            if (seen := charged(scratch, _SCRATCH_BYTES)) < _SCRATCH_BYTES - _NEAR_BYTES:
                raise _failed("a child's reads are not charged to its group", f"{seen} of {_SCRATCH_BYTES} bytes")
            limited.group.set_limit(_LIMIT_BYTES)
            if (kept := pages.cached_bytes()) > _LIMIT_BYTES + _NEAR_BYTES:
                raise _failed("the limit leaves too much in the page cache", f"{kept} of {_LIMIT_BYTES} bytes")
        limited.group.set_limit(None)
        nbytes = min(_PLACE_BYTES, path.stat().st_size)
        if (seen := charged(path, nbytes)) < nbytes // 2:
            raise _failed(f"reads of {path.name} are not charged to the reader's group", f"{seen} of {nbytes} bytes")
    return f"a limit of {_LIMIT_BYTES} bytes left {kept} of a scratch file cached; reads of {path.name} are charged"


def _try_balloon() -> str:
    only_on_macos()
    with Balloon(_BALLOON_BYTES):
        return f"a child could lock {_BALLOON_BYTES} bytes"


@contextlib.contextmanager
def _scratch(folder: Path):
    """A clean file of random bytes, removed afterwards."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".edge0-budget-") as file:
        file.write(os.urandom(_SCRATCH_BYTES))
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _failed(detail: str, found: str) -> Edge0Error:
    return Edge0Error(ErrorKind.PROBE_UNAVAILABLE, detail, found=found)
