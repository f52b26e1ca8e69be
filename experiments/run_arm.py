"""One arm of a session, in its own process: bring the page cache into its condition, warm up, measure, write rows.

    python -m experiments.run_arm SPEC.json OUT_DIR

Replays a given token sequence, so that every arm does the same work. Knows nothing of other arms, of order or of
verdicts; it says of itself alone whether its condition held.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pandas as pd
import psutil

from edge0 import Edge0Error
from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import EXIT_CODE, ErrorKind
from edge0.families import ModelConfig, read_config
from edge0.prerouter.schedule import predicted_layers
from edge0.telemetry.host import StolenTime, disk_of
from edge0.telemetry.memory import (
    memory_counters,
    process_device_bytes,
    process_large_page_bytes,
    system_swap_counters,
)
from edge0.telemetry.pagecache import FilePages, self_test
from edge0.trace import RouteTrace
from experiments.arms import find_arm
from experiments.conditions import Condition, open_budget, prepare
from experiments.decoders import Decoder, ResidentDecoder, StreamedDecoder, way_of
from experiments.finished import write_json
from experiments.observer import CacheObserver
from experiments.peers.llama import LlamaDecoder
from experiments.rows import ROW_KINDS, StepTime, load_rows, step_rows
from experiments.steady import warm_up
from experiments.void import void_reasons

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
    "cached_before_bytes cached_after_bytes foreign_device_bytes checkpoint_bytes large_page_bytes stolen_share"
).split()


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
    probe_every: int  # in timed steps the page cache is looked at before one in n loads; 0: never, not even before
    seed: int
    budget_by: str = "eviction"  # or "cgroup": of the group that the process was started in
    memory_limit_bytes: int | None = None  # of that group, for the whole process; whoever starts it sets it
    trace: str | None = None  # a file of routes
    kernels: str = "mlx"  # what computes, as EngineOptions.kernels has it; the resident arm is MLX's in any case
    gguf: str | None = None  # the file of a peer's arm
    peers: str | None = None  # the folder of the peers' packages
    lower_cache: str = "unknown"  # what is known of a cache below this machine's: "none", "suspected" or "unknown"

    @property
    def options(self) -> dict[str, Any]:
        """What the session decides of EngineOptions; the arm may change some of it."""
        keys = ("k", "adapter_k", "lora", "launch_groups", "reader_threads", "kernels")
        return {key: getattr(self, key) for key in keys}


def measure(spec: RunSpec) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Run one arm; returns (run row without order, step rows, load rows)."""
    config = read_config(spec.model)
    condition = Condition.parse(spec.condition)
    layout = ExpertLayout.of(CheckpointIndex.open(spec.model), config)
    arm = find_arm(spec.arm)
    paths = (Path(spec.gguf),) if arm.peer else layout.paths
    probe = self_test(paths[0])
    if probe.method == "unavailable":
        detail, hint = "the cold share cannot be measured", "`edge0 doctor` says what works on this machine"
        raise Edge0Error(ErrorKind.PROBE_UNAVAILABLE, detail, found=probe.reason, hint=hint)
    with ExitStack() as stack:
        files = {path: stack.enter_context(FilePages(path, probe.method)) for path in paths}
        budget_bytes = condition.budget_bytes(layout.total_bytes)
        budget = None
        if budget_bytes is not None:
            by = spec.budget_by if condition.name == "budget" else "eviction"  # cold is a budget of nothing
            budget = open_budget(by, files, budget_bytes, layout)
            stack.callback(budget.close)
        observer = CacheObserver(files, budget, 1 if spec.probe_every else 0, spec.seed)
        limited = condition.name == "limit"
        cached_before = prepare(condition, files) if limited else None  # before somebody maps the files
        decoder = _decoder(spec, config, layout, observer)
        stack.callback(decoder.close)
        load_peak = None if arm.peer else mx.get_peak_memory()
        if not limited:
            cached_before = prepare(condition, files, budget, spec.seed)
        swap = system_swap_counters()
        warmup, steady = warm_up(decoder, spec.prompt, spec.warmup_tokens)
        disk = disk_of(paths[0])
        read_before = _device_reads(disk)
        first = decoder.recorder.step + 1
        observer.probe_every = spec.probe_every
        stolen = StolenTime()
        times, outputs = _timed_steps(decoder, spec.timed_tokens, observer.counts_device_bytes and not arm.peer)
        stolen_share = stolen.share()
        memory, large_page_bytes = dataclasses.asdict(memory_counters()), process_large_page_bytes()
        if arm.peer:  # what it allocates is not MLX's
            memory |= {key: None for key in memory if key.startswith("alloc_")}
        decoder.close()  # with it end the reads of the last prediction: what was asked for has a row, and no more comes
        read_after = _device_reads(disk)
        kept_page_bytes = None
        if budget is not None:
            budget.drain()  # raises what the budget met
            kept_page_bytes = budget.kept_page_bytes()
        cached_after = sum(pages.cached_bytes() for pages in files.values())
        predicted = _predicted(spec, config)
        loads = load_rows(decoder.recorder, spec.run_id, predicted)
        loads["step"] -= first  # timed steps count from 0; what came before is negative
        steps = step_rows(decoder.recorder, loads, first, times, predicted)
        steps.insert(0, "run_id", spec.run_id)
        if arm.resident or arm.peer:
            steps["hits"] = math.nan  # nothing is asked for
        timed = loads[loads.step >= 0]
        foreign = None
        if read_before is not None and read_after is not None:
            foreign = read_after - read_before - int(steps.device_bytes.sum())
        row = _described(spec, layout) | {
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
            **memory,
            "large_page_bytes": large_page_bytes,
            "stolen_share": stolen_share,
            "budget_bytes": budget_bytes,
            "cached_before_bytes": cached_before,
            "cached_after_bytes": cached_after,
            "foreign_device_bytes": foreign,
            "checkpoint_bytes": sum(pages.file_bytes for pages in files.values()),
            "dropped": decoder.recorder.dropped,
            "token_hash": _digest([*spec.prompt, *spec.warmup_tokens, *spec.timed_tokens]),
            "output_hash": _digest(outputs),
        }
        swapped = swap != system_swap_counters()
        reasons = list(void_reasons(row, timed, condition, swapped, kept_page_bytes))
        return row | {"void": bool(reasons), "void_reason": "; ".join(reasons)}, steps, loads


def failed(spec: RunSpec, error: Edge0Error) -> dict[str, Any]:
    """The row of a run that ended in an error of its own: void, with the reason, and no number.

    Raises:
        Edge0Error: whatever the checkpoint is refused for.
    """
    row = _described(spec, ExpertLayout.of(CheckpointIndex.open(spec.model), read_config(spec.model)))
    row |= dict.fromkeys(RUN_NUMBERS) | {"timed_steps": 0, "warmup_steps": 0, "steady": False}
    dropped = int(error.kind is ErrorKind.EXPERT_ABSENT)
    row |= {"bank_bytes": 0, "bank_slots": 0, "dropped": dropped, "token_hash": "", "output_hash": None}
    return row | {"void": True, "void_reason": str(error)}


def _described(spec: RunSpec, layout: ExpertLayout) -> dict[str, Any]:
    """What a run is, as columns, before anything of it is measured."""
    return {
        "run_id": spec.run_id,
        "arm": spec.arm,
        "k": spec.k,
        "condition": str(Condition.parse(spec.condition)),
        "layout": "stacked" if layout.stacked else "records",
        **way_of(find_arm(spec.arm), spec.options),
        "budget_by": spec.budget_by,
        "memory_limit_bytes": spec.memory_limit_bytes,
        "trace": Path(spec.trace).name if spec.trace is not None else "",
        "lower_cache": spec.lower_cache,
    }


def _timed_steps(decoder: Decoder, tokens: list[int], counted: bool) -> tuple[list[StepTime], list[int]]:
    """Decode the tokens, each step timed; returns (times, the tokens that were chosen). `counted`: the loads say what
    the storage delivered, otherwise the process is asked after each step."""
    totals = decoder.recorder.totals
    times, outputs = [], []
    for token in tokens:
        hits, device = totals.hits, None if counted else process_device_bytes()
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        outputs.append(decoder.step(token))
        took = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        moved = None if device is None else process_device_bytes() - device
        times.append(StepTime(*took, totals.hits - hits, moved))
    return times, outputs


def _decoder(spec: RunSpec, config: ModelConfig, layout: ExpertLayout, observer: CacheObserver) -> Decoder:
    arm = find_arm(spec.arm)
    if arm.resident:
        return ResidentDecoder(Path(spec.model), config, spec.k)
    if arm.peer:
        positions = len(spec.prompt) + len(spec.warmup_tokens) + len(spec.timed_tokens)
        return LlamaDecoder(Path(spec.gguf), config, spec.k, arm.peer, positions, Path(spec.peers))
    routes = RouteTrace.load(spec.trace) if spec.trace is not None else None
    return StreamedDecoder(arm, Path(spec.model), spec.options, spec.bank_slots, layout, observer, routes)


def _predicted(spec: RunSpec, config: ModelConfig) -> tuple[int, ...]:
    """The layers that heads would predict, in every arm, so that arms compare the same layers."""
    adapter = open_adapter(Path(spec.model), config.family, "prerouter", spec.adapter_k or spec.k)
    return predicted_layers(config, adapter.owners, adapter.header.path)


def _device_reads(disk: str | None) -> int | None:
    """Bytes that a disk has read since boot, whoever asked; None where it has no counter."""
    counters = (psutil.disk_io_counters(perdisk=True, nowrap=False) or {}).get(disk)
    return counters.read_bytes if counters is not None else None


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def write_row(row: dict[str, Any], out: Path) -> None:
    """Write a run's row, its last file: whole or not at all, since it says that the run was finished."""
    write_json(out / f"{row['run_id']}.json", row)


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
        for kind, rows in zip(ROW_KINDS, (steps, loads), strict=True):
            rows.to_parquet(out / f"{spec.run_id}.{kind}.parquet")
    write_row(row, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
