"""A data root: what is missing or wrong is named, before anything is run."""

import argparse
import json
import shutil

import pandas as pd
import pytest

from edge0.errors import ErrorKind
from experiments.quality import command
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.data import DataRoot, lay_out
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
    refused(ErrorKind.CORPUS_INVALID, lambda: found.benchmark("aime2026"), "30 different questions")


def test_a_question_twice_is_refused(refused, root):
    path = root / BENCHMARKS["ifbench"].file
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[0]]))
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark("ifbench"), "7 ids")


@pytest.mark.parametrize("text", ["not json", '{"key": "1"}'])
def test_a_file_of_another_kind_is_refused(refused, root, text):
    path = root / BENCHMARKS["ifbench"].file
    path.write_text(text)
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root).benchmark("ifbench"), path)


def test_a_broken_manifest_is_refused(refused, root):
    (root / MANIFEST).write_text("{}")
    refused(ErrorKind.CORPUS_INVALID, lambda: DataRoot.open(root), root / MANIFEST)


def test_no_root_is_refused(refused, tmp_path):
    refused(ErrorKind.FILE_MISSING, lambda: DataRoot.open(tmp_path / "none"), tmp_path / "none")


def test_a_digest_is_of_every_byte(root):
    before = DataRoot.open(root).benchmark("mmlu-pro").digest
    path = root / "data/mmlu_pro/validation.jsonl"
    path.write_text(path.read_text() + "\n")
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


def test_laying_out_says_what_to_bring_and_where(tmp_path):
    lines = list(lay_out(tmp_path / "real"))
    for benchmark in BENCHMARKS.values():
        (line,) = (line for line in lines if line.startswith(f"{benchmark.title}: "))
        assert str(tmp_path / "real" / benchmark.file) in line or "there" in line
    assert "punkt_tab" in lines[-1]


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
