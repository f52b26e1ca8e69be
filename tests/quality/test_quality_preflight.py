"""Preflight: a check of IFBench that cannot run is an error before the run, not a lower score after it."""

import dataclasses
import importlib.util
import json

import pytest

from edge0.errors import ErrorKind
from experiments.quality.preflight import check_instructions, check_packages, check_reference

NLTK_SAYS = "\n****\n  Resource \x1b[93mpunkt_tab\x1b[0m not found.\n  Please use the NLTK Downloader\n"


class Check:
    def __init__(self, name):
        self.name = name

    def build_description(self, **told):
        assert None not in told.values()

    def check_following(self, text):
        return bool(text)


def raising(error):
    class Broken(Check):
        def check_following(self, text):
            raise error

    return Broken


@pytest.fixture
def ifbench(stand_ins):
    return stand_ins.benchmark("ifbench")


def registry(ifbench, check=Check):
    names = {name for question in ifbench.questions for name in question.category.split("+")}
    return {**dict.fromkeys(names, Check), ifbench.questions[0].category: check}


def test_checks_that_run_pass(ifbench, tmp_path):
    check_instructions(ifbench, registry(ifbench), tmp_path)


@pytest.mark.parametrize("said", [NLTK_SAYS, NLTK_SAYS.replace("\x1b[93m", "'").replace("\x1b[0m", "'")])
def test_missing_nltk_data_is_named(refused, ifbench, tmp_path, said):
    broken = registry(ifbench, raising(LookupError(said)))
    refused(
        ErrorKind.FILE_MISSING,
        lambda: check_instructions(ifbench, broken, tmp_path),
        tmp_path,
        "punkt_tab",
        "nltk.downloader -d",
    )


@pytest.mark.parametrize("error", [AttributeError("None has no is_emoji"), KeyError("x"), LookupError("other")])
def test_whatever_else_a_check_raises_is_an_error(refused, ifbench, tmp_path, error):
    broken = registry(ifbench, raising(error))
    refused(ErrorKind.CORPUS_INVALID, lambda: check_instructions(ifbench, broken, tmp_path), "not followed")


def test_an_unknown_instruction_is_refused(refused, ifbench, tmp_path):
    said = ("key 0: ", ifbench.questions[0].category, "no such instruction")
    refused(ErrorKind.CORPUS_INVALID, lambda: check_instructions(ifbench, {}, tmp_path), *said)


def test_what_each_question_tells_its_check_is_tried(refused, ifbench, tmp_path):
    class Strict(Check):
        def build_description(self, **told):
            if "percent" in told:
                raise TypeError("unexpected keyword argument")

    name = ifbench.questions[0].category
    wrong = {"key": "99", "prompt": "p", "instruction_id_list": [name], "kwargs": [{"percent": 3}]}
    path = tmp_path / "IFBench_test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (*ifbench.rows, wrong)))
    data = dataclasses.replace(ifbench, files=(path,))
    known = {**registry(ifbench), name: Strict}
    refused(ErrorKind.CORPUS_INVALID, lambda: check_instructions(data, known, tmp_path), path, f"key 99: {name}")


@pytest.mark.skipif(importlib.util.find_spec("opencompass") is not None, reason="this is the quality environment")
def test_another_environment_is_told_as_such(refused):
    refused(ErrorKind.FILE_MISSING, check_packages, "opencompass", "make quality")


def test_the_reference_solution_must_pass(refused, stand_ins, tmp_path):
    data = stand_ins.benchmark("humaneval")
    check_reference(data)
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps({**row, "canonical_solution": "    return 0.5\n"}) + "\n" for row in data.rows))
    broken = dataclasses.replace(data, files=(path,))
    refused(ErrorKind.CORPUS_INVALID, lambda: check_reference(broken), path, "StandIn/0")
