"""One arm of a session, in its own process: bring the page cache into its condition, warm up, measure, write rows.

    python -m experiments.run_arm SPEC.json OUT_DIR

Replays a given token sequence, so that every arm does the same work. Knows nothing of other arms, of order or of
verdicts; it says of itself alone whether its condition held.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
import psutil

from edge0 import Edge0Error
from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import EXIT_CODE, ErrorKind
from edge0.prerouter.schedule import predicted_layers
from edge0.telemetry.loads import COMPUTE, LOADS, Recorder
from edge0.telemetry.memory import memory_counters, system_swap_counters
from edge0.telemetry.pagecache import FilePages, self_test
from edge0.tiers import ModelConfig, read_config
from experiments.arms import find_arm
from experiments.conditions import CacheBudget, Condition, prepare
from experiments.decoders import Decoder, ResidentDecoder, StreamedDecoder
from experiments.observer import CacheObserver

MAX_WARMUPS = 5  # times that a request is warmed up before a run gives up on a steady state
STEADY_ERRORS = 3.0  # two windows agree when they differ by fewer standard errors of their steps' scatter
STEADY_SHARE = 0.05  # or by less than this: of the loads, or as a share of cold bytes
# What ends one run and not its session; the run is void.
RUN_FAILURES = {
    ErrorKind.PROBE_UNAVAILABLE,
    ErrorKind.READ_FAILED,
    ErrorKind.EXPERT_ABSENT,
    ErrorKind.NUMERIC,
}
RUN_NUMBERS = (
    "tok_s probe fault_window resident_bytes alloc_load_peak_bytes alloc_active_bytes alloc_cache_bytes "
    "alloc_peak_bytes rss_anon_bytes rss_file_bytes rss_bytes rss_peak_bytes swap_bytes budget_bytes "
    "cached_before_bytes cached_after_bytes foreign_device_bytes checkpoint_bytes"
).split()
FOREIGN_SHARE, FOREIGN_BYTES = 0.25, 64 << 20  # reads of others that make a run void


Window = tuple[np.ndarray, np.ndarray]  # loads and cold share of each step


@dataclass(frozen=True)
class RunSpec:
    """Everything that one arm process is told."""

    run_id: str
    arm: str
    k: int
    model: str
    condition: str
    prompt: list[int]
    warmup_tokens: list[int]
    timed_tokens: list[int]
    bank_slots: int
    lora: bool
    adapter_k: int | None
    launch_groups: int
    reader_threads: int
    probe_every: int  # in timed steps the page cache is looked at before each n-th load; 0: never, not even before
    seed: int


def measure(spec: RunSpec) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Run one arm; returns (run row without order, step rows, load rows)."""
    config = read_config(spec.model)
    condition = Condition.parse(spec.condition)
    layout = ExpertLayout.of(CheckpointIndex.open(spec.model), config)
    probe = self_test(layout.paths[0])
    if probe.method == "unavailable":
        raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, "the cold share cannot be measured", found=probe.reason)
    with ExitStack() as stack:
        files = {path: stack.enter_context(FilePages(path, probe.method)) for path in layout.paths}
        budget_bytes = condition.budget_bytes(layout.total_bytes)
        budget = None
        if budget_bytes is not None:
            budget = stack.enter_context(
                CacheBudget(
                    files,
                    budget_bytes,
                    lambda layer, expert: [(r.path, r.offset, r.nbytes) for r in layout.ranges(layer, expert)],
                    layout.records(),
                )
            )
        observer = CacheObserver(files, budget, 1 if spec.probe_every else 0)
        decoder = _decoder(spec, config, layout, observer)
        stack.callback(decoder.close)
        load_peak = mx.get_peak_memory()
        cached_before = prepare(condition, files, budget, spec.seed)
        swap = system_swap_counters()
        warmup, steady = _warm_up(decoder, spec)
        disk = _device_reads()
        first = decoder.recorder.step + 1
        times, outputs = [], []
        observer.probe_every = spec.probe_every
        for token in spec.timed_tokens:
            start = time.perf_counter_ns()
            outputs.append(decoder.step(token))
            times.append(time.perf_counter_ns() - start)
        foreign = _device_reads() - disk
        if budget is not None:
            budget.drain()  # raises what the evictor met
        cached_after = sum(pages.cached_bytes() for pages in files.values())
        memory = memory_counters()
        predicted = _predicted(spec, config)
        loads = load_rows(decoder.recorder, predicted, spec)
        loads["step"] -= first  # timed steps count from 0; what came before is negative
        steps = step_rows(decoder.recorder, loads, first, times, predicted, spec)
        steps["hits"] = (spec.k * len(config.moe_layers) - steps.loads).clip(lower=0)
        timed = loads[loads.step >= 0]
        foreign -= int(timed.device_bytes.clip(lower=0).sum())
        row = {
            "run_id": spec.run_id,
            "arm": spec.arm,
            "k": spec.k,
            "condition": str(condition),
            "tok_s": len(times) / (steps.step_ms.sum() / 1e3),
            "timed_steps": len(times),
            "warmup_steps": warmup,
            "steady": steady,
            "probe": probe.method,
            "fault_window": decoder.window,
            "bank_bytes": decoder.bank_bytes,
            "bank_slots": decoder.bank_slots,
            "resident_bytes": decoder.resident_bytes,
            "alloc_load_peak_bytes": load_peak,
            **dataclasses.asdict(memory),
            "budget_bytes": budget_bytes,
            "cached_before_bytes": cached_before,
            "cached_after_bytes": cached_after,
            "foreign_device_bytes": foreign,
            "checkpoint_bytes": sum(pages.file_bytes for pages in files.values()),
            "dropped": decoder.recorder.dropped,
            "token_hash": _digest([*spec.prompt, *spec.warmup_tokens, *spec.timed_tokens]),
            "output_hash": _digest(outputs),
        }
        reasons = list(void_reasons(row, timed, condition, swap != system_swap_counters()))
        return row | {"void": bool(reasons), "void_reason": "; ".join(reasons)}, steps, loads


def failed(spec: RunSpec, error: Edge0Error) -> dict[str, Any]:
    """The row of a run that ended in an error of its own: void, with the reason, and no number."""
    row = {"run_id": spec.run_id, "arm": spec.arm, "k": spec.k, "condition": str(Condition.parse(spec.condition))}
    row |= dict.fromkeys(RUN_NUMBERS) | {"timed_steps": 0, "warmup_steps": 0, "steady": False}
    dropped = int(error.kind is ErrorKind.EXPERT_ABSENT)
    row |= {"bank_bytes": 0, "bank_slots": 0, "dropped": dropped, "token_hash": "", "output_hash": None}
    return row | {"void": True, "void_reason": str(error)}


def void_reasons(row: dict[str, Any], timed: pd.DataFrame, condition: Condition, swapped: bool) -> Iterator[str]:
    """Why a run may not speak: something was dropped, the machine swapped, or the condition did not hold."""
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
    if condition.name == "budget":
        ceiling = row["budget_bytes"] + max(16 << 20, row["budget_bytes"] // 10) + step_bytes
        if row["cached_after_bytes"] > ceiling:
            yield f"{row['cached_after_bytes']} bytes of the checkpoint were cached, above {ceiling}"
    own = int(timed.device_bytes.clip(lower=0).sum())
    if row["foreign_device_bytes"] > max(FOREIGN_BYTES, FOREIGN_SHARE * own):
        yield f"other processes read {row['foreign_device_bytes']} bytes from the device"


def _decoder(spec: RunSpec, config: ModelConfig, layout: ExpertLayout, observer: CacheObserver) -> Decoder:
    arm = find_arm(spec.arm)
    if arm.resident:
        return ResidentDecoder(Path(spec.model), config)
    keys = ("k", "adapter_k", "lora", "launch_groups", "reader_threads")
    options = {key: getattr(spec, key) for key in keys}
    return StreamedDecoder(arm, Path(spec.model), options, spec.bank_slots, layout, observer)


def _warm_up(decoder: Decoder, spec: RunSpec) -> tuple[int, bool]:
    """Warm up until loads and cold share hold still; returns (steps, whether they did).

    A warm-up is a new request, its prompt and all warm-up tokens: however often it takes, the timed steps begin in the
    same context in every arm, while bank and page cache live on. Its first third still feels the prompt, which goes
    through more experts than memory holds. It was steady when its other two thirds agree, or when the last third
    repeats what the same tokens did in the warm-up before.
    """
    window = max(1, len(spec.warmup_tokens) // 3)
    previous = None
    for attempt in range(1, MAX_WARMUPS + 1):
        decoder.begin(spec.prompt)
        for token in spec.warmup_tokens:
            decoder.step(token)
        last = decoder.recorder.step
        middle, end = (_window(decoder.recorder, step, window) for step in (last - window, last))
        if _agree(middle, end) or (previous is not None and _agree(previous, end)):
            return attempt * len(spec.warmup_tokens), True
        previous = end
    return MAX_WARMUPS * len(spec.warmup_tokens), False


def _window(recorder: Recorder, last: int, steps: int) -> Window:
    """(loads, cold share) of each of some steps up to `last`."""
    loads, asked, cold = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for load in recorder.loads:
        place = load.step - (last - steps + 1)
        if 0 <= place < steps:
            loads[place] += 1
            asked[place] += load.asked_bytes
            cold[place] += max(0, load.cold_bytes)
    return loads, cold / np.maximum(asked, 1)


def _agree(a: Window, b: Window) -> bool:
    """Whether two windows' means differ by no more than their steps' own scatter, or by less than a trifle.

    Steps differ in what they route, so that windows of a steady arm differ too.
    """

    def alike(x: np.ndarray, y: np.ndarray, trifle: float) -> bool:
        error = np.sqrt((np.var(x) + np.var(y)) / max(1, len(x) - 1))
        return bool(abs(np.mean(x) - np.mean(y)) <= max(trifle, STEADY_ERRORS * error))

    return alike(a[0], b[0], STEADY_SHARE * np.mean(a[0])) and alike(a[1], b[1], STEADY_SHARE)


def load_rows(recorder: Recorder, predicted: tuple[int, ...], spec: RunSpec) -> pd.DataFrame:
    """One row per expert read, by the recorder's own step numbers."""
    columns = ["step", "layer", "expert", "purpose", "asked_bytes", "submit_ns", "start_ns", "end_ns", "advise_ns"]
    columns += ["calls", "thread", "cold_bytes", "inflight_bytes", "device_bytes"]
    rows = [[getattr(load, column) for column in columns] for load in recorder.loads]
    frame = pd.DataFrame(rows, columns=columns)
    frame.insert(0, "run_id", spec.run_id)
    return frame.assign(predicted_layer=frame.layer.isin(predicted).astype(bool))


def step_rows(
    recorder: Recorder, loads: pd.DataFrame, first: int, times_ns: list[int], predicted: tuple[int, ...], spec: RunSpec
) -> pd.DataFrame:
    """One row per timed decode step. Loads belong to the step that asked for them."""
    rows = []
    waits = pd.DataFrame(recorder.waits, columns=["step", "reason", "layer", "ns"])
    # An arm that loads on the engine thread is also observed there: that time is taken out of its step and its waits.
    observing = pd.DataFrame(recorder.observing, columns=["step", "layer", "ns"])
    observing = observing.assign(reason=LOADS, ns=-observing.ns)
    waits = pd.concat([waits, observing], ignore_index=True)
    for number, time_ns in enumerate(times_ns):
        step = first + number
        here = loads[loads.step == number]
        looked = observing[observing.step == step].ns.sum()
        waited = waits[waits.step == step]
        on_loads = waited[waited.reason == LOADS]
        in_predicted = on_loads[on_loads.layer.isin(predicted)]
        of_predicted = here[here.predicted_layer]
        rows.append(
            {
                "run_id": spec.run_id,
                "step": number,
                "timed": True,
                "step_ms": (time_ns + looked) / 1e6,
                "wait_ms": on_loads.ns.sum() / 1e6,
                "wait_predicted_ms": in_predicted.ns.sum() / 1e6,
                "wait_gate_ms": (on_loads.ns.sum() - in_predicted.ns.sum()) / 1e6,
                "compute_ms": waited[waited.reason == COMPUTE].ns.sum() / 1e6,
                "loads": len(here),
                "loads_predicted": len(of_predicted),
                "read_calls": int(here.calls.sum()),
                "asked_bytes": int(here.asked_bytes.sum()),
                "probed_bytes": int(here[here.cold_bytes >= 0].asked_bytes.sum()),
                "cold_bytes": int(here.cold_bytes.clip(lower=0).sum()),
                "inflight_bytes": int(here.inflight_bytes.clip(lower=0).sum()),
                "device_bytes": int(here.device_bytes.clip(lower=0).sum()),
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


def _predicted(spec: RunSpec, config: ModelConfig) -> tuple[int, ...]:
    """The layers that heads would predict, in every arm, so that arms compare the same layers."""
    adapter = open_adapter(Path(spec.model), config.family, "prerouter", spec.adapter_k or spec.k)
    return predicted_layers(config, adapter.owners, adapter.header.path)


def _device_reads() -> int:
    counters = psutil.disk_io_counters(nowrap=False)
    return counters.read_bytes if counters is not None else 0


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def main() -> int:
    spec = RunSpec(**json.loads(Path(sys.argv[1]).read_text()))
    out = Path(sys.argv[2])
    try:
        row, steps, loads = measure(spec)
    except Edge0Error as error:
        if error.kind not in RUN_FAILURES:
            print(f"edge0: {error}", file=sys.stderr)
            return EXIT_CODE
        row = failed(spec, error)
    else:
        steps.to_parquet(out / f"{spec.run_id}.steps.parquet")
        loads.to_parquet(out / f"{spec.run_id}.loads.parquet")
    (out / f"{spec.run_id}.json").write_text(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
