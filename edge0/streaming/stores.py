"""Which store holds experts, which reader fills it, and how that reads, as an engine's options say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from edge0.checkpoint.layout import ExpertLayout
from edge0.options import EngineOptions
from edge0.streaming.bank import Bank
from edge0.streaming.bundles import Bundles
from edge0.streaming.direct import DirectSource
from edge0.streaming.executor import Store
from edge0.streaming.patch import PatchStore
from edge0.streaming.reader import EngineReader, ExpertReader, Reader
from edge0.streaming.source import FaultSource, PreadSource, Source
from edge0.streaming.stack import StackStore
from edge0.telemetry.loads import Recorder


def open_source(paths: Iterable[Path], io: str) -> Source:
    """
    Raises:
        Edge0Error: FILE_UNREADABLE; OPTION_INVALID where a file system refuses direct reads.
    """
    return {"pread": PreadSource, "mmap": FaultSource, "direct": DirectSource}[io](paths)


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
    advise = options.advise and options.io == "pread"  # page faults and direct reads take no advice
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
