"""The named counters of memory, as tables show them: never one number called "memory".

Knows the counters of a run's row and nothing of what is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.rows import MIB, Session, markdown_table

# Name in tables to the run's column and what it counts.
COUNTERS = {
    "alloc peak": ("alloc_peak_bytes", "highest live bytes of MLX's allocator, largest of the rounds"),
    "alloc active": ("alloc_active_bytes", "live arrays of MLX's allocator at the end: weights, bank, caches"),
    "alloc cache": ("alloc_cache_bytes", "freed buffers that the allocator keeps"),
    "resident": ("resident_bytes", "weights and heads that always stay in memory; part of alloc active"),
    "bank": ("bank_bytes", "memory that may hold experts; part of alloc active"),
    "RssAnon": ("rss_anon_bytes", "anonymous memory of the process, the allocator's included"),
    "RssFile": ("rss_file_bytes", "file pages mapped into the process; the kernel may take them"),
    "peak RSS": ("rss_peak_bytes", "highest resident size, mapped file pages included, largest of the rounds"),
    "page cache": ("cached_after_bytes", "bytes of the checkpoint in the page cache when the run ended"),
}
PEAKS = ("alloc_peak_bytes", "rss_peak_bytes")


def counters(session: Session, arm: str, k: int) -> dict[str, float]:
    """Bytes by column: medians over the valid rounds, of peaks the largest; NaN where it was not counted."""
    cell = session.cell(arm, k)
    found = {}
    for column, _ in COUNTERS.values():
        values = pd.to_numeric(cell[column], errors="coerce") if column in cell else pd.Series(dtype=float)
        found[column] = float(values.max() if column in PEAKS else values.median())
    return found


def counter_table(session: Session, arms: Sequence[str]) -> str:
    """A Markdown table of all counters in MiB, one row per K and arm that the session ran."""
    planned = session.all_runs[session.all_runs["role"] == "arm"]
    rows = []
    for k in sorted(set(planned["k"])):
        for arm in (arm for arm in arms if ((planned["arm"] == arm) & (planned["k"] == k)).any()):
            values = counters(session, arm, int(k))
            shown = [
                "" if pd.isna(values[column]) else f"{values[column] / MIB:.1f}" for column, _ in COUNTERS.values()
            ]
            rows.append([str(k), arm, str(len(session.cell(arm, int(k)))), *shown])
    return markdown_table(["K", "arm", "rounds", *(f"{name} (MiB)" for name in COUNTERS)], rows, right_from=2)
