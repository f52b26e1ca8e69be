"""Why a run may not speak: reasons that it finds in itself, and one that only shows beside the session's other runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from experiments.arms import ARMS
from experiments.budgets.budget import slack_bytes
from experiments.conditions import Condition

FOREIGN_SHARE, FOREIGN_BYTES = 0.25, 64 << 20  # reads of others that make a run void


def void_reasons(
    row: dict[str, Any],
    timed: pd.DataFrame,
    condition: Condition,
    swapped: bool,
    kept_page_bytes: int | None = None,
) -> Iterator[str]:
    """Of one run: something was dropped, the machine swapped, or the condition did not hold.

    Args:
        timed: its loads.
        kept_page_bytes: what its budget had brought into the page cache and not given up.
    """
    if row["dropped"]:
        yield f"{row['dropped']} routed experts were dropped"
    if swapped:
        yield "the machine swapped"
    if not row["steady"]:
        yield f"no steady state after {row['warmup_steps']} warm-up steps"
    probed = timed[timed.cold_bytes >= 0]
    asked, cold = int(probed.asked_bytes.sum()), int(probed.cold_bytes.sum())
    step_bytes = int(timed.asked_bytes.sum()) // max(1, row["timed_steps"])
    after, whole = row["cached_after_bytes"], row["checkpoint_bytes"]
    # A page fault also reads the neighbourhood, so that some of a step's later reads find their bytes there.
    floor = 0.9 if row["fault_window"] == "none" else 0.75
    if condition.name == "cold" and (cold < floor * asked or after > max(16 << 20, whole // 20) + step_bytes):
        yield f"cold asked for, but {cold} of {asked} probed bytes were, and {after} bytes stayed cached"
    if condition.name == "warm" and (cold > 0.02 * asked or after < 0.97 * whole):
        yield f"warm asked for, but {cold} of {asked} probed bytes were cold, and {after} of {whole} stayed cached"
    if condition.name == "limit" and after > row["memory_limit_bytes"]:
        yield f"{after} bytes of the file were cached, more than its limit allows: somebody else read it"
    if condition.name == "budget":
        slack = slack_bytes(row["budget_bytes"])
        ceiling = row["budget_bytes"] + slack + step_bytes
        if after > ceiling:
            yield f"{after} bytes of the checkpoint were cached, above {ceiling}"
        # The kernel's own reclaim may take pages that were idle for a minute. Direct reads look for none.
        if kept_page_bytes is not None and row["reader"] != "direct" and after < kept_page_bytes - slack:
            kept = f"{kept_page_bytes} that the budget kept (slack {slack})"
            yield f"only {after} bytes of the checkpoint were cached of {kept}: somebody else took pages away"
    own, foreign = int(timed.device_bytes.clip(lower=0).sum()), row["foreign_device_bytes"]
    if foreign is not None and foreign > max(FOREIGN_BYTES, FOREIGN_SHARE * own):
        yield f"other processes read {foreign} bytes from the device"


def void_where_outputs_differ(rows: list[dict[str, Any]], same_weights: bool = False) -> None:
    """Arms that route alike by the same kernels must choose the same tokens, and a repeat must repeat; a run that does
    not is void.

    `same_weights`: no arm has adapters, so that stock mlx-lm, too, must choose what `ondemand` chooses. It is never the
    measure of others.
    """
    first: dict[tuple[str, int, str], str] = {}
    for row in sorted(rows, key=lambda row: ARMS[row["arm"]].resident):
        if row["output_hash"] is None:  # it failed before it chose anything
            continue
        arm = ARMS[row["arm"]]
        route = ("ondemand" if arm.resident and same_weights else arm.route, row["k"], row["kernels"])
        expected = first.setdefault(route, row["output_hash"])
        if row["output_hash"] != expected:
            why = f"its tokens differ from the first run of {route[0]} at K={row['k']}"
            row["void"], row["void_reason"] = True, "; ".join(filter(None, [row["void_reason"], why]))
