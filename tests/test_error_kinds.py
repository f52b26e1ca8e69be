"""Every error kind is documented in one line, and some test expects it of a call: the enum is the list of tests.

What counts is where a test names a kind: in a call of `refused` or `refusal`, in a comparison, or among the cases of a
parametrized test. A kind that a test only makes an error of does not count.
"""

import ast
from pathlib import Path

import pytest

from edge0.errors import Edge0Error, ErrorKind

TESTS = Path(__file__).parent
CHECKS = {"refused", "refusal"}


def called(node):
    """The last name of what a call calls; None for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)


def kinds_in(node):
    """Names K of ErrorKind.K below a node, without those of errors that are made there."""
    if called(node) == "Edge0Error":
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ErrorKind":
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from kinds_in(child)


def expected_kinds(text):
    """The kinds that a test module expects of calls; cases of parametrized tests may have a name in the module."""
    tree = ast.parse(text)
    constants = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) or called(node) in CHECKS:
            yield from kinds_in(node)
        elif called(node) == "parametrize":
            yield from kinds_in(node)
            for name in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & constants.keys():
                yield from kinds_in(constants[name])


@pytest.fixture(scope="module")
def expected():
    """All kinds that some test expects."""
    here = Path(__file__).resolve()
    return {
        kind
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.resolve() != here
        for kind in expected_kinds(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("kind", ErrorKind, ids=lambda kind: kind.name)
def test_a_test_expects_the_kind(expected, kind):
    assert kind.name in expected, f"no test expects {kind.name}: {kind.value}"


def test_no_test_names_a_kind_that_is_gone(expected):
    assert expected <= ErrorKind.__members__.keys()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("refused(ErrorKind.A, call, path)", {"A"}),
        ("self.refusal(ErrorKind.A if short else ErrorKind.B, call)", {"A", "B"}),
        ("assert error.kind is ErrorKind.A", {"A"}),
        ("assert found == {(ErrorKind.A, 1), (ErrorKind.B, 2)}", {"A", "B"}),
        ("CASES = {ErrorKind.A: 1}\n@pytest.mark.parametrize('kind', CASES)\ndef test(kind): pass", {"A"}),
        ("@pytest.mark.parametrize('kind', [ErrorKind.A])\ndef test(kind): pass", {"A"}),
        ("CASES = {ErrorKind.A: 1}\n# ErrorKind.B", set()),
        ("error = Edge0Error(ErrorKind.A, 'x')", set()),
        ("assert str(Edge0Error(ErrorKind.A, 'x')) == 'x'", set()),
        ("refused(kind, lambda: fail(Edge0Error(ErrorKind.A, 'x')))", set()),
    ],
)
def test_where_a_kind_counts_as_expected(text, names):
    assert set(expected_kinds(text)) == names


def test_each_kind_says_in_one_line_of_its_own_what_it_is():
    texts = [kind.value for kind in ErrorKind]
    assert len(set(texts)) == len(texts) == len(ErrorKind.__members__)
    assert all(text.isprintable() and 15 < len(text) < 120 and not text.endswith(".") for text in texts)


def test_an_error_is_one_line_with_all_of_its_parts():
    parts = {
        "path": "a/b.safetensors",
        "tensor": "layer.1",
        "expected": "4 bytes",
        "found": 3,
        "hint": "fetch it again",
    }
    error = Edge0Error(ErrorKind.TENSOR_OFFSETS, "two\nlines of  text", **parts)
    assert str(error) == ("a/b.safetensors: layer.1: two lines of text (expected 4 bytes, found 3); fetch it again")
    assert (error.kind, error.detail) == (ErrorKind.TENSOR_OFFSETS, "two\nlines of  text")
    assert {name: getattr(error, name) for name in parts} == parts
    assert str(Edge0Error(ErrorKind.NUMERIC, "not a number", found=0)) == "not a number (found 0)"
