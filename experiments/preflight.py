"""What a session checks in its first second, so that nothing fails after minutes that could be refused now."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig
from edge0.opening import Opening
from edge0.options import EngineOptions
from edge0.plan import MemoryPlan
from edge0.prerouter.schedule import Schedule
from edge0.trace import RouteTrace
from experiments.arms import ARMS, find_arm
from experiments.budgets.cgroup_budget import MIN_BUDGET_BYTES
from experiments.budgets.cgroups import limited_command
from experiments.budgets.methods import budget_methods, eviction_method
from experiments.conditions import Condition
from experiments.options import BUDGET_WAYS, SessionOptions
from experiments.window import put_back


@dataclass(frozen=True)
class Ready:
    """A session that may start. `budget_by`: the way that keeps the budget of its runs, never "auto"."""

    config: ModelConfig
    layout: ExpertLayout
    budget_by: str


def preflight(options: SessionOptions) -> Ready:
    """
    Raises:
        Edge0Error: for an unknown arm or condition, a K or adapter that the model cannot serve, a broken checkpoint,
            a bank below the floor, records that are none or of another model, routes of another model or K, or too
            few of them; a condition or memory limit that cannot be kept here.
    """
    condition = Condition.parse(options.condition)
    routes = RouteTrace.load(options.trace) if options.trace is not None else None
    for arm in options.arms:
        find_arm(arm)
    if not options.ks or not options.arms:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "a session needs at least one arm and one K", tensor="arms, ks")
    for name in ("rounds", "timed_steps", "warmup_steps", "prompt_tokens", "run_timeout_s"):
        _require(name, getattr(options, name) >= 1, ">= 1", getattr(options, name))
    for name in ("bank", "stack_bank"):
        share = getattr(options, name)
        _require(name, share is None or 0 < share <= 1, "a share of all experts, above 0, up to 1", share)
    _require("budget_by", options.budget_by in BUDGET_WAYS, " or ".join(BUDGET_WAYS), options.budget_by)
    records = any(ARMS[arm].records for arm in options.arms)
    repack = "a checkpoint that `edge0 repack` made, for the arms that read records"
    _require("records", options.records is not None or not records, repack, "none")
    opening = _open(options, options.model)
    if options.records is not None:
        repacked = _open(options, options.records).layout
        if repacked.stacked or repacked.total_bytes != opening.layout.total_bytes:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "option records: not this model's checkpoint, repacked",
                path=options.records,
                expected=f"records of {opening.layout.total_bytes} bytes of experts",
                found=f"{'stacks' if repacked.stacked else 'records'} of {repacked.total_bytes}",
            )
    peers = [arm for arm in options.arms if ARMS[arm].peer]
    if peers:
        _check_peers(options, condition, ", ".join(peers))
    if condition.name == "limit":
        _require("memory_limit_bytes", options.memory_limit_bytes is not None, "the limit of condition limit", "none")
    if routes is not None:
        _check_trace(options, routes, opening.config)
    put_back(opening.layout.paths)  # what a killed session left behind
    budget_by = _budget_by(options, condition, opening.layout)
    if options.memory_limit_bytes is not None:
        _check_limit(options.memory_limit_bytes, budget_by)
    return Ready(opening.config, opening.layout, budget_by)


def _require(name: str, holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise Edge0Error(ErrorKind.OPTION_INVALID, f"option {name}", expected=expected, found=found)


def _open(options: SessionOptions, directory: str) -> Opening:
    """Open a checkpoint as the session's arms will, with every K and every bank; returns the last opening."""
    engine = EngineOptions(
        lora=options.lora,
        adapter_k=options.adapter_k,
        launch_groups=options.launch_groups,
        reader_threads=options.reader_threads,
        kernels=options.kernels,
    )
    for k in options.ks:
        opening = Opening.of(directory, dataclasses.replace(engine, k=k))
        for arm in options.arms:  # some arms say themselves in how many groups they launch
            groups = ARMS[arm].options.get("launch_groups", options.launch_groups)
            Schedule.of(opening.config, opening.heads.owners, groups, opening.heads.header.path)
        # Once for the size of a slot, which the banks' bytes follow from, and once with each bank.
        slot = MemoryPlan.of(opening).slot_bytes
        for slots in {bank_slots(options, opening.layout, arm) for arm in options.arms}:
            bank = dataclasses.replace(opening.options, bank_bytes=slots * slot)
            MemoryPlan.of(dataclasses.replace(opening, options=bank))
    return opening


def bank_slots(options: SessionOptions, layout: ExpertLayout, arm: str) -> int:
    """An arm's share of all experts, in experts: its own where it has one, else the session's."""
    stacks = ARMS[arm].options.get("assembly", "bank") != "bank"
    shares = (ARMS[arm].bank, options.stack_bank if stacks else None, options.bank)
    return max(1, round(next(share for share in shares if share is not None) * len(layout.records())))


def _check_peers(options: SessionOptions, condition: Condition, arms: str) -> None:
    _require("condition", condition.name in ("warm", "limit"), f"warm or limit, which {arms} can be held to", condition)
    for name, made in (("gguf", "`python -m experiments.peers.gguf`"), ("peers", "`snakemake peers-lib`")):
        place = getattr(options, name)
        _require(name, place is not None and Path(place).exists(), f"what {made} made, for {arms}", place or "none")


def _check_trace(options: SessionOptions, routes: RouteTrace, config: ModelConfig) -> None:
    """Every arm at every K must be able to replay the whole request."""
    for k in options.ks:
        try:
            routes.check(config, k)
        except Edge0Error as error:
            sides = {"expected": error.expected, "found": error.found, "hint": error.hint}
            raise Edge0Error(error.kind, error.detail, path=options.trace, tensor=error.tensor, **sides) from error
    native = [arm for arm in options.arms if ARMS[arm].resident or ARMS[arm].peer]
    advises = [arm for arm in options.arms if ARMS[arm].options.get("prerouter") == "advise"]
    advised = advises if routes.recall == 1 else []
    for arms, why in (
        (native, "another engine routes by itself"),
        (advised, "predictions come from the trace too, so that advice would never be wrong"),
    ):
        if arms:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                f"option trace: {why}",
                expected="other arms of the engine",
                found=", ".join(arms),
            )
    steps = options.warmup_steps + options.timed_steps
    if routes.tokens <= steps:
        raise Edge0Error(
            ErrorKind.TRACE_INVALID,
            "the trace is shorter than a run",
            path=options.trace,
            expected=f"{steps + 1} tokens (warmup_steps + timed_steps, and one that the last step predicts)",
            found=routes.tokens,
            hint="make a longer one with `edge0 trace record` or `edge0 trace generate`, or decode fewer steps",
        )


def _budget_by(options: SessionOptions, condition: Condition, layout: ExpertLayout) -> str:
    """The way that keeps the budget, by what the self-tests say of those that were asked for."""
    if condition.name in ("warm", "limit"):
        return "eviction"
    by = options.budget_by if condition.name == "budget" else "eviction"  # cold is a budget of nothing
    asked = ("eviction", "cgroup") if by == "auto" else (by,)
    budget_bytes = condition.budget_bytes(layout.total_bytes)
    if by == "cgroup":
        _require("condition", budget_bytes >= MIN_BUDGET_BYTES, f">= {MIN_BUDGET_BYTES} bytes by cgroup", budget_bytes)
    path = layout.paths[0]
    reports = [eviction_method(path)] if by == "eviction" else budget_methods(path)
    for way in asked:
        if any(report.works for report in reports if report.name.startswith(way)):
            return way
    raise Edge0Error(
        ErrorKind.PROBE_UNAVAILABLE,
        f"no way to keep the page cache at {condition} works on this machine",
        tensor="budget_by" if condition.name == "budget" else "condition",
        expected=" or ".join(asked),
        found="; ".join(f"{report.name}: {report.reason}" for report in reports if report.name.startswith(asked)),
        hint="`edge0 doctor` says what works here; condition warm needs no way",
    )


def _check_limit(limit_bytes: int, budget_by: str) -> None:
    _require("memory_limit_bytes", limit_bytes >= 1 << 20, "at least 1 MiB", limit_bytes)
    if budget_by == "cgroup":
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "option memory_limit_bytes: a budget by cgroup sets the group's limit itself",
            hint="leave it out, or keep the budget by eviction (budget_by)",
        )
    with limited_command(limit_bytes):  # refused here where no group can be made
        pass
