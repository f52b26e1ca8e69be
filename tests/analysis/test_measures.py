"""Measure files: made from rows, with a goal each, and read back by the benchmark."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from synthetic import make_session

from analysis.bench import read_measures
from analysis.measures import main


def write_reads(folder, fault_ns, pread_ns):
    rows = [
        {"pair": pair, "way": way, "layer": 1, "experts": 8, "cold_share": 1.0, "ns": ns}
        for pair, times in enumerate(zip(fault_ns, pread_ns, strict=True))
        for way, ns in zip(("mmap", "pread"), times, strict=True)
    ]
    pd.DataFrame(rows).to_parquet(folder / "reads.parquet")
    about = {"session": "s", "commit": "c", "fault_window": "as-is", "threads": 2, "k": 8}
    (folder / "reads.json").write_text(json.dumps(about))
    return folder / "reads.json"


@pytest.mark.parametrize(("fault_ns", "passed"), [([30e6, 36e6, 33e6], True), ([20e6, 21e6, 19e6], False)])
def test_reads_are_paired_and_judged(tmp_path, fault_ns, passed):
    out = tmp_path / "measures" / "reads.json"
    assert main(["reads", str(write_reads(tmp_path, fault_ns, [10e6, 12e6, 11e6])), str(out)]) == 0
    (measure,) = read_measures(out)
    assert (measure.measure, measure.passed, measure.goal) == ("reads.fault_ratio", passed, ">= 2.50")
    assert measure.ci_low <= measure.value <= measure.ci_high
    assert "n=3 pairs" in measure.note


def measured(tmp_path, kind, source):
    """Name -> measure of one kind, through the command and its file."""
    out = tmp_path / "measures" / f"{kind}.json"
    assert main([kind, str(source), str(out)]) == 0
    return {measure.measure: measure for measure in read_measures(out)}


def write_rows(folder, name, rows):
    pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    (folder / f"{name}.json").write_text(json.dumps({"session": "s", "commit": "c", "k": 4}))
    return folder / f"{name}.json"


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernel_rows(times, served="engine"):
    """One row for each way and round; an own kernel's step has 2 ms in kernels."""
    return [
        {
            "round": number,
            "kernels": name,
            "served": served,
            "k": 4,
            "threads": 2,
            "loads": 0,
            "step_ms": ms,
            "cpu_ms": ms,
        }
        | {"experts_ms": 0.0 if name == "mlx" else 1.5, "delta_ms": 0.0 if name == "mlx" else 0.5}
        for name, series in times.items()
        for number, ms in enumerate(series)
    ]


@pytest.mark.parametrize(("int8", "passed"), [([10, 11, 12], True), ([20, 21, 22], False)])
def test_kernels_are_paired_with_mlx_by_round_and_int8_is_judged(tmp_path, int8, passed):
    rows = kernel_rows({"mlx": [100, 120, 140], "int8-avx2": int8, "exact-avx2": [50, 60, 70]})
    found = measured(tmp_path, "kernels", write_rows(tmp_path, "kernels", rows))
    assert set(found) == {"kernels.int8.step_ratio.k4", "kernels.exact.step_ratio.k4"}
    exact, judged = found["kernels.exact.step_ratio.k4"], found["kernels.int8.step_ratio.k4"]
    assert exact.value == pytest.approx(2) and exact.passed is None and exact.goal == ""
    assert judged.passed is passed and judged.goal == ">= 8" and judged.ci_low < judged.value < judged.ci_high
    assert f"int8-avx2, 2 threads, n=3; median 120.0 against {int8[1]:.1f} ms per step, of it 2.0 ms" in judged.note


@pytest.mark.parametrize(("bare", "passed"), [([10, 11, 12], True), ([11, 12, 13], False)])
def test_the_engine_is_paired_with_what_has_every_expert_in_memory(tmp_path, bare, passed):
    rows = kernel_rows({"mlx": [100, 120, 140], "int8-avx2": [9, 9, 9]})
    rows += kernel_rows({"int8-avx2": bare}, "engine-bare") + kernel_rows({"int8-avx2": [10, 11, 12]}, "resident")
    found = measured(tmp_path, "kernels", write_rows(tmp_path, "kernels", rows))
    assert set(found) == {"kernels.int8.step_ratio.k4", "kernels.streamed_ratio.k4"}
    judged = found["kernels.streamed_ratio.k4"]
    assert judged.passed is passed and judged.goal == ">= 0.97" and (judged.value == pytest.approx(1)) == passed
    assert f"medians: engine {bare[1]:.2f}, stock 11.00 ms per step" in judged.note


def test_older_rows_of_kernels_are_refused_in_one_line(tmp_path, capsys):
    rows = [{key: value for key, value in row.items() if key != "served"} for row in kernel_rows({"mlx": [1, 2, 3]})]
    assert main(["kernels", str(write_rows(tmp_path, "kernels", rows)), str(tmp_path / "out.json")]) == 2
    assert "measure again" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_without_own_kernels_there_is_nothing_to_compare(tmp_path):
    assert measured(tmp_path, "kernels", write_rows(tmp_path, "kernels", kernel_rows({"mlx": [1, 2, 3]}))) == {}


# --- work ------------------------------------------------------------------------------------------------------------


def work_rows(ms):
    """One row for each shape and round; `ms` gives the time of (k, layers, experts)."""
    shapes = [(2, 20, 64), (4, 20, 64), (8, 20, 64), (8, 10, 64), (8, 40, 64), (8, 20, 128), (8, 20, 256)]
    return [
        {
            "round": number,
            "k": k,
            "layers": layers,
            "experts": experts,
            "step_ms": ms(k, layers, experts) * (1 + number),
        }
        for k, layers, experts in shapes
        for number in range(3)
    ]


@pytest.mark.parametrize(
    ("ms", "linear", "grows"),
    [
        (lambda k, layers, experts: 1 + layers * (2 + k), {"k": True, "layers": True, "experts": True}, False),
        (lambda k, layers, experts: layers * (10 + experts), {"k": True, "layers": True, "experts": True}, True),
        (lambda k, layers, experts: layers**2 * k**3, {"k": False, "layers": False, "experts": True}, False),
    ],
)
def test_a_steps_time_is_held_against_lines_over_its_work(tmp_path, ms, linear, grows):
    found = measured(tmp_path, "work", write_rows(tmp_path, "work", work_rows(ms)))
    assert {name: found[f"work.{name}.linear"].passed for name in linear} == linear
    assert found["work.experts.growth"].passed is not grows and found["work.k.growth"].passed is None
    assert found["work.layers.growth"].value == pytest.approx(ms(8, 40, 64) / ms(8, 10, 64))
    assert "layers 10 / 20 / 40" in found["work.layers.linear"].note and "k 8" in found["work.layers.linear"].note


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [30.0, 5.0])
def test_speed_is_judged_where_computing_and_reading_are_of_one_size(tmp_path, waiting):
    def change(frames, info):
        runs, steps = frames["runs"], frames["steps"]
        arms = steps.run_id.map(runs.set_index("run_id").arm)
        steps["step_ms"], steps["wait_ms"] = 60.0, waiting
        steps.loc[arms == "ondemand-mmap", "step_ms"] = 150.0
        runs["tok_s"] = runs.arm.map({"ondemand": 20.0, "prerouter": 32.0, "ondemand-mmap": 8.0, "prerouter-mmap": 9.0})

    found = measured(tmp_path, "speed", make_session(tmp_path / "s", change=change))
    faults = found["speed.explicit_over_faults.k8"]
    assert faults.value == pytest.approx(2.5) and faults.passed and faults.goal == ">= 2.0"
    ahead = found["speed.prerouter_over_ondemand.k8"]
    assert ahead.value == pytest.approx(1.6)
    assert (ahead.passed, ahead.goal) == ((True, ">= 1.5") if waiting == 30 else (None, ""))
    bound = 60 / max(waiting, 60 - waiting)
    assert f"hidden {bound:.2f}; {1.6 / bound:.2f} of that" in ahead.note
    assert {"speed.device_over_cold.ondemand", "speed.device_over_cold.prerouter"} <= set(found)


def test_a_prerouter_without_a_valid_round_is_an_error_and_no_silence(tmp_path, capsys):
    def change(frames, info):
        frames["runs"].loc[frames["runs"].arm == "prerouter", ["void", "void_reason"]] = [True, "too warm"]

    session = make_session(tmp_path / "s", change=change)
    assert main(["speed", str(session), str(tmp_path / "out.json")]) == 2
    assert "prerouter and ondemand share no valid round" in capsys.readouterr().err


def test_what_computed_stands_with_each_measure_of_a_session(tmp_path):
    def change(frames, info):
        frames["runs"]["kernels"] = "int8-avx2"
        frames["runs"].loc[frames["runs"].arm == "ondemand-mmap", "kernels"] = "mlx"

    found = measured(tmp_path, "speed", make_session(tmp_path / "s", change=change))
    assert found and all(measure.note.endswith("; kernels: int8-avx2 and mlx") for measure in found.values())


def test_direct_reads_have_their_own_line_where_they_were_measured(tmp_path):
    arms = ("ondemand", "prerouter", "ondemand-mmap", "ondemand-direct", "prerouter-direct")
    found = measured(tmp_path, "speed", make_session(tmp_path / "s", arms=arms))
    assert found["speed.prerouter_over_ondemand.direct.k8"].value == pytest.approx(2.02)
    assert "speed.prerouter_over_ondemand.records.k8" not in found


def test_a_session_on_a_machine_that_drifted_has_no_verdict(tmp_path):
    def change(frames, info):
        runs = frames["runs"]
        runs.loc[runs.role == "drift", "tok_s"] *= 3

    found = measured(tmp_path, "speed", make_session(tmp_path / "s", change=change))
    assert found and all(measure.passed is None for measure in found.values())
    assert all("no verdict: drift" in measure.note for measure in found.values())


# --- paths and layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 9])
def test_layouts_are_compared_in_speed_and_read_calls(tmp_path, calls):
    def rename(frames, info):
        records = frames["runs"].arm == "prerouter"
        ids = set(frames["runs"].loc[records, "run_id"])
        frames["runs"].loc[records, "arm"] = "ondemand-records"
        info["arms"] = ["ondemand", "ondemand-records"]
        frames["loads"]["calls"] = [calls if run in ids else 9 for run in frames["loads"].run_id]

    folder = make_session(
        tmp_path / "s", arms=("ondemand", "prerouter"), k_values=(8,), condition="cold", change=rename
    )
    found = measured(tmp_path, "layout", folder)
    assert found["records.cold.k8.tok_s_ratio"].value == pytest.approx(1.8 * 1.01, rel=1e-3)
    assert found["records.cold.k8.calls_stacked"].value == 9 and found["records.cold.k8.calls_stacked"].passed
    assert found["records.cold.k8.calls_records"].value == calls
    assert found["records.cold.k8.calls_records"].passed == (calls == 1)
    assert "aa.ondemand.k8" in found


def test_rows_that_do_not_count_calls_are_refused(tmp_path, capsys):
    folder = make_session(tmp_path / "s", arms=("ondemand", "ondemand-mmap"), k_values=(8,))
    assert main(["layout", str(folder), str(tmp_path / "o.json")]) == 2
    assert main(["hot", str(folder), str(tmp_path / "o.json")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def prompts(ondemand_ms, whole_ms, auto_ms, condition="cold", tokens=27):
    rows = []
    for round_, (demand, whole, auto) in enumerate(zip(ondemand_ms, whole_ms, auto_ms, strict=True)):
        common = {
            "round": round_,
            "condition": condition,
            "tokens": tokens,
            "layers": 2,
            "experts": 10,
            "asked_bytes": 5,
        }
        ways = (("ondemand", demand, 8), ("whole-layer", whole, 20), ("auto", auto, 10))
        rows += [common | {"role": "arm", "way": w, "ttft_ms": ms, "experts_read": n} for w, ms, n in ways]
        rows.append(common | {"role": "aa", "way": "ondemand", "ttft_ms": demand * 1.01, "experts_read": 8})
    return rows


@pytest.mark.parametrize(("factor", "passed"), [(4.0, True), (1.2, False)])
def test_prompts_are_paired_judged_as_shipped_and_told_what_bytes_allow(tmp_path, factor, passed):
    """The choice is judged, not what was forced: here on demand takes twice as long, and is only told."""
    times = [1000.0, 1100.0, 900.0]
    whole, auto = [factor * ms * (1 + n / 100) for n, ms in enumerate(times)], times
    twice = [2 * ms for ms in times]
    rows = prompts(twice, whole, auto) + prompts(times, times, times, "warm", 128)
    found = measured(tmp_path, "prefill", write_rows(tmp_path, "prefill", rows))
    ratio = found["prefill.cold.27.ttft_ratio"]
    assert ratio.value == pytest.approx(factor * 1.01, rel=1e-2) and ratio.passed is passed
    assert "auto reads 0.50 of all experts: bytes alone allow 2.00" in ratio.note
    forced = found["prefill.cold.27.ondemand.ttft_ratio"]
    assert forced.value == pytest.approx(ratio.value / 2) and forced.passed is None and forced.goal == ""
    assert "ondemand reads 0.40 of all experts: bytes alone allow 2.50" in forced.note
    assert found["prefill.cold.27.ondemand.tok_s"].value == pytest.approx(13.5)
    assert found["prefill.cold.27.auto.tok_s"].value == pytest.approx(27.0)
    assert found["prefill.warm.128.ttft_ratio"].passed is None and found["prefill.warm.128.ttft_ratio"].goal == ""
    assert found["prefill.cold.27.aa"].value == pytest.approx(1.01)


def lived(growth_mib, odd_tokens=(), pinned=0):
    rows = [
        {
            "part": "long",
            "number": number,
            "request_bytes": number * 1000,
            "alloc_cache_bytes": number % 256 * 2000,
            "rss_anon_bytes": (100 << 20)
            + number * 1000
            + number % 256 * 2000
            + int(growth_mib * 2**19 * number / 1000),
            "dropped": 0,
            "pinned": 3,
        }
        for number in range(50, 2001, 50)
    ]
    rows += [
        {
            "part": "short",
            "number": number,
            "request_bytes": 0,
            "alloc_cache_bytes": 0,
            "rss_anon_bytes": 100 << 20,
            "dropped": 0,
            "pinned": pinned,
            "kind": number % 2,
            "tokens": "odd" if number in odd_tokens else f"kind {number % 2}",
        }
        for number in range(50)
    ]
    return rows


def test_growth_beyond_the_requests_caches_is_judged(tmp_path):
    for growth, passed in ((1.0, True), (20.0, False)):
        found = measured(tmp_path, "endurance", write_rows(tmp_path, "endurance", lived(growth)))
        assert found["endurance.growth"].value == pytest.approx(0.9 * growth, rel=0.01)
        assert found["endurance.growth"].passed is passed
        assert found["endurance.requests_different"].passed and found["endurance.pinned"].passed


def test_a_request_that_felt_the_one_before_is_counted(tmp_path):
    found = measured(tmp_path, "endurance", write_rows(tmp_path, "endurance", lived(0.0, odd_tokens=(7, 9), pinned=2)))
    assert found["endurance.requests_different"].value == 2 and found["endurance.requests_different"].passed is False
    assert found["endurance.pinned"].passed is False


def test_missing_rows_are_one_line(tmp_path, capsys):
    assert main(["reads", str(tmp_path / "reads.json"), str(tmp_path / "out.json")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()
