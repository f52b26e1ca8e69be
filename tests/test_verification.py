"""Directories whose files are all in order and which still cannot be opened."""

import json

import pytest

from edge0 import verification
from edge0.checkpoint.verify import verify_files
from edge0.cli import main
from edge0.errors import EXIT_CODE, ErrorKind
from edge0.verification import verify

MALFORMED = ErrorKind.CONFIG_MALFORMED


def edit(path, **fields):
    document = json.loads(path.read_text())
    document.get("text_config", document).update(fields)
    path.write_text(json.dumps(document))


def only_problem(directory):
    """The one problem of a directory whose files have none."""
    assert not verify_files(directory).problems
    (problem,) = verify(directory).problems
    return problem


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("unit-8b", {"rope_interleave": False}),
        ("unit-8b", {"kda_safe_gate": False}),
        ("unit-8b", {"rope_scaling": "linear"}),
    ],
)
def test_a_config_of_no_model(copy_of, capsys, name, fields):
    directory = copy_of(name)
    edit(directory / "config.json", **fields)
    problem = only_problem(directory)
    assert problem.kind is MALFORMED and problem.path == directory / "config.json"
    assert main(["verify", str(directory)]) == EXIT_CODE
    assert f"problem: {problem}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": "7"}'])
def test_a_generation_config_that_serving_cannot_read(copy_of, text):
    directory = copy_of("unit-8b")
    (directory / "generation_config.json").write_text(text)
    problem = only_problem(directory)
    assert problem.kind is MALFORMED and problem.path == directory / "generation_config.json"


@pytest.mark.parametrize("decoder", [None, {"type": "Fuse"}])
def test_a_tokenizer_that_is_not_byte_level(copy_of, decoder):
    directory = copy_of("unit-8b")
    edit(directory / "tokenizer.json", decoder=decoder)
    problem = only_problem(directory)
    assert problem.kind is ErrorKind.FILE_UNREADABLE and "not a byte-level tokenizer" in problem.detail


def test_a_config_that_lies_about_sizes_reaches_no_library(copy_of, monkeypatch):
    """A library that believes it may take all memory."""

    def asked(*arguments, **options):
        pytest.fail("a library was asked")

    monkeypatch.setattr(verification, "Vocabulary", asked)
    monkeypatch.setattr(verification.models, "build", asked)
    directory = copy_of("unit-8b")
    for fields, kind in (({"vocab_size": 4096}, ErrorKind.TENSOR_MISMATCH), ({"vocab_size": 1 << 62}, MALFORMED)):
        edit(directory / "config.json", **fields)
        assert {problem.kind for problem in verify(directory).problems} == {kind}


def test_a_broken_tokenizer_is_told_once(copy_of):
    directory = copy_of("unit-8b")
    (directory / "tokenizer.json").write_text("{")
    (problem,) = verify(directory).problems
    assert problem.kind is ErrorKind.FILE_UNREADABLE and problem.path == directory / "tokenizer.json"


@pytest.mark.parametrize("template", ["{% for", "{{ ''.__class__.__mro__[1].__subclasses__() }}", None])
def test_a_chat_template_that_cannot_be_rendered(copy_of, template):
    directory = copy_of("unit-35b")
    path = directory / "chat_template.jinja"
    path.unlink()
    if template is None:
        report = verify(directory)
        assert not report.problems and any("no chat template" in note for note in report.notes)
        return
    path.write_text(template)
    (problem,) = verify(directory).problems
    assert problem.kind is ErrorKind.TEMPLATE_INVALID
