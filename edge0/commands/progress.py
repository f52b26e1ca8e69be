"""A progress bar on stderr for commands that move many bytes; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bytes_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (bytes done, bytes in all)."""
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)]
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
