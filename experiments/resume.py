"""The folder in which a session works, so that one that was killed goes on where it was, and with nothing else.

`ROOT/.STAMP.unfinished` holds a manifest and the files of every finished run. A session is taken up only by one that
would measure the same thing: same options, same code, same checkpoint files, same machine since the same boot. It keeps
its stamp. A lock that the system drops with its process says whether a folder is being written. What nobody took up for
a week is swept out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import edge0
from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import describe_host, machine_id
from experiments.finished import POINTER, point, read_json, write_json
from experiments.options import SessionOptions
from experiments.plan import Run, whole_rounds

SUFFIX, MANIFEST, LOCK, COMPLETE = ".unfinished", "manifest.json", "lock", "complete"
KEPT_DAYS = 7
Say = Callable[[str], None]


def identity(options: SessionOptions, budget_by: str) -> dict[str, Any]:
    """What two sessions must share for one to go on with the other's rows. `budget_by`: the way that was settled on."""
    measured = dataclasses.asdict(options) | {"budget_by": budget_by}
    del measured["run_timeout_s"]  # a session that was too slow may go on with more patience
    places = [place for place in (options.model, options.records, options.gguf, options.trace) if place is not None]
    return identity_of(measured, places)


def identity_of(options: Mapping[str, Any], places: Sequence[Path | str]) -> dict[str, Any]:
    """The same for any experiment: its options, and what it reads, directories or files, a checkpoint first."""
    files = [path for place in map(Path, places) for path in (place, *sorted(place.rglob("*"))) if path.is_file()]
    status = {str(path.resolve()): path.stat() for path in files}
    host = describe_host(places[0])
    found = {
        "options": dict(options),
        "commit": host.get("git_commit"),
        "versions": {key: value for key, value in host.items() if key.endswith("_version")},
        "code": _code(),
        "checkpoint": {path: [stat.st_size, stat.st_mtime_ns] for path, stat in status.items()},
        "machine": machine_id(),
        "boot": _boot(),
    }
    return json.loads(json.dumps(found))


def _code() -> str:
    """Digest of what measures: the engine and the experiments, committed or not."""
    digest = hashlib.sha256()
    for package in (Path(edge0.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _boot() -> str | None:
    """The system's name for the time since it was started; None where it has none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


@dataclass
class Work:
    """The folder of one session while it is measured, locked by this process."""

    root: Path
    session: str
    resumed: list[str]  # when it was taken up again

    @property
    def folder(self) -> Path:
        return self.root / f".{self.session}{SUFFIX}"

    @property
    def target(self) -> Path:
        return self.root / self.session

    @property
    def published(self) -> bool:
        """Whether all was measured, by a process that was killed before it had announced it."""
        return self.target.exists()

    def keep_whole_rounds(self, runs: list[Run]) -> int:
        """Remove the files of every run that does not belong to a whole finished round; returns how many runs stay."""
        names = [run.name(order) for order, run in enumerate(runs)]
        kept = whole_rounds(runs, [self._row(name).exists() for name in names])
        for name in names[kept:]:
            for path in self.folder.glob(f"{name}.*"):
                path.unlink()
        return kept

    def rounds_kept(self, runs: list[Run]) -> int:
        """Rounds whose every run has its row."""
        names = [run.name(order) for order, run in enumerate(runs)]
        kept = whole_rounds(runs, [self._row(name).exists() for name in names])
        return len({run.round for run in runs[:kept]})

    def _row(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def complete(self) -> Path:
        """An empty folder for what the session leaves behind."""
        folder = self.folder / COMPLETE
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def publish(self) -> Path:
        """Give the completed folder its name, and announce it. OSError passes."""
        (self.folder / COMPLETE).rename(self.target)  # from here on nothing goes on with this folder
        return self.announce()

    def announce(self) -> Path:
        """Make the published folder the latest, and remove the rest. OSError passes."""
        point(self.root, self.session)
        self.remove()
        return self.target

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def working(root: Path, found: dict[str, Any], fresh: bool, say: Say) -> Iterator[Work]:
    """The work folder of an interrupted session with this identity, else a new one; stale ones are swept out.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with contextlib.ExitStack() as held:
        try:
            root.mkdir(parents=True, exist_ok=True)
            if (root / POINTER).is_dir():
                raise IsADirectoryError(21, f"{POINTER} is a directory")
            work = None if fresh else _take_up(root, found, held, say)
            sweep(root, say)
            if work is None:
                work = _begin(root, found, held)
        except OSError as error:
            raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=root) from error
        yield work


def _take_up(root: Path, found: dict[str, Any], held: contextlib.ExitStack, say: Say) -> Work | None:
    """The newest session of this identity that was not finished, or not announced, and that no process is writing."""
    for folder in sorted(root.glob(f".*{SUFFIX}"), reverse=True):
        if (read_json(folder / MANIFEST) or {}).get("identity") != found:
            continue
        attempt = contextlib.ExitStack()
        try:
            ours = attempt.enter_context(_locked(folder))
        except FileNotFoundError:  # finished and removed meanwhile
            continue
        if ours:
            manifest = read_json(folder / MANIFEST) or {}  # nobody ended or removed it meanwhile
            if manifest.get("identity") == found:
                held.push(attempt)
                work = Work(root, _stamp_of(folder), manifest["resumed"])
                if work.published:
                    say(f"session {work.session} is complete, and was killed before it could say so (--fresh: anew)")
                    return work
                work.resumed.append(_now())
                write_json(folder / MANIFEST, manifest)
                say(f"going on with session {work.session}, which was interrupted (--fresh: begin anew)")
                return work
        attempt.close()
    return None


def _begin(root: Path, found: dict[str, Any], held: contextlib.ExitStack) -> Work:
    while True:
        work = Work(root, _now(), [])
        try:
            if (root / work.session).exists():
                raise FileExistsError
            work.folder.mkdir()
            break
        except FileExistsError:  # of a session that began in this very second
            time.sleep(0.1)
    held.enter_context(_locked(work.folder))
    write_json(work.folder / MANIFEST, {"identity": found, "resumed": []})
    return work


def sweep(root: Path, say: Say) -> None:
    """Remove what finished sessions left over, and what nobody went on with for `KEPT_DAYS`."""
    for folder in sorted(root.glob(f".*{SUFFIX}")):
        finished = (root / _stamp_of(folder)).exists()
        with contextlib.suppress(FileNotFoundError):  # removed by another session meanwhile
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if not finished and time.time() - written < KEPT_DAYS * 86400:
                continue
            with _locked(folder) as ours:
                if ours:
                    shutil.rmtree(folder, ignore_errors=True)
                    if not finished:
                        say(f"swept session {_stamp_of(folder)}: unfinished, untouched for {KEPT_DAYS} days")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the folder is ours alone; the lock ends with this process, however that ends."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = True
    except BlockingIOError:
        ours = False
    try:
        yield ours
    finally:
        os.close(descriptor)


def _stamp_of(folder: Path) -> str:
    return folder.name.removeprefix(".").removesuffix(SUFFIX)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
