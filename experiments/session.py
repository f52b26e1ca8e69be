"""A session: all arms of one experiment on one machine, in rounds of rotated order, each arm a fresh process.

    python -m experiments.session --model DIR --tier mini-35b --root DIR [...]

Every arm replays one token sequence, sampled once at the start. The first arm at its largest K runs twice in each round
(an A/A pair), and the very first run is repeated at the end (drift). Writes raw rows only; what they mean is said by
`analysis`, from the files. The folder appears under its name when it is complete.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.opening import Opening
from edge0.options import EngineOptions
from edge0.plan import MemoryPlan
from edge0.telemetry.host import describe_host, machine_id
from edge0.tiers import ModelConfig
from experiments.arms import ARMS, find_arm
from experiments.conditions import Condition
from experiments.processes import run_python
from experiments.run_arm import RunSpec


@dataclass(frozen=True)
class SessionOptions:
    """One experiment, as the command line gives it. `bank` is a share of all experts, 1.0 for all of them; `records`
    is the directory of the repacked checkpoint, for the arms that read it."""

    model: str
    tier: str
    records: str | None = None
    experiment: str = "tab3"
    condition: str = "budget:0.5"
    arms: tuple[str, ...] = ("ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap")
    ks: tuple[int, ...] = (2, 4, 8)
    rounds: int = 3
    timed_steps: int = 20
    warmup_steps: int = 12
    prompt_tokens: int = 8
    bank: float = 0.25
    lora: bool = True
    adapter_k: int | None = None
    launch_groups: int = 3
    reader_threads: int = 2
    probe_every: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One place in the session's order."""

    role: str  # "arm", "aa" or "drift"
    arm: str
    k: int
    round: int


def plan(options: SessionOptions) -> list[Run]:
    """The order of all runs: in each round every K, and within a K every arm, side by side.

    Both orders rotate; every other round runs backwards, so that no arm of a pair is always the later one. An A/A
    repeat of the first arm at the largest K stands beside its twin, and the very first run comes once more at the end.
    """
    ks = sorted(options.ks, reverse=True)
    runs = []
    for number in range(options.rounds):
        order = []
        for k in _rotated(ks, number // 2):
            for arm in _rotated(list(options.arms), number // 2):
                order.append(Run("arm", arm, k, number))
                if (arm, k) == (options.arms[0], ks[0]):
                    order.append(Run("aa", arm, k, number))
        runs += order if number % 2 == 0 else order[::-1]
    return [*runs, Run("drift", runs[0].arm, runs[0].k, 0)]


def _rotated(items: list, places: int) -> list:
    shift = places % len(items)
    return items[shift:] + items[:shift]


def preflight(options: SessionOptions) -> tuple[ModelConfig, ExpertLayout]:
    """Refuse in the first second what would fail after minutes.

    Raises:
        Edge0Error: for an unknown arm or condition, a K or adapter that the model cannot serve, a broken checkpoint,
            a bank below the floor, records that are none or of another model.
    """
    Condition.parse(options.condition)
    for arm in options.arms:
        find_arm(arm)
    for name in ("rounds", "timed_steps", "warmup_steps", "prompt_tokens"):
        if getattr(options, name) < 1:
            raise Edge0Error(ErrorKind.OPTION_INVALID, f"option {name}", expected=">= 1", found=getattr(options, name))
    if not 0 < options.bank <= 1:
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "option bank",
            expected="a share of all experts, above 0, up to 1",
            found=options.bank,
        )
    if options.records is None and any(ARMS[arm].records for arm in options.arms):
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option records", expected="a repacked checkpoint", found=None)
    if not options.ks or not options.arms:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "a session needs at least one arm and one K")
    opening = _open(options, options.model)
    if options.records is not None:
        records = _open(options, options.records).layout
        if records.stacked or records.total_bytes != opening.layout.total_bytes:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "option records: not this model's checkpoint, repacked",
                path=options.records,
                expected=f"records of {opening.layout.total_bytes} bytes of experts",
                found=f"{'stacks' if records.stacked else 'records'} of {records.total_bytes}",
            )
    return opening.config, opening.layout


def _open(options: SessionOptions, directory: str) -> Opening:
    """Open a checkpoint as the session's arms will, with every K; returns the last opening."""
    engine = EngineOptions(
        lora=options.lora,
        adapter_k=options.adapter_k,
        launch_groups=options.launch_groups,
        reader_threads=options.reader_threads,
    )
    for k in options.ks:
        opening = Opening.of(directory, dataclasses.replace(engine, k=k))
        # Once for the size of a slot, which the bank's bytes follow from, and once with that bank.
        slot = MemoryPlan.of(opening).slot_bytes
        bank = dataclasses.replace(opening.options, bank_bytes=bank_slots(options, opening.layout) * slot)
        MemoryPlan.of(dataclasses.replace(opening, options=bank))
    return opening


def bank_slots(options: SessionOptions, layout: ExpertLayout) -> int:
    """The bank's share of all experts, in experts."""
    return max(1, round(options.bank * len(layout.records())))


def run_session(options: SessionOptions, root: Path, console: Console) -> Path:
    """Run everything and write the session folder under `root`; returns it. `root`/latest.json names it then.

    Raises:
        Edge0Error: from `preflight`; OUTPUT_UNWRITABLE; SESSION_VOID when an arm process failed (its message is kept).
    """
    config, layout = preflight(options)
    sweep_partials(root)
    session = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    partial = root / f".{session}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        if (root / "latest.json").is_dir():
            raise IsADirectoryError(21, "latest.json is a directory")
    except OSError as error:
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=root) from error
    try:
        tokens = sample_tokens(options, partial)
        rows = _run_all(options, layout, tokens, partial, console)
        _collect(options, config, layout, session, rows, tokens, partial)
        partial.rename(root / session)
        pointer = root / ".latest.partial"
        pointer.write_text(json.dumps({"session": session}) + "\n")
        pointer.replace(root / "latest.json")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root / session


def sample_tokens(options: SessionOptions, folder: Path) -> list[int]:
    """The sequence that all arms replay, sampled by the model itself, natively routed, in a process of its own."""
    count = options.warmup_steps + options.timed_steps
    target = folder / "tokens.json"
    run_python(
        ["-m", "experiments.sample_tokens", options.model, str(options.prompt_tokens), str(count), str(options.seed)]
        + [str(target)],
        "sampling the token sequence",
    )
    return json.loads(target.read_text())["tokens"]


def _run_all(
    options: SessionOptions, layout: ExpertLayout, tokens: list[int], folder: Path, console: Console
) -> list[dict[str, Any]]:
    prompt, rest = tokens[: options.prompt_tokens], tokens[options.prompt_tokens :]
    runs = plan(options)
    rows = []
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("starting", total=len(runs))
        for order, run in enumerate(runs):
            progress.update(task, description=f"round {run.round + 1}/{options.rounds} {run.arm} K={run.k}")
            spec = RunSpec(
                run_id=f"{order:03}-{run.role}-{run.arm}-k{run.k}-r{run.round}",
                arm=run.arm,
                k=run.k,
                model=options.records if ARMS[run.arm].records else options.model,
                condition=options.condition,
                prompt=prompt,
                warmup_tokens=rest[: options.warmup_steps],
                timed_tokens=rest[options.warmup_steps :],
                bank_slots=bank_slots(options, layout),
                lora=options.lora,
                adapter_k=options.adapter_k,
                launch_groups=options.launch_groups,
                reader_threads=options.reader_threads,
                probe_every=options.probe_every,
                seed=options.seed,
            )
            path = folder / f"{spec.run_id}.spec.json"
            path.write_text(json.dumps(dataclasses.asdict(spec)))
            run_python(["-m", "experiments.run_arm", str(path), str(folder)], f"arm {run.arm} at K={run.k}")
            row = json.loads((folder / f"{spec.run_id}.json").read_text())
            rows.append(dataclasses.asdict(run) | {"order": order} | row)
            speed = "failed" if row["tok_s"] is None else f"{row['tok_s']:.2f} tok/s"
            note = f" void: {row['void_reason']}" if row["void"] else ""
            progress.console.print(f"{spec.run_id}: {speed}{note}", highlight=False, soft_wrap=True)
            progress.advance(task)
    return rows


def _collect(
    options: SessionOptions,
    config: ModelConfig,
    layout: ExpertLayout,
    session: str,
    rows: list[dict[str, Any]],
    tokens: list[int],
    folder: Path,
) -> None:
    """Join the runs' files into one table each, and say what the session was."""
    void_where_outputs_differ(rows, resident_alike=not options.lora)
    frame = pd.DataFrame(rows).assign(session=session, tier=options.tier)
    frame.to_parquet(folder / "runs.parquet")
    for kind in ("steps", "loads"):
        parts = sorted(folder.glob(f"*.{kind}.parquet"))  # a run that failed has none
        if not parts:
            raise Edge0Error(ErrorKind.SESSION_VOID, "every run failed", found=rows[0]["void_reason"])
        pd.concat([pd.read_parquet(part) for part in parts], ignore_index=True).to_parquet(folder / f"{kind}.parquet")
        for part in parts:
            part.unlink()
    for row in rows:
        (folder / f"{row['run_id']}.json").unlink()
        (folder / f"{row['run_id']}.spec.json").unlink()
    condition = Condition.parse(options.condition)
    host = describe_host(Path(options.model))
    summary = dataclasses.asdict(options) | {
        "session": session,
        "machine": machine_id(),
        "family": config.family.name,
        "created": session,
        "commit": host.get("git_commit"),
        "condition": str(condition),
        "k_values": list(options.ks),
        "budget_bytes": condition.budget_bytes(layout.total_bytes),
        "expert_bytes": layout.total_bytes,
        "bank_bytes": max(row["bank_bytes"] for row in rows),
        "dropped": sum(row["dropped"] for row in rows),
        "text": text_health(tokens),
        "host": host,
        "meanings": {arm: ARMS[arm].meaning for arm in options.arms},
    }
    (folder / "session.json").write_text(json.dumps(summary, indent=1, default=str))


def void_where_outputs_differ(rows: list[dict[str, Any]], resident_alike: bool = False) -> None:
    """Arms that route alike must choose the same tokens, and a repeat must repeat; a run that does not is void.

    `resident_alike`: without adapters stock mlx-lm, too, must choose what `ondemand` chooses at the model's own K.
    """
    first: dict[tuple[str, int], str] = {}
    for row in rows:
        if row["output_hash"] is None:  # it failed before it chose anything
            continue
        arm = ARMS[row["arm"]].route
        route = ("ondemand" if arm == "resident" and resident_alike else arm, row["k"])
        expected = first.setdefault(route, row["output_hash"])
        if row["output_hash"] != expected:
            why = f"its tokens differ from the first run of {route[0]} at K={row['k']}"
            row["void"], row["void_reason"] = True, "; ".join(filter(None, [row["void_reason"], why]))


def text_health(tokens: list[int]) -> dict[str, Any]:
    """Whether the replayed text is alive: distinct share, and the longest stretch that one short period explains."""
    longest, period_of = 0, 0
    for period in range(1, min(33, len(tokens))):
        run = 0
        for a, b in zip(tokens, tokens[period:], strict=False):
            run = run + 1 if a == b else 0
            if run + period > longest and run >= period:
                longest, period_of = run + period, period
    return {
        "tokens": len(tokens),
        "distinct_share": len(set(tokens)) / len(tokens),
        "longest_repeat_tokens": longest,
        "repeat_period": period_of,
        "stop_reason": "length",
    }


def options_from(arguments: list[str]) -> tuple[SessionOptions, Path, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m experiments.session", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--tier", required=True, help="name under which results are kept")
    parser.add_argument("--root", required=True, type=Path, help="folder that keeps the sessions")
    parser.add_argument("--log", type=Path, help="file that gets the same lines")
    for field in dataclasses.fields(SessionOptions):
        if field.name in ("model", "tier"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        elif isinstance(field.default, tuple):
            parser.add_argument(flag, nargs="+", type=type(field.default[0]), default=field.default)
        else:
            kind = str if field.name == "records" else int if field.default is None else type(field.default)
            parser.add_argument(flag, type=kind, default=field.default, help=f"default {field.default}")
    given = vars(parser.parse_args(arguments))
    root, log = given.pop("root"), given.pop("log")
    return SessionOptions(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}), root, log


def sweep_partials(root: Path) -> None:
    """Remove what sessions left behind that were killed: folders named after a process that is gone."""
    for folder in root.glob(".*.partial-*"):
        if not psutil.pid_exists(int(folder.name.rpartition("-")[2])):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    options, root, log = options_from(sys.argv[1:])
    console = Console(stderr=True, record=log is not None)
    started = time.monotonic()
    code = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running arm ends with its session
    try:
        if log is not None:
            _writable(log)
        folder = run_session(options, root, console)
    except Edge0Error as error:
        console.print(f"edge0: {error}", highlight=False, markup=False, soft_wrap=True)
        code = EXIT_CODE
    except KeyboardInterrupt:
        console.print("edge0: interrupted; nothing of this session was kept", highlight=False)
        code = 130
    else:
        took = time.monotonic() - started
        console.print(f"session of {took:.0f} s in {folder}", highlight=False, soft_wrap=True)
    if log is not None and code != EXIT_CODE:
        log.write_text(console.export_text())
    return code


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=path) from error


if __name__ == "__main__":
    sys.exit(main())
