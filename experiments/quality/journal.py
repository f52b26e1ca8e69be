"""What one arm has answered so far, one line of JSON for each question: what makes a run that was killed go on.

An answer is found again by what was asked (messages and limit), so neither order nor OpenCompass's own files matter. A
line that was torn by a kill is asked again. Whose answers they are, the work folder knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from experiments.quality.arms import Answer, Messages


@dataclass(frozen=True)
class Entry:
    """An answer and the seconds that it took."""

    answer: Answer
    seconds: float


class Journal:
    """The file `path`. `broken`: lines that could not be read, and are no longer there.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """

    def __init__(self, path: Path):
        self.path, self._entries = path, {}
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
        whole = []
        for line in filter(None, lines):
            try:
                key, entry = _parsed(line)
            except (ValueError, TypeError, KeyError):
                continue
            self._entries[key] = entry
            whole.append(f"{line}\n")
        self.broken = len([line for line in lines if line]) - len(whole)
        if self.broken:
            self._write("".join(whole), "w")

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, messages: Messages, limit: int) -> Entry | None:
        return self._entries.get(_key(messages, limit))

    def add(self, messages: Messages, limit: int, entry: Entry) -> None:
        """
        Raises:
            Edge0Error: OUTPUT_UNWRITABLE.
        """
        key = _key(messages, limit)
        self._entries[key] = entry
        line = {"key": key, "seconds": entry.seconds, **dataclasses.asdict(entry.answer)}
        self._write(json.dumps(line) + "\n", "a")

    def _write(self, text: str, mode: str) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            detail = f"cannot be written ({error.strerror})"
            raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=self.path) from error


def _parsed(line: str) -> tuple[str, Entry]:
    """Raises ValueError, TypeError or KeyError for a line that is not one of ours."""
    values = json.loads(line)
    key, seconds = values.pop("key"), float(values.pop("seconds"))
    answer = Answer(**values)
    kinds = {field.name: type(getattr(answer, field.name)) for field in dataclasses.fields(Answer)}
    if kinds != {"text": str, "prompt_tokens": int, "answer_tokens": int, "stop": str}:
        raise ValueError("a field is of another kind")
    return key, Entry(answer, seconds)


def _key(messages: Messages, limit: int) -> str:
    asked = [[message["role"], message["content"]] for message in messages]
    return hashlib.sha256(json.dumps([asked, limit]).encode()).hexdigest()
