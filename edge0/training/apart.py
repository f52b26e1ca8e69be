"""Whether what is trained holds what is kept for evaluation: questions compared by words, white space and case aside.

A question also counts where it stands inside a longer text, from the beginning of a word to the end of one; only a
single word must be all there is, since any text may hold one by chance. A question that was worded anew, or translated,
is not found.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

# Scripts without spaces have words of one letter: kana, Han, Hangul.
WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+|\S")


def words(text: str) -> tuple[str, ...]:
    """Runs of letters and digits without their case, and every other character that is no white space."""
    return tuple(WORD.findall(text.casefold()))


class Questions:
    """Questions to be found in texts, each text in one pass however many questions there are."""

    def __init__(self, questions: Iterable[str]):
        self._whole = {words(question) for question in questions}
        # First two words -> lengths of the questions that begin with them: most words of a text begin none.
        self._lengths: dict[tuple[str, ...], set[int]] = defaultdict(set)
        for question in self._whole:
            if len(question) > 1:
                self._lengths[question[:2]].add(len(question))

    def stands_in(self, text: str) -> bool:
        """Whether the text is one of the questions, or holds one of at least two words."""
        found = words(text)
        return found in self._whole or any(
            found[start : start + length] in self._whole
            for start, pair in enumerate(pairwise(found))
            for length in self._lengths.get(pair, ())
        )
