"""The public names lie where the package says, and everything that it imports is declared."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

import edge0

ROOT = Path(edge0.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"


@pytest.mark.parametrize("name", edge0.__all__)
def test_a_public_name_is_fetched_from_the_module_that_defines_it(name):
    value, home = getattr(edge0, name), f"edge0.{edge0._HOME[name]}"
    assert getattr(value, "__module__", home) == home
    assert value is getattr(sys.modules[home], name)


def imported():
    """Top-level names of what the package imports, without itself and the standard library."""
    names = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"edge0"}


def test_every_import_is_a_declared_dependency():
    declared = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    names = {line.partition("==")[0].partition("[")[0].replace("-", "_") for line in declared}
    assert {"mlx", "numpy", "tokenizers"} <= imported() <= names


def test_pins_are_those_of_the_constraints():
    lines = (ROOT.parent / "constraints.txt").read_text().splitlines()
    pins = {name.lower().replace("_", "-"): pin for name, _, pin in (line.partition("==") for line in lines)}
    project = tomllib.loads(PROJECT.read_text())["project"]
    for line in project["dependencies"]:
        name, _, pin = line.partition("==")
        assert pins[name.partition("[")[0].lower().replace("_", "-")] == pin, line
