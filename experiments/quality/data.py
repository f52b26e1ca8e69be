"""A data root: the five benchmarks' files where OpenCompass looks for them, read here for ids, counts and hashes.

A file that is absent, or has not the rows that its benchmark has, is refused before anything is run. OpenCompass reads
the files again, and more strictly than it tells: a blank line ends its run. This module knows which question stands in
which row, `schema` what a row holds.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from experiments.quality.benchmarks import BENCHMARKS, Benchmark
from experiments.quality.schema import GPQA_COLUMNS, Placed, Row, check_different, check_rows, question_id
from experiments.quality.standin import GPQA_FIRST, LIMIT, MANIFEST

NLTK_DATA = "nltk_data"  # folder of NLTK's own files, below a data root
_DIGITS = 12  # of a hash, for a person


@dataclass(frozen=True)
class Question:
    """One row of a benchmark. `category`: MMLU-Pro's, or IFBench's instructions joined by +; else ""."""

    id: str
    category: str


@dataclass(frozen=True)
class DataRoot:
    """The folder that COMPASS_DATA_CACHE names. `questions`: of each stand-in; None where the files are real."""

    path: Path
    questions: int | None

    @classmethod
    def open(cls, path: Path) -> DataRoot:
        """
        Raises:
            Edge0Error: FILE_MISSING where there is no such folder; CORPUS_INVALID for a broken manifest.
        """
        if not path.is_dir():
            raise Edge0Error(ErrorKind.FILE_MISSING, "no data root", path=path, hint=_bring(path))
        manifest = path / MANIFEST
        if not manifest.exists():
            return cls(path, None)
        try:
            return cls(path, int(json.loads(manifest.read_text(encoding="utf-8"))["questions"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            detail = f"not the manifest of stand-ins ({error!r})"
            raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=manifest, hint="make them anew") from error

    @property
    def stand_in(self) -> bool:
        return self.questions is not None

    def benchmark(self, name: str, limit: int | None = None) -> Data:
        """One benchmark's file, checked.

        Args:
            limit: tokens that an answer may have; None: the benchmark's own.

        Raises:
            Edge0Error: FILE_MISSING, FILE_UNREADABLE, CORPUS_INVALID.
        """
        benchmark = BENCHMARKS[name]
        rows = self.questions or benchmark.rows
        files = _files(self.path, benchmark, self.hint)
        data = Data(benchmark, files, limit or (LIMIT if self.stand_in else benchmark.limit), self)
        if len(data.rows) != rows:
            raise Edge0Error(
                ErrorKind.CORPUS_INVALID,
                f"not {benchmark.title}" + (" in its stand-in" if self.stand_in else ""),
                path=data.files[0],
                expected=f"{rows} questions",
                found=f"{len(data.rows)} rows",
                hint=self.hint,
            )
        return data

    @property
    def hint(self) -> str:
        """What to do about a file that is missing or wrong."""
        if not self.stand_in:
            return _bring(self.path)
        return f"edge0 quality data {shlex.quote(str(self.path))} --stand-in makes them anew"


def _bring(root: Path) -> str:
    return f"edge0 quality data {shlex.quote(str(root))} says what to bring, and where it goes"


@dataclass(frozen=True)
class Data:
    """What one benchmark is made of. `limit`: tokens that an answer may have."""

    benchmark: Benchmark
    files: tuple[Path, ...]
    limit: int
    root: DataRoot

    @cached_property
    def digest(self) -> str:
        """The file's sha256, or that of the sha256 of each of them."""
        digests = [hashlib.sha256(_read(path)).digest() for path in self.files]
        return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()

    @property
    def version(self) -> str:
        """Its digest, and whether it is the published one's where that is known."""
        said, published = f"sha256 {self.digest[:_DIGITS]}", self.benchmark.published
        if not published or self.root.stand_in:
            return said
        same = self.digest.startswith(published)
        return f"{said}, the published file" if same else f"{said}, not the published file's {published}"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """
        Raises:
            Edge0Error: FILE_UNREADABLE; CORPUS_INVALID naming the row, its field, what was expected and found.
        """
        name, hint = self.benchmark.name, self.root.hint
        rows = [placed for path in self.files for placed in _rows(path, hint)]
        check_rows(name, rows, hint)
        asked = [placed for placed in rows if "validation" not in placed.path.name]
        check_different(name, asked, hint)
        return tuple(placed.row for placed in asked)

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """In the order of its rows.

        Raises:
            Edge0Error: as `rows`.
        """
        name = self.benchmark.name
        return tuple(Question(question_id(name, row), _category(row)) for row in self.rows)

    @property
    def categories(self) -> tuple[str, ...]:
        """Of MMLU-Pro, those that occur."""
        return tuple(sorted({question.category for question in self.questions}))


def _files(root: Path, benchmark: Benchmark, hint: str) -> tuple[Path, ...]:
    """
    Raises:
        Edge0Error: FILE_MISSING, naming the file.
    """
    path = root / benchmark.file
    if benchmark.name == "mmlu-pro":
        folder = path.parent
        splits = [_split(folder, split) for split in ("test", "validation")]
        if all(splits):
            return tuple(file for split in splits for file in split)
        path = path if not splits[0] else folder / "validation.jsonl"
    elif path.is_file():
        return (path,)
    raise Edge0Error(ErrorKind.FILE_MISSING, f"no {benchmark.title}", path=path, hint=hint)


def _split(folder: Path, split: str) -> list[Path]:
    """A split of MMLU-Pro: one JSONL file, or the Parquet files as they are published."""
    return [path for path in [folder / f"{split}.jsonl"] if path.is_file()] or sorted(
        folder.rglob(f"{split}-*.parquet")
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        detail = f"cannot be read ({error.strerror})"
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, detail, path=path) from error


def _rows(path: Path, hint: str) -> list[Placed]:
    """
    Raises:
        Edge0Error: FILE_UNREADABLE; CORPUS_INVALID where the file is not of its kind.
    """
    read = {".parquet": _parquet, ".csv": _csv}.get(path.suffix, _jsonl)
    try:
        return [Placed(path, place, row) for place, row in read(_read(path))]
    except ValueError as error:
        detail = f"cannot be understood ({error})"
        raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=path, hint=hint) from error


def _parquet(data: bytes) -> Iterator[tuple[str, Row]]:
    """Raises ValueError, as the others."""
    import pandas as pd

    rows = pd.read_parquet(io.BytesIO(data)).to_dict("records")
    for number, row in enumerate(rows, 1):
        yield (
            f"row {number}",
            {name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.items()},
        )


def _csv(data: bytes) -> Iterator[tuple[str, Row]]:
    """GPQA's questions: five columns by their place, as OpenCompass takes them, below a header that names them."""
    columns = slice(GPQA_FIRST, GPQA_FIRST + len(GPQA_COLUMNS))
    header, *rows = list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""))) or [[]]
    if tuple(header[columns]) != GPQA_COLUMNS:
        raise ValueError(f"columns {GPQA_FIRST + 1} to {columns.stop} are not {', '.join(GPQA_COLUMNS)}")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", dict(zip(GPQA_COLUMNS, row[columns], strict=False))


def _jsonl(data: bytes) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(data.decode("utf-8").removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error.msg}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: no JSON object")
        yield f"line {number}", row


def _category(row: Row) -> str:
    return str(row["category"]) if "category" in row else "+".join(row.get("instruction_id_list", ()))
