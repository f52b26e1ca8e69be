"""How many reader threads and launch groups decode fastest here: short trials of one checkpoint, and what is kept.

A trial opens the engine as its commands do, and decodes the same random tokens as every other trial, each with the
experts out of the page cache: a small model that came to lie there would choose for reads that no larger one has. First
the threads are chosen, then the groups with these; of what is nearly as fast the least is taken. Half a minute cannot
see a difference of a few per cent, and does not claim one. What was chosen stands in the machine file by the
checkpoint's shape, so that a copy or a repacked one finds it too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edge0.checkpoint.layout import part_specs
from edge0.errors import Edge0Error
from edge0.families import ModelConfig, read_config
from edge0.options import EngineOptions
from experiments.host.machine_file import MACHINES, calibrations, other_machine, this_machine

THREADS, GROUPS = (1, 2, 4), (1, 2, 3, 5)
SECONDS = 24.0  # of all trials together, opening the engine included where that takes less than a trial's share
MARGIN = 0.05  # a step that is slower by no more counts as equally fast
WARMUP_STEPS, LEAST_STEPS, MOST_STEPS, PROMPT_TOKENS = 2, 3, 64, 4


@dataclass(frozen=True)
class Trial:
    """One way to decode: the median of `n` steps, in milliseconds."""

    reader_threads: int
    launch_groups: int
    step_ms: float
    n: int


Decode = Callable[[int, int], Trial]  # (reader threads, launch groups) -> what they give


def shape_words(config: ModelConfig) -> str:
    """What a choice is kept for: a model's shape, whatever its weights and wherever they lie."""
    expert_bytes = sum(spec.nbytes for spec in part_specs(config.hidden, config.expert_width))
    layers = len(config.moe_layers)
    return f"{config.family.tag}: {layers} layers of {config.experts} experts of {expert_bytes} bytes"


def chosen(config: ModelConfig, folder: Path = MACHINES) -> dict[str, int]:
    """`reader_threads` and `launch_groups` that were chosen on this machine for a model of this shape; else nothing.

    A machine file of another machine says nothing, and one that cannot be read is told by who writes it.
    """
    with suppress(Edge0Error):
        here = this_machine()
        if not other_machine(here, folder):
            for entry in calibrations(folder / f"{here['id']}.yaml"):
                if entry["shape"] == shape_words(config):
                    return {key: entry[key] for key in ("reader_threads", "launch_groups")}
    return {}


def calibrate(
    checkpoint: Path, report: Callable[[str], None], seconds: float = SECONDS, decode: Decode | None = None
) -> dict[str, Any]:
    """An entry of a machine file's `calibrations`. `decode` makes a trial; by default of the checkpoint itself.

    Evicts the checkpoint's experts from the page cache.

    Raises:
        Edge0Error: what the checkpoint or its heads are refused for, READ_FAILED.
    """
    from edge0.opening import Opening

    config = read_config(checkpoint)
    groups = [count for count in GROUPS if count <= len(Opening.of(checkpoint, _options(2, 1)).schedule.predicted)]
    default = min(EngineOptions().launch_groups, groups[-1])
    share = seconds / (len(THREADS) + len(groups) - 1)
    trials: list[Trial] = []

    def tried(threads: int, count: int) -> Trial:
        found = next((one for one in trials if (one.reader_threads, one.launch_groups) == (threads, count)), None)
        if found is None:
            report(f"decoding with {threads} reader threads and {count} launch groups")
            found = decode(threads, count) if decode else _decoded(checkpoint, config, threads, count, share)
            trials.append(found)
        return found

    threads = fewest([tried(threads, default) for threads in THREADS]).reader_threads
    best = fewest([tried(threads, count) for count in groups])
    return {
        "shape": shape_words(config),
        "created": datetime.now(UTC).strftime("%Y-%m-%d"),
        "reader_threads": best.reader_threads,
        "launch_groups": best.launch_groups,
        "trials": [asdict(trial) | {"step_ms": round(trial.step_ms, 2)} for trial in trials],
    }


def fewest(trials: Sequence[Trial]) -> Trial:
    """Of the trials that are no slower than the fastest, but for `MARGIN`, the one with the least threads or groups."""
    limit = (1 + MARGIN) * min(trial.step_ms for trial in trials)
    able = [trial for trial in trials if trial.step_ms <= limit]
    return min(able, key=lambda trial: (trial.reader_threads, trial.launch_groups))


def words(entry: dict[str, Any]) -> list[str]:
    """What was chosen, why, and all trials, line by line."""
    trials = [Trial(**trial) for trial in entry["trials"]]
    wanted = (entry["reader_threads"], entry["launch_groups"])
    best = next(trial for trial in trials if (trial.reader_threads, trial.launch_groups) == wanted)
    slowest = max(trial.step_ms for trial in trials)
    head = f"calibration of {entry['shape']}: {_named(best)}"
    why = f"({best.step_ms:.1f} ms a step, the least within {MARGIN:.0%} of the fastest; slowest {slowest:.1f} ms)"
    rows = [f"  {_named(trial):<40} {trial.step_ms:>8.1f} ms, n={trial.n}" for trial in trials]
    return [head, why, *rows, "the engine's commands and the workflow take this as their default for such a model here"]


def _named(trial: Trial) -> str:
    threads, groups = trial.reader_threads, trial.launch_groups
    return f"{threads} reader thread{'s' * (threads > 1)}, {groups} launch group{'s' * (groups > 1)}"


def _options(threads: int, groups: int) -> EngineOptions:
    """As the engine's commands would have it: by own kernels where they run, since what computes sooner waits more."""
    return EngineOptions(reader_threads=threads, launch_groups=groups, kernels="auto")


def _decoded(checkpoint: Path, config: ModelConfig, threads: int, groups: int, seconds: float) -> Trial:
    """Decode for `seconds`, at the least `LEAST_STEPS`; what opening takes is part of them."""
    import numpy as np

    from edge0 import Engine
    from experiments.host.storage import evict

    tokens = np.random.default_rng(0).integers(0, config.vocab, PROMPT_TOKENS + WARMUP_STEPS + MOST_STEPS).tolist()
    end, times = time.monotonic() + seconds, []
    with Engine(checkpoint, _options(threads, groups)) as engine:
        request = engine.new_request()
        engine.prefill(request, tokens[:PROMPT_TOKENS])
        for number, token in enumerate(tokens[PROMPT_TOKENS:]):
            evict(engine.layout.paths)
            begun = time.monotonic()
            np.array(engine.step(request, token))
            if number >= WARMUP_STEPS:
                times.append(time.monotonic() - begun)
            if len(times) >= LEAST_STEPS and time.monotonic() > end:
                break
        request.release()
    return Trial(threads, groups, 1e3 * statistics.median(times), len(times))
