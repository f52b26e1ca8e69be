"""What a cold expert costs by explicit reads and by page faults: `MODEL OUT_DIR [--threads N] [--pairs N]`.

A sample is the K experts of one layer's step. Each pair of samples evicts the same experts, verifies them cold, and
brings them into memory, once with the engine's readers and once through a mapping as the paper's arm does, in turn
first. Writes rows; ratios are made from the files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.streaming.reader import Reader, Target
from edge0.streaming.source import FaultSource, PreadSource
from edge0.telemetry.loads import DEMAND, Recorder
from edge0.telemetry.pagecache import FilePages
from experiments.alone import alone
from experiments.observer import by_file
from experiments.publish import open_pages, publish, run_command
from experiments.window import fault_window

COLD_SHARE = 0.99


def measure(model: Path, k: int, pairs: int, threads: int, seed: int) -> tuple[pd.DataFrame, str]:
    """Rows of `pairs` pairs, and how the fault window was set.

    Raises:
        Edge0Error: PROBE_UNAVAILABLE when residency cannot be read or experts cannot be made cold.
    """
    config = read_config(model)
    layout = ExpertLayout.of(CheckpointIndex.open(model), config)
    rng = np.random.default_rng(seed)
    rows = []
    with ExitStack() as stack:
        files = stack.enter_context(open_pages(layout.paths))
        with fault_window(layout.paths) as window:
            faults = FaultSource(layout.paths, random=window == "random")
        stack.callback(faults.close)
        explicit = PreadSource(layout.paths)
        stack.callback(explicit.close)
        recorder = Recorder()
        reader = Reader(explicit, recorder, threads, advise=True)
        stack.callback(reader.close)
        # Touched once, so that no way pays for the first touch of its destination.
        memory = [[np.ones(spec.nbytes, np.uint8) for spec in layout.specs] for _ in range(k)]
        targets = [[Target(memoryview(part), False) for part in expert] for expert in memory]

        def read_explicit(layer: int, experts: list[int]) -> None:
            futures = []
            for number, expert in enumerate(experts):
                ranges = layout.ranges(layer, expert)
                futures.append(reader.submit(recorder.load(layer, expert, DEMAND, ranges), ranges, targets[number]))
            for future in futures:
                future.result()

        def read_faults(layer: int, experts: list[int]) -> None:
            for number, expert in enumerate(experts):
                for part, piece in zip(memory[number], layout.ranges(layer, expert), strict=True):
                    part[:] = faults.array(piece)

        ways: dict[str, Callable[[int, list[int]], None]] = {"pread": read_explicit, "mmap": read_faults}
        for pair in track(range(pairs), "cold reads", console=Console(stderr=True)):
            layer = int(rng.choice(layout.layers))
            experts = rng.choice(layout.experts, k, replace=False).tolist()
            for way in list(ways) if pair % 2 == 0 else list(ways)[::-1]:
                cold = _evict(files, faults, layout, layer, experts)
                start = time.perf_counter_ns()
                ways[way](layer, experts)
                took = time.perf_counter_ns() - start
                rows.append({"pair": pair, "way": way, "layer": layer, "experts": k, "cold_share": cold, "ns": took})
    return pd.DataFrame(rows), window


def _evict(
    files: dict[Path, FilePages], faults: FaultSource, layout: ExpertLayout, layer: int, experts: list[int]
) -> float:
    """Make some experts cold; returns the share of their bytes that is."""
    faults.unmap()
    ranges = by_file(tuple(piece for expert in experts for piece in layout.ranges(layer, expert)))
    for pages in files.values():
        pages.evict()
    found = [files[path].residency(parts) for path, parts in ranges.items()]
    share = sum(r.cold_bytes for r in found) / sum(r.asked_bytes for r in found)
    if share < COLD_SHARE:
        raise Edge0Error(
            ErrorKind.PROBE_UNAVAILABLE, "experts could not be made cold", expected=f">= {COLD_SHARE}", found=share
        )
    return share


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.read_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    @alone("cold reads")
    def command() -> None:
        rows, window = measure(options.model, options.k, options.pairs, options.threads, options.seed)
        about = {"fault_window": window, "threads": options.threads, "k": options.k}
        publish(options.out, "reads", rows, options.model, about)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
