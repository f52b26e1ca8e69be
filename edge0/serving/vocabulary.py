"""A checkpoint's tokenizer as serving needs it: text to ids, an id to its bytes, and the ids that end an answer.

mlx-lm's streaming detokenizers are not used: the byte-level one loses NUL, holds back everything while a text ends in
invalid bytes, and fails at the end on special tokens beyond ASCII. Both families have byte-level tokenizers, where
each token simply is some bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.pre_tokenizers import ByteLevel

from edge0.errors import Edge0Error, ErrorKind
from edge0.tokens import load_tokenizer


class Vocabulary:
    """Ids and text of one checkpoint. `ends`: the ids after which an answer is over.

    Raises:
        Edge0Error: FILE_MISSING, FILE_UNREADABLE, CONFIG_MALFORMED.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.tokenizer = load_tokenizer(directory)
        decoder = self.tokenizer.backend_tokenizer.decoder
        if decoder is None or b'"ByteLevel"' not in decoder.__getstate__():
            raise Edge0Error(ErrorKind.FILE_UNREADABLE, "not a byte-level tokenizer", path=directory / "tokenizer.json")
        self.ends = end_tokens(directory, self.tokenizer)
        self._silent = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        self._bytes = letter_bytes()

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            Edge0Error: PROMPT_INVALID when the text holds half a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Edge0Error(
                ErrorKind.PROMPT_INVALID, "the prompt is not valid Unicode", found=repr(error.object[error.start])
            ) from error
        return list(self.tokenizer.encode(text))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and for ids without a token."""
        letters = None if token in self._silent else self.tokenizer.convert_ids_to_tokens(token)
        if letters is None:
            return b""
        codes = [self._bytes.get(letter) for letter in letters]
        return letters.encode() if None in codes else bytes(codes)


def letter_bytes() -> dict[str, int]:
    """Letter of a byte-level vocabulary -> byte. Printable bytes stand for themselves, the rest are moved past 255."""
    letters = sorted(ByteLevel.alphabet())
    table = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    moved = [letter for letter in letters if ord(letter) >= 256]
    return table | dict(zip(moved, sorted(set(range(256)) - set(table.values())), strict=True))


def end_tokens(directory: Path, tokenizer: TokenizerWrapper) -> frozenset[int]:
    """The tokenizer's own end, and those that generation_config.json names (35b has two; its tokenizer says one)."""
    path, found = directory / "generation_config.json", []
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") or []
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise Edge0Error(ErrorKind.CONFIG_MALFORMED, f"not a JSON object ({error})", path=path) from error
    found = found if isinstance(found, list) else [found]
    if not all(type(token) is int for token in found):
        raise Edge0Error(ErrorKind.CONFIG_MALFORMED, "eos_token_id", path=path, expected="ids", found=repr(found))
    return frozenset(tokenizer.eos_token_ids) | frozenset(found)
