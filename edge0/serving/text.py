"""Token ids to text as it comes: characters are never broken, and stop strings never come out.

Everything is linear in the number of characters. Does not know where tokens come from, nor when a text is over for
another reason than a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class StopString:
    """Follows one stop string through a text, character by character (Knuth, Morris and Pratt)."""

    def __init__(self, text: str):
        self.text, self.matched = text, 0  # characters at the end of what was seen that begin the stop string
        self._fallback = [0] * len(text)  # matched prefix -> its longest proper prefix that is also its end
        length = 0
        for place in range(1, len(text)):
            while length and text[place] != text[length]:
                length = self._fallback[length - 1]
            length += text[place] == text[length]
            self._fallback[place] = length

    def advance(self, character: str) -> bool:
        """Whether this character completes the stop string. Not to be called again after that."""
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)


class TextStream:
    """The text of one answer. The stop string that is complete first ends it, the longest if several are.

    Args:
        token_bytes: token id -> its bytes, which need not be whole characters.
        stops: strings that end the text and are not part of it; none of them empty.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Iterable[str] = ()):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [StopString(stop) for stop in stops]
        self._held = ""  # seen, but it may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """What may be shown after this token; all but the longest end that could still begin a stop string."""
        return self._sift(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """The rest, when no token follows. Bytes that never became a character are one U+FFFD."""
        shown = self._sift(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _sift(self, text: str) -> str:
        if self.stopped:
            return ""
        for place, character in enumerate(text):
            complete = [len(stop.text) for stop in self._stops if stop.advance(character)]
            if complete:
                self.stopped = True
                seen, self._held = self._held + text[: place + 1], ""
                return seen[: len(seen) - max(complete)]
        seen = self._held + text
        shown = len(seen) - max((stop.matched for stop in self._stops), default=0)
        self._held = seen[shown:]
        return seen[:shown]
