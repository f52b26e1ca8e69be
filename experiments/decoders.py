"""What an arm drives, one token at a time: the engine, or stock mlx-lm with every expert in memory."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from edge0 import Engine, EngineOptions, models
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import ModelConfig
from edge0.kernels.choice import MLX, kernel_name, scale_dtype
from edge0.streaming.bank import slot_bytes
from edge0.streaming.source import FaultSource
from edge0.telemetry.loads import EVALUATE, SAMPLE, Recorder
from edge0.trace import RouteTrace
from experiments.arms import Arm
from experiments.observer import CacheObserver
from experiments.resident import logits_of, open_resident
from experiments.window import fault_window

NO_LAYER = -1  # of a wait that belongs to the whole step


class Decoder(Protocol):
    recorder: Recorder
    resident_bytes: int
    bank_bytes: int
    bank_slots: int
    window: str  # how much one page fault reads; "none" where nothing is read by faults

    def begin(self, prompt: list[int]) -> None:
        """Start a new request with its prompt; what is in memory and in the page cache stays."""

    def step(self, token: int) -> int:
        """Decode one token; returns the most likely next one."""

    def close(self) -> None: ...


def way_of(arm: Arm, options: Mapping[str, Any]) -> dict[str, Any]:
    """How an arm reads, fills, assembles, launches and computes, as columns of its run; "none" where it does not.

    `options`: those of EngineOptions that the session sets. The two assemblies of the paper fill on the engine thread.
    """
    if arm.resident or arm.peer:
        reader = "mmap" if arm.peer == "mapped" else "none"
        return {
            "reader": reader,
            "fill": "none",
            "assembly": "none",
            "launch_groups": 1,
            "kernels": "llama.cpp" if arm.peer else MLX,
        }
    engine = EngineOptions(**{**options, **arm.options})
    explicit = "willneed" if engine.advise else "pread"
    return {
        "reader": explicit if engine.io == "pread" else engine.io,
        "fill": engine.fill if engine.assembly == "bank" else "engine",
        "assembly": engine.assembly,
        "launch_groups": engine.launch_groups,
        "kernels": kernel_name(engine.kernels),
    }


class ResidentDecoder:
    """Stock mlx-lm on the same checkpoint, no adapters; its routers choose as many experts as the engine's, `k`."""

    bank_bytes = bank_slots = 0
    window = "none"

    def __init__(self, model: Path, config: ModelConfig, k: int):
        self.recorder = Recorder(rows=True)
        self._model, _ = open_resident(model, config, k)
        self.resident_bytes = models.parameter_bytes(self._model)

    def begin(self, prompt: list[int]) -> None:
        self._cache = self._model.make_cache()
        mx.eval(logits_of(self._model, prompt, self._cache))

    def step(self, token: int) -> int:
        self.recorder.step += 1
        chosen = mx.argmax(logits_of(self._model, [token], self._cache))
        with self.recorder.waiting(EVALUATE, NO_LAYER):
            mx.eval(chosen)
        with self.recorder.waiting(SAMPLE, NO_LAYER):
            return int(chosen.item())

    def close(self) -> None:
        """Nothing is open."""


class StreamedDecoder:
    """The engine, as an arm's options say. `routes`: what every decode step routes to, in place of the model."""

    window = "none"

    def __init__(
        self,
        arm: Arm,
        model: Path,
        options: Mapping[str, Any],
        bank_slots: int,
        layout: ExpertLayout,
        observer: CacheObserver,
        routes: RouteTrace | None = None,
    ):
        engine_options = EngineOptions(**{**options, **arm.options})
        slot = slot_bytes(layout.specs, scale_dtype(engine_options.kernels, models.activation_dtype()))
        engine_options = dataclasses.replace(engine_options, bank_bytes=bank_slots * slot)
        by_readers = engine_options.assembly == "bank" and engine_options.fill == "readers"
        observer.reading_threads = engine_options.reader_threads if by_readers else 1
        source = None
        with ExitStack() as undo:
            if engine_options.io == "mmap":
                with fault_window(layout.paths) as self.window:
                    source = FaultSource(layout.paths, random=self.window == "random")
                undo.callback(source.close)
                observer.after_load = source.unmap
            observer.leaves_pages = engine_options.io != "direct"
            self._engine = Engine(model, engine_options, Recorder(observer, rows=True), routes, source)
            undo.pop_all()
        self.recorder = self._engine.recorder
        self.resident_bytes = self._engine.resident_bytes
        self.bank_bytes, self.bank_slots = self._engine.store.nbytes, self._engine.store.capacity
        self._request = self._engine.new_request()

    def begin(self, prompt: list[int]) -> None:
        self._request.release()
        self._request = self._engine.new_request()
        self._engine.prefill(self._request, prompt)

    def step(self, token: int) -> int:
        logits = self._engine.step(self._request, token)
        with self.recorder.waiting(SAMPLE, NO_LAYER):
            return int(mx.argmax(logits).item())

    def close(self) -> None:
        """Twice is once. Weights and bank are given back: under a limit, writing the run's rows needs the room."""
        if self._engine is None:
            return
        self._request.release()
        self._engine.close()
        self._engine = self._request = None
        gc.collect()
        mx.clear_cache()
