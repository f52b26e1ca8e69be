"""Files and JSON documents that are not believed: how they are opened, parsed and refused.

Whatever a file holds, the outcome is a JSON object of bounded size or an `Edge0Error` on one line. The bounds are
counted before parsing, so that a hostile document costs seconds at the most and not minutes. Knows nothing of what a
document means.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from edge0.errors import Edge0Error, ErrorKind

MAX_SIZE = 2**63 - 1
"""Largest dimension, element count, byte count or offset: what a signed 64-bit file offset can hold."""

DOWNLOAD_FILE = "download the file again"

# Shortens and escapes: a hostile header must not put megabytes, or terminal control codes, into an error line.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 3, 8, 4, 120, 120
shown = _SHORT.repr


def plain(text: str) -> str:
    """`text` itself where it is short and printable."""
    return text if text.isprintable() and len(text) <= _SHORT.maxstring else shown(text)


def refuse(
    kind: ErrorKind,
    detail: str,
    path: Path,
    tensor: str | None = None,
    expected: object = None,
    found: object = None,
    hint: str | None = DOWNLOAD_FILE,
) -> NoReturn:
    """Raise an `Edge0Error` whose `tensor` may come from a hostile file; `found` is the caller's to shorten."""
    tensor = None if tensor is None else plain(tensor)
    raise Edge0Error(kind, detail, path=path, tensor=tensor, expected=expected, found=found, hint=hint)


@contextmanager
def os_errors(path: Path, hint: str) -> Iterator[None]:
    """Turns what the operating system says of `path` into an Edge0Error. Wraps system calls only, never parsing."""
    try:
        yield
    except FileNotFoundError as error:
        raise Edge0Error(ErrorKind.FILE_MISSING, "there is no such file or directory", path=path, hint=hint) from error
    except (OSError, ValueError) as error:  # ValueError: a path that the system cannot express, such as one with a NUL
        detail = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = "check its type and permissions"
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, detail, path=path, hint=hint) from error


@contextmanager
def regular_file(path: Path, hint: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Opens `path` and yields it with its status. O_NONBLOCK: a FIFO is refused here, not waited for."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with os_errors(path, hint), open(path, "rb", opener=opener) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        yield file, status


@dataclass(frozen=True)
class Document:
    """What a JSON document is called in an error, which kinds its faults have, and how many values it may hold."""

    what: str
    utf8_kind: ErrorKind
    json_kind: ErrorKind
    hint: str
    max_values: int

    def parse(self, raw: bytes, path: Path) -> dict[str, object]:
        """The JSON object in `raw`, with no key twice at any level and integers saturated just beyond +-MAX_SIZE.

        Raises:
            Edge0Error: TENSOR_COUNT above `max_values`, `utf8_kind`, `json_kind`.
        """

        def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
            result: dict[str, object] = {}
            for key, value in pairs:
                if key in result:
                    refuse(self.json_kind, f"{self.what} holds this key twice", path, key, hint=self.hint)
                for part in (key, value):
                    if isinstance(part, str):
                        part.encode()  # an escaped lone surrogate is legal JSON but cannot be written as UTF-8
                result[key] = value
            return result

        hooks = {"object_pairs_hook": unique, "parse_int": _saturated_int, "parse_constant": _refuse_constant}
        try:
            text = raw.decode()
            self._check_values(text, path)
            document = json.loads(text, **hooks)
        except UnicodeError as error:
            refuse(self.utf8_kind, f"{self.what} is not UTF-8: {error.reason}", path, hint=self.hint)
        except RecursionError:
            refuse(self.json_kind, f"{self.what} is nested too deeply", path, hint=self.hint)
        except ValueError as error:
            refuse(self.json_kind, f"{self.what} is not JSON: {error}", path, hint=self.hint)
        if not isinstance(document, dict) or not raw.startswith(b"{"):
            detail = f"{self.what} is not one JSON object from its first byte on"
            refuse(self.json_kind, detail, path, None, "{", shown(raw[:16]), self.hint)
        return document

    def _check_values(self, text: str, path: Path) -> None:
        """Every value but the outermost follows one of these marks, so the count is an upper bound of their number."""
        values = sum(text.count(mark) for mark in (",", "[", "{"))
        if values > self.max_values:
            detail = f"{self.what} holds more values than any checkpoint needs"
            refuse(ErrorKind.TENSOR_COUNT, detail, path, None, f"at most {self.max_values}", values, self.hint)


def _saturated_int(digits: str) -> int:
    """Keeps a number of a million digits from costing more than its reading: beyond 20 characters all are too large."""
    if digits == "-0":
        raise ValueError("-0 is no size and no offset")
    bound = MAX_SIZE + 1
    if len(digits) > 20:
        return -bound if digits.startswith("-") else bound
    return max(-bound, min(bound, int(digits)))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def check_string_map(value: object, path: Path, key: str, kind: ErrorKind, hint: str) -> None:
    """JSON keys are strings already; only the values are in question."""
    if not isinstance(value, dict):
        refuse(kind, "not a map", path, key, "a JSON object", shown(value), hint)
    for name, text in value.items():
        if not isinstance(text, str):
            refuse(kind, f"not a string in {key}", path, name, "a string", shown(text), hint)
