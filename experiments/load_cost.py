"""What bringing one expert into memory costs, by how much of it the page cache lacks: `MODEL OUT_DIR [--records DIR]`.

One expert per load, by each way of reading, from either layout. Before each load the expert is evicted, all of it but
one run of pages at a random place is cached again, and what really is cold is looked up outside the timed interval. A
unit is one way, share and expert from both layouts, one right after the other; units come in a seeded random order, so
that no way and no share has a time of its own. Every so often one fixed expert is read past the page cache: a reference
that moves only when the device does. Where the file system refuses such reads, that way is left out, and the reference
is an advised read of the evicted expert.

One thread on purpose: what a load costs by itself. Scales and biases stay bf16 here (the engine widens them on a CPU).
The memory that is read into was touched before, so no load pays for that. Writes rows; lines are fitted from the files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ByteRange, ExpertLayout
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.streaming.direct import DirectSource
from edge0.streaming.reader import Target, fill, parts
from edge0.streaming.source import FaultSource, PreadSource, Source
from edge0.telemetry.pagecache import PAGE_BYTES, FilePages, thread_device_bytes
from experiments.alone import alone
from experiments.observer import by_file, page_ranges
from experiments.publish import open_pages, publish, run_command
from experiments.window import fault_window

MMAP, PREAD, WILLNEED, DIRECT = WAYS = ("mmap", "pread", "willneed", "direct")
STACKED, RECORDS = LAYOUTS = ("stacked", "records")
REFERENCE_EVERY = 24  # units between two reference loads
TRIES = 5  # to bring one expert's pages into the wanted state; the kernel may hold or reclaim some at any moment
NEAR = 0.02  # how far the share that is found may lie from the one that can be made of whole pages


@dataclass(frozen=True)
class Unit:
    """One way and share, for one expert, from both layouts in turn. `place` in [0, 1) says where the cold run lies."""

    way: str
    target_cold: float
    repetition: int
    layer: int
    expert: int
    place: float
    layouts: tuple[str, ...]


def plan(
    layout: ExpertLayout,
    loads: int,
    levels: Sequence[float],
    seed: int,
    layouts: tuple[str, ...] = LAYOUTS,
    ways: tuple[str, ...] = WAYS,
) -> list[Unit]:
    """`loads` units of each way and share, in random order."""
    rng = np.random.default_rng(seed)
    units = []
    for repetition in range(loads):
        for way in ways:
            for level in levels:
                layer, expert = int(rng.choice(layout.layers)), int(rng.integers(layout.experts))
                order = layouts if rng.random() < 0.5 else layouts[::-1]
                units.append(Unit(way, level, repetition, layer, expert, float(rng.random()), order))
    return [units[index] for index in rng.permutation(len(units))]


class Storage:
    """One layout of the checkpoint: its descriptors, the state of its page cache, and the memory that is read into."""

    def __init__(self, model: Path, stack: ExitStack):
        self.layout = ExpertLayout.of(CheckpointIndex.open(model), read_config(model))
        self._files: dict[Path, FilePages] = stack.enter_context(open_pages(self.layout.paths))
        with fault_window(self.layout.paths) as self.window:
            self._faults = FaultSource(self.layout.paths, random=self.window == "random")
        stack.callback(self._faults.close)
        pread = PreadSource(self.layout.paths)
        stack.callback(pread.close)
        self._sources: dict[str, Source | DirectSource] = {MMAP: self._faults, PREAD: pread, WILLNEED: pread}
        self.no_direct = ""  # why direct reads are left out
        try:
            self._sources[DIRECT] = direct = DirectSource(self.layout.paths)
            stack.callback(direct.close)
        except Edge0Error as error:
            if error.kind is not ErrorKind.OPTION_INVALID:
                raise
            self.no_direct = error.detail
        self.memory = [np.ones(spec.nbytes, np.uint8) for spec in self.layout.specs]
        self._targets = [Target(memoryview(part), False) for part in self.memory]

    def load(self, way: str, layer: int, expert: int) -> dict[str, int]:
        """Read one expert; what it took. On Linux device bytes are those that this thread made the device deliver."""
        source, ranges = self._sources[way], self.layout.ranges(layer, expert)
        pieces, scratch = parts(ranges, self._targets), memoryview(b"")
        device = thread_device_bytes()
        start = time.perf_counter_ns()
        if way == WILLNEED:
            source.advise(ranges)
        advised = time.perf_counter_ns()
        for piece, targets in pieces:
            fill(source, piece, targets, scratch)
        end = time.perf_counter_ns()
        moved = thread_device_bytes() - device
        return {"device_bytes": moved, "advise_ns": advised - start, "read_ns": end - advised, "ns": end - start}

    def bundle_ns(self) -> int:
        """Time to make the paper's bundle, nine MLX arrays of an expert, of the bytes that were read last."""
        start = time.perf_counter_ns()
        bundle = []
        for part, spec in zip(self.memory, self.layout.specs, strict=True):
            if spec.dtype == "U32":
                bundle.append(mx.array(part.view(np.uint32).reshape(spec.shape)))
            else:
                bundle.append(mx.array(part.view(np.uint16).reshape(spec.shape)).view(mx.bfloat16))
        mx.eval(bundle)
        return time.perf_counter_ns() - start

    def bring(self, layer: int, expert: int, share: float, place: float) -> dict[str, int]:
        """Leave one run of an expert's pages cold, `share` of them, and the others cached; returns what is found.

        Raises:
            Edge0Error: PROBE_UNAVAILABLE when the pages do not stay in that state.
        """
        spans = page_ranges(self.layout.ranges(layer, expert), self._files)
        warm, cold_bytes = complement(spans, share, place)
        whole = sum(span.nbytes for span in spans)
        for _ in range(TRIES):
            self._faults.unmap()
            for path, pieces in by_file(spans).items():
                self._files[path].evict(pieces)
            for path, pieces in by_file(warm).items():
                self._files[path].warm(pieces)
            found = self._state(layer, expert, spans)
            if abs(found["cold_page_bytes"] - cold_bytes) <= NEAR * whole:
                return found
        raise Edge0Error(
            ErrorKind.PROBE_UNAVAILABLE,
            f"expert {expert} of layer {layer} could not be made {share:.0%} cold",
            expected=f"{cold_bytes} cold bytes",
            found=found["cold_page_bytes"],
        )

    def _state(self, layer: int, expert: int, spans: tuple[ByteRange, ...]) -> dict[str, int]:
        pieces = self.layout.pieces(layer, expert)
        states = [self._files[piece.path].residency([(piece.offset, piece.nbytes)]) for piece in pieces]
        pages = [self._files[path].residency(parts) for path, parts in by_file(spans).items()]
        return {
            "asked_bytes": sum(state.asked_bytes for state in states),
            "cold_bytes": sum(state.cold_bytes for state in states),
            "inflight_bytes": sum(state.inflight_bytes for state in states),
            "cold_page_bytes": sum(state.cold_bytes for state in pages),
            "cold_pieces": sum(state.cold_bytes > 0 for state in states),
        }


def complement(spans: Sequence[ByteRange], share: float, place: float) -> tuple[tuple[ByteRange, ...], int]:
    """All pages of the spans but one run of them: (what is left, bytes of the run).

    The run counts through the spans as if they were one, and so may begin in one and end in another.
    """
    pages = [
        ByteRange(span.path, at, min(PAGE_BYTES, span.offset + span.nbytes - at))
        for span in spans
        for at in range(span.offset, span.offset + span.nbytes, PAGE_BYTES)
    ]
    count = round(share * len(pages))
    first = int(place * (len(pages) - count + 1))
    cold = sum(page.nbytes for page in pages[first : first + count])
    kept: list[ByteRange] = []
    for number, page in enumerate(pages):
        if first <= number < first + count:
            continue
        last = kept[-1] if kept else None
        if last is not None and last.path == page.path and last.offset + last.nbytes == page.offset:
            kept[-1] = ByteRange(page.path, last.offset, last.nbytes + page.nbytes)
        else:
            kept.append(page)
    return tuple(kept), cold


def measure(
    model: Path, records: Path | None, loads: int, levels: Sequence[float], seed: int
) -> tuple[pd.DataFrame, str]:
    """Rows, one per load in the order of time, and how the fault window was set. Without `records`: one layout.

    Raises:
        Edge0Error: OPTION_INVALID when the two directories do not hold the two layouts of one model;
            PROBE_UNAVAILABLE when the page cache cannot be read, or brought into a wanted state;
            READ_FAILED, and what opening a checkpoint or a source raises.
    """
    with ExitStack() as stack:
        stores = {STACKED: Storage(model, stack)}
        if records is not None:
            stores[RECORDS] = Storage(records, stack)
        for store in stores.values():
            check_pair(stores[STACKED].layout, store.layout, records)
        refused = next((store.no_direct for store in stores.values() if store.no_direct), "")
        ways = tuple(way for way in WAYS if way != DIRECT or not refused)
        if refused:
            Console(stderr=True).print(f"no {DIRECT} reads, and the reference is {WILLNEED}: {refused}", markup=False)
        units = plan(stores[STACKED].layout, loads, levels, seed, tuple(stores), ways)
        rows = list(_rows(stores, units, ways))
        for order, row in enumerate(rows):
            row["order"] = order
        return pd.DataFrame(rows), stores[STACKED].window


def check_pair(stacked: ExpertLayout, other: ExpertLayout, records: Path | None) -> None:
    """`stacked` must be as released, `other` be it or its repacked copy.

    Raises:
        Edge0Error: OPTION_INVALID.
    """
    if stacked.stacked and (other is stacked or (not other.stacked and _shape(other) == _shape(stacked))):
        return
    raise Edge0Error(
        ErrorKind.OPTION_INVALID,
        "MODEL must be as released, and --records its repacked copy",
        path=records,
        expected=f"{_shape(stacked)} stacked, and the same as records",
        found=f"{_shape(stacked)} {_kind(stacked)}"
        + ("" if other is stacked else f", and {_shape(other)} {_kind(other)}"),
        hint="make the copy with `edge0 repack MODEL DIR`",
    )


def _shape(layout: ExpertLayout) -> str:
    return f"{len(layout.layers)} layers of {layout.experts} experts of {layout.expert_bytes} bytes"


def _kind(layout: ExpertLayout) -> str:
    return "stacked" if layout.stacked else "as records"


def _rows(stores: dict[str, Storage], units: list[Unit], ways: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    steady = next(reversed(stores))  # the layout of the reference: records, where there are some
    first = stores[steady].layout.layers[0]
    for store in stores.values():  # what a way does once (its buffers, its first descriptors) is no load's cost
        for way in ways:
            store.load(way, first, 0)
        store.bundle_ns()
    reference = Unit(DIRECT if DIRECT in ways else WILLNEED, 1.0, 0, first, 0, 0.0, (steady,))
    for number, unit in enumerate(track(units, "loads", console=Console(stderr=True))):
        if number % REFERENCE_EVERY == 0:
            yield _row(stores[steady], reference, steady, "reference")
        for layout in unit.layouts:
            yield _row(stores[layout], unit, layout, "load")


def _row(store: Storage, unit: Unit, layout: str, role: str) -> dict[str, Any]:
    state = store.bring(unit.layer, unit.expert, unit.target_cold, unit.place)
    took = store.load(unit.way, unit.layer, unit.expert)
    return {
        "way": unit.way,
        "layout": layout,
        "target_cold": unit.target_cold,
        "role": role,
        "repetition": unit.repetition,
        "layer": unit.layer,
        "expert": unit.expert,
        **state,
        **took,
        "build_ns": store.bundle_ns(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.load_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="STACKED_MODEL", help="directory of a checkpoint as released")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder that gets SESSION/loads.parquet and .json")
    parser.add_argument("--records", type=Path, help="directory of its repacked copy; without, one layout is measured")
    parser.add_argument("--loads", type=int, default=30, help="loads per way, layout and cold share (default 30)")
    parser.add_argument("--levels", type=float, nargs="+", default=[0, 0.1, 0.25, 0.5, 0.75, 1], help="cold shares")
    parser.add_argument("--tier", default="", help="name of the checkpoint, for the tables")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.loads < 1 or not all(0 <= level <= 1 for level in options.levels):
        parser.error("--loads must be at least 1, and every one of --levels between 0 and 1")

    @alone("fit")
    def command() -> None:
        levels = sorted(set(options.levels))
        rows, window = measure(options.model, options.records, options.loads, levels, options.seed)
        about = {"experiment": "fit", "tier": options.tier or options.model.name, "fault_window": window}
        about |= {"page_bytes": PAGE_BYTES, "loads": options.loads, "levels": levels, "seed": options.seed}
        publish(options.out, "loads", rows, options.model, about)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
