"""The header index against files that nobody should have; `test_header_fuzz` has those that the library writes."""

import json
import math
import os
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from edge0.checkpoint import header
from edge0.checkpoint.header import CheckpointIndex, checked_multiply, read_header
from edge0.errors import Edge0Error, ErrorKind

GOOD = {
    "a": {"dtype": "U32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
}
GOOD_DATA = bytes(range(34))


def file_bytes(document, data=b"", length=None) -> bytes:
    """A safetensors file; `document` may be raw header bytes, `length` a header length that lies."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def refusal(kind: ErrorKind, call, *parts) -> Edge0Error:
    """`call` fails with `kind`, on one printable line that holds each of `parts`."""
    with pytest.raises(Edge0Error) as caught:
        call()
    message = str(caught.value)
    assert caught.value.kind is kind, message
    assert message.isprintable() and len(message) < 1200
    for part in parts:
        assert str(part) in message
    return caught.value


def write(directory, name, document, data=b""):
    path = directory / name
    path.write_bytes(file_bytes(document, data))
    return path


# --- what a file may hold ------------------------------------------------------------------------------------


def test_zero_size_tensors_may_share_an_offset(tmp_path):
    document = {"z1": entry(shape=(0,), offsets=(4, 4)), "t": entry(), "z0": entry(shape=(0, 9), offsets=(0, 0))}
    shard = read_header(write(tmp_path, "m.safetensors", document, b"1234"))
    assert [found.offset - shard.data_offset for found in shard.tensors.values()] == [4, 0, 0]


def test_null_metadata_as_mlx_writes_it_is_none(tmp_path):
    path = write(tmp_path, "m.safetensors", {"__metadata__": None, **GOOD}, GOOD_DATA)
    assert read_header(path).metadata == {} and set(read_header(path).tensors) == set(GOOD)


# --- what no file may hold -----------------------------------------------------------------------------------


def tensor(fields) -> bytes:
    """A file whose only tensor `t` has `fields`, or that raw JSON text, as its entry, over 4 data bytes."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    return file_bytes(f'{{"t": {text}}}'.encode(), b"1234")


def two(second: dict) -> bytes:
    """A file with tensor `s` in data bytes 0 to 4, tensor `t` as given, and the data up to the end of both."""
    return file_bytes({"s": entry(), "t": second}, bytes(max(4, second["data_offsets"][1])))


NINES = "9" * 5000
TWICE = ['{"k": 1, "k": 1}', '{"__metadata__": {"k": "", "k": ""}}', '{"t": [{"k": 0, "k": 1}]}']
NOT_UTF8 = [b'{"\xff": 1}', b'{"\\ud800": 1}', b'{"__metadata__": {"k": "\\udfff"}}']  # the last two: lone surrogates
OVERLAPPING = [entry(offsets=(3, 7)), entry(), entry(shape=(0,), offsets=(2, 2))]
# Each kind with files that raise it; beside each file, a part of the message.
BAD_FILES = {
    ErrorKind.HEADER_TOO_SHORT: [(bytes(size), f"expected 8, found {size}") for size in (0, 7)],
    ErrorKind.HEADER_LENGTH: [(file_bytes(b"{}", length=n), f"1 to 2, found {n}") for n in (0, 3, 2**64 - 1)],
    ErrorKind.HEADER_UTF8: [(file_bytes(raw), "the header is not UTF-8") for raw in NOT_UTF8],
    ErrorKind.HEADER_JSON: [
        *((tensor(value), value) for value in ("NaN", "Infinity", "-Infinity", "-0")),
        *((file_bytes(text.encode()), "k: the header holds this key twice") for text in TWICE),
        *((file_bytes(opening * 200_000), "nested too deeply") for opening in (b"[", b'{"t":')),
        *((file_bytes(raw), "is not JSON") for raw in (b"{", b'{"t": ', b"{}\0", b"\xef\xbb\xbf{}")),
        *((file_bytes(raw), f"first byte on (expected {{, found {raw})") for raw in (b"[1]", b" {}", b"null")),
    ],
    ErrorKind.HEADER_METADATA: [
        *((file_bytes({"__metadata__": value}), f"found {value!r}") for value in ([], 0, False, "", 1)),
        (file_bytes({"__metadata__": {"k": 1}}), "k: not a string in __metadata__ (expected a string, found 1)"),
    ],
    ErrorKind.TENSOR_ENTRY: [
        (tensor("1"), "t: the entry is not an object (expected a JSON object, found 1)"),
        (tensor("[" * 500 + "]" * 500), "found [[[[...]]]]"),
        (tensor({"dtype": "U8", "data_offsets": [0, 4]}), "found ['data_offsets', 'dtype']"),
        (tensor(entry(extra=1)), "'extra'"),
        (tensor(entry(dtype=8)), "found 8"),
        (tensor({**entry(), "shape": 4}), "found 4"),
        *((tensor(entry(offsets=pair)), f"found {pair}") for pair in ([], [0, 2, 4], [0.0, 4], [False, 4], ["0", 4])),
    ],
    ErrorKind.TENSOR_DTYPE: [(tensor(entry(dtype)), f"found '{dtype}'") for dtype in ("u8", "F4", "F6_E2M3", "")],
    ErrorKind.TENSOR_SHAPE: [
        *((tensor(entry(shape=shape)), f"found {shape}") for shape in ([-2, -2], [4, True], [4.0], [None], [[4]])),
        *((tensor(entry("F64", shape)), "overflows") for shape in ([2**62, 4, 4], [2**61], [0, 2**63])),
        (tensor('{"dtype": "U8", "shape": [1e999], "data_offsets": [0, 4]}'), "found [inf]"),
        (tensor(f'{{"dtype": "U8", "shape": [{NINES}], "data_offsets": [0, 4]}}'), "overflows"),
    ],
    ErrorKind.TENSOR_OFFSETS: [
        *((tensor(entry(offsets=pair)), f"found {pair}") for pair in ([-4, 0], [4, 0], [2**63 - 5, 2**63 - 1])),
        *((tensor(entry(offsets=(0, end))), f"expected 4, found {end}") for end in (0, 3, 5)),
        (tensor(f'{{"dtype": "U8", "shape": [4], "data_offsets": [0, {NINES}]}}'), "too large"),
        (tensor(f'{{"dtype": "U8", "shape": [4], "data_offsets": [-{NINES}, 4]}}'), "negative"),
    ],
    ErrorKind.TENSOR_OVERLAP: [(two(second), "t: the tensor begins inside another") for second in OVERLAPPING],
    ErrorKind.TENSOR_HOLE: [
        (two(entry(offsets=(5, 9))), "t: the bytes before this tensor"),
        (file_bytes({"t": entry(offsets=(1, 5))}, bytes(5)), "t: the bytes before this tensor"),
    ],
    ErrorKind.FILE_TRUNCATED: [(file_bytes(GOOD, GOOD_DATA[:24]), "b: the file ends before this tensor")],
    ErrorKind.FILE_TRAILING: [(file_bytes(GOOD, GOOD_DATA + b"x"), "last tensor"), (file_bytes({}, b"x"), "found 11")],
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files(tmp_path, kind):
    path = tmp_path / "bad.safetensors"
    for content, part in BAD_FILES[kind]:
        path.write_bytes(content)
        error = refusal(kind, lambda: read_header(path), path, part, "download the file again")
        assert error.path == path


def test_length_above_the_cap_of_a_large_file(tmp_path):
    path = tmp_path / "sparse.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 200_000_000)
    refusal(ErrorKind.HEADER_LENGTH, lambda: read_header(path), path, "1 to 100000000, found 100000001")


@pytest.mark.parametrize(("count", "part"), [(4, "at most 3"), (9, "at most 48")])
def test_too_many_tensors(tmp_path, monkeypatch, count, part):
    """Counted exactly after parsing; far above the cap, already before."""
    document = {f"t{i}": entry(shape=(0,), offsets=(0, 0)) for i in range(count)}
    path = write(tmp_path, "m.safetensors", {"__metadata__": {}, **document})
    assert len(read_header(path).tensors) == count
    monkeypatch.setattr(header, "MAX_TENSORS", 3)
    refusal(ErrorKind.TENSOR_COUNT, lambda: read_header(path), path, part)


@pytest.mark.parametrize("lost_bytes", [1, 4096, 10_000])
def test_truncation_names_the_first_tensor_that_is_cut(tmp_path, lost_bytes):
    path = tmp_path / "m.safetensors"
    save_file({name: np.zeros(5000, dtype=np.uint8) for name in ("first", "middle", "near", "last")}, path)
    size = path.stat().st_size
    ends = sorted((found.offset + found.nbytes, name) for name, found in read_header(path).tensors.items())
    cut = next(name for end, name in ends if end > size - lost_bytes)
    os.truncate(path, size - lost_bytes)
    sizes = f"expected {size}, found {size - lost_bytes}"
    refusal(ErrorKind.FILE_TRUNCATED, lambda: read_header(path), path, f"{cut}: ", sizes)


def test_every_shorter_file_is_refused(tmp_path):
    path = write(tmp_path, "m.safetensors", GOOD, GOOD_DATA)
    content, data_offset = path.read_bytes(), read_header(path).data_offset
    for size in range(len(content)):
        path.write_bytes(content[:size])
        kind = ErrorKind.HEADER_LENGTH if size < data_offset else ErrorKind.FILE_TRUNCATED
        refusal(ErrorKind.HEADER_TOO_SHORT if size < 8 else kind, lambda: read_header(path), path)


def test_hostile_names_are_escaped_and_shortened(tmp_path):
    name = "\x1b[31m\n" + "n" * 1_000_000
    path = write(tmp_path, "m.safetensors", {name: 1})
    refusal(ErrorKind.TENSOR_ENTRY, lambda: read_header(path), path, "\\x1b[31m")


def test_missing_and_unreadable_files(tmp_path):
    refusal(ErrorKind.FILE_MISSING, lambda: read_header(tmp_path / "no.safetensors"), "no.safetensors", "again")
    refusal(ErrorKind.FILE_UNREADABLE, lambda: read_header(tmp_path), tmp_path)
    with pytest.raises(Edge0Error, match="null"):
        read_header(tmp_path / "nul\0")
    os.mkfifo(tmp_path / "fifo")
    refusal(ErrorKind.FILE_UNREADABLE, lambda: read_header(tmp_path / "fifo"), "fifo", "regular")


def test_checked_multiply():
    assert [checked_multiply(), checked_multiply(2**63 - 1), checked_multiply(0, 5)] == [1, 2**63 - 1, 0]
    for factors in [(2**63,), (2**32, 2**31), (-1, 0), (0, 2**63), (3, -1), (2**62, 2, 0)]:
        with pytest.raises(OverflowError):
            checked_multiply(*factors)


# --- directories ---------------------------------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    """Two shards and an index whose total_size is wrong, as that of the released 35b checkpoint is."""
    write(tmp_path, FIRST, GOOD, GOOD_DATA)
    write(tmp_path, SECOND, {"t": entry()}, b"1234")
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "t": SECOND})
    return tmp_path


def write_index(directory, weight_map):
    document = {"metadata": {"total_size": 20_401_929_952}, "weight_map": weight_map}
    (directory / header.INDEX_NAME).write_text(json.dumps(document))


def test_open_with_an_index_ignores_total_size_and_other_files(checkpoint):
    write(checkpoint, "model-stale.safetensors", b"not JSON")
    index = CheckpointIndex.open(str(checkpoint))
    assert index.directory == checkpoint
    assert [shard.path.name for shard in index.shards] == [FIRST, SECOND]
    assert {name: found.path.name for name, found in index.tensors.items()} == {"a": FIRST, "b": FIRST, "t": SECOND}
    with open(index.tensors["t"].path, "rb") as file:
        assert os.pread(file.fileno(), 4, index.tensors["t"].offset) == b"1234"


def test_open_without_an_index_takes_model_files_only(checkpoint):
    (checkpoint / header.INDEX_NAME).unlink()
    write(checkpoint, "lora.safetensors", b"not JSON")
    index = CheckpointIndex.open(checkpoint)
    assert [shard.path.name for shard in index.shards] == [FIRST, SECOND]
    assert set(index.tensors) == {"a", "b", "t"}


def test_require(checkpoint):
    index = CheckpointIndex.open(checkpoint)
    assert index.require("a", "U32", (2, 3)) is index.require("a", shape=[2, 3]) is index.require("a", dtype="U32")
    refusal(ErrorKind.TENSOR_MISSING, lambda: index.require("gone"), checkpoint, "gone")
    for wanted, wrong in [({"dtype": "F32"}, "expected F32 [2, 3]"), ({"shape": (6,)}, "expected U32 [6]")]:
        parts = (checkpoint / FIRST, "a: ", f"{wrong}, found U32 [2, 3]")
        refusal(ErrorKind.TENSOR_MISMATCH, lambda wanted=wanted: index.require("a", **wanted), *parts)


def test_missing_files(tmp_path, checkpoint):
    refusal(ErrorKind.FILE_MISSING, lambda: CheckpointIndex.open(tmp_path / "gone"), "gone")
    refusal(ErrorKind.FILE_UNREADABLE, lambda: CheckpointIndex.open(checkpoint / FIRST), FIRST)
    (checkpoint / SECOND).unlink()
    refusal(ErrorKind.FILE_MISSING, lambda: CheckpointIndex.open(checkpoint), checkpoint / SECOND, "again")
    (checkpoint / header.INDEX_NAME).unlink()
    (checkpoint / header.INDEX_NAME).symlink_to("gone")  # a dangling link is a missing index, not a checkpoint without
    refusal(ErrorKind.FILE_MISSING, lambda: CheckpointIndex.open(checkpoint), header.INDEX_NAME)
    (checkpoint / header.INDEX_NAME).unlink()
    (checkpoint / FIRST).unlink()
    refusal(ErrorKind.FILE_MISSING, lambda: CheckpointIndex.open(checkpoint), checkpoint, "model*.safetensors")


def test_tensor_in_two_shards(checkpoint):
    write(checkpoint, SECOND, {"t": entry(), "a": entry(shape=(0,), offsets=(4, 4))}, b"1234")
    refusal(ErrorKind.TENSOR_DUPLICATE, lambda: CheckpointIndex.open(checkpoint), SECOND, "a: ", FIRST)
    (checkpoint / header.INDEX_NAME).unlink()
    refusal(ErrorKind.TENSOR_DUPLICATE, lambda: CheckpointIndex.open(checkpoint), SECOND, "a: ", FIRST)


def test_index_and_shards_disagree(checkpoint):
    right = {"a": FIRST, "b": FIRST, "t": SECOND}
    for name, weight_map, expected, found in [
        ("b", {**right, "b": SECOND}, SECOND, FIRST),
        ("gone", {**right, "gone": SECOND}, SECOND, "no shard"),
        ("b", {"a": FIRST, "t": SECOND}, "no shard", FIRST),
    ]:
        write_index(checkpoint, weight_map)
        parts = (f"{header.INDEX_NAME}: {name}: ", f"expected {expected}, found {found}")
        refusal(ErrorKind.INDEX_MISMATCH, lambda: CheckpointIndex.open(checkpoint), *parts)


def test_malformed_index(checkpoint):
    documents = ['{"weight_map": {"a": "m", "a": "m"}}', '{"weight_map": {"a": "m"}, "metadata": NaN}']
    documents += [json.dumps({"weight_map": value}) for value in (None, [], {}, {"a": 1}, {"a": "\ud800"})]
    for content in (b"", b"\xff", b"[]", b"{}", b"[" * 100_000, *map(str.encode, documents)):
        (checkpoint / header.INDEX_NAME).write_bytes(content)
        refusal(ErrorKind.INDEX_MALFORMED, lambda: CheckpointIndex.open(checkpoint), header.INDEX_NAME, "again")
    os.truncate(checkpoint / header.INDEX_NAME, 100_000_001)
    refusal(ErrorKind.INDEX_MALFORMED, lambda: CheckpointIndex.open(checkpoint), header.INDEX_NAME, "100000001")


def test_shard_names_stay_in_the_directory(checkpoint):
    for shard in ("../m", "/m", "sub/m", "sub\\m", "..", ".", "", "m\0", "m\n"):
        write_index(checkpoint, {"a": shard})
        refusal(ErrorKind.INDEX_MALFORMED, lambda: CheckpointIndex.open(checkpoint), header.INDEX_NAME, "a: ")


# --- properties ----------------------------------------------------------------------------------------------

BRIEF = settings(max_examples=200, deadline=None, database=None)
TEXT = st.text(max_size=4)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
SPECS = st.dictionaries(TEXT, st.tuples(st.sampled_from(sorted(header.ITEM_BYTES)), SHAPES), max_size=4)
BYTES = st.integers(1, 255) | st.sampled_from(list(b'{}[]",:\\-019 '))
MUTATIONS = st.lists(st.tuples(st.sampled_from(["flip", "insert", "delete"]), st.integers(0, 300), BYTES), min_size=1)
EXTREMES = st.sampled_from([0, 1, 2, 3, 5, 24, 34, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, "U8", "BF16"])
KEYS = st.sampled_from(["", "dtype", "shape", "data_offsets", "extra"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | TEXT | EXTREMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("header") / "scratch.safetensors"


def sound_or_refused(path, content: bytes) -> None:
    """The file is refused in one line, or it is one that the library reads too, to the same bytes."""
    path.write_bytes(content)
    try:
        shard = read_header(path)
    except Edge0Error as error:
        assert str(path) in str(error) and str(error).isprintable()
        return
    for name, fields in safetensors.deserialize(content):
        found = shard.tensors[name]
        assert (found.dtype, list(found.shape)) == (fields["dtype"], fields["shape"])
        assert content[found.offset : found.offset + found.nbytes] == bytes(fields["data"])


@BRIEF
@given(SPECS, st.none() | st.dictionaries(TEXT, TEXT, max_size=3), st.integers(0, 9), st.randoms())
def test_valid_files_round_trip(scratch, specs, metadata, padding, order):
    items, position = [], 0
    for name, (dtype, shape) in specs.items():
        end = position + math.prod(shape) * header.ITEM_BYTES[dtype]
        items.append((name, entry(dtype, shape, (position, end))))
        position = end
    order.shuffle(items)  # the header's order need not be that of the data
    document = dict(items) if metadata is None else {"__metadata__": metadata, **dict(items)}
    content = file_bytes(json.dumps(document).encode() + b" " * padding, bytes(i % 251 for i in range(position)))
    scratch.write_bytes(content)
    shard = read_header(scratch)
    assert shard.metadata == (metadata or {}) and list(shard.tensors) == [name for name, _ in items]
    sound_or_refused(scratch, content)


@BRIEF
@given(MUTATIONS, st.booleans())
def test_mutated_bytes_never_escape(scratch, mutations, whole_file):
    """Of the whole file, or of the JSON alone with a header length that stays right."""
    raw = json.dumps({"__metadata__": {"k": "v"}, **GOOD}).encode()
    content = bytearray(file_bytes(raw, GOOD_DATA) if whole_file else raw)
    for how, place, value in mutations:
        place %= len(content)
        if how == "flip":
            content[place] ^= value
        elif how == "insert":
            content.insert(place, value)
        else:
            del content[place]
    sound_or_refused(scratch, bytes(content) if whole_file else file_bytes(bytes(content), GOOD_DATA))


@BRIEF
@given(st.sampled_from(["a", "b", "__metadata__", "c"]), KEYS, st.sampled_from(["set", "last", "drop"]), JUNK)
def test_mutated_entries_never_escape(scratch, name, key, how, junk):
    document = json.loads(json.dumps({"__metadata__": {"k": "v"}, **GOOD}))
    target, place = (document.setdefault(name, {}), key) if key else (document, name)
    if how == "drop":
        target.pop(place, None)
    elif how == "last" and isinstance(target.get(place), list):
        target[place][-1] = junk
    else:
        target[place] = junk
    sound_or_refused(scratch, file_bytes(document, GOOD_DATA))
