"""Adapter files: where they are looked for, what their doubly nested metadata must say, and each way to be refused."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from edge0 import Engine, EngineOptions
from edge0.checkpoint.adapters import adapter_path, open_adapter
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import LING

KINDS = ("lora", "prerouter")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def private(copy_of, tier):
    return copy_of(tier.name)


def test_metadata_is_nested_twice(tier, checkpoint, kind):
    for k in (2, 4, 8):
        with safe_open(adapter_path(checkpoint, tier.family, kind, k), "np") as file:
            outer = file.metadata()
        assert set(outer) == {"__metadata__"}
        fields = json.loads(outer["__metadata__"])
        assert all(isinstance(value, str) for value in fields.values())
        assert fields["K"] == str(k) and fields["kind"] == kind and tier.family.tag in fields["model"]
        assert (fields["r"], fields["alpha"], fields["format_version"]) == ("16", "32", "1")
        assert {"source", "source_md5", "converted"} <= fields.keys()
        if kind == "prerouter":
            assert json.loads(fields["owners"]) == list(tier.owners)


def test_opened_fields(tier, checkpoint):
    heads, lora = (open_adapter(checkpoint, tier.family, kind, 4) for kind in ("prerouter", "lora"))
    assert (heads.k, heads.rank, heads.alpha, heads.owners) == (4, 16, 32, tier.owners)
    assert (lora.k, lora.rank, lora.alpha, lora.owners) == (4, 16, 32, ())


def test_places_in_order(tier, private, kind):
    """The set of this K first, then beside the model, then in artifacts, as the released files may lie."""
    own = adapter_path(private, tier.family, kind, 4)
    beside, inside = private / own.name, private / "artifacts" / own.name
    for place in (beside, inside):
        shutil.copy(own, place)
    for place in (own, beside, inside):
        assert open_adapter(private, tier.family, kind, 4).header.path == place
        place.unlink()


def test_missing(tier, private, kind, refused):
    path = adapter_path(private, tier.family, kind, 4)
    path.unlink()
    refused(ErrorKind.ADAPTER_MISSING, lambda: open_adapter(private, tier.family, kind, 4), path, kind, "K=4")
    refused(ErrorKind.ADAPTER_MISSING, lambda: open_adapter(private, tier.family, kind, 3), "k3", kind, "K=3")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "edge0-70b"),
        ("model", ""),
        ("model", None),
        ("K", "8"),
        ("K", "04"),
        ("K", None),
        ("format_version", "2"),
        ("format_version", None),
        ("kind", "something"),
        ("kind", None),
    ],
)
def test_made_for_something_else(tier, private, kind, rewrite_adapter, refused, key, value):
    path = adapter_path(private, tier.family, kind, 4)
    rewrite_adapter(path, fields={key: value})
    refused(
        ErrorKind.ADAPTER_MISMATCH, lambda: open_adapter(private, tier.family, kind, 4), path, key, f"found {value}"
    )


@pytest.mark.parametrize("model", ["Edge0/Edge0-{}-preview", "edge0_{}", "{}", "EDGE0-{}-a3b"])
def test_names_of_the_model_that_are_accepted(tier, private, kind, rewrite_adapter, model):
    rewrite_adapter(adapter_path(private, tier.family, kind, 4), fields={"model": model.format(tier.family.tag)})
    assert open_adapter(private, tier.family, kind, 4).k == 4


@pytest.mark.parametrize("model", ["edge0-2{}", "edge0-1.{}", "edge0-{}x", "edge\x1b[0m", "x" * 10_000])
def test_names_of_other_models(tier, private, kind, rewrite_adapter, refused, model):
    path = adapter_path(private, tier.family, kind, 4)
    rewrite_adapter(path, fields={"model": model.format(tier.family.tag)})
    error = refused(ErrorKind.ADAPTER_MISMATCH, lambda: open_adapter(private, tier.family, kind, 4), path, "model")
    assert len(str(error)) < 1000


def test_an_adapter_of_the_other_family(checkpoints, copy_of, kind, refused):
    for name, other in (("unit-35b", "unit-8b"), ("unit-8b", "unit-35b")):
        directory = copy_of(name)
        (mine,) = (directory / "artifacts" / "k4").glob(f"{kind}_*")
        (theirs,) = (checkpoints[other] / "artifacts" / "k4").glob(f"{kind}_*")
        shutil.copy(theirs, mine)
        error = refused(ErrorKind.ADAPTER_MISMATCH, lambda d=directory: Engine(d, EngineOptions(k=4)), mine, "model")
        assert error.tensor == "model"


def test_lora_in_the_place_of_heads(tier, private, refused):
    heads, lora = (adapter_path(private, tier.family, kind, 4) for kind in ("prerouter", "lora"))
    shutil.copy(lora, heads)
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: open_adapter(private, tier.family, "prerouter", 4), heads, "kind")


def test_heads_of_another_k(tier, private, kind, refused):
    shutil.copy(adapter_path(private, tier.family, kind, 8), adapter_path(private, tier.family, kind, 4))
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: open_adapter(private, tier.family, kind, 4), "K", "expected 4, found 8")


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "mlx"},
        {"__metadata__": "not json"},
        {"__metadata__": "[" * 5000},
        {"__metadata__": "[1, 2]"},
        {"__metadata__": '"text"'},
        {"__metadata__": '{"K": 4}'},
        {"model": "edge0-35b", "K": "4", "kind": "lora"},
    ],
    ids=range(8),
)
def test_metadata_that_is_not_nested_twice(tier, private, kind, rewrite_adapter, refused, metadata):
    path = adapter_path(private, tier.family, kind, 4)
    rewrite_adapter(path, metadata=metadata)
    refused(ErrorKind.ADAPTER_METADATA, lambda: open_adapter(private, tier.family, kind, 4), path, "__metadata__")


@pytest.mark.parametrize("fields", [{"r": None}, {"r": "x"}, {"alpha": None}, {"alpha": "1.5"}])
def test_malformed_numbers(tier, private, kind, rewrite_adapter, refused, fields):
    path = adapter_path(private, tier.family, kind, 4)
    rewrite_adapter(path, fields=fields)
    refused(ErrorKind.ADAPTER_METADATA, lambda: open_adapter(private, tier.family, kind, 4), path, "__metadata__")


@pytest.mark.parametrize(
    "owners", [None, "", "6", "null", "[6, ", "[[1]]", '["a"]', "[null]", "[1.0]", "[true]", "[1e999]"]
)
def test_malformed_owners(tier, private, rewrite_adapter, refused, owners):
    path = adapter_path(private, tier.family, "prerouter", 4)
    rewrite_adapter(path, fields={"owners": owners})
    refused(ErrorKind.ADAPTER_METADATA, lambda: open_adapter(private, tier.family, "prerouter", 4), path)


@pytest.mark.parametrize("owners", ["[]", "[3, 5]", "[7]", "[99]", "[-1, 0]"])
def test_owners_that_the_model_cannot_have_name_the_file(private, tier, rewrite_adapter, refused, owners):
    path = adapter_path(private, tier.family, "prerouter", 4)
    rewrite_adapter(path, fields={"owners": owners})
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: Engine(private, EngineOptions(k=4)), path, "owners")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_cut_adapter_file(tier, private, kind, refused, keep):
    path = adapter_path(private, tier.family, kind, 4)
    path.write_bytes(path.read_bytes()[:keep])
    expected = ErrorKind.FILE_TRUNCATED if keep == -1 else ErrorKind.HEADER_LENGTH
    if 0 <= keep < 8:
        expected = ErrorKind.HEADER_TOO_SHORT
    refused(expected, lambda: open_adapter(private, tier.family, kind, 4), path)


FIELDS = ("model", "kind", "K", "r", "alpha", "format_version", "owners")
TEXTS = st.sampled_from(["8b", "prerouter", "8", "16", "1", "[7]", "[7, 7]", "", "-1", "[]", "1e9", "\x1b", "\ud800"])
VALUES = st.recursive(TEXTS | st.text() | st.none() | st.integers(), lambda inner: st.lists(inner, max_size=2))


@settings(max_examples=300, deadline=None, database=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES), cut=st.integers(0, 200) | st.none())
def test_no_metadata_escapes(scratch, fields, cut):
    """An adapter, or one printable line: whatever stands in the nested metadata."""
    good = {"model": "8b", "kind": "prerouter", "K": "8", "r": "16", "alpha": "32", "format_version": "1"}
    text = json.dumps(good | {"owners": "[7]"} | fields)[:cut]
    (scratch / "prerouter_edge0_8b.safetensors").write_bytes(save({"t": np.zeros(1)}, {"__metadata__": text}))
    try:
        assert open_adapter(scratch, LING, "prerouter", 8).k == 8
    except Edge0Error as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        assert error.kind in (ErrorKind.ADAPTER_METADATA, ErrorKind.ADAPTER_MISMATCH)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("adapter")
