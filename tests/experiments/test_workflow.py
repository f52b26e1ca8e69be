"""The workflow as Snakemake sees it: the slurm profile, and targets that must not measure anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURING = ("_session", "fit_loads", "bench_reads", "engine_prefill", "engine_endurance", "tab1_prefill")


@pytest.fixture(scope="module")
def workflow(tmp_path_factory) -> Path:
    """A copy of the workflow without results, where a dry run leaves nothing behind in the project."""
    folder = tmp_path_factory.mktemp("workflow")
    for name in ("Snakefile", "experiments", "analysis", "edge0", "profiles", "results/paper"):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


def dry_run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", "-n", *arguments, "--quiet", "host"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


def jobs(output: str) -> dict[str, str]:
    """Each rule's part of a dry run's text, by the rule's name."""
    parts = output.replace("localrule ", "rule ").split("\nrule ")[1:]
    return {part.partition(":")[0]: part for part in parts}


def test_the_slurm_profile_gives_each_session_a_node_of_its_own(workflow):
    output = dry_run(workflow, "tab3", "--profile", "profiles/slurm", "--config", "machine=node-a", "tier=unit-35b")
    found = jobs(output)
    assert {"tab3_session", "tab3_table", "tab3"} <= set(found)
    session = found["tab3_session"]
    assert "slurm_extra='--exclusive'" in session and "measuring=1" in session
    assert "mem_mb=32000" in session and "runtime=240" in session
    assert "results/node-a/unit-35b/tab3/sessions/latest.json" in session


@pytest.mark.parametrize("target", ["claims", "report"])
def test_ledger_and_report_measure_nothing(workflow, target):
    found = jobs(dry_run(workflow, target, "--config", "tier=unit-35b"))
    assert target in found
    assert not [rule for rule in found if any(name in rule for name in MEASURING)]
