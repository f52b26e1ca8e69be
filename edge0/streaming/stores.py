"""Which store holds experts, and which reader fills it, as an engine's options say."""

from __future__ import annotations

import mlx.core as mx

from edge0.checkpoint.layout import ExpertLayout
from edge0.options import EngineOptions
from edge0.streaming.bank import Bank
from edge0.streaming.executor import Store
from edge0.streaming.patch import PatchStore
from edge0.streaming.reader import EngineReader, ExpertReader, Reader
from edge0.streaming.source import Source
from edge0.streaming.stack import StackStore
from edge0.telemetry.loads import Recorder


def open_store(
    options: EngineOptions,
    layout: ExpertLayout,
    capacity: int,
    dtype: mx.Dtype,
    source: Source,
    recorder: Recorder,
    k: int,
    layers: int,
) -> tuple[Store, ExpertReader | None]:
    """The store, and the reader that must be closed with it (stores of stacks read by themselves).

    Args:
        capacity: experts.
        k, layers: experts per layer and token, and layers that have experts.
    """
    parts = (layout, capacity, dtype)
    advise = options.advise and options.io == "pread"  # other sources take no advice
    if options.assembly == "stack":
        return StackStore(*parts, source, recorder, advise), None
    if options.assembly == "patch":
        return PatchStore(*parts, source, recorder, advise, k, layers), None
    if options.fill == "engine":
        reader = EngineReader(source, recorder, advise)
    else:
        reader = Reader(source, recorder, options.reader_threads, advise)
    try:
        return Bank(*parts, reader, recorder), reader
    except BaseException:
        reader.close()
        raise
