"""`edge0 doctor`: the machine file it writes, the report it prints, the warnings, and what is kept out of both."""

import argparse
import getpass
import platform
from pathlib import Path

import pytest
import yaml

from edge0.cli import main
from edge0.errors import ErrorKind
from edge0.telemetry.host import describe_host, machine_id
from edge0.telemetry.pagecache import ProbeReport
from experiments.budgets.methods import MethodReport
from experiments.host import doctor, examination, machine_file
from experiments.host.machine_file import MACHINES, check, device_kind, without_paths, write

WORKS = MethodReport("eviction", True, "a scratch file could be evicted from /some/where/else")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A small scratch file, in a folder of one's own; what others test is not tried again."""
    monkeypatch.setattr(examination, "SCRATCH_BYTES", 16 << 20)
    monkeypatch.setattr(examination, "budget_methods", lambda path: [WORKS])
    monkeypatch.chdir(tmp_path)


def run(*arguments) -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    doctor.run(parser.parse_args([*map(str, arguments), "--seconds", "0.01"]))


@pytest.fixture(scope="module")
def values(unit_35b):
    """A machine file's values of this machine, and the host that it was made from."""
    with pytest.MonkeyPatch.context() as patch, examination.subject(unit_35b, lambda what: None) as what:
        patch.setattr(examination, "budget_methods", lambda path: [WORKS])
        return examination.examine(what, 0.01, lambda what: None), what


def test_without_a_checkpoint_a_scratch_file_is_read_and_removed(tmp_path, capsys):
    run("--out", tmp_path / "machines")
    assert [path.name for path in tmp_path.iterdir()] == ["machines"]
    (path,) = (tmp_path / "machines").iterdir()
    assert path.name == f"{machine_id()}.yaml"
    written = yaml.safe_load(path.read_text())
    check(written, path)
    assert written["source"] == "measured" and written["id"] == machine_id()
    storage = written["storage"]
    if storage["random_reads"]:
        assert [row["threads"] for row in storage["random_reads"]] == [1, 2, 4, 8]
        assert (storage["read_file"], storage["read_bytes"]) == ("scratch", 1_769_472)  # 1.69 MiB
    printed = capsys.readouterr().out
    assert f"written: {path}" in printed and "upper bound" not in printed
    assert "as the engine reads" in printed or not storage.get("advised_reads")


def test_with_a_checkpoint_its_experts_are_read_and_a_step_is_priced(unit_35b, tmp_path, capsys):
    run(unit_35b, "--out", tmp_path)
    printed = capsys.readouterr().out
    assert "checkpoint" in printed and "less than this machine's memory" in printed
    if "random reads are not measured" not in printed:
        assert "upper bound of what reading costs" in printed and "K=4:" in printed
        assert "the checkpoint's expert files" in printed


def test_the_file_of_another_machine_of_the_same_kind_is_told_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_file, "MACHINES", tmp_path / "machines")
    run()
    (path,) = (tmp_path / "machines").iterdir()
    first = yaml.safe_load(path.read_text())
    here = machine_file.this_machine()
    assert machine_file.other_machine(here, path.parent) == ""
    nearly = first | {"ram_bytes": int(1.005 * first["ram_bytes"]), "kernel": "another"}
    path.write_text(yaml.safe_dump(nearly))
    assert machine_file.other_machine(here, path.parent) == ""
    for change in ({"cpu_model": "another CPU"}, {"ram_bytes": int(1.02 * first["ram_bytes"])}):
        path.write_text(text := yaml.safe_dump(first | change))
        capsys.readouterr()
        run()
        (key, value), printed = next(iter(change.items())), " ".join(capsys.readouterr().out.split())
        assert f"not written: {path} is of another machine ({key}: {value} there" in printed
        assert "machine=NAME" in printed and path.read_text() == text


def test_what_would_tell_whose_machine_it_is_stays_out(unit_35b, values, tmp_path):
    text = write(values[0], tmp_path).read_text()
    words = set(text.replace("'", " ").split())
    assert str(unit_35b) not in text and unit_35b.name not in text and "/some/where" not in text
    assert platform.node() not in words
    assert f"/home/{getpass.getuser()}" not in text


def test_the_arithmetic_of_a_step():
    step = examination.Step(k=8, layers=40, step_bytes=8 * 40 * 1_769_472)
    assert step.cost_ms(540) == pytest.approx(1000)  # 540 MiB at 540 MiB/s


def test_steps_of_a_checkpoint(unit_35b, values):
    _, what = values
    assert [step.k for step in what.steps] == [2, 4, 8]
    assert all(step.step_bytes == step.k * step.layers * what.expert_bytes for step in what.steps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"storage": {"guest": True}}, "virtual machine"),
        ({"storage": {"guest": False, "lower_cache": "suspected"}}, "below the page cache"),
        ({"storage": {"read_ahead_kb": 8192}}, "read-ahead window is 8192"),
        ({"storage": {"filesystem": "tmpfs"}}, "tmpfs, which is memory"),
        ({"host": {"damon_schemes": "pageout"}}, "DAMON: pageout"),
        ({"host": {"load_1min": 99.0}}, "load average 99.0"),
        ({"swap": 1 << 30}, "1024 MiB of swap"),
        ({"power": {"on_battery": True}}, "on battery"),
        ({"power": {"low_power_mode": True}}, "Low power mode"),
        ({"power": {"governor": "powersave", "max_frequency_mhz": 4000}}, "governor is powersave"),
        ({"thermal": {"limited": True}}, "too hot"),
        ({"probe": {"method": "unavailable"}}, "cannot be probed"),
        ({"budgets": [{"method": "eviction", "works": False, "reason": "no"}]}, "No way to limit"),
        (
            {"storage": {"random_reads": [{"threads": 1, "mib_s": 9.0, "median_ms": 1.0, "device_share": 0.4}]}},
            "Only 40%",
        ),
    ],
)
def test_each_warning_comes_with_its_cause_and_only_then(values, change, words):
    quiet = values[0] | {
        "storage": values[0]["storage"]
        | {"guest": False, "lower_cache": "none", "read_ahead_kb": 128, "filesystem": "ext4", "random_reads": []},
        "power": dict.fromkeys(values[0]["power"]),
        "thermal": dict.fromkeys(values[0]["thermal"]),
        "probe": {"method": "mincore", "evicts": True, "counts_device_bytes": True, "reason": ""},
        "budgets": [{"method": "eviction", "works": True, "reason": ""}],
    }
    host = {"damon_schemes": "", "load_1min": 0.1, "cores_logical": 4}
    assert examination.warnings(quiet, host, 0) == []
    changed = {
        key: value if isinstance(value, list) else quiet[key] | value for key, value in change.items() if key in quiet
    }
    found = examination.warnings(quiet | changed, host | change.get("host", {}), change.get("swap", 0))
    assert len(found) == 1 and words in found[0]


def test_on_memory_nothing_is_read(unit_35b, monkeypatch):
    monkeypatch.setattr(examination, "describe_host", lambda path: describe_host(path) | {"filesystem": "tmpfs"})
    with examination.subject(unit_35b, lambda what: None) as what:
        found = examination.examine(what, 0.01, lambda what: None)
    assert found["storage"]["random_reads"] == [] and "memory" in found["warnings"][0]
    assert "not measured here" in doctor.report_text(found, what)


def test_a_machine_that_tells_much(values):
    told = values[0] | {
        "thermal": {"hottest_c": 71.0, "zone": "cpu", "limited": True, "speed_limit_percent": 60},
        "power": {
            "on_battery": True,
            "battery_percent": 57,
            "low_power_mode": True,
            "governor": "powersave",
            "frequency_mhz": 1800,
            "max_frequency_mhz": 4200,
            "boost": False,
        },
        "warnings": [],
        "swap_bytes": 2 << 30,
    }
    text = doctor.report_text(told, values[1])
    assert "71 C at the hottest (cpu), slowed down by heat" in text
    assert "on battery (57% charged), low power mode, governor powersave, 1800 of 4200 MHz, boost off" in text
    assert "2.0 GiB of swap" in text and "nothing was found" in text


def test_eviction_that_does_not_work_leaves_advised_reads_out(unit_35b, monkeypatch):
    monkeypatch.setattr(examination, "self_test", lambda path: ProbeReport("mincore", False, False, "as told"))
    with examination.subject(unit_35b, lambda what: None) as what:
        found = examination.examine(what, 0.01, lambda what: None)
    assert "advised_reads" not in found["storage"]


def test_no_room_for_a_scratch_file(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(examination, "SCRATCH_BYTES", 1 << 60)
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: run("--out", tmp_path), "too little room", "name a checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_is_refused(tmp_path, refused):
    refused(ErrorKind.FILE_MISSING, lambda: run(tmp_path / "nowhere"), "config.json")


def test_a_machine_file_is_written_whole_or_not_at_all(values, tmp_path, refused):
    (tmp_path / "file").touch()
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: write(values[0], tmp_path / "file"), "--out")
    bad = values[0] | {"storage": values[0]["storage"] | {"lower_cache": "perhaps"}}
    refused(ErrorKind.OPTION_INVALID, lambda: write(bad, tmp_path), f"{values[0]['id']}.yaml: storage.lower_cache")
    without = {key: value for key, value in values[0].items() if key != "probe"}
    refused(ErrorKind.OPTION_INVALID, lambda: write(without, tmp_path), "'probe' is a required property")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("nvme0n1p2", "nvme0n1p2"),
        ("sda", "sda"),
        ("vda1", "vda1"),
        ("mmcblk0p1", "mmcblk0p1"),
        ("disk3s1s1", "disk3s1s1"),
        ("dm-0", "dm-0"),
        ("alices--laptop-root", "other"),
        ("export", "other"),
        (None, None),
    ],
)
def test_devices_by_kind(device, kind):
    assert device_kind(device) == kind


def test_what_nobody_can_measure_stays_in_the_file(values, tmp_path, refused):
    serving = {"checkpoint_bytes": 1e9, "load_a_ms": 0.4, "load_b_ms": 1.5, "load_source": "Table 4"}
    path = write(values[0] | {"serving": serving, "name": "before"}, tmp_path)
    assert write(values[0], tmp_path) == path
    written = yaml.safe_load(path.read_text())
    assert written["serving"] == serving and written["name"] == values[0]["name"]
    for text in ("serving: [", "", "\udcff"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        refused(ErrorKind.OPTION_INVALID, lambda: write(values[0], tmp_path), path.name, "mend it")


def test_the_report_ends_with_what_to_run_next(unit_35b, values, tmp_path, capsys):
    run(unit_35b, "--out", tmp_path)
    last = capsys.readouterr().out.strip().splitlines()[-len(doctor.NEXT) :]
    assert [line.split()[1] for line in last] == ["noise", "budgets", "fit", "tab3", "predict"]
    quiet = values[0] | {"warnings": [], "budgets": [{"method": "eviction", "works": True, "reason": ""}]}
    assert doctor.next_text(quiet, None).startswith("run next:\n  snakemake noise     how small")
    assert "snakemake tab3 --config model=mine/edge0-35b" in doctor.next_text(quiet, Path("mine/edge0-35b"))
    assert "snakemake fit --config tier=mini-35b" in doctor.next_text(quiet, Path("models/mini-35b"))
    nothing = doctor.next_text(values[0] | {"warnings": ["hot"], "budgets": []}, None)
    assert nothing.startswith("when the warnings above") and "budgets" not in nothing
    assert "snakemake tab3 --config condition=warm" in nothing


def test_the_targets_exist():
    rules = "".join(path.read_text() for path in (MACHINES.parent / "rules").glob("*.smk"))
    rules += (MACHINES.parents[1] / "Snakefile").read_text()
    assert all(f"\nrule {target}:" in rules for target, _ in doctor.NEXT)


def test_paths_are_taken_out_of_reasons(tmp_path):
    file = tmp_path / "secret-name.safetensors"
    text = f"secret-name.safetensors: 5 MiB/s, denied: '/sys/fs/cgroup/user.slice' and {file}, ratio 3/4"
    assert without_paths(text, [file]) == "the file: 5 MiB/s, denied: '(a path)' and the file, ratio 3/4"


def test_the_committed_machine_files_pass_the_schema():
    found = sorted(MACHINES.glob("*.yaml"))
    assert {"m2-16gb", "m4pro-24gb"} <= {path.stem for path in found}
    for path in found:
        values = yaml.safe_load(path.read_text())
        machine_file.check(values, path)
        assert values["id"] == path.stem


def test_a_machine_file_that_is_there_is_not_replaced_by_reads_of_a_scratch_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_file, "MACHINES", tmp_path)
    there = tmp_path / f"{machine_id()}.yaml"
    there.write_text("kept: true\n")
    assert main(["doctor", "--seconds", "0.01"]) == 0
    assert there.read_text() == "kept: true\n" and f"not written: {there}" in capsys.readouterr().out
