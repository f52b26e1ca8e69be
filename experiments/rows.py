"""What one run leaves behind, as rows: one for each read, one for each timed step. Arithmetic only; judges nothing.

A step's time has parts that do not overlap, all on the engine thread: `wait_ms` for reads (or reading, copying and
stacking itself), `route_ms` for a router's choice, `launch_ms` and `evaluate_ms` for MLX, `sample_ms` to bring the
token to the host, and what is left, `build_ms`: Python, and graphs that are built. `compute_ms` is the three of MLX.
An arm that reads on the engine thread is also observed there; that time is taken out of its steps and waits.
`cpu_ms` is what all threads of the process used meanwhile, observing included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from edge0.telemetry.loads import EVALUATE, LAUNCH, LOADS, ROUTE, SAMPLE, Recorder

ROW_KINDS = ("steps", "loads")  # the files of a run beside its own row
LOAD_COLUMNS = (
    "step layer expert purpose asked_bytes submit_ns start_ns end_ns advise_ns calls thread cold_bytes cold_page_bytes "
    "inflight_bytes device_bytes"
).split()


@dataclass(frozen=True)
class StepTime:
    """What one timed step took: of the clock, and of all cores together; experts that it found in memory; what the
    storage delivered to the whole process, None where the loads themselves say it."""

    wall_ns: int
    cpu_ns: int
    hits: int
    device_bytes: int | None = None


def load_rows(recorder: Recorder, run_id: str, predicted: Iterable[int]) -> pd.DataFrame:
    """One row per expert read, by the recorder's own step numbers. `predicted`: layers that heads would predict."""
    rows = [[getattr(load, column) for column in LOAD_COLUMNS] for load in recorder.loads]
    frame = pd.DataFrame(rows, columns=LOAD_COLUMNS)
    frame.insert(0, "run_id", run_id)
    return frame.assign(predicted_layer=frame.layer.isin(list(predicted)).astype(bool))


def step_rows(
    recorder: Recorder, loads: pd.DataFrame, first: int, times: list[StepTime], predicted: Iterable[int]
) -> pd.DataFrame:
    """One row per timed decode step. Loads, numbered from the first timed step, belong to the step that asked for
    them; the recorder calls that step `first`."""
    predicted = list(predicted)
    waits = pd.DataFrame(recorder.waits, columns=["step", "reason", "layer", "ns"])
    observing = pd.DataFrame(recorder.observing, columns=["step", "layer", "ns"])
    waits = pd.concat([waits, observing.assign(reason=LOADS, ns=-observing.ns)], ignore_index=True)
    rows = []
    for number, time in enumerate(times):
        step = first + number
        here, waited = loads[loads.step == number], waits[waits.step == step]
        of_predicted = here[here.predicted_layer]
        on_loads = waited[waited.reason == LOADS]
        in_predicted_ms = on_loads[on_loads.layer.isin(predicted)].ns.sum() / 1e6
        step_ms = (time.wall_ns - observing[observing.step == step].ns.sum()) / 1e6
        ms = {reason: waited[waited.reason == reason].ns.sum() / 1e6 for reason in (LOADS, ROUTE, LAUNCH, EVALUATE)}
        sample_ms = waited[waited.reason == SAMPLE].ns.sum() / 1e6
        moved = int(here.device_bytes.clip(lower=0).sum()) if time.device_bytes is None else time.device_bytes
        rows.append(
            {
                "step": number,
                "timed": True,
                "step_ms": step_ms,
                "wait_ms": ms[LOADS],
                "wait_predicted_ms": in_predicted_ms,
                "wait_gate_ms": ms[LOADS] - in_predicted_ms,
                "route_ms": ms[ROUTE],
                "launch_ms": ms[LAUNCH],
                "evaluate_ms": ms[EVALUATE],
                "sample_ms": sample_ms,
                "build_ms": step_ms - sum(ms.values()) - sample_ms,
                "compute_ms": ms[ROUTE] + ms[LAUNCH] + ms[EVALUATE],
                "cpu_ms": time.cpu_ns / 1e6,
                "loads": len(here),
                "loads_predicted": len(of_predicted),
                "hits": time.hits,
                "read_calls": int(here.calls.sum()),
                "asked_bytes": int(here.asked_bytes.sum()),
                "probed_bytes": int(here[here.cold_bytes >= 0].asked_bytes.sum()),
                "cold_bytes": int(here.cold_bytes.clip(lower=0).sum()),
                "inflight_bytes": int(here.inflight_bytes.clip(lower=0).sum()),
                "device_bytes": moved,
                "load_busy_ms": busy_ms(here),
                "load_busy_predicted_ms": busy_ms(of_predicted),
                "dropped": recorder.drops[step],
            }
        )
    return pd.DataFrame(rows)


def busy_ms(loads: pd.DataFrame) -> float:
    """Time during which at least one of these loads was under way."""
    total, reached = 0, 0
    for start, end in sorted(zip(loads.start_ns, loads.end_ns, strict=True)):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6
