"""Every error kind is documented in one line and raised by a test: the enum is the list of tests."""

import re
from pathlib import Path

import pytest

from edge0.errors import Edge0Error, ErrorKind

TESTS = Path(__file__).parent
NAMED = re.compile(r"\bErrorKind\.([A-Z][A-Z0-9_]*)\b")


@pytest.fixture(scope="module")
def named():
    """Kind -> the test files that name it."""
    files = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in NAMED.findall(path.read_text(encoding="utf-8")):
            files.setdefault(name, set()).add(path.relative_to(TESTS))
    return files


@pytest.mark.parametrize("kind", ErrorKind, ids=lambda kind: kind.name)
def test_a_test_names_the_kind(named, kind):
    assert named.get(kind.name), f"no test raises {kind.name}: {kind.value}"


def test_no_test_names_a_kind_that_is_gone(named):
    gone = {name: files for name, files in named.items() if name not in ErrorKind.__members__}
    assert not gone


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
