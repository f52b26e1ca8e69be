"""The options of an engine, frozen and checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from edge0.errors import Edge0Error, ErrorKind


@dataclass(frozen=True)
class EngineOptions:
    """How a checkpoint is served.

    Raises:
        Edge0Error: OPTION_INVALID.
    """

    k: int | None = None  # experts per token; None: what the family serves
    prerouter: Literal["route", "advise", "off"] = "route"  # prediction is the route / only prefetches / is not made
    lora: bool = True
    adapter_k: int | None = None  # use the adapter set of another K, knowingly
    feature: Literal["executed", "teacher"] = "executed"  # what the heads' one-hots say (8b: teacher is upstream's)
    io: Literal["pread", "mmap", "direct"] = "pread"  # explicit reads, the paper's page faults, or past the page cache
    assembly: Literal["bank", "stack", "patch"] = "bank"  # slots written in place, or the paper's: stacked, or patched
    fill: Literal["readers", "engine"] = "readers"  # who fills the bank: threads, or (the paper's way) the engine's own
    native: Literal["hot", "exact"] = "hot"  # not predicted: compute what is in memory while the rest is read, or wait
    # Who computes on a CPU: MLX (stock mlx-lm's bits), own kernels with 8-bit or fp32 activations, or the fastest here.
    kernels: Literal["auto", "int8", "exact", "mlx"] = "mlx"
    kernel_threads: int | None = None  # None: as many as there are cores
    prefill: Literal["auto", "ondemand", "whole-layer"] = "auto"  # by expected coverage, or one way for every layer
    reads: Literal["expert", "layer"] = "expert"  # a job of a reader: one expert, or a thread's share of a layer's
    bank_bytes: int | None = None  # None: twice the floor, or what `memory_bytes` leaves
    memory_bytes: int | None = None  # all memory of the process; None: no limit
    context: int | None = None  # tokens of a request that memory is planned for; None: up to 8,192 with `memory_bytes`
    reader_threads: int = 2
    launch_groups: int = 3
    advise: bool = True  # announce an expert's nine ranges before reading them
    prefill_chunk: int = 2048  # tokens at a time in a prompt; fewer where memory is short
    hidden_clip: float | None = 1000.0  # after each layer NaN becomes 0 and values are held within this; None: off

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            choices = get_args(kind)
            if choices and all(isinstance(choice, str) for choice in choices):
                self._require(name, getattr(self, name) in choices, " or ".join(choices))
        optional = ("k", "adapter_k", "bank_bytes", "memory_bytes", "context", "kernel_threads")
        for name in (*optional, "reader_threads", "launch_groups", "prefill_chunk"):
            value = getattr(self, name)
            absent = value is None and name in optional
            self._require(name, absent or type(value) is int and value >= 1, "an integer >= 1")
        both = self.bank_bytes is not None and self.memory_bytes is not None
        self._require("bank_bytes", not both, "none beside memory_bytes, which plans the bank")
        self._require("hidden_clip", self.hidden_clip is None or self.hidden_clip > 0, "a positive number or none")
        bank = self.assembly == "bank"
        self._require("assembly", not (bank and self.io == "mmap"), "stack or patch with io=mmap")
        self._require("fill", bank or self.fill == "readers", "no choice without a bank: the engine stacks and patches")
        threads = bank and self.fill == "readers"
        self._require("reads", threads or self.reads == "expert", "expert where no threads read into a bank")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID, f"option {name}", expected=expected, found=repr(getattr(self, name))
            )

    def bank_slots(self, slot_bytes: int, floor: int, ceiling: int) -> int:
        """Experts that the bank holds: `bank_bytes` in slots, no more than there are experts.

        Raises:
            Edge0Error: BANK_TOO_SMALL, naming the floor.
        """
        if self.bank_bytes is None:
            return min(2 * floor, ceiling)
        slots, floor = min(self.bank_bytes // slot_bytes, ceiling), min(floor, ceiling)
        if slots < floor:
            raise Edge0Error(
                ErrorKind.BANK_TOO_SMALL,
                "the bank cannot hold one token's experts and the prefetch for the next",
                expected=f"at least {floor * slot_bytes} bytes ({floor} slots of {slot_bytes})",
                found=f"{self.bank_bytes} bytes ({slots} slots)",
                hint="give it more memory, or lower K",
            )
        return slots
