"""Rows as load_cost writes them, on lines that a person can check by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

ASKED = 1 << 20
LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
# way -> (a, b) in ms; records cost half of stacked.
LINES = {"mmap": (0.4, 4.0), "pread": (0.4, 2.0), "willneed": (0.5, 1.5), "direct": (2.0, 0.0)}


def make_loads(
    folder: Path, *, loads: int = 30, noise_ms: float = 0.01, bump: float = 0.0, change=None, records: bool = True
) -> Path:
    """Write loads.parquet and loads.json; `bump` ms more for whatever is partly cold; `change(rows)` edits the rows."""
    rng = np.random.default_rng(1)
    layouts = {"stacked": 1.0, "records": 0.5} if records else {"stacked": 1.0}
    rows = []
    for repetition in range(loads):
        for way, (a, b) in LINES.items():
            for level in LEVELS:
                for layout, factor in layouts.items():
                    partly = bump if 0 < level < 1 and way != "direct" else 0.0
                    ms = factor * (a + b * level) + partly + rng.normal(0, noise_ms)
                    rows.append(_row(way, layout, level, repetition, ms))
        rows.append(_row("direct", "records", 1.0, repetition, 1.0) | {"role": "reference"})
    for order, row in enumerate(rows):
        row["order"] = order
    frame = pd.DataFrame(rows)
    if change is not None:
        frame = change(frame)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / "loads.parquet")
    about = {
        "session": "s9",
        "machine": "testbox",
        "tier": "mini-35b",
        "commit": "abc",
        "fault_window": "as-is",
        "seed": 0,
    }
    (folder / "loads.json").write_text(json.dumps(about | {"host": {"cpu_model": "Some CPU"}}))
    return folder


def _row(way: str, layout: str, level: float, repetition: int, ms: float) -> dict:
    cold = round(level * ASKED)
    return {
        "way": way,
        "layout": layout,
        "target_cold": level,
        "role": "load",
        "repetition": repetition,
        "layer": 1,
        "expert": repetition,
        "asked_bytes": ASKED,
        "cold_bytes": cold,
        "inflight_bytes": 0,
        "cold_page_bytes": cold,
        "cold_pieces": 1 + repetition % 3 if 0 < level < 1 else 0,
        "device_bytes": ASKED if way == "direct" else cold,
        "advise_ns": 0,
        "read_ns": round(ms * 1e6),
        "build_ns": 700_000,
        "ns": round(ms * 1e6),
    }
