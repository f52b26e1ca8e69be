"""Whether the ways of keeping a page-cache budget agree: `MODEL OUT_DIR [--share 0.5] [--loads N]`.

The same streams of expert loads, uniform and Zipf, run under our own eviction and under a memory cgroup (on macOS: a
balloon), each in a fresh process and from the same contents. Writes SESSION/agreement.parquet, a row per load,
and agreement.json, which also says of a way that does not work here why. Judges nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from experiments.alone import alone
from experiments.budgets.methods import budget_methods
from experiments.budgets.run import COLUMNS, BudgetSpec
from experiments.processes import run_python, run_python_limited
from experiments.publish import publish, run_command

EXPONENTS = (0.0, 0.8, 1.1)
WAYS = {"eviction": ("eviction",), "cgroup": ("cgroup-v1", "cgroup-v2"), "balloon": ("balloon",)}


def available_ways(path: Path) -> dict[str, str]:
    """Each way of `WAYS`, and "" where it works on this file, else why it does not."""
    reports = {report.name: report for report in budget_methods(path)}
    found = {}
    for way, methods in WAYS.items():
        if way == "balloon" and sys.platform != "darwin":
            continue  # it is for where there are no cgroups
        tried = [reports[method] for method in methods]
        works = any(report.works for report in tried)
        found[way] = "" if works else "; ".join(f"{report.name}: {report.reason}" for report in tried)
    return found


def measure(
    model: Path, share: float, loads: int, window: int, seed: int, exponents: Sequence[float] = EXPONENTS
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(rows of all runs, what is to be known of them).

    Raises:
        Edge0Error: OPTION_INVALID; SESSION_VOID with the last word of a run that failed.
    """
    for name, value in (("loads", loads), ("window", window)):
        if value < 1:
            raise Edge0Error(ErrorKind.OPTION_INVALID, f"option {name}", expected=">= 1", found=value)
    if not 0 < share < 1:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option share", expected="above 0, below 1", found=share)
    layout = ExpertLayout.of(CheckpointIndex.open(model), read_config(model))
    budget_bytes = int(share * layout.total_bytes)
    ways = available_ways(layout.paths[0])
    plan = [
        BudgetSpec(str(model), way, exponent, budget_bytes, loads, window, seed)
        for exponent in exponents
        for way, lack in ways.items()
        if not lack
    ]
    frames, runs = [pd.DataFrame(columns=["by", "exponent", *COLUMNS])], []
    with tempfile.TemporaryDirectory(prefix="edge0-budget-") as folder:
        for spec in track(plan, "budgets", console=Console(stderr=True)):
            rows, about = _run(spec, Path(folder))
            frames.append(rows.assign(by=spec.by, exponent=spec.exponent))
            runs.append({"by": spec.by, "exponent": spec.exponent} | about)
    about = {
        "budget_bytes": budget_bytes,
        "expert_bytes": layout.total_bytes,
        "layout": "stacked" if layout.stacked else "records",
        "share": share,
        "loads": loads,
        "window": window,
        "seed": seed,
        "exponents": list(exponents),
        "unavailable": {way: lack for way, lack in ways.items() if lack},
        "runs": runs,
    }
    return pd.concat(frames[1:] or frames, ignore_index=True), about


def _run(spec: BudgetSpec, folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """One run in a fresh process, in the surroundings that its way of keeping the budget needs."""
    path, out = folder / "spec.json", folder / "run"
    path.write_text(json.dumps(dataclasses.asdict(spec)))
    arguments = ["-m", "experiments.budgets.run", str(path), str(out)]
    what = f"loads with exponent {spec.exponent} under {spec.by}"
    if spec.by == "cgroup":
        run_python_limited(arguments, what, None)
    else:
        run_python(arguments, what)
    return pd.read_parquet(out.with_suffix(".parquet")), json.loads(out.with_suffix(".json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.budgets.agreement", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tier", default="", help="the checkpoint's name in tables; default: its folder's")
    parser.add_argument("--share", type=float, default=0.5, help="the budget, as a share of all experts")
    parser.add_argument("--loads", type=int, default=3000, help="measured loads of each run")
    parser.add_argument("--window", type=int, default=1500, help="loads between two looks for a steady state")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    @alone("budgets")
    def command() -> None:
        rows, about = measure(options.model, options.share, options.loads, options.window, options.seed)
        about["tier"] = options.tier or options.model.resolve().name
        publish(options.out, "agreement", rows, options.model, about)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
