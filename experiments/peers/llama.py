"""llama.cpp as an arm: the same tokens, one at a time, through its library and a GGUF file of our checkpoint.

Uses the C interface as llama-cpp-python lays it open; its own sampler, chat and caches play no part. As many threads
as the process may use cores. A mapping is opened with the same read-ahead window as the paper's page-fault arms, where
that is permitted. What the library allocates is in the process's counters, not in MLX's.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np

from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig
from edge0.telemetry.loads import EVALUATE, SAMPLE, Recorder
from experiments.peers.library import importable
from experiments.peers.names import architecture
from experiments.window import fault_window

NO_LAYER = -1  # of a wait that belongs to the whole step
ERROR_LEVEL = 4
WEIGHTS = ("mapped", "repacked")  # pages of the file as they are, or copied into the order of its fastest kernels


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LlamaDecoder:
    """One model and one context. `positions`: tokens of the longest request; `weights`: of `WEIGHTS`.

    Raises:
        Edge0Error: FILE_MISSING without the library; READ_FAILED, with the library's last word, when it cannot load
            the file or decode.
    """

    bank_bytes = bank_slots = 0

    def __init__(self, file: Path, config: ModelConfig, k: int, weights: str, positions: int, library: Path):
        self.recorder = Recorder(rows=True)
        self._undo = ExitStack()
        self._vocab = config.vocab
        with ExitStack() as undo:
            self._lib = lib = undo.enter_context(importable(library, "llama_cpp"))
            self._words: list[str] = []
            self._log = lib.llama_log_callback(self._hear)  # kept for as long as the library may call it
            lib.llama_log_set(self._log, ctypes.c_void_p(0))
            lib.llama_backend_init()
            with fault_window([file]) as window:
                # Where the window cannot be lowered, read-around cannot be switched off in somebody's mapping either.
                self.window = "as-is" if window == "random" else window
                self._model = lib.llama_model_load_from_file(str(file).encode(), _how(lib, config, k, weights))
            if not self._model:
                raise self._failed("the file could not be loaded")
            undo.callback(lib.llama_model_free, self._model)
            self._context = lib.llama_init_from_model(self._model, _context(lib, positions))
            if not self._context:
                raise self._failed("no context could be made")
            undo.callback(lib.llama_free, self._context)
            self._undo = undo.pop_all()
        self.resident_bytes = int(lib.llama_model_size(self._model))

    def begin(self, prompt: list[int]) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._decode(prompt)

    def step(self, token: int) -> int:
        self.recorder.step += 1
        with self.recorder.waiting(EVALUATE, NO_LAYER):
            self._decode([token])
        with self.recorder.waiting(SAMPLE, NO_LAYER):
            return int(self.logits().argmax())

    def logits(self) -> np.ndarray:
        """Of the last token, fp32 `[vocab]`; the library's own memory, until the next step."""
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, -1), (self._vocab,))

    def close(self) -> None:
        self._undo.close()

    def _decode(self, tokens: list[int]) -> None:
        array = (self._lib.llama_token * len(tokens))(*tokens)
        if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, len(tokens))):
            raise self._failed("a token could not be decoded")

    def _hear(self, level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level == ERROR_LEVEL:
            self._words.append(text.decode(errors="replace").strip())

    def _failed(self, detail: str) -> Edge0Error:
        found = self._words[-1] if self._words else None
        return Edge0Error(ErrorKind.READ_FAILED, f"llama.cpp: {detail}", found=found)


def _how(lib: ModuleType, config: ModelConfig, k: int, weights: str) -> ctypes.Structure:
    """How the model is loaded: nothing on another device, K experts per token."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = weights == "repacked"
    overrides = (lib.llama_model_kv_override * 2)()  # an entry without a key ends them
    overrides[0].tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = f"{architecture(config)}.expert_used_count".encode()
    overrides[0].value.val_i64 = k
    params.kv_overrides = overrides
    return params


def _context(lib: ModuleType, positions: int) -> ctypes.Structure:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = positions
    params.n_threads = params.n_threads_batch = cores()
    params.no_perf = True
    return params
