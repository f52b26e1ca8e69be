"""The workflow as Snakemake sees it: the slurm profile, and targets that must not measure anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge0.errors import EXIT_CODE

ROOT = Path(__file__).parents[2]
STAMP = "20260202T000000Z"
# Rules that measure, but for those that are never asked to measure less: recorded routes, counts.
MEASURING = (
    *("_session", "fit_loads", "budgets_loads", "bench_reads", "bench_kernels", "bench_work"),
    *("engine_prefill", "engine_endurance", "tab1_prefill", "math_residual"),
    *("ladder_run", "merge_rows", "quality_run"),
)
TRAINED = ("ladder_tiers=[tiny-35b]", "ladder_seeds=[0]", "quality_tiers=[tiny-35b]")
BOX = ("--config", "machine=box", "tier=unit-35b", "bank=0.5", "tab1_tiers=[unit-35b]", "ks=[8]", *TRAINED)
SLURM = ("--workflow-profile", "profiles/slurm", "--config", "tier=unit-35b", "bank=0.5")
TIER = "results/box/unit-35b"
# Targets with rows that are of no session.
OWN_ROWS = ("fit", "budgets", "bench", "engine", "tab1", "math", "ladder", "merge", "tab2")
# What stands in place of finished measurements: folder of sessions to the file that a finished one has.
FINISHED = {
    **{f"{TIER}/{name}/sessions": "session.json" for name in ("tab3", "noise", "appxB", "levers")},
    f"{TIER}/resident/sessions/free": "session.json",
    **{f"{TIER}/peers/sessions/{part}": "session.json" for part in ("warm", "limit-0.5", "limit-0.25")},
    **{f"{TIER}/predict/sessions/{part}": "session.json" for part in ("compute", "loads", "target", "cold")},
    **{f"results/box/bench/sessions/{part}": "session.json" for part in ("overlap", "resident", "speed")},
    **{f"results/box/engine/sessions/{part}": "session.json" for part in ("records-cold", "records-warm", "hot")},
    "results/box/tab1/sessions/unit-35b": "session.json",
    "results/box/merge/sessions/tiny-35b/cost": "session.json",
    "results/box/merge/sessions/tiny-35b/rows": "merge.json",
    "results/box/tiny-35b/quality/sessions": "quality.json",
    "results/box/tiny-35b/ladder/sessions/seed0": "ladder.json",
    f"{TIER}/fit/sessions": "loads.json",
    f"{TIER}/budgets/sessions": "agreement.json",
    "results/box/bench/sessions/reads": "reads.json",
    "results/box/bench/sessions/kernels": "kernels.json",
    "results/box/bench/sessions/work": "work.json",
    "results/box/engine/sessions/prefill": "prefill.json",
    "results/box/engine/sessions/endurance": "endurance.json",
    "results/box/tab1/sessions/unit-35b/prefill": "prefill.json",
    "results/box/math/sessions/unit-35b": "residuals.json",
    "results/box/math/sessions/unit-8b": "residuals.json",
}


# Importing takes longer than a dry run: one process imports what all of them do, and forks for each.
FORKING = """
import json, os, sys
import experiments.config, smart_open, snakemake.cli, snakemake.report

for line in sys.stdin:
    output, errors, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        for path, number in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        snakemake.cli.main(arguments)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Workflow:
    """A copy of the workflow, and a Snakemake that was started in it."""

    folder: Path
    snakemake: subprocess.Popen

    def called(self, *arguments: str) -> subprocess.CompletedProcess:
        """What `snakemake -n` does with these arguments."""
        said = [self.folder.parent / name for name in ("stdout", "stderr")]
        self.snakemake.stdin.write(json.dumps([*map(str, said), ["-n", *arguments]]) + "\n")
        self.snakemake.stdin.flush()
        code = int(self.snakemake.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in said))


@pytest.fixture(scope="module")
def workflow(tmp_path_factory) -> Iterator[Workflow]:
    """The workflow without results, where a dry run leaves nothing behind in the project."""
    folder = tmp_path_factory.mktemp("workflow") / "copy"
    for name in ("Snakefile", "experiments", "analysis", "edge0", "profiles", "results/paper"):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKING], cwd=folder, **pipes) as process:
        yield Workflow(folder, process)


def dry_run(workflow: Workflow, *arguments: str, quiet: tuple[str, ...] = ("--quiet", "host")) -> str:
    done = workflow.called(*arguments, *quiet)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


def refusal(workflow: Workflow, *arguments: str) -> str:
    """The one line with which a call ends before anything is run."""
    done = workflow.called(*arguments)
    assert done.returncode == EXIT_CODE, done.stderr + done.stdout
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("edge0: "))
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    return line


def jobs(output: str) -> dict[str, str]:
    """Each rule's part of a dry run's text, by the rule's name."""
    parts = output.replace("localrule ", "rule ").split("\nrule ")[1:]
    return {part.partition(":")[0]: part for part in parts}


def test_the_slurm_profile_gives_each_session_a_node_of_its_own(workflow):
    output = dry_run(workflow, "tab3", *SLURM, "machine=node-a", quiet=())
    found = jobs(output)
    assert {"tab3_session", "tab3_table", "tab3"} <= set(found)
    session = found["tab3_session"]
    assert "slurm_extra='--exclusive'" in session and "measuring=1" in session
    assert "mem_mb=32000" in session and "runtime=240" in session
    assert "results/node-a/unit-35b/tab3/sessions/latest.json" in session


def test_with_the_slurm_profile_results_need_the_name_of_their_machine(workflow):
    line = refusal(workflow, "tab3", *SLURM)
    assert "--config: machine:" in line and "machine=NAME" in line


def test_a_plain_dry_run_says_what_it_would_do(workflow):
    assert "tab3_session" in dry_run(workflow, "tab3", *BOX, quiet=())


@pytest.mark.parametrize("target", ["claims", "report"])
def test_ledger_and_report_measure_nothing(workflow, target):
    found = jobs(dry_run(workflow, target, "--config", "tier=unit-35b", "bank=0.5"))
    assert target in found
    assert measuring(found) <= {"math_residual"}  # seconds, and no session


@pytest.fixture
def measured(workflow) -> Iterator[Workflow]:
    """The workflow after everything was measured once, and no table made.

    Without latest.json: a dry run cannot know that a rule's parameters changed, so that what measures shows only there.
    """
    for folder, document in FINISHED.items():
        path = workflow.folder / folder / STAMP / document
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    yield workflow
    shutil.rmtree(workflow.folder / "results" / "box")


def measuring(found: dict[str, str]) -> set[str]:
    return {rule for rule in found if any(name in rule for name in MEASURING)}


@pytest.mark.parametrize("target", ["tab4", "memory", "fig3"])
def test_tables_of_other_targets_rows_do_not_measure_them_again(measured, target):
    found = jobs(dry_run(measured, target, *BOX))
    assert f"{TIER}/tab3/sessions/{STAMP}/session.json" in found[f"{target.replace('fig3', 'fit')}_table"]
    assert measuring(found) <= {"fit_loads"} and "tab3_table" not in found
    assert ("fit_loads" in found) == (target in ("fit", "fig3"))


def test_in_one_call_with_table_3_they_wait_for_its_new_session(measured):
    found = jobs(dry_run(measured, "tab3", "tab4", "memory", "fit", *BOX))
    assert "tab3_session" in found
    for table in ("tab3_table", "tab4_table", "memory_table", "fit_table"):
        assert f"{TIER}/tab3/sessions/latest.json" in found[table]
        assert f"{STAMP}/session.json" not in found[table]
    by_file = jobs(dry_run(measured, f"{TIER}/tab3/table.md", "tab4", *BOX))
    assert "tab3_session" in by_file and f"{STAMP}/session.json" not in by_file["tab4_table"]


def test_table_4_of_nothing_measures_table_3_and_a_fit_does_not(workflow):
    assert measuring(jobs(dry_run(workflow, "tab4", *BOX))) == {"tab3_session"}
    assert measuring(jobs(dry_run(workflow, "fit", *BOX))) == {"fit_loads"}


def test_a_newer_session_of_table_3_makes_the_fits_table_anew(measured):
    newer = measured.folder / TIER / "tab3/sessions/20260303T000000Z/session.json"
    newer.parent.mkdir()
    newer.write_text("{}")
    assert "20260303T000000Z/session.json" in jobs(dry_run(measured, "fit", *BOX))["fit_table"]


def test_without_measuring_rows_are_taken_as_they_are_and_sessions_reused(measured):
    targets = (*OWN_ROWS, "tab3", "tab4", "predict", "noise", "appxB", "levers", "resident", "peers")
    found = jobs(dry_run(measured, *targets, "-p", *BOX, "remeasure=false", "bench_rounds=7", "fit_loads=9"))
    assert set(targets) <= set(found)
    for rule in measuring(found):
        assert rule.endswith("_session") and "--reuse" in found[rule]


def test_what_was_asked_for_is_measured_anew_and_old_rows_are_no_output(measured):
    found = jobs(dry_run(measured, *OWN_ROWS, *BOX))
    rules = {rule for rule in measuring(found) if not rule.endswith("_session")}
    assert rules == {rule for rule in MEASURING if rule != "_session"}
    for rule in rules:
        (output,) = re.findall(r"output: (.*)", found[rule])
        assert output.endswith("latest.json") and STAMP not in output


@pytest.mark.parametrize(
    ("target", "folder"),
    [
        ("tab3", "unit-35b/tab3"),
        ("tab4", "unit-35b/tab3"),
        ("noise", "unit-35b/noise"),
        ("fit", "unit-35b/fit"),
        ("budgets", "unit-35b/budgets"),
        ("appxB", "unit-35b/appxB"),
        ("levers", "unit-35b/levers"),
        ("resident", "unit-35b/resident"),
        ("peers", "unit-35b/peers"),
        ("reuse", "unit-35b/reuse"),
        ("predict", "unit-35b"),
        ("tab1", "tab1"),
        ("math", "math"),
        ("bench", "bench"),
        ("full", "shape-35b/full"),
        ("engine", "engine"),
    ],
)
def test_without_measuring_and_with_nothing_measured_every_target_is_refused_alike(workflow, target, folder):
    line = refusal(workflow, target, *BOX, "remeasure=false")
    assert f"results/box/{folder}" in line and "no raw rows" in line and "remeasure=false" in line


def test_a_ledger_without_measuring_is_of_what_is_there(workflow):
    found = jobs(dry_run(workflow, "claims", *BOX, "remeasure=false"))
    assert "claims_table" in found and not measuring(found)


def test_everything_lands_below_the_folder_of_results_that_is_named(workflow):
    targets = (
        "tab3",
        "claims",
        "report",
        "compare",
        "predict",
        "tab1",
        "bench",
        "engine",
        "regress",
        "peers",
        *OWN_ROWS,
    )
    made = dry_run(workflow, *dict.fromkeys(targets), "-p", *BOX, "results=trials/a", "rows=experiments/config.yaml")
    outputs = re.findall(r"^ +(?:output|log): (.*)", made, flags=re.MULTILINE)
    paths = {path.removesuffix(" (update)") for line in outputs for path in line.split(", ")}
    places = {path.partition("/")[0] for path in paths}
    assert places == {"trials", "models", ".venv-quality", ".peers"}
    assert "trials/a/compare/box+m2-16gb+m4pro-24gb/table.md" in paths
    assert "--results trials/a " in jobs(made)["compare_table"] and "--results trials/a " in jobs(made)["predict_table"]
    inputs = {path for line in re.findall(r"^ +input: (.*)", made, flags=re.MULTILINE) for path in line.split(", ")}
    assert {path for path in inputs if path.startswith("results/")} == {"results/paper/claims.yaml"}


def test_other_engines_run_warm_and_under_every_limit_with_our_arms_first(workflow):
    found = jobs(dry_run(workflow, "peers", "-p", *BOX, "peers_limits=[0.4]", "peers_limit_ks=[4]"))
    assert {"peers_library", "peers_file", "peers_check", "peers_session", "peers_limited_session"} <= set(found)
    assert (
        " --condition warm " in found["peers_session"]
        and " --arms ondemand prerouter resident " in found["peers_session"]
    )
    limited = found["peers_limited_session"]
    assert (
        " --condition limit " in limited
        and " --ks 4 " in limited
        and " --bank 0." in limited
        and "/peers/sessions/limit-0.4/limit.json" in limited
    )
    assert "peers_library" in jobs(dry_run(workflow, "peers-lib", *BOX))


def test_appendix_b_and_the_stock_model_are_measured_at_the_largest_k_that_is_asked_for(workflow):
    found = jobs(dry_run(workflow, "appxB", "resident", "-p", *BOX[:-1], "ks=[2,4]"))
    for rule in ("appxb_session", "resident_session", "resident_limited_session"):
        assert " --ks 4 " in found[rule]
