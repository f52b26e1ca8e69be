"""The command line: what it prints, and that every expected failure is one line and exit code 2."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference import direct_or_skip

from edge0 import cli
from edge0.cli import main
from edge0.commands.engine import parse_bytes
from edge0.errors import EXIT_CODE
from edge0.kernels.choice import kernel_name


def test_synth_then_generate(tmp_path, capsys, caplog):
    target = tmp_path / "unit"
    assert main(["synth", "unit-35b", str(target), "--log", str(tmp_path / "log")]) == 0
    assert (target / "config.json").exists() and str(target) in (tmp_path / "log").read_text()
    capsys.readouterr()
    command = ["generate", str(target), "hello", "--k", "4", "--max-tokens", "6", "--seed", "3"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert re.match(r"prefill 5 tokens in .* tok/s\).* MiB.*; decode 6 tokens, .* tok/s, \d+ expert loads", first.err)
    assert main(command) == 0
    assert capsys.readouterr().out == first.out
    by = kernel_name("auto")
    assert first.err.endswith(f"; kernels {by}, io pread\n") and not caplog.records
    direct_or_skip(target.glob("*.safetensors")).close()
    assert main([*command, "--io", "direct"]) == 0
    direct = capsys.readouterr()
    assert direct.out == first.out and direct.err.endswith(f"; kernels {by}, io direct\n")
    assert "is not repacked" in caplog.text and "edge0 repack" in caplog.text
    caplog.clear()
    assert main(["repack", str(target), str(tmp_path / "records")]) == 0
    command[1] = str(tmp_path / "records")
    capsys.readouterr()
    assert main([*command, "--io", "direct"]) == 0
    assert capsys.readouterr().out == first.out and not caplog.records


def test_a_chat_template_makes_another_prompt(checkpoints, capsys):
    command = ["generate", str(checkpoints["unit-35b"]), "hello", "--k", "4", "--max-tokens", "2"]
    assert main([*command, "--chat"]) == 0
    assert "prefill 5 tokens" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["synth", "giga-35b", "x"],
        ["synth", "unit-35b", "."],
        ["generate", "no/such/checkpoint", "hello"],
    ],
)
def test_expected_failures_are_one_line_and_exit_code_two(command, capsys):
    assert main(command) == EXIT_CODE
    error = capsys.readouterr().err.strip()
    assert error.startswith("edge0: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "extra",
    [
        ["--k", "99"],
        ["--k", "3"],
        ["--memory", "10kB"],
        ["--memory", "much"],
        ["--memory", "9" * 400],
        ["--context", "0"],
        ["--temperature", "-1"],
        ["--max-tokens", "0"],
    ],
)
def test_generate_refuses_bad_options_in_one_line(checkpoints, capsys, extra):
    assert main(["generate", str(checkpoints["unit-35b"]), "hello", *extra]) == EXIT_CODE
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("command", [["verify"], ["plan"], ["generate", "hello"]])
def test_an_output_that_cannot_be_written_is_one_line(checkpoints, command):
    name, *rest = command
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "edge0.cli", name, str(checkpoints["unit-35b"]), *rest],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == EXIT_CODE
    assert [line for line in done.stderr.splitlines() if line.startswith("edge0: cannot write")]
    assert "Traceback" not in done.stderr


def test_closed_standard_input_is_no_fault_of_the_checkpoint(checkpoints):
    command = f"{shlex.quote(sys.executable)} -m edge0.cli generate {checkpoints['unit-35b']} hello --max-tokens 2 <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "nbytes"), [("1TiB", 2**40), ("2tb", 2 * 10**12), ("1.5GiB", 3 << 29), ("7", 7)])
def test_sizes(text, nbytes):
    assert parse_bytes(text, "memory") == nbytes


def test_the_command_line_imports_nothing_that_draws_or_tabulates():
    """Every `edge0 serve` would keep it in memory, and a base installation does not have it."""
    program = "import sys, edge0.cli as cli; cli.command_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"experiments.host.doctor", "analysis.prediction.command"} <= modules
    assert not modules & {"pandas", "matplotlib", "scipy", "pyarrow", "mlx.core", "transformers"}


class Point:
    """An entry point of another package."""

    def __init__(self, name, load):
        self.name, self.load = name, load

    def __lt__(self, other):
        return self.name < other.name


def test_a_command_whose_package_is_not_installed_is_absent(monkeypatch, capsys):
    def absent():
        raise ImportError("no pandas here")

    monkeypatch.setattr(cli, "entry_points", lambda group: [Point("draw", absent)])
    assert set(cli.all_commands()) == set(cli.COMMANDS)
    with pytest.raises(SystemExit):
        main(["draw"])
    assert "invalid choice: 'draw'" in capsys.readouterr().err


def test_a_command_that_lacks_a_package_when_it_runs_names_it_in_one_line(monkeypatch, capsys):
    def run(options):
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

    module = SimpleNamespace(HELP="draws", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli, "entry_points", lambda group: [Point("draw", lambda: module)])
    assert main(["draw"]) == EXIT_CODE
    assert capsys.readouterr().err == "edge0: draw needs the package pandas: install edge0[harness]\n"
