"""The peers' packages, in a folder of their own: `python -m experiments.peers.library FOLDER OUT.json`.

Installs what `requirements.txt` pins with `pip --target`, which compiles llama.cpp where there is no wheel of it (a
compiler and cmake; 15 minutes on two cores), tries it, and writes whether it is there, and if not why: a machine
without it still has every other arm. Nothing that is installed here is seen by anything else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from edge0.errors import Edge0Error, ErrorKind, writing
from experiments.publish import run_command

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
BUILD_TIMEOUT_S = 7200
# Loading the library says whether this machine can run it: one that was built elsewhere may use other instructions.
TRY = "import llama_cpp, gguf; llama_cpp.llama_backend_init(); print(llama_cpp.llama_print_system_info().decode())"


def pinned() -> dict[str, str]:
    """Package -> version."""
    lines = (line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def missing(folder: Path) -> list[str]:
    """Pinned packages that the folder does not hold in that version."""
    held = {each.metadata["Name"]: each.version for each in distributions(path=[str(folder)])}
    held = {name.replace("_", "-"): version for name, version in held.items()}
    return [f"{name} {version}" for name, version in pinned().items() if held.get(name) != version]


@contextmanager
def importable(folder: Path, name: str) -> Iterator[ModuleType]:
    """A package of the folder, importable with all that it needs meanwhile.

    Raises:
        Edge0Error: FILE_MISSING.
    """
    sys.path.insert(0, str(folder))
    try:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            hint = "`snakemake peers-lib` builds it"
            raise Edge0Error(ErrorKind.FILE_MISSING, f"no {name} ({error})", path=folder, hint=hint) from error
        yield module
    finally:
        sys.path.remove(str(folder))


def build(folder: Path) -> dict[str, Any]:
    """Install what is missing and try it; returns what is to be known. OSError passes."""
    about = {"folder": str(folder), "versions": pinned(), "built": False, "reason": "", "system": ""}
    if missing(folder):
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(folder)]
        if failure := _failure([*install, "-r", str(REQUIREMENTS)]):
            return about | {"reason": f"pip could not build it: {failure}"}
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {TRY}"
    tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    if tried.returncode:
        return about | {"reason": f"it does not run here: {_last(tried.stderr, tried.returncode)}"}
    return about | {"built": True, "system": tried.stdout.strip()}


def _failure(command: list[str]) -> str:
    """The last line of error of a command; "" where it ended well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it took longer than {BUILD_TIMEOUT_S} s"
    return _last(done.stderr, done.returncode) if done.returncode else ""


def _last(text: str, code: int) -> str:
    return (text.strip().splitlines() or [f"exit code {code}"])[-1].strip()


def write(about: Mapping[str, Any], out: Path) -> None:
    """
    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.peers.library", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    return run_command(lambda: write(build(options.folder.resolve()), options.out))


if __name__ == "__main__":
    sys.exit(main())
