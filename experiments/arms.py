"""The arms of a session: one way to serve a checkpoint each, by name. Everything else is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge0.errors import Edge0Error, ErrorKind

DIRECT_THREADS = 4  # nothing reads ahead of them: with two the device waits
LARGE_BANK = 1024 / 2944  # the paper's larger cache for 8b: 1024 of its 23 x 128 experts (Tab. 1)


@dataclass(frozen=True)
class Arm:
    """`options` are fields of EngineOptions; `resident` is stock mlx-lm with all experts in memory; `records` serves
    the repacked copy of the checkpoint; `bank` is a share of all experts in place of the session's; `peer` is how
    another engine holds the weights of a GGUF file (`experiments.peers.llama`); without `large_pages` memory lies in
    pages of 4 KiB (`edge0.pages`). What stands before a hyphen in the name says how the arm routes; without the LoRA,
    or with a peer's weights, hidden states and so routes are others."""

    name: str
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)
    resident: bool = False
    records: bool = False
    bank: float | None = None
    peer: str | None = None
    large_pages: bool = True

    @property
    def route(self) -> str:
        """Arms of one route choose the same tokens."""
        if self.peer is not None:
            return self.name
        return self.name.partition("-")[0] + (" without LoRA" if self.options.get("lora") is False else "")


def _levers(base: str, options: Mapping[str, Any]) -> tuple[Arm, ...]:
    """An arm of some options, from the repacked checkpoint, with a layer's reads together, and in small pages."""
    together = "each thread reads its share of a layer's experts at once, neighbours in one call"
    return (
        Arm(f"{base}-records", f"as {base}: from the repacked checkpoint", options, records=True),
        Arm(f"{base}-layer", f"as {base}: {together}", options | {"reads": "layer"}),
        Arm(f"{base}-smallpages", f"as {base}: weights and bank in pages of 4 KiB", options, large_pages=False),
    )


ARMS = {
    arm.name: arm
    for arm in (
        Arm(
            "ondemand",
            "the router decides, misses are read explicitly when it has decided",
            {"prerouter": "off", "native": "exact"},
        ),
        Arm(
            "prerouter",
            "the prediction is the route; its reads start one token ahead",
            {"prerouter": "route", "native": "exact"},
        ),
        Arm(
            "ondemand-mmap",
            "as the paper: page faults on a mapping, nine stacks built per layer and step",
            {"prerouter": "off", "io": "mmap", "assembly": "stack"},
        ),
        Arm(
            "prerouter-mmap",
            "as the paper: predicted route, all of it faulted in on the main thread between two steps",
            {"prerouter": "route", "io": "mmap", "assembly": "stack", "launch_groups": 1},
        ),
        Arm(
            "prerouter-stack",
            "appendix B, before: predicted route, nine stacks built per layer and step by the main thread",
            {"prerouter": "route", "native": "exact", "assembly": "stack", "launch_groups": 1},
        ),
        Arm(
            "prerouter-patch",
            "appendix B, the paper's pipeline: as prerouter-stack, but only the rows of changed experts are written",
            {"prerouter": "route", "native": "exact", "assembly": "patch", "launch_groups": 1},
        ),
        Arm(
            "prerouter-fill",
            "predicted experts are read straight into the bank, by the main thread between two steps",
            {"prerouter": "route", "native": "exact", "fill": "engine", "launch_groups": 1},
        ),
        *(
            Arm(
                f"prerouter-groups{groups}",
                f"as prerouter, its predicted layers launched in {groups} group{'s' * (groups > 1)}",
                {"prerouter": "route", "native": "exact", "launch_groups": groups},
            )
            for groups in (1, 2, 5)
        ),
        Arm(
            "ondemand-stack",
            "the router decides, misses are read by the main thread, nine stacks built per layer and step",
            {"prerouter": "off", "assembly": "stack"},
        ),
        Arm(
            "ondemand-patch",
            "as ondemand-stack, but only the rows of changed experts are written",
            {"prerouter": "off", "assembly": "patch"},
        ),
        Arm(
            "ondemand-hot",
            "as ondemand, but experts that are in memory compute while the missing ones are read",
            {"prerouter": "off", "native": "hot"},
        ),
        *_levers("ondemand-hot", {"prerouter": "off", "native": "hot"}),
        Arm(
            "ondemand-hot-advise",
            "as ondemand-hot, and the prediction starts reads one token ahead",
            {"prerouter": "advise", "native": "hot"},
        ),
        *_levers("prerouter", {"prerouter": "route", "native": "exact"}),
        Arm(
            "ondemand-records",
            "as ondemand, from the repacked checkpoint",
            {"prerouter": "off", "native": "exact"},
            records=True,
        ),
        *(
            Arm(
                f"{base}-direct",
                f"as {base}, from the repacked checkpoint by reads past the page cache",
                {"prerouter": prerouter, "native": "exact", "io": "direct", "reader_threads": DIRECT_THREADS},
                records=True,
            )
            for base, prerouter in (("ondemand", "off"), ("prerouter", "route"))
        ),
        Arm(
            "ondemand-large",
            f"as ondemand, with a bank of {LARGE_BANK:.0%} of all experts",
            {"prerouter": "off", "native": "exact"},
            bank=LARGE_BANK,
        ),
        Arm(
            "prerouter-large",
            f"as prerouter, with a bank of {LARGE_BANK:.0%} of all experts",
            {"prerouter": "route", "native": "exact"},
            bank=LARGE_BANK,
        ),
        Arm(
            "prerouter-bare",
            "as prerouter, without the recovery LoRA",
            {"prerouter": "route", "native": "exact", "lora": False},
        ),
        Arm("resident", "stock mlx-lm by MLX's own operations, every expert in memory, no adapters", resident=True),
        Arm("llama-cpp", "llama.cpp on a GGUF file of equal bytes (Q4_0), mapped: page faults", peer="mapped"),
        Arm("llama-cpp-repacked", "the same, weights copied into the order of its fastest kernels", peer="repacked"),
    )
}


def find_arm(name: str) -> Arm:
    """
    Raises:
        Edge0Error: OPTION_INVALID.
    """
    if name not in ARMS:
        raise Edge0Error(ErrorKind.OPTION_INVALID, f"no arm {name!r}", expected=", ".join(ARMS), found=name)
    return ARMS[name]
