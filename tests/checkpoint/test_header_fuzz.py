"""20,000 mutations of real headers: each is read to one that tiles its file, or refused on one printable line.

A mutation edits the document (fields, entries, names), then its bytes (flips, splices, cuts, tokens), then the length
field and the length of the file. The data section is a hole: nothing but its length is ever looked at.
"""

import copy
import json
import math
import os
import struct
from collections import Counter

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from edge0.checkpoint.header import ITEM_BYTES, LENGTH_FIELD_BYTES, ShardHeader, read_header
from edge0.errors import Edge0Error, ErrorKind

MUTATIONS = 20_000
HEADER_KINDS = {kind for kind in ErrorKind if kind.name.startswith(("HEADER_", "TENSOR_", "FILE_TR"))} - {
    ErrorKind.TENSOR_COUNT,  # needs a header of megabytes
    ErrorKind.TENSOR_DUPLICATE,  # needs two shards
    ErrorKind.TENSOR_MISSING,  # need a model
    ErrorKind.TENSOR_MISMATCH,
}
EDITS = 3  # of each example; each alone and all together are four mutations


def header_of(path):
    """(the JSON text of a file's header, bytes of its data section)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(LENGTH_FIELD_BYTES))
        return file.read(length), path.stat().st_size - LENGTH_FIELD_BYTES - length


def put(file, text, data_bytes, length=None):
    """Make `file` one with this header text, a length field that may lie, and a hole of `data_bytes` behind it."""
    head = struct.pack("<Q", len(text) if length is None else length) + text
    os.pwrite(file.fileno(), head, 0)
    os.ftruncate(file.fileno(), max(0, len(head) + data_bytes))


def check(path) -> ShardHeader | Edge0Error:
    """The outcome of reading `path`, which is a sound header or an error on one printable line that names the file."""
    try:
        header = read_header(path)
    except Edge0Error as error:
        line = str(error)
        assert line.isprintable() and line.startswith(str(path)) and len(line) < 2000, line
        return error
    position = header.data_offset
    for name, entry in sorted(header.tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        assert entry.offset == position and entry.name == name and entry.path == path
        assert entry.nbytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype] >= 0
        position += entry.nbytes
    assert position == header.file_bytes == path.stat().st_size
    assert all(isinstance(text, str) for item in header.metadata.items() for text in item)
    return header


# --- mutations -----------------------------------------------------------------------------------------------------

PLACES = st.integers(0, 2**16)  # taken modulo whatever there is to choose from
NUMBERS = (
    st.sampled_from([0, 1, -1, 2, 7, 64, 2**31, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]) | st.integers()
)
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from([None, True, 0.5, 1e400, "", "U8", "BF16", "F4", "\x1b[31m", "\ud800", [], {}, [0], [[0, 8]]]),
    st.lists(NUMBERS, max_size=3),
    st.text(max_size=3),
)
FIELDS = st.sampled_from(["dtype", "shape", "data_offsets", "begin", "end", "dimension", "more"])
DOCUMENT_EDITS = st.one_of(
    st.tuples(st.just("field"), PLACES, FIELDS, VALUES),
    st.tuples(st.just("drop field"), PLACES, FIELDS, st.none()),
    st.tuples(st.just("entry"), PLACES, st.none(), VALUES),
    st.tuples(st.just("drop entry"), PLACES, st.none(), st.none()),
    st.tuples(st.just("rename"), PLACES, st.none(), st.text(max_size=4)),
    st.tuples(st.just("swap"), PLACES, st.none(), PLACES),
    st.tuples(st.just("twin"), PLACES, st.none(), PLACES),
    st.tuples(st.just("metadata"), PLACES, st.none(), VALUES),
)
TOKENS = st.sampled_from([b"{", b"}", b"[", b"]", b",", b":", b'"', b"-", b"0", b"e9", b"null", b"NaN", b"\\u0000"])
TOKENS |= st.sampled_from(
    [b"\xff", b"\xef\xbb\xbf", b"\\", b" ", b"\0", b"9" * 400, b"[" * 2000, b'"__metadata__":{},']
)
BYTE_EDITS = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(1, 255), st.none()),
    st.tuples(st.just("insert"), PLACES, st.none(), TOKENS),
    st.tuples(st.just("delete"), PLACES, st.integers(1, 40), st.none()),
    st.tuples(st.just("splice"), PLACES, st.integers(1, 120), PLACES),
    st.tuples(st.just("cut"), PLACES, st.none(), st.none()),
)
FILE_EDITS = st.one_of(
    st.tuples(st.just("length"), st.integers(-9, 9) | st.sampled_from([2**16, -(2**40), 2**31, 10**8, 2**63])),
    st.tuples(st.just("size"), st.sampled_from([-1, 1, -8, 8, -4096, 4096]) | st.integers(-(2**20), 2**20)),
)


BYTE_KINDS = ("flip", "insert", "delete", "splice", "cut", "length", "size")  # after the document was written out
ANY_EDIT = DOCUMENT_EDITS | BYTE_EDITS | FILE_EDITS


def edit_document(document, edit):
    how, place, key, value = copy.deepcopy(edit)  # no list is shared between documents, or put into itself
    names = [name for name in document if name != "__metadata__"]
    if how == "metadata":
        document["__metadata__"] = value if place % 2 else {"k": value}
        return
    if not names:
        return
    name = names[place % len(names)]
    entry = document[name]
    if how == "entry":
        document[name] = value
    elif how == "drop entry":
        del document[name]
    elif how == "rename":
        document[value] = document.pop(name)
    elif how == "twin":
        document[name] = copy.deepcopy(document[names[value % len(names)]])
    elif not isinstance(entry, dict):
        return
    elif how == "swap":
        other = document[names[value % len(names)]]
        if isinstance(other, dict):
            offsets = entry.get("data_offsets")
            entry["data_offsets"], other["data_offsets"] = other.get("data_offsets"), offsets
    elif how == "drop field":
        entry.pop(key, None)
    elif key in ("begin", "end", "dimension"):
        items = entry.get("shape" if key == "dimension" else "data_offsets")
        if isinstance(items, list) and items:
            items[0 if key == "begin" else -1] = value
    else:
        entry[key] = value


def edit_bytes(text, edit):
    how, place, number, value = edit
    place %= len(text) + 1
    if how == "flip" and place < len(text):
        text[place] ^= number
    elif how == "insert":
        text[place:place] = value
    elif how == "delete":
        del text[place : place + number]
    elif how == "splice":
        source = value % (len(text) + 1)
        text[place:place] = text[source : source + number]
    elif how == "cut":
        del text[place:]


@pytest.fixture(scope="module")
def victims(tmp_path_factory, checkpoints):
    """(document, data bytes) of a file that the library wrote and of the headers of a checkpoint's smaller files."""
    path = tmp_path_factory.mktemp("library") / "m.safetensors"
    arrays = {f"t{n}": np.zeros((n, 3), dtype) for n, dtype in enumerate((np.uint32, np.float16, np.int8, np.int64))}
    safetensors.numpy.save_file(arrays, path, metadata={"format": "mlx"})
    paths = [path, *sorted((checkpoints["unit-35b"] / "artifacts" / "k4").glob("prerouter*"))]
    return [(text, data_bytes) for text, data_bytes in map(header_of, paths)]


def mutant(text, data_bytes, edits):
    """What `put` needs for the victim after all of these edits, document edits first."""
    document = None
    for edit in edits:
        if edit[0] not in BYTE_KINDS:
            document = json.loads(text) if document is None else document
            edit_document(document, edit)
    text, length = bytearray(text if document is None else json.dumps(document).encode()), None
    for edit in edits:
        if edit[0] == "length":
            length = (len(text) + edit[1]) % 2**64
        elif edit[0] == "size":
            data_bytes += edit[1]
        elif edit[0] in BYTE_KINDS:
            edit_bytes(text, edit)
    return bytes(text), data_bytes, length


def test_no_mutation_of_a_header_escapes(victims, tmp_path):
    path, outcomes = tmp_path / "mutant.safetensors", Counter()
    file = path.open("w+b")

    @settings(max_examples=MUTATIONS // (EDITS + 1), deadline=None, database=None)
    @given(st.integers(0, len(victims) - 1), st.lists(ANY_EDIT, min_size=EDITS, max_size=EDITS))
    def mutate(number, edits):
        for chosen in [*([edit] for edit in edits), edits]:
            put(file, *mutant(*victims[number], chosen))
            outcome = check(path)
            outcomes[outcome.kind if isinstance(outcome, Edge0Error) else "sound"] += 1

    with file:
        mutate()
    assert sum(outcomes.values()) >= MUTATIONS
    assert HEADER_KINDS | {"sound"} <= outcomes.keys()


# --- valid headers -------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__")
NUMPY_DTYPES = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.float16, np.uint32, np.int32, np.float32]
NUMPY_DTYPES += [np.uint64, np.int64, np.float64]
ARRAYS = st.tuples(st.sampled_from(NUMPY_DTYPES), st.lists(st.integers(0, 5), max_size=4))


@settings(max_examples=300, deadline=None, database=None)
@given(
    specs=st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=6),
    metadata=st.none() | st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
)
def test_every_file_of_the_library_is_read_as_the_library_reads_it(scratch, specs, metadata):
    """Names, dtypes, shapes, metadata and the place of every byte. Of no tensor at all it writes what it refuses."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in specs.items()}
    content = safetensors.numpy.save(arrays, metadata)
    scratch.write_bytes(content)
    header = check(scratch)
    assert isinstance(header, ShardHeader), header
    assert header.metadata == (metadata or {}) and header.tensors.keys() == arrays.keys()
    for name, fields in safetensors.deserialize(content):
        entry = header.tensors[name]
        assert (entry.dtype, list(entry.shape)) == (fields["dtype"], fields["shape"])
        assert content[entry.offset : entry.offset + entry.nbytes] == bytes(fields["data"]) == arrays[name].tobytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "m.safetensors"


# --- cost ----------------------------------------------------------------------------------------------------------

HOSTILE = {  # headers of tens of MB that once cost a minute and a gigabyte
    "numbers": lambda: b'{"t":[' + b"1," * 10_000_000 + b"1]}",
    "empty lists": lambda: b'{"t":[' + b"[]," * 7_000_000 + b"[]]}",
    "keys": lambda: b'{"__metadata__":{' + b",".join(b'"%x":""' % n for n in range(1_700_000)) + b"}}",
    "tensors": lambda: b"{" + b",".join(b'"%x":{}' % n for n in range(900_000)) + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_of_too_many_values_is_refused_before_it_is_parsed(scratch, monkeypatch, name):
    raw = HOSTILE[name]()
    scratch.write_bytes(struct.pack("<Q", len(raw)) + raw)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the header was parsed"))
    outcome = check(scratch)
    assert isinstance(outcome, Edge0Error) and outcome.kind is ErrorKind.TENSOR_COUNT and "1600000" in str(outcome)


def test_a_header_of_as_many_tensors_as_are_allowed_is_read(scratch):
    entries = {f"layer.{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(100_000)}
    raw = json.dumps({"__metadata__": {"format": "mlx"}, **entries}).encode()
    with scratch.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + 100_000)
    assert len(check(scratch).tensors) == 100_000
