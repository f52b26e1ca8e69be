"""A page-cache budget by a balloon: a child locks memory until about the budget is left for files (macOS only).

The balloon is filled when the budget is, which is after the process has taken the memory that it serves from. It holds
as much of what is available then as leaves the budget. So it leaves less cache to a process that grows later, and the
system chooses which pages go. What is cached is probed, as with every budget: a run whose probe finds less or more is
void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.pagecache import FilePages
from experiments.budgets.balloon import Balloon, balloon_bytes, only_on_macos
from experiments.budgets.budget import RangesOf, Record, Records, slack_bytes


class BalloonBudget:
    """A `Budget` kept by locked memory elsewhere in the machine.

    Args:
        files: probe of each file, keyed by the paths that `ranges_of` returns; not closed here.
        budget_bytes: bytes of the files that may stay cached.
        ranges_of: (layer, expert) -> its (path, offset, nbytes) ranges.
        records: every record that may be noted.

    Raises (constructor): Edge0Error PROBE_UNAVAILABLE elsewhere than on macOS.
    """

    def __init__(
        self, files: Mapping[Path, FilePages], budget_bytes: int, ranges_of: RangesOf, records: Sequence[Record]
    ):
        only_on_macos()
        self.budget_bytes = budget_bytes
        self._files = dict(files)
        self._records = Records(ranges_of, records)
        self._kept_page_bytes = 0
        self._held = ExitStack()

    def note(self, layer: int, expert: int | None) -> None:
        """Nothing: the system saw the read itself."""

    def prefill(self, seed: int) -> list[Record]:
        """Evict the files, fill the balloon, then cache the same records that eviction starts with; returns them.

        Raises:
            Edge0Error: PROBE_UNAVAILABLE when less memory is available than the budget, or so much cannot be locked.
        """
        self.close()
        for pages in self._files.values():
            pages.evict()
        self._held.enter_context(Balloon(balloon_bytes(self.budget_bytes)))
        chosen, ledger = self._records.prefill(self._files, self.budget_bytes, seed)
        self._kept_page_bytes = ledger.page_bytes
        return [self._records.names[index] for index in chosen]

    def cached_bytes(self) -> int:
        """Bytes of the files in the page cache, by probe, everything in the files included."""
        return sum(pages.cached_bytes() for pages in self._files.values())

    def kept_page_bytes(self) -> int:
        """Bytes of the pages of the records that `prefill` chose; what is kept later only the system knows."""
        return self._kept_page_bytes

    def drain(self) -> None:
        """
        Raises:
            Edge0Error: PROBE_UNAVAILABLE when the files hold more than the budget.
        """
        cached, limit = self.cached_bytes(), self.budget_bytes + slack_bytes(self.budget_bytes)
        if cached > limit:
            raise Edge0Error(
                ErrorKind.PROBE_UNAVAILABLE,
                "the balloon left too much memory",
                expected=f"at most {limit} bytes cached",
                found=cached,
                hint="other programs may have ended meanwhile; keep the budget by eviction",
            )

    def close(self) -> None:
        """Let go of the locked memory."""
        self._held.close()
