"""The end of a session: the files of its runs joined into one table each, and session.json, which says what it was."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import describe_host, machine_id
from experiments.arms import ARMS
from experiments.conditions import Condition
from experiments.options import SessionOptions
from experiments.preflight import Ready
from experiments.resume import Work
from experiments.rows import ROW_KINDS
from experiments.void import void_where_outputs_differ


def gather(
    options: SessionOptions, ready: Ready, work: Work, rows: list[dict[str, Any]], about: Mapping[str, Any]
) -> None:
    """Fill the complete folder of `work`; `about`: what else session.json is to say. What was there is not changed.

    Raises:
        Edge0Error: SESSION_VOID when every run failed. OSError passes.
    """
    folder = work.complete()
    void_where_outputs_differ(rows, same_weights=not options.lora)
    pd.DataFrame(rows).assign(session=work.session, tier=options.tier).to_parquet(folder / "runs.parquet")
    for kind in ROW_KINDS:
        parts = [path for row in rows if (path := work.folder / f"{row['run_id']}.{kind}.parquet").exists()]
        if not parts:  # a run that failed has none
            raise Edge0Error(ErrorKind.SESSION_VOID, "every run failed", found=rows[0]["void_reason"])
        pd.concat([pd.read_parquet(part) for part in parts], ignore_index=True).to_parquet(folder / f"{kind}.parquet")
    tokens = shutil.copy(work.folder / "tokens.json", folder)
    condition = Condition.parse(options.condition)
    host = describe_host(Path(options.model))
    summary = dataclasses.asdict(options) | {
        "session": work.session,
        "resumed": work.resumed,
        "machine": machine_id(),
        "family": ready.config.family.name,
        "created": work.session,
        "commit": host.get("git_commit"),
        "condition": str(condition),
        "budget_by": ready.budget_by,
        "k_values": list(options.ks),
        "budget_bytes": condition.budget_bytes(ready.layout.total_bytes),
        "expert_bytes": ready.layout.total_bytes,
        "bank_bytes": max(row["bank_bytes"] for row in rows),
        "dropped": sum(row["dropped"] for row in rows),
        "text": text_health(json.loads(Path(tokens).read_text())["tokens"]),
        "host": host,
        "meanings": {arm: ARMS[arm].meaning for arm in options.arms},
    }
    (folder / "session.json").write_text(json.dumps(summary | dict(about), indent=1, default=str))


def text_health(tokens: list[int]) -> dict[str, Any]:
    """Whether the replayed text is alive: distinct share, and the longest stretch that one short period explains."""
    longest, period_of = 0, 0
    for period in range(1, min(33, len(tokens))):
        run = 0
        for a, b in zip(tokens, tokens[period:], strict=False):
            run = run + 1 if a == b else 0
            if run + period > longest and run >= period:
                longest, period_of = run + period, period
    return {
        "tokens": len(tokens),
        "distinct_share": len(set(tokens)) / len(tokens),
        "longest_repeat_tokens": longest,
        "repeat_period": period_of,
        "stop_reason": "length",
    }
