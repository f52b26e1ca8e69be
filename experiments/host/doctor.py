"""Look at this machine: its storage, page cache, memory limits, MLX device, heat and power, and write a machine file.

Reads at random places for about ten seconds: of CHECKPOINT, whose cached pages it evicts, or without one of a scratch
file in the current folder (256 MiB, removed at the end). Warns of what would spoil a measurement. The machine file
holds no host name, user, path or serial number, so it may be published beside results.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge0.errors import Edge0Error, ErrorKind

if TYPE_CHECKING:
    from experiments.host.examination import Report, Subject

HELP = "look at this machine and write its machine file"

# Targets for a machine that nothing is known of yet: what can be seen at all, then what is said with it.
NEXT = (
    ("noise", "how small an effect shows here"),
    ("budgets", "whether the ways to limit the page cache agree"),
    ("fit", "what a load costs here, by its cold share"),
    ("tab3", "decode speed of each arm at each K"),
    ("predict", "the same speeds, predicted from these parts"),
)

_MIB, _GIB = 1 << 20, 1 << 30
_LABEL, _COLUMNS, _COMMAND = 13, 110, 18
_PROGRESS_STEPS = 11  # scratch file, three checks, eight read measurements; only the bar's length hangs on it
_YES = {True: "yes", False: "no", None: "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(large_pages=True)  # it decodes as other commands do
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, nargs="?", help="a checkpoint directory")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the machine file (default: the project's)")
    parser.add_argument(
        "--seconds", type=_positive, default=1.0, help="of each of the eight read measurements (default 1)"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="also decode for half a minute, to choose reader threads and launch groups for CHECKPOINT here",
    )


def run(options: argparse.Namespace) -> None:
    from experiments.alone import alone
    from experiments.host.calibration import calibrate
    from experiments.host.examination import examine, subject
    from experiments.host.machine_file import MACHINES, other_machine, write

    if options.calibrate and options.checkpoint is None:
        detail, hint = "option calibrate: nothing to decode", "name a checkpoint"
        raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected="a CHECKPOINT", found="none", hint=hint)
    with alone("edge0 doctor"), _progress() as report, subject(options.checkpoint, report) as what:
        values = examine(what, options.seconds, report)
        if options.calibrate:
            values["calibrations"] = [calibrate(options.checkpoint, report)]
    print(report_text(values, what))
    there = MACHINES / f"{values['id']}.yaml"
    if options.out is None and (other := other_machine(values, MACHINES)):
        told = f"not written: {other}, and --out another folder for this machine's file"
    elif options.out is None and options.checkpoint is None and there.exists():
        told = f"not written: {there} is there, and may be of a checkpoint's own reads; name a checkpoint, or --out"
    else:
        told = f"written: {write(values, options.out or MACHINES)}"
    print(f"\n{told}\n\n{next_text(values, options.checkpoint)}")


def engine_defaults(checkpoint: Path) -> dict[str, int]:
    """Fields of `EngineOptions` that were chosen on this machine for a checkpoint of this shape; the command line takes
    them. None where the harness's packages, which read machine files, are not installed. Raises Edge0Error for a
    directory that is no checkpoint."""
    from edge0.families import read_config

    try:
        from experiments.host.calibration import chosen
    except ModuleNotFoundError:
        return {}
    return chosen(read_config(checkpoint))


def report_text(values: Mapping[str, Any], what: Subject) -> str:
    """The report for people. `values`: a machine file's; `what`: that which was read."""
    blocks = [
        _machine(values, what),
        _storage(values["storage"]),
        _reads(values["storage"]),
        _cache(values),
        _state(values),
        _steps(values["storage"], what),
        *_calibrations(values),
        _warnings(values.get("warnings", [])),
    ]
    return "\n\n".join(block for block in blocks if block)


def next_text(values: Mapping[str, Any], checkpoint: Path | None) -> str:
    """Which targets to run on this machine, in order. `values`: a machine file's; `checkpoint`: the one asked about."""
    from edge0.tiers import TIERS

    settings = []
    if checkpoint is not None:
        name = checkpoint.resolve().name
        settings.append(f"tier={name}" if name in TIERS else f"model={checkpoint}")
    limited = any(budget["works"] for budget in values["budgets"])
    if not limited:
        settings.append("condition=warm")
    config = " ".join(["", "--config", *settings]) if settings else ""
    lines = ["when the warnings above are seen to, run:" if values.get("warnings") else "run next:"]
    for target, meaning in NEXT:
        if target != "budgets" or limited:
            lines.append(f"  {f'snakemake {target}{config}':<{_COMMAND}}  {meaning}")
    return "\n".join(lines)


def _machine(values: Mapping[str, Any], what: Subject) -> str:
    swap, device = values["swap_bytes"], values["mlx"]["device"]
    memory = f"{values['ram_bytes'] / _GIB:.1f} GiB, " + (f"{swap / _GIB:.1f} GiB of swap" if swap else "no swap")
    checkpoint = []
    if what.checkpoint_bytes is not None:
        fits = "less than" if what.checkpoint_bytes < values["ram_bytes"] else "more than"
        checkpoint = [("checkpoint", f"{what.checkpoint_bytes / _GIB:.2f} GiB, {fits} this machine's memory")]
    return _lines(
        ("machine", f"{values['name']}; results go to results/{values['id']}/"),
        ("system", f"{values['os']} {values['kernel']}"),
        ("memory", f"{memory}, pages of {values['page_bytes'] // 1024} KiB"),
        ("MLX", f"{values['mlx']['version']} on the {'GPU (Metal)' if device == 'gpu' else 'CPU'}"),
        ("kernels", values["kernels"]),
        ("BLAS", values["blas"]),
        ("pages", values["memory_pages"]),
        *checkpoint,
    )


def _storage(storage: Mapping[str, Any]) -> str:
    window, request = (_kib(storage[key]) for key in ("read_ahead_kb", "max_sectors_kb"))
    queue = f"read-ahead {window}, largest request {request}, scheduler {storage['scheduler'] or 'unknown'}"
    return _lines(
        ("storage", f"{storage['filesystem'] or 'unknown file system'} on {storage['device'] or 'an unknown device'}"),
        ("", queue),
        ("guest", f"{_YES[storage['guest']]} (a hypervisor between this system and the device)"),
        ("lower cache", f"{storage['lower_cache']}: {storage['lower_cache_reason']}"),
    )


def _reads(storage: Mapping[str, Any]) -> str:
    rows = storage["random_reads"]
    if not rows:
        return "random reads are not measured here: the files lie in memory"
    files = {"scratch": "a scratch file that was written a moment ago: an old file may read more slowly"}
    source = files.get(storage["read_file"], "the checkpoint's expert files")
    way = "past the page cache" if storage["read_way"] == "direct" else "evicted first (no direct reads here)"
    head = f"random reads of {_size(storage['read_bytes'])} from {source}"
    advised = {row["threads"]: row for row in storage.get("advised_reads", [])}
    lines = [head, f"  {'threads':>7}  {way:>28}" + (f"  {'as the engine reads':>28}" if advised else "")]
    for row in rows:
        line = f"  {row['threads']:>7}  {_rate(row)}"
        lines.append(line + (f"  {_rate(advised[row['threads']])}" if row["threads"] in advised else ""))
    if advised:
        lines.append("  (as the engine reads: evicted, then advised and read through the page cache, each byte once)")
    return "\n".join(lines)


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['mib_s']:>8.0f} MiB/s {row['median_ms']:>8.2f} ms each"


def _cache(values: Mapping[str, Any]) -> str:
    probe = values["probe"]
    told = f"evicts: {_YES[probe['evicts']]}, counts device bytes: {_YES[probe['counts_device_bytes']]}"
    lines = [("cache probe", f"{probe['method']} ({told})"), ("", probe["reason"])]
    for number, budget in enumerate(values["budgets"]):
        works = "works" if budget["works"] else "does not work here"
        lines.append(("" if number else "cache limit", f"{budget['method']} {works}: {budget['reason']}"))
    return _lines(*lines)


def _state(values: Mapping[str, Any]) -> str:
    thermal, power = values["thermal"], values["power"]
    heat = [
        f"{thermal['hottest_c']:.0f} C at the hottest ({thermal['zone']})" if thermal["hottest_c"] is not None else "",
        {True: "slowed down by heat", False: "not slowed down by heat"}.get(thermal["limited"], ""),
    ]
    source = {True: "on battery", False: "on mains"}.get(power["on_battery"], "")
    charge = f" ({power['battery_percent']}% charged)" if power["battery_percent"] is not None else ""
    clock = [
        source + charge,
        "low power mode" if power["low_power_mode"] else "",
        f"governor {power['governor']}" if power["governor"] else "",
        f"{power['frequency_mhz']} of {power['max_frequency_mhz']} MHz" if power["frequency_mhz"] else "",
        {True: "boost on", False: "boost off"}.get(power["boost"], ""),
    ]
    none = "this system does not tell"
    return _lines(("heat", _listed(heat) or none), ("power", _listed(clock) or none))


def _steps(storage: Mapping[str, Any], what: Subject) -> str:
    """Cold reads of one token's experts at the measured rates: arithmetic, and only where a checkpoint was named."""
    if not what.steps or not storage["random_reads"]:
        return ""
    alone, best = storage["random_reads"][0], max(storage["random_reads"], key=lambda row: row["mib_s"])
    about = f"upper bound of what reading costs a token of {what.steps[0].layers} layers, none of its experts in memory"
    lines = [
        about,
        "(arithmetic from the direct reads above; the page cache, the bank and overlap with computing lower it)",
    ]
    for step in what.steps:
        lines.append(
            f"  K={step.k}: {step.step_bytes / _MIB:.1f} MiB per token: {step.cost_ms(alone['mib_s']):.0f} ms with "
            f"{_threads(alone)}, {step.cost_ms(best['mib_s']):.0f} ms with {_threads(best)}"
        )
    return "\n".join(lines)


def _calibrations(values: Mapping[str, Any]) -> list[str]:
    from experiments.host.calibration import words

    return ["\n".join(words(entry)) for entry in values.get("calibrations", [])]


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return "nothing was found that would spoil a measurement"
    return "\n".join(["before you measure:", *(_wrapped("  - ", warning) for warning in warnings)])


def _threads(row: Mapping[str, Any]) -> str:
    return f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f} MiB" if nbytes >= _MIB / 10 else f"{nbytes / 1024:.0f} KiB"


def _kib(value: int | None) -> str:
    return "unknown" if value is None else f"{value} KiB"


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(part for part in parts if part)


def _lines(*pairs: tuple[str, str]) -> str:
    return "\n".join(_wrapped(f"{label:<{_LABEL}}", text) for label, text in pairs)


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, _COLUMNS, initial_indent=head, subsequent_indent=" " * len(head))


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError("expected a number above 0 and at most 600")
    return value


@contextmanager
def _progress() -> Iterator[Report]:
    """Says on stderr what runs now; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = [BarColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=_PROGRESS_STEPS)

        def report(what: str) -> None:
            progress.update(task, description=what, advance=1)

        yield report
