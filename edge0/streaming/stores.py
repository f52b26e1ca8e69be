"""Which store holds experts, and which reader fills it, as an engine's options say."""

from __future__ import annotations

import mlx.core as mx

from edge0.checkpoint.layout import ExpertLayout
from edge0.options import EngineOptions
from edge0.streaming.bank import Bank
from edge0.streaming.bundles import Bundles
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
) -> tuple[Store, ExpertReader | None]:
    """The store, and the reader that must be closed with it (stores of stacks read by themselves).

    Args:
        capacity: experts.
        dtype: of scales and biases in memory.
        k: experts per layer and token.
    """
    advise = options.advise and options.io == "pread"  # page faults take no advice
    if options.assembly != "bank":
        bundles = Bundles(layout, capacity, dtype, source, recorder, advise)
        if options.assembly == "stack":
            return StackStore(bundles), None
        return PatchStore(bundles, recorder, k, len(layout.layers)), None
    if options.fill == "engine":
        reader = EngineReader(source, recorder, advise)
    else:
        reader = Reader(source, recorder, options.reader_threads, advise, options.reads == "layer")
    try:
        return Bank(layout, capacity, dtype, reader, recorder), reader
    except BaseException:
        reader.close()
        raise
