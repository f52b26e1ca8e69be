"""A page-cache budget by a memory cgroup: the kernel itself keeps it, as it would on a machine with less memory.

The process runs in a group of its own (`cgroups.limited_command`). The limit of a group counts everything
that its processes hold, so a limit alone would give less cache to whoever holds more slots. Here the limit follows:
it is the budget plus whatever else the group is charged for, and what is made equal between arms is the bytes of the
checkpoint in the page cache. Those were evicted before, so that what is read from then on is charged to this group.

Does not know which records the kernel keeps: it ages pages in two lists, which is only nearly last-used-first. Memory
that grows by more than the budget between two looks of the thread has nowhere to go: the kernel ends the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.pagecache import FilePages
from experiments.budgets.budget import RangesOf, Record, Records, slack_bytes
from experiments.budgets.cgroups import Group, own_group

MIN_BUDGET_BYTES = 4 << 20  # below, the kernel's own batches of charges are a large part of a limit
_TICK_S, _WORK_SHARE = 0.1, 0.02  # of one core at most, for looking
_STEP_MIN_BYTES, _STEP_SHARE = 512 << 10, 1 / 256  # a limit that is nearly right is left alone


class CgroupBudget:
    """A `Budget` kept by the limit of the group that this process is in; a thread lets the limit follow its memory.

    Args:
        files: probe of each file, keyed by the paths that `ranges_of` returns; not closed here.
        budget_bytes: bytes of the files that may stay cached, at least `MIN_BUDGET_BYTES`.
        ranges_of: (layer, expert) -> its (path, offset, nbytes) ranges.
        records: every record that may be noted.
        group: the group that this process is in.

    Raises (constructor): Edge0Error OPTION_INVALID for a smaller budget, PROBE_UNAVAILABLE outside a group of its own.
    """

    def __init__(
        self,
        files: Mapping[Path, FilePages],
        budget_bytes: int,
        ranges_of: RangesOf,
        records: Sequence[Record],
        group: Group | None = None,
    ):
        if budget_bytes < MIN_BUDGET_BYTES:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "a cgroup cannot keep so small a budget",
                expected=f">= {MIN_BUDGET_BYTES}",
                found=budget_bytes,
                hint="keep it by eviction",
            )
        self.budget_bytes = budget_bytes
        self._group = group or own_group()
        self._files = dict(files)
        self._records = Records(ranges_of, records)
        self._kept_page_bytes = 0
        self._limit: int | None = None
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # one adjustment at a time
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CgroupBudget:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def note(self, layer: int, expert: int | None) -> None:
        """Nothing: the kernel saw the read itself."""

    def prefill(self, seed: int) -> list[Record]:
        """Evict the files, set the limit, then cache the same records that eviction starts with; returns them."""
        for pages in self._files.values():
            pages.evict()
        self._adjust()
        chosen, ledger = self._records.prefill(self._files, self.budget_bytes, seed)
        self._kept_page_bytes = ledger.page_bytes
        self._adjust()
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="edge0-cgroup-budget", daemon=True)
            self._thread.start()
        return [self._records.names[index] for index in chosen]

    def cached_bytes(self) -> int:
        """Bytes of the files in the page cache, by probe, everything in the files included."""
        return sum(pages.cached_bytes() for pages in self._files.values())

    def charged_bytes(self) -> int:
        """Bytes of page cache that the group is charged for, by the kernel's own count: other files included."""
        return self._group.usage().file_bytes

    def kept_page_bytes(self) -> int:
        """Bytes of the pages of the records that `prefill` chose; what is kept later only the kernel knows."""
        return self._kept_page_bytes

    def drain(self) -> None:
        """Let the limit follow once more and check that it held.

        Raises:
            Edge0Error: PROBE_UNAVAILABLE when the group is charged for less than the files hold (another process reads
                them) or the files hold more than the budget; or what the following thread failed with.
        """
        if self._failure is not None:
            raise self._failure
        self._adjust()
        cached, charged = self.cached_bytes(), self.charged_bytes()
        slack = slack_bytes(self.budget_bytes)
        if cached > charged + slack:
            raise _broken("pages of the checkpoint are charged to others", f"at most {charged + slack}", cached)
        if cached > self.budget_bytes + slack:
            raise _broken("the limit did not hold", f"at most {self.budget_bytes + slack}", cached)

    def close(self) -> None:
        """Stop following and lift the limit."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._limit is not None:
            self._limit = self._group.set_limit(None)

    def _follow(self) -> None:
        pause = _TICK_S
        while not self._closing.wait(pause):
            begun = time.monotonic()
            try:
                self._adjust()
            except Exception as error:  # the run goes on; `drain` tells
                self._failure = self._failure or error
            pause = max(_TICK_S, (time.monotonic() - begun) / _WORK_SHARE)

    def _adjust(self) -> None:
        """Set the limit to the budget plus what the group holds besides the files: other memory, and other files."""
        with self._lock:
            usage = self._group.usage()
            foreign = max(0, usage.file_bytes - self.cached_bytes())
            wanted = self.budget_bytes + usage.other_bytes + foreign
            step = max(_STEP_MIN_BYTES, int(self.budget_bytes * _STEP_SHARE))
            if self._limit is None or abs(wanted - self._limit) > step:
                self._limit = self._group.set_limit(wanted)


def _broken(detail: str, expected: str, found: int) -> Edge0Error:
    hint = "another process may read the checkpoint"
    return Edge0Error(ErrorKind.PROBE_UNAVAILABLE, detail, expected=f"{expected} bytes cached", found=found, hint=hint)
