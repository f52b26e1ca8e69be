"""What an arm drives, one token at a time: the engine, or stock mlx-lm with every expert in memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from edge0 import Engine, EngineOptions, models
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.streaming.bank import slot_bytes
from edge0.streaming.source import FaultSource
from edge0.telemetry.loads import Recorder
from edge0.tiers import ModelConfig
from experiments.arms import Arm
from experiments.observer import CacheObserver
from experiments.window import fault_window


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


class ResidentDecoder:
    """Stock mlx-lm on the same checkpoint, no adapters."""

    bank_bytes = bank_slots = 0
    window = "none"

    def __init__(self, model: Path, config: ModelConfig):
        self.recorder = Recorder()
        self._model = models.load(model, config, CheckpointIndex.open(model), streamed=False)
        self.resident_bytes = models.parameter_bytes(self._model)

    def begin(self, prompt: list[int]) -> None:
        self._cache = self._model.make_cache()
        mx.eval(self._model(mx.array([prompt]), self._cache))

    def step(self, token: int) -> int:
        self.recorder.step += 1
        return int(mx.argmax(self._model(mx.array([[token]]), self._cache)[0, -1]).item())

    def close(self) -> None:
        """Nothing is open."""


class StreamedDecoder:
    """The engine, as an arm's options say."""

    window = "none"

    def __init__(
        self, arm: Arm, model: Path, options: dict, bank_slots: int, layout: ExpertLayout, observer: CacheObserver
    ):
        options = options | {"bank_bytes": bank_slots * slot_bytes(layout.specs, models.activation_dtype())}
        options |= arm.options
        with ExitStack() as opening:
            if options.get("io") == "mmap":
                self.window = opening.enter_context(fault_window(layout.paths))
                options["mmap_random"] = self.window == "random"
            self._engine = Engine(model, EngineOptions(**options), Recorder(observer, rows=True))
        if isinstance(self._engine.source, FaultSource):
            observer.after_load = self._engine.source.unmap
        self.recorder = self._engine.recorder
        self.resident_bytes = self._engine.resident_bytes
        self.bank_bytes, self.bank_slots = self._engine.store.nbytes, self._engine.store.capacity
        self._request = self._engine.new_request()

    def begin(self, prompt: list[int]) -> None:
        self._request.release()
        self._request = self._engine.new_request()
        self._engine.prefill(self._request, prompt)

    def step(self, token: int) -> int:
        return int(mx.argmax(self._engine.step(self._request, token)).item())

    def close(self) -> None:
        self._request.release()
        self._engine.close()
