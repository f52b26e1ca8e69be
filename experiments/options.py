"""What a session is told: its options, and the command line that gives them. Knows nothing of what becomes of them."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind

BUDGET_WAYS = ("eviction", "cgroup", "balloon", "auto")
KERNELS = ("mlx", "int8", "exact", "auto")


def _option(default: Any, help_: str, kind: type | None = None, **more: Any) -> Any:
    """A field with its line of help; `kind` where the default does not say what the value is."""
    return dataclasses.field(default=default, metadata={"help": help_, "kind": kind or type(default)} | more)


@dataclass(frozen=True)
class SessionOptions:
    """One experiment, as the command line gives it."""

    model: str
    tier: str
    records: str | None = _option(None, "directory of the repacked checkpoint, for the arms that read it", str)
    gguf: str | None = _option(None, "GGUF file of the same model, for the arms of llama.cpp", str)
    peers: str | None = _option(None, "folder of the peers' packages, for the same arms", str)
    experiment: str = _option("tab3", "name of what is measured, for those who read the rows")
    condition: str = _option(
        "budget:0.5",
        "page cache: warm, cold, limit (what memory_limit_bytes leaves), budget:FRACTION of the experts or budget:SIZE",
    )
    budget_by: str = _option(
        "eviction",
        "who keeps the budget: own eviction, a cgroup's limit, a balloon (macOS), or the first of two that works here",
        choices=BUDGET_WAYS,
    )
    memory_limit_bytes: int | None = _option(None, "limit on all memory of an arm; above it the arm is killed", int)
    arms: tuple[str, ...] = _option(
        ("ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap"), "ways to serve, in order", str
    )
    ks: tuple[int, ...] = _option((2, 4, 8), "experts per token", int)
    rounds: int = _option(3, "times that every arm is run at every K")
    timed_steps: int = _option(20, "decode steps that are timed in a run")
    warmup_steps: int = _option(12, "decode steps of one warm-up, which is repeated until it is steady")
    prompt_tokens: int = _option(8, "length of the prompt")
    bank: float = _option(0.25, "memory for experts, as a share of all experts: 1.0 holds them all")
    stack_bank: float | None = _option(
        None, "the same for arms that build stacks, which are a second copy beside it (default: that of bank)", float
    )
    lora: bool = _option(True, "apply the recovery LoRA")
    adapter_k: int | None = _option(None, "K of the adapter set to use at every K (a labelled deviation)", int)
    trace: str | None = _option(None, "file of routes that every arm replays, of one K", str)
    launch_groups: int = _option(3, "groups of layers that a step is launched in")
    reader_threads: int = _option(2, "threads that read experts")
    kernels: str = _option(
        "mlx", "what computes on a CPU: MLX, or own kernels of 8-bit or fp32 activations", choices=KERNELS
    )
    probe_every: int = _option(8, "look at the page cache before one in n loads of the timed steps; 0: never")
    seed: int = _option(0, "of the sampled tokens, of what a budget starts with and of the loads that are looked at")
    run_timeout_s: int = _option(1800, "seconds after which one run, or the sampling of the tokens, has failed")


@dataclass(frozen=True)
class Command:
    """One call of `python -m experiments.session`."""

    options: SessionOptions
    root: Path
    log: Path | None
    fresh: bool
    reuse: bool


def parse(arguments: list[str]) -> Command:
    """The command line as a `Command`; argparse's own exit for what is none.

    Raises:
        Edge0Error: OPTION_INVALID for options that exclude each other.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.session",
        description="Run all arms of one experiment in rounds, and keep the rows of every run.",
    )
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--tier", required=True, help="name under which results are kept")
    parser.add_argument("--root", required=True, type=Path, help="folder that keeps the sessions")
    parser.add_argument("--log", type=Path, help="file that gets the same lines")
    parser.add_argument("--fresh", action="store_true", help="begin anew, even where a killed session could go on")
    parser.add_argument("--reuse", action="store_true", help="measure nothing: name the newest session there is")
    for field in dataclasses.fields(SessionOptions):
        if field.metadata:
            _add(parser, field)
    given = vars(parser.parse_args(arguments))
    call = {name: given.pop(name) for name in ("root", "log", "fresh", "reuse")}
    if call["fresh"] and call["reuse"]:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "options fresh and reuse exclude each other")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Command(SessionOptions(**values), **call)


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    flag, kind, choices = "--" + field.name.replace("_", "-"), field.metadata["kind"], field.metadata.get("choices")
    several = isinstance(field.default, tuple)
    default = " ".join(map(str, field.default)) if several else field.default
    text = field.metadata["help"] + ("" if default is None else f" (default {default})")
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
    else:
        more = {"nargs": "+"} if several else {"choices": choices}
        parser.add_argument(flag, type=kind, default=field.default, help=text, **more)
