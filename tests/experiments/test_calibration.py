"""The calibration of `edge0 doctor`: what is chosen, where it is kept, and who takes it from there."""

import dataclasses
import sys

import pytest
import yaml

from edge0 import EngineOptions
from edge0.cli import command_parser, main
from edge0.commands.engine import engine_options
from edge0.errors import ErrorKind
from edge0.families import read_config
from experiments.config import CONFIG, Workflow
from experiments.host import calibration, doctor
from experiments.host.calibration import Trial, calibrate, chosen, fewest, words
from experiments.host.machine_file import calibrations, this_machine, write


def quiet(what: str) -> None:
    pass


def values(**more):
    return {**this_machine(), "name": "a machine", "source": "paper", "created": "today", **more}


@pytest.fixture
def entry(unit_35b):
    """Two threads decode faster than one, and four no faster than two; two groups beat three by less than shows."""
    ms = {(1, 3): 30.0, (2, 3): 20.0, (4, 3): 19.9, (2, 1): 25.0, (2, 2): 20.5, (2, 5): 24.0}
    return calibrate(unit_35b, quiet, decode=lambda threads, groups: Trial(threads, groups, ms[threads, groups], 9))


def test_the_least_of_what_is_fast_is_chosen_and_each_way_is_tried_once(entry, unit_35b):
    assert (entry["reader_threads"], entry["launch_groups"]) == (2, 2)
    tried = [(trial["reader_threads"], trial["launch_groups"]) for trial in entry["trials"]]
    assert len(set(tried)) == len(tried) == 6
    told = "\n".join(words(entry))
    assert "2 reader threads, 2 launch groups" in told and "20.5 ms" in told and "30.0 ms" in told
    assert str(unit_35b) not in told


def test_the_fewest_within_the_margin():
    trials = [Trial(4, 3, 10.0, 5), Trial(2, 3, 10.4, 5), Trial(1, 3, 10.6, 5)]
    assert fewest(trials) == trials[1]


def test_trials_decode_the_checkpoint(unit_35b, monkeypatch):
    monkeypatch.setattr(calibration, "THREADS", (1, 2))
    monkeypatch.setattr(calibration, "GROUPS", (1, 40))
    found = calibrate(unit_35b, quiet, seconds=0.01)
    assert [trial["launch_groups"] for trial in found["trials"]] == [1, 1]  # 40 are more than there are layers
    assert all(trial["n"] >= calibration.LEAST_STEPS and trial["step_ms"] > 0 for trial in found["trials"])


def test_a_choice_is_kept_by_shape_and_found_on_its_machine_only(entry, unit_35b, tmp_path):
    other = dict(entry, shape="another model", reader_threads=7)
    write(values(calibrations=[other]), tmp_path)
    path = write(values(calibrations=[entry]), tmp_path)
    write(values(), tmp_path)  # a later look at the machine takes nothing away
    assert [one["shape"] for one in calibrations(path)] == ["another model", entry["shape"]]
    config = read_config(unit_35b)
    assert chosen(config, tmp_path) == {"reader_threads": 2, "launch_groups": 2}
    assert chosen(dataclasses.replace(config, experts=64), tmp_path) == {}
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(document | {"ram_bytes": 2 * document["ram_bytes"]}))
    assert chosen(config, tmp_path) == {}
    path.write_text("no machine file")
    assert chosen(config, tmp_path) == {} == chosen(config, tmp_path / "nowhere")


def test_commands_and_workflow_take_what_was_chosen_and_the_configuration_goes_first(entry, unit_35b, monkeypatch):
    monkeypatch.setattr(doctor, "engine_defaults", lambda checkpoint: {"reader_threads": 5, "launch_groups": 2})
    options = engine_options(command_parser().parse_args(["plan", str(unit_35b)]))
    assert (options.reader_threads, options.launch_groups) == (5, 2)
    shipped = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | {"model": str(unit_35b)}
    plain = EngineOptions()
    monkeypatch.setattr("experiments.config.chosen", lambda config: {})
    found = Workflow.of(shipped).values
    assert (found["reader_threads"], found["launch_groups"]) == (plain.reader_threads, plain.launch_groups)
    monkeypatch.setattr("experiments.config.chosen", lambda config: {"reader_threads": 5, "launch_groups": 2})
    found = Workflow.of(shipped | {"launch_groups": 4}).values
    assert (found["reader_threads"], found["launch_groups"]) == (5, 4)
    assert " --reader-threads 5 " in Workflow.of(shipped).session_arguments() + " "


def test_a_calibration_needs_a_checkpoint(refused):
    options = command_parser().parse_args(["doctor", "--calibrate"])
    refused(ErrorKind.OPTION_INVALID, lambda: doctor.run(options), "name a checkpoint")
    assert main(["doctor", "--calibrate"]) == 2


def test_without_the_harness_packages_there_are_no_defaults_and_no_error(monkeypatch, checkpoints):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    for name in ("calibration", "machine_file"):
        monkeypatch.delitem(sys.modules, f"experiments.host.{name}", raising=False)
    assert doctor.engine_defaults(checkpoints["unit-35b"]) == {}
