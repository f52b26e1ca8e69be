"""Memory cgroups: a fresh group with a limit of its own for one child process, read back, watched and removed.

    with limited_command(limit_bytes) as limited:
        done = subprocess.run([*limited.prefix, sys.executable, "-m", ...])
        killed = limited.killed(done.returncode)

The child finds the group that it was started in with `own_group()` and may set the limit later, when it knows what it
needs. Three ways, tried in this order: cgroup v1 where its memory controller is mounted and writable (root); cgroup v2
where a group above ours is delegated to us; `systemd-run --scope`, which asks the service manager for a scope.

A group's name carries the process that made it, so that groups of dead processes can be told apart and swept out.
Pages are charged to the group that read them first: what is cached before the child starts is not limited by it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind

V1, V2, SCOPE = "cgroup-v1", "cgroup-v2", "cgroup-v2-scope"
_NAME = re.compile(r"edge0-(\d+)-(\d+)-\d+(\.scope)?")  # process id and start of the maker, a number
# $0 is the group's cgroup.procs: the shell moves itself there and becomes the command.
_ENTER = 'echo $$ > "$0" && exec "$@"'
_SET_TRIES, _EMPTY_TRIES, _WAIT_S = 10, 200, 0.01
_SCOPE_TIMEOUT_S = 10.0
_NO_LIMIT = 1 << 62  # v1 states "no limit" as the largest number of whole pages
_numbers = itertools.count()


@dataclass(frozen=True)
class Cgroupfs:
    """Where the system shows its groups, and which of them this process is in."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def own(self) -> tuple[str, Path]:
        """(V1 or V2, folder of the memory group that this process is in).

        Raises:
            Edge0Error: PROBE_UNAVAILABLE where there is no memory controller.
        """
        try:
            lines = [line.split(":", 2) for line in self.membership.read_text().splitlines()]
        except OSError as error:
            raise _unavailable(f"{self.membership} cannot be read ({error.strerror})") from error
        for _, controllers, path in lines:
            if "memory" in controllers.split(","):
                return V1, _below(self.root / "memory", path)
        for _, controllers, path in lines:
            folder = _below(self.root, path)
            if not controllers and "memory" in _words(folder / "cgroup.controllers"):
                return V2, folder
        raise _unavailable("no cgroup of this process has a memory controller")


def _below(root: Path, path: str) -> Path:
    """A group's folder; inside a container the path may be the host's, and the root is ours."""
    folder = root / path.lstrip("/")
    return folder if folder.is_dir() else root


@dataclass(frozen=True)
class Usage:
    """What a group is charged for. `file_bytes`: page cache of files; `other_bytes`: all else (anonymous, shared
    memory, kernel), which a limit must leave room for; `oom_kills`: processes that the limit has ended."""

    file_bytes: int
    other_bytes: int
    oom_kills: int


class Group:
    """One memory group, by its folder. Writing needs the rights that making it needed."""

    def __init__(self, version: str, folder: Path):
        self.version, self.folder = version, folder
        self._limit = folder / ("memory.limit_in_bytes" if version == V1 else "memory.max")

    def limit_bytes(self) -> int | None:
        """The limit in force; None: no limit."""
        text = self._limit.read_text().strip()
        return None if text == "max" or int(text) >= _NO_LIMIT else int(text)

    def set_limit(self, nbytes: int | None) -> int | None:
        """Set the limit and return what is in force then (the kernel takes whole pages). Lowering it drops page cache.

        Raises:
            Edge0Error: PROBE_UNAVAILABLE when it cannot be written, or not reached by dropping page cache.
        """
        text = str(nbytes) if nbytes is not None else {V1: "-1", V2: "max"}[self.version]
        for attempt in range(_SET_TRIES):
            try:
                if self.version == V2 and nbytes is not None:
                    self._reclaim_to(nbytes)
                self._limit.write_text(text)
                break
            except OSError as error:
                if attempt == _SET_TRIES - 1:
                    raise _unavailable(f"no limit of {text} bytes ({error.strerror})", self._limit) from error
                time.sleep(_WAIT_S)
        found = self.limit_bytes()
        if (found is None) != (nbytes is None) or (nbytes is not None and abs(found - nbytes) > (1 << 16)):
            raise _unavailable("the limit was not taken", self._limit, expected=text, found=found)
        return found

    def _reclaim_to(self, nbytes: int) -> None:
        """v2 ends processes when a new limit cannot be reached at once: drop page cache before it is set."""
        over = int((self.folder / "memory.current").read_text()) - nbytes
        if over > 0:
            with contextlib.suppress(OSError):  # not before Linux 5.19; EAGAIN: could not drop all of it
                (self.folder / "memory.reclaim").write_text(str(over))

    def usage(self) -> Usage:
        """Raises Edge0Error PROBE_UNAVAILABLE when the group's counters cannot be read (it was removed)."""
        v1 = self.version == V1
        try:
            stat = _table(self.folder / "memory.stat")
            total = int((self.folder / ("memory.usage_in_bytes" if v1 else "memory.current")).read_text())
            events = _table(self.folder / ("memory.oom_control" if v1 else "memory.events"))
        except (OSError, ValueError) as error:
            raise _unavailable(f"the group's counters cannot be read ({error})", self.folder) from error
        file_bytes = stat["cache" if v1 else "file"] - stat.get("shmem", 0)  # both count shared memory as cache
        other = max(0, total - file_bytes)
        return Usage(file_bytes, other, events.get("oom_kill", 0))

    def pids(self) -> list[int]:
        """The processes in the group; 0 for one that this process cannot name, since it is of another PID namespace."""
        return [int(word) for word in _words(self.folder / "cgroup.procs")]

    def remove(self) -> None:
        """End what still runs in the group, drop its page cache and remove it. A group that is gone is no error."""
        for _ in range(_EMPTY_TRIES):
            for pid in filter(None, self.pids()):  # os.kill(0) would end our own process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError, ValueError):  # pages would keep a removed group alive in the kernel
                if self.version == V2:
                    self._reclaim_to(0)
                elif (empty := self.folder / "memory.force_empty").exists():
                    empty.write_text("0")
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # a process is still ending
                time.sleep(_WAIT_S)
            else:
                return
        raise _unavailable("the group cannot be removed", self.folder, found=f"processes {self.pids()}")


@dataclass(frozen=True)
class Limited:
    """How to start a command inside the group: its argument list goes behind `prefix`.

    `group` is None for a scope, which the service manager makes when the command starts and removes when it ends.
    """

    prefix: tuple[str, ...]
    method: str  # V1, V2 or SCOPE
    group: Group | None
    limit_bytes: int | None

    def killed(self, returncode: int) -> bool:
        """Whether the limit ended the command, which has this exit status. A scope has no counter left: SIGKILL is
        taken for the limit there, if one was set."""
        if self.group is not None:
            return self.group.usage().oom_kills > 0
        return self.limit_bytes is not None and returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)


@contextlib.contextmanager
def limited_command(limit_bytes: int | None = None, places: Cgroupfs | None = None) -> Iterator[Limited]:
    """A fresh group for one command at a time; on leaving, what still runs in it is ended and it is removed.

    `limit_bytes` None: no limit until the child sets one (`own_group().set_limit`).

    Raises:
        Edge0Error: PROBE_UNAVAILABLE with the reason where no group can be made.
    """
    places = places or Cgroupfs()
    version, own = places.own()
    name = f"{_stamp(os.getpid())}-{next(_numbers)}"
    parent = own if version == V1 else _delegated(places.root, own)
    if parent is None:
        _try_scope(_scope_prefix(places.root, f"{name}-try.scope", limit_bytes))
        yield Limited((*_scope_prefix(places.root, f"{name}.scope", limit_bytes),), SCOPE, None, limit_bytes)
        return
    sweep(parent, version)
    folder = parent / name
    try:
        folder.mkdir()
    except OSError as error:
        raise _unavailable(f"no group can be made ({error.strerror})", parent) from error
    group = Group(version, folder)
    try:
        if version == V1:
            with contextlib.suppress(OSError):
                (folder / "memory.swappiness").write_text("0")
        else:
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (folder / "memory.swap.max").write_text("0")
        if limit_bytes is not None:
            group.set_limit(limit_bytes)
        yield Limited(("/bin/sh", "-c", _ENTER, str(folder / "cgroup.procs")), version, group, limit_bytes)
    finally:
        group.remove()


def own_group(places: Cgroupfs | None = None) -> Group:
    """The group that this process was started in by `limited_command`.

    Raises:
        Edge0Error: PROBE_UNAVAILABLE when it runs in no such group: that of others is not ours to limit.
    """
    version, folder = (places or Cgroupfs()).own()
    if not _NAME.fullmatch(folder.name):
        raise _unavailable("this process was not started in a group of its own", folder)
    return Group(version, folder)


def sweep(parent: Path, version: str) -> list[str]:
    """Remove the groups below `parent` whose makers have ended; returns their names. What still runs there is ended:
    the arm of a killed session would disturb the next one. A group with a process of another PID namespace is left
    alone: its maker may live there, and what cannot be removed is of somebody else."""
    swept = []
    for folder in sorted(parent.iterdir()):
        found = _NAME.fullmatch(folder.name)
        if found and folder.is_dir() and not folder.name.startswith(f"{_stamp(int(found[1]))}-"):
            group = Group(version, folder)
            if 0 not in group.pids():
                with contextlib.suppress(Edge0Error):
                    group.remove()
                    swept.append(folder.name)
    return swept


def _stamp(pid: int) -> str:
    """First part of the names of a process's groups: a number that is used again belongs to a later process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "ended"
    return f"edge0-{pid}-{stat.rpartition(')')[2].split()[19]}"  # start in clock ticks since boot


def _delegated(root: Path, own: Path) -> Path | None:
    """The nearest v2 group above ours that may have limited children, in which this user may make groups.

    Our own group cannot: a group with processes in it has no limited children.
    """
    for folder in own.parents:
        if not folder.is_relative_to(root):
            return None
        limits = "memory" in _words(folder / "cgroup.subtree_control")
        if limits and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
            return folder
    return None


def _scope_prefix(root: Path, unit: str, limit_bytes: int | None) -> list[str]:
    user = os.geteuid()
    manager = root / "user.slice" / f"user-{user}.slice" / f"user@{user}.service"
    if shutil.which("systemd-run") is None:
        raise _unavailable("no group is delegated to this user, and there is no systemd-run")
    if user and "memory" not in _words(manager / "cgroup.controllers"):
        raise _unavailable("the user's service manager is not running, or has no memory controller", manager)
    limit = "infinity" if limit_bytes is None else str(limit_bytes)
    properties = (f"MemoryMax={limit}", "MemorySwapMax=0", "Delegate=yes")
    return [
        *("systemd-run", "--scope", "--quiet", "--collect", f"--unit={unit}"),
        *(["--user"] if user else []),
        *(part for setting in properties for part in ("-p", setting)),
        "--",
    ]


def _try_scope(prefix: list[str]) -> None:
    """Run nothing behind a scope's prefix. Raises Edge0Error PROBE_UNAVAILABLE with what the service manager said."""
    command = [*prefix, "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCOPE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unavailable("the service manager makes no scope", found=error) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise _unavailable("the service manager makes no scope", found=said)


def _table(path: Path) -> dict[str, int]:
    """`name number` lines."""
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _unavailable(detail: str, path: Path | None = None, **sides: object) -> Edge0Error:
    hint = "a page-cache budget by eviction needs no cgroup"
    return Edge0Error(ErrorKind.PROBE_UNAVAILABLE, detail, path=path, hint=hint, **sides)
