"""Text as it comes is the text as a whole, whatever the cuts between tokens, and ends before the first stop string."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from edge0.checkpoint.tokenizer import SPECIALS, write_tokenizer
from edge0.errors import ErrorKind
from edge0.serving.text import TextStream
from edge0.serving.vocabulary import Vocabulary

STOPS = st.lists(st.text("ab€", min_size=1, max_size=5), max_size=4)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Vocabulary(directory)


def flow(pieces, stops=()):
    """What comes out piece by piece, and whether a stop string ended it; pieces are bytes."""
    stream = TextStream(pieces.__getitem__, stops)
    shown = []
    for number in range(len(pieces)):
        shown.append(stream.add(number))
        if stream.stopped:
            break
    return [*shown, stream.finish()], stream.stopped


def cut(text, stops):
    """The text before the stop string that is complete first, the longest of those; the slow way."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(st.lists(st.binary(max_size=4), max_size=12))
@example([b"\xe2\x82", b"\xac"])
@example([b"\xff\xff", b"\x80", b"\xf0\x9f"])
def test_pieces_are_the_whole_text(pieces):
    shown, stopped = flow(pieces)
    assert "".join(shown) == b"".join(pieces).decode("utf-8", "replace") and not stopped


@given(st.text("ab€c", max_size=30), STOPS, st.data())
@example("aab", ["ab"], None)
@example("xabcab", ["abcd", "b"], None)
def test_stop_strings_end_the_text_wherever_it_is_cut(text, stops, data):
    raw = text.encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8))) if data else range(len(raw) + 1)
    bounds = [0, *places, len(raw)]
    shown, stopped = flow([raw[start:end] for start, end in zip(bounds, bounds[1:], strict=False)], stops)
    assert ("".join(shown), stopped) == cut(text, stops)


@given(st.text("ab", max_size=20), STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(text, stops):
    stream = TextStream(lambda token: text[token].encode(), stops)
    shown = ""
    for number in range(len(text)):
        shown += stream.add(number)
        if stream.stopped:
            return
        held = text[len(shown) : number + 1]
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        assert held == max((part for part in beginnings if text[: number + 1].endswith(part)), key=len, default="")


def test_a_character_comes_when_its_last_byte_does_and_never_broken():
    smile = "😀".encode()
    assert flow([smile[:1], smile[1:3], smile[3:] + b"!"])[0] == ["", "", "😀!", ""]
    assert flow([b"a", smile[:3]])[0] == ["a", "", "\ufffd"]


def test_nothing_follows_a_stop_string():
    stream = TextStream([b"a-", b"-b", b"c"].__getitem__, ["--"])
    assert [stream.add(0), stream.add(1), stream.add(2), stream.finish()] == ["a", "", "", ""]


@given(st.lists(st.integers(0, 300), max_size=40))
@example([0xE2, 256, 0x82])
def test_the_checkpoints_own_decoder_says_the_same(vocabulary, tokens):
    """Ids beyond the vocabulary, which a padded model can choose, are no text; nor are special tokens."""
    stream = TextStream(vocabulary.token_bytes)
    text = "".join([stream.add(token) for token in tokens]) + stream.finish()
    assert text == vocabulary.tokenizer.decode(tokens, skip_special_tokens=True)


@given(st.text())
def test_text_survives_its_way_through_ids(vocabulary, text):
    tokens = vocabulary.encode(text) if not any(special in text for special in SPECIALS) else []
    stream = TextStream(vocabulary.token_bytes)
    assert not tokens or "".join(map(stream.add, tokens)) + stream.finish() == text


def test_half_a_surrogate_pair_is_refused(vocabulary, refused):
    refused(ErrorKind.PROMPT_INVALID, lambda: vocabulary.encode("a\ud800"), "d800")


def test_ends_are_the_tokenizers_and_those_of_the_generation_config(tmp_path, refused):
    write_tokenizer(tmp_path)
    config = tmp_path / "generation_config.json"
    for text, ends in (("{}", {256}), ('{"eos_token_id": 7}', {7, 256}), ('{"eos_token_id": [258, 256]}', {256, 258})):
        config.write_text(text)
        assert Vocabulary(tmp_path).ends == ends
    deep = '{"eos_token_id": ' + "[" * 200_000
    for text in ("[]", "{", '{"eos_token_id": ["x"]}', '{"eos_token_id": true}', deep):
        config.write_text(text)
        refused(ErrorKind.CONFIG_MALFORMED, lambda: Vocabulary(tmp_path), config)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path, refused):
    write_tokenizer(tmp_path)
    other = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    other.decoder = decoders.Metaspace()
    other.save(str(tmp_path / "tokenizer.json"))
    refused(ErrorKind.FILE_UNREADABLE, lambda: Vocabulary(tmp_path), "byte-level")
