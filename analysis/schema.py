"""The schema of raw rows: `python -m analysis.schema` prints results/SCHEMA.md.

Says of every column of every Parquet file what it holds, and whether a file keeps to it (`problems`). Knows nothing of
who writes the files; a test holds real sessions to it, both ways.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pandas as pd
from pandas.api import types

from analysis import schema_columns
from analysis.rows import markdown_table

KINDS = ("text", "integer", "number", "flag")


@dataclass(frozen=True)
class Column:
    """One column: `kind` of `KINDS`, whether it may be empty, its unit ("-": none), one sentence."""

    name: str
    kind: str
    may_be_empty: bool
    unit: str
    meaning: str

    @classmethod
    def parse(cls, line: str) -> Column:
        """A line of `analysis.schema_columns`."""
        head, _, meaning = line.partition(": ")
        name, kind, unit = head.split()
        column = cls(name, kind.removesuffix("?"), kind.endswith("?"), unit, meaning)
        if column.kind not in KINDS or not meaning.endswith("."):
            raise ValueError(f"column {name}: expected a kind of {', '.join(KINDS)} and a sentence, found {line!r}")
        return column

    def problem(self, values: pd.Series) -> str:
        """Why these values are not of the column, "" if they are."""
        kept = values.dropna()
        if len(kept) < len(values) and not self.may_be_empty:
            return f"column {self.name} has {len(values) - len(kept)} empty values"
        # A column with empty values loses its type: integers become floats, an empty column holds objects.
        whole = self.may_be_empty and types.is_numeric_dtype(kept) and (kept % 1 == 0).all()
        fits = {
            "text": types.is_string_dtype(kept),
            "integer": (types.is_integer_dtype(kept) or whole) and not types.is_bool_dtype(kept),
            "number": types.is_float_dtype(kept),
            "flag": types.is_bool_dtype(kept.infer_objects()),
        }[self.kind]
        return "" if fits or kept.empty else f"column {self.name} should be {self.kind}, found {values.dtype}"


@dataclass(frozen=True)
class File:
    """A kind of Parquet file: where it lies, what a row of it is, its columns."""

    path: str
    row: str
    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, path: str, row: str, text: str) -> File:
        """A block of `analysis.schema_columns`."""
        return cls(path, row, tuple(Column.parse(line) for line in text.strip().splitlines()))

    def problems(self, frame: pd.DataFrame) -> list[str]:
        """What keeps a frame from being of this schema: columns that it lacks or has too many, wrong kinds."""
        known = [column.name for column in self.columns]
        missing = [f"column {name} is missing" for name in known if name not in frame.columns]
        strange = [f"column {name} is not in the schema" for name in frame.columns if name not in known]
        wrong = [column.problem(frame[column.name]) for column in self.columns if column.name in frame.columns]
        return [*missing, *strange, *filter(None, wrong)]


FILES = {
    "runs": File.parse("<session>/runs.parquet", "A run: one arm in a process of its own.", schema_columns.RUNS),
    "steps": File.parse("<session>/steps.parquet", "A timed decode step of a run.", schema_columns.STEPS),
    "loads": File.parse("<session>/loads.parquet", "A read of one expert, in warm-up too.", schema_columns.LOADS),
    "load_cost": File.parse(
        "fit/sessions/<session>/loads.parquet", "A read of one expert alone.", schema_columns.LOAD_COST
    ),
    "prefill": File.parse("<session>/prefill.parquet", "A prompt in a process of its own.", schema_columns.PREFILL),
    "kernels": File.parse(
        "<session>/kernels.parquet", "Some decode steps of one way to compute.", schema_columns.KERNELS
    ),
    "work": File.parse("<session>/work.parquet", "Some decode steps of one shape.", schema_columns.WORK),
    "agreement": File.parse("<session>/agreement.parquet", "A load under a budget.", schema_columns.AGREEMENT),
    "reads": File.parse("<session>/reads.parquet", "Some experts of a layer, read cold.", schema_columns.READS),
    "endurance": File.parse("<session>/endurance.parquet", "A look at a long-lived engine.", schema_columns.ENDURANCE),
    "ladder": File.parse("<session>/ladder.parquet", "An answer to a held-out problem.", schema_columns.LADDER),
    "quality": File.parse("<session>/quality.parquet", "An answer to a benchmark's question.", schema_columns.QUALITY),
    "merge": File.parse("<session>/merge.parquet", "A matrix that a LoRA corrects.", schema_columns.MERGE),
    "logits": File.parse("<session>/logits.parquet", "A position of a prompt.", schema_columns.MERGE_LOGITS),
}
INTRODUCTION = """# Raw rows

Each session is a folder `results/<machine>/<tier>/<experiment>/sessions/<session>/` with session.json (what was
measured, on which host, from which commit), tokens.json (the sequence that every arm replays) and the first three files
below. The other files lie in such a folder too, each with a JSON file of its name in place of these two. Rows are never
changed after they were written, a new measurement is a new folder, and rows of two sessions are never joined;
latest.json beside the folders names the newest. Bytes are bytes, MiB are 2^20 of them. A kind with `or empty` has no
value in a void run, or on a system without that counter.

Printed by `python -m analysis.schema`."""


def markdown() -> str:
    """The text of results/SCHEMA.md."""
    blocks = [INTRODUCTION]
    for file in FILES.values():
        rows = [
            (column.name, column.kind + " or empty" * column.may_be_empty, column.unit, column.meaning)
            for column in file.columns
        ]
        blocks += [f"## {file.path}", file.row, markdown_table(("column", "kind", "unit", "meaning"), rows, 4)]
    return "\n\n".join(blocks)


def main() -> int:
    """Command line."""
    print(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
