"""The arms of a session: one way to serve a checkpoint each, by name. Everything else is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge0.errors import Edge0Error, ErrorKind


@dataclass(frozen=True)
class Arm:
    """`options` are fields of EngineOptions; `resident` is stock mlx-lm with all experts in memory; `records` serves
    the repacked copy of the checkpoint. What stands before a hyphen in the name says how the arm routes."""

    name: str
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)
    resident: bool = False
    records: bool = False

    @property
    def route(self) -> str:
        """Arms of one route choose the same tokens."""
        return self.name.partition("-")[0]


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
            "ondemand-hot",
            "as ondemand, but experts that are in memory compute while the missing ones are read",
            {"prerouter": "off", "native": "hot"},
        ),
        Arm(
            "ondemand-records",
            "as ondemand, from the repacked checkpoint",
            {"prerouter": "off", "native": "exact"},
            records=True,
        ),
        Arm("resident", "stock mlx-lm, every expert in memory, no adapters", resident=True),
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
