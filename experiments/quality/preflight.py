"""What is looked at before a run that may take days: packages, IFBench's checks, and that an answer's code can be run.

IFBench's evaluator takes whatever a check raises for "not followed": without its data or packages it scores lower and
says nothing. So each check that the questions ask for is called here, where nothing catches what it raises.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from experiments.quality.benchmarks import ENVIRONMENT
from experiments.quality.data import NLTK_DATA, Data, DataRoot
from experiments.quality.humaneval import passes
from experiments.quality.layout import nltk_command

OPENCOMPASS = "0.5.4"
MODULES = ("mmengine", "datasets", "torch", "math_verify", "latex2sympy2_extended", "emoji", "syllapy", "nltk")
_ENVIRONMENT = f"make quality builds it: use python and edge0 of {ENVIRONMENT}"
# Something of each kind that a check may look for: with it, all 58 run to their end.
SAMPLE = (
    "Read the first line, and answer. Is it short? It is short! We see one, two and three things here.\n\n"
    "- First (one [two {three} four]) item.\n- Second item, \"quoted 'inner' text\" there.\n\n"
    "The last paragraph has a few more words, so that every check finds what it looks for. Bob and Alice went to Paris."
)


def check_packages() -> None:
    """That this is the quality environment.

    Raises:
        Edge0Error: FILE_MISSING.
    """
    found = _version("opencompass")
    if found != OPENCOMPASS:
        _refuse("opencompass", OPENCOMPASS, found)
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            _refuse(module, "installed", "not here")
    arrow = _version("pyarrow")
    if arrow is None or int(arrow.partition(".")[0]) >= 26:
        _refuse("pyarrow", "below 26, which OpenCompass's numpy can serve", arrow)


def preflight(root: DataRoot, data: Mapping[str, Data]) -> None:
    """
    Raises:
        Edge0Error: FILE_MISSING naming NLTK data; CORPUS_INVALID for a check or a reference solution that fails.
    """
    if "ifbench" in data:
        import nltk
        from opencompass.datasets.IFBench.instructions_registry import INSTRUCTION_DICT

        nltk.data.path.insert(0, str(root.path / NLTK_DATA))
        check_instructions(data["ifbench"], INSTRUCTION_DICT, root.path / NLTK_DATA)
    if "humaneval" in data:
        check_reference(data["humaneval"])


def check_instructions(data: Data, registry: Mapping[str, Callable[[str], Any]], nltk_data: Path) -> None:
    """Call every check that IFBench's questions ask for, with what they tell it.

    Raises:
        Edge0Error: as `preflight`.
    """
    asked = [
        (f"key {row['key']}: {name}", name, {key: value for key, value in told.items() if value is not None})
        for row in data.rows
        for name, told in zip(row["instruction_id_list"], row["kwargs"], strict=True)
    ]
    for where, name, told in asked:
        if name not in registry:
            detail, expected = "OpenCompass has no such instruction", f"one of its {len(registry)}"
            raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=data.files[0], tensor=where, expected=expected)
        try:
            check = registry[name](name)
            check.build_description(**told)
            check.check_following(SAMPLE)
        except LookupError as error:
            resource = re.search(r"Resource '?(?:\x1b\[\d+m)?'?(\w+)", str(error))
            if resource is None:
                _refuse_check(data, where, error)
            raise Edge0Error(
                ErrorKind.FILE_MISSING,
                f"IFBench's check {name} needs NLTK data that is not here",
                path=nltk_data,
                tensor=resource[1],
                hint=nltk_command(nltk_data),
            ) from error
        except Exception as error:  # whatever it raises, the evaluator would take it for an instruction not followed
            _refuse_check(data, where, error)


def check_reference(data: Data) -> None:
    """Run the first problem's own solution.

    Raises:
        Edge0Error: CORPUS_INVALID.
    """
    problem = data.rows[0]
    if not passes(problem, problem["canonical_solution"]):
        detail, task = "the reference solution of a problem does not pass here", str(problem["task_id"])
        hint = "code of answers cannot be run on this machine, or the file is damaged"
        raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=data.files[0], tensor=task, hint=hint)


def _refuse_check(data: Data, where: str, error: Exception) -> None:
    detail = f"IFBench's check fails, and would count as not followed ({type(error).__name__}: {error})"
    raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=data.files[0], tensor=where) from error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _refuse(package: str, expected: object, found: object) -> None:
    detail = "not the environment of the quality benchmarks"
    raise Edge0Error(ErrorKind.FILE_MISSING, detail, tensor=package, expected=expected, found=found, hint=_ENVIRONMENT)
