"""One whole small session from its command line to the table, and what becomes of single runs."""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import pandas as pd
import pytest
from rich.console import Console

from analysis import tab3
from analysis.schema import FILES
from edge0 import Engine, EngineOptions
from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.trace import generate
from experiments import preflight, run_arm, sample_tokens
from experiments import session as module
from experiments.decoders import ResidentDecoder
from experiments.gather import text_health
from experiments.options import SessionOptions
from experiments.run_arm import RunSpec, failed, measure
from experiments.void import void_where_outputs_differ

PROMPT, REST = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]


def test_outputs_that_differ_between_alike_arms_make_a_run_void():
    def row(arm, output):
        return {"arm": arm, "k": 8, "kernels": "mlx", "output_hash": output, "void": False, "void_reason": ""}

    rows = [row("ondemand", "a"), row("ondemand-mmap", "a"), row("prerouter", "b"), row("prerouter-mmap", "c")]
    void_where_outputs_differ(rows)
    assert [r["void"] for r in rows] == [False, False, False, True]
    assert "prerouter" in rows[3]["void_reason"]


def test_stock_mlx_lm_of_the_same_weights_is_held_to_ondemand_and_never_the_measure():
    def row(arm, k, output, kernels="mlx"):
        return {"arm": arm, "k": k, "kernels": kernels, "output_hash": output, "void": False, "void_reason": ""}

    def voided(*rows, same_weights=True):
        void_where_outputs_differ(list(rows), same_weights)
        return [r["void"] for r in rows]

    assert voided(row("resident", 8, "b"), row("ondemand", 8, "a")) == [True, False]
    assert voided(row("resident", 8, "a"), row("ondemand", 8, "a")) == [False, False]
    assert voided(row("resident", 4, "b"), row("ondemand", 8, "a")) == [False, False]
    assert voided(row("resident", 8, "b"), row("ondemand", 8, "a", "int8-avx2")) == [False, False]
    assert voided(row("resident", 8, "b"), row("ondemand", 8, "a"), same_weights=False) == [False, False]


def test_stock_mlx_lm_chooses_as_many_experts_as_its_row_says(checkpoint):
    def chosen(k):
        decoder = ResidentDecoder(checkpoint, read_config(checkpoint), k)
        decoder.begin(PROMPT)
        return [decoder.step(token) for token in REST]

    with Engine(checkpoint, EngineOptions(k=2, lora=False, prerouter="off")) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        assert [int(mx.argmax(engine.step(request, token)).item()) for token in REST] == chosen(2) != chosen(8)
        request.release()


def test_text_health_finds_the_period_of_a_loop():
    assert text_health([1, 2, 3, 4, 5])["longest_repeat_tokens"] == 0
    looped = text_health([9, 8, *[1, 2, 3] * 5])
    assert (looped["repeat_period"], looped["longest_repeat_tokens"]) == (3, 15)


def here(arguments, what, timeout_s=None, large_pages=True):
    """What `run_python` does, in this process: a start of Python takes longer than what it runs in these tests."""
    _, name, *rest = arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *rest])
        assert {"experiments.run_arm": run_arm, "experiments.sample_tokens": sample_tokens}[name].main() == 0


def typed(*arguments):
    """The command line of a session in this process; returns its exit code. `test_resume` starts real ones."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "run_python", here)
            patch.setattr(sys, "argv", ["experiments.session", *map(str, arguments)])
            return module.main()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def session(unit_35b, tmp_path_factory):
    root = tmp_path_factory.mktemp("sessions")
    command = ["--model", unit_35b, "--tier", "unit-35b", "--root", root, "--rounds", 1, "--ks", 4]
    command += ["--timed-steps", 4, "--warmup-steps", 6, "--prompt-tokens", 5]
    assert typed(*command, "--condition", "budget:0.5", "--bank", 0.5, "--log", root / "log.txt") == 0
    assert "session of" in (root / "log.txt").read_text()
    return root


def test_session_keeps_raw_rows_of_every_run_step_and_load(session):
    name = json.loads((session / "latest.json").read_text())["session"]
    folder = session / name
    assert sorted(path.name for path in folder.iterdir()) == [
        "loads.parquet",
        "runs.parquet",
        "session.json",
        "steps.parquet",
        "tokens.json",
    ]
    runs, steps, loads = (pd.read_parquet(folder / f"{kind}.parquet") for kind in ("runs", "steps", "loads"))
    assert Counter(runs.role) == {"arm": 4, "aa": 1, "drift": 1}
    assert (runs.dropped == 0).all() and runs.token_hash.nunique() == 1
    for route in ("ondemand", "prerouter"):
        assert runs[runs.arm.str.startswith(route)].output_hash.nunique() == 1
    assert len(steps) == 4 * len(runs)
    timed = loads[loads.step >= 0]
    probed = timed[timed.cold_bytes >= 0]
    assert 0 < len(probed) < len(timed)  # every n-th load is looked at while steps are timed, all of them before
    assert (probed.cold_bytes + probed.inflight_bytes <= probed.asked_bytes).all()
    assert (loads.end_ns >= loads.start_ns).all() and (loads.start_ns >= loads.submit_ns).all()
    per_step = timed.groupby(["run_id", "step"]).size()
    counted = steps.set_index(["run_id", "step"]).loads
    assert (per_step == counted[counted > 0]).all()
    about = json.loads((folder / "session.json").read_text())
    assert about["host"]["os"] and about["resumed"] == []
    assert {about["lower_cache"]} == set(runs.lower_cache) <= {"none", "suspected", "unknown"}


@pytest.mark.parametrize("kind", ["runs", "steps", "loads"])
def test_a_sessions_columns_are_those_of_the_schema(session, kind):
    rows = pd.read_parquet(session / json.loads((session / "latest.json").read_text())["session"] / f"{kind}.parquet")
    assert len(rows) and FILES[kind].problems(rows) == []


def test_rows_say_how_each_arm_worked_and_where_its_time_went(session):
    folder = session / json.loads((session / "latest.json").read_text())["session"]
    runs = pd.read_parquet(folder / "runs.parquet").set_index("run_id")
    ways = runs.drop_duplicates("arm").set_index("arm")[["layout", "reader", "fill", "assembly"]]
    assert ways.loc["ondemand"].tolist() == ["stacked", "willneed", "readers", "bank"]
    assert ways.loc["prerouter-mmap"].tolist() == ["stacked", "mmap", "engine", "stack"]
    assert set(runs.budget_by) == {"eviction"} and set(runs.trace) == {""}
    steps = pd.read_parquet(folder / "steps.parquet")
    parts = steps[["wait_ms", "route_ms", "launch_ms", "evaluate_ms", "sample_ms", "build_ms"]]
    assert parts.sum(axis=1).to_numpy() == pytest.approx(steps.step_ms.to_numpy())
    assert (parts.drop(columns="wait_ms") >= 0).all(axis=None) and (steps.cpu_ms > 0).all()
    assert (steps.sample_ms > 0).all()


def test_session_becomes_a_table(session, tmp_path):
    command = [str(session / "latest.json"), "--claims", "results/paper/claims.yaml", "--out", str(tmp_path)]
    assert tab3.main(command) == 0
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert sorted(summary.arm) == sorted(["ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap"])
    assert (summary.dropped == 0).all()
    assert "prerouter" in (tmp_path / "table.md").read_text()


def test_session_that_cannot_start_is_one_line_and_leaves_nothing(unit_35b, tmp_path, capsys):
    asked = ("--model", unit_35b, "--tier", "unit-35b", "--root", tmp_path / "r", "--condition", "tepid")
    assert typed(*asked) == EXIT_CODE
    told = capsys.readouterr().err
    assert told.startswith("edge0: ") and len(told.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()


def test_session_whose_results_cannot_be_written_says_so(unit_35b, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    asked = ("--model", unit_35b, "--tier", "unit-35b", "--ks", 4, "--root", tmp_path / "file")
    assert typed(*asked) == EXIT_CODE and str(tmp_path / "file") in capsys.readouterr().err


def spec_of(model, **changes):
    values = {
        "run_id": "x",
        "arm": "ondemand",
        "k": 4,
        "model": str(model),
        "condition": "budget:0.5",
        "prompt": [1, 2, 3],
        "warmup_tokens": [4, 5, 6],
        "timed_tokens": [7, 8],
        "bank_slots": 64,
        "lora": True,
        "adapter_k": None,
        "launch_groups": 1,
        "reader_threads": 1,
        "probe_every": 1,
        "seed": 0,
    }
    return RunSpec(**values | changes)


def test_a_run_that_fails_is_void_with_its_reason(copy_of):
    """A failed run has the rows of a good one, without numbers."""
    model = copy_of("unit-35b")
    spec = spec_of(model)
    row = failed(spec, Edge0Error(ErrorKind.READ_FAILED, "the disk said no", path=model))
    assert row["void"] and "the disk said no" in row["void_reason"] and row["tok_s"] is None
    rows = [row | {"role": "arm", "round": 0, "order": 0}]
    void_where_outputs_differ(rows)
    good, steps, loads = measure(spec)
    assert set(row) == set(good) and not good["void"]
    assert len(steps) == 2 and len(loads)


@pytest.mark.parametrize("arm", ["prerouter", "prerouter-stack", "resident"])
def test_every_load_that_was_asked_for_has_its_row_and_hits_are_those_of_the_recorder(unit_35b, monkeypatch, arm):
    made = []

    def decoder(*parts):
        made.append(make(*parts))
        return made[-1]

    make = run_arm._decoder
    monkeypatch.setattr(run_arm, "_decoder", decoder)
    _, steps, loads = measure(spec_of(unit_35b, arm=arm, reader_threads=2))
    totals = made[0].recorder.totals
    assert len(loads) == totals.loads and (len(loads) > 0) == (arm != "resident")
    if arm == "resident":
        assert steps.hits.isna().all()
    else:
        assert 0 < steps.hits.sum() <= totals.hits


@pytest.mark.parametrize("arm", ["prerouter", "ondemand-mmap"])
def test_a_run_gives_its_memory_back_before_its_rows_are_written(unit_35b, arm):
    """Under a limit an arm of stacks was killed while it wrote what it had measured."""
    gc.collect()
    before = mx.get_active_memory()
    measure(spec_of(unit_35b, arm=arm))
    assert mx.get_active_memory() - before < 1 << 16 and mx.get_cache_memory() == 0


@pytest.mark.parametrize("arm", ["ondemand", "prerouter", "ondemand-mmap"])
def test_a_run_replays_the_routes_of_a_trace(unit_35b, tmp_path, arm):
    config = read_config(unit_35b)
    trace = generate(config.moe_layers, config.experts, 4, 6, 0.5, 1.0, 0)
    path = tmp_path / "routes.safetensors"
    trace.save(path)
    row, _, loads = measure(spec_of(unit_35b, trace=str(path), arm=arm))
    assert row["trace"] == "routes.safetensors" and not row["dropped"]
    routed = {
        (layer, expert)
        for step in range(3, 6)  # the timed ones, and the one before them, which may read ahead
        for layer, ids in trace.step(min(step, 5)).items()
        for expert in ids.tolist()
    }
    timed = loads[loads.step >= 0]
    assert len(timed) and set(zip(timed.layer, timed.expert, strict=True)) <= routed


def test_a_run_that_its_memory_limit_kills_is_void_and_the_session_goes_on(unit_35b, tmp_path, monkeypatch):
    """The limit is played, where no group can be made, and every process by this one; the rows are of real runs."""

    def limited(arguments, what, limit_bytes, timeout_s, large_pages):
        if "resident" in what:  # as if it had been killed while it wrote its rows
            spec, folder = map(Path, arguments[2:])
            (folder / f"{json.loads(spec.read_text())['run_id']}.loads.parquet").write_bytes(b"PAR1")
            raise Edge0Error(ErrorKind.MEMORY_TOO_SMALL, f"{what} was killed by its limit of {limit_bytes} bytes")
        here(arguments, what, timeout_s)

    monkeypatch.setattr(module, "run_python", here)
    monkeypatch.setattr(module, "run_python_limited", limited)
    monkeypatch.setattr(preflight, "limited_command", lambda limit_bytes: nullcontext())
    options = SessionOptions(
        *(str(unit_35b), "unit-35b"),
        arms=("ondemand", "resident"),
        ks=(4,),
        rounds=1,
        timed_steps=2,
        warmup_steps=6,
        bank=0.5,
        memory_limit_bytes=1 << 30,
    )
    folder = module.run_session(options, tmp_path, Console(quiet=True))
    runs = pd.read_parquet(folder / "runs.parquet")
    (killed,) = runs[runs.arm == "resident"].to_dict("records")
    assert killed["void"] and "killed by its limit of 1073741824 bytes" in killed["void_reason"]
    assert len(runs) == 4 and (runs.memory_limit_bytes == 1 << 30).all()
    assert runs[runs.arm == "ondemand"].tok_s.notna().all()
