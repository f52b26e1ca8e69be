"""The configuration is literal text, and a run has an identity: another weight, byte of data or K is another run."""

import ast
import shutil

import pytest

from edge0.errors import ErrorKind
from experiments.quality import run as runner
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.configuration import digest_of


def planned(model, root, *more):
    return runner.Run.of(runner.arguments().parse_args([str(model), "--data", str(root), "--out", "out", *more]), print)


@pytest.fixture
def identity(monkeypatch):
    """A run's identity as hexadecimal digits, where OpenCompass need not be installed."""
    monkeypatch.setattr(runner, "version", lambda package: "0.5.4")
    return lambda run, *places: digest_of(run.identity(list(places)))


def test_nothing_of_ours_is_imported_and_every_value_is_written_out(checkpoints, stand_ins):
    text = planned(checkpoints["unit-35b"], stand_ins.path, "--cross-check", "ifbench").configuration
    tree = ast.parse(text)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"mmengine.config", *(benchmark.module for benchmark in BENCHMARKS.values())}
    (models,) = (ast.literal_eval(node.value) for node in tree.body if getattr(node, "targets", [None])[0] is not None
                 and getattr(node.targets[0], "id", "") == "models")  # fmt: skip
    assert [model["abbr"] for model in models] == ["unit-35b-int4-k4", "unit-35b-server-k4"]
    assert {model["type"] for model in models} == {"experiments.quality.model.ArmModel"}
    assert "['max_out_len'] = 64" in text and "in ('math', 'other')" in text


def test_a_part_of_the_benchmarks(checkpoints, stand_ins, refused):
    model = checkpoints["unit-35b"]
    run = planned(model, stand_ins.path, "--benchmarks", "ifbench", "aime2026")
    assert list(run.data) == ["aime2026", "ifbench"]
    asked = ("--benchmarks", "aime2026", "--cross-check", "ifbench")
    refused(ErrorKind.OPTION_INVALID, lambda: planned(model, stand_ins.path, *asked), "cross-check")


def test_answers_may_be_cut_earlier(checkpoints, stand_ins, refused, identity):
    model = checkpoints["unit-35b"]
    run, short = (planned(model, stand_ins.path, *more) for more in ((), ("--limit", "7")))
    assert {data.limit for data in short.data.values()} == {7}
    assert "['max_out_len'] = 7" in short.configuration
    assert identity(short, model) != identity(run, model)
    refused(ErrorKind.OPTION_INVALID, lambda: planned(model, stand_ins.path, "--limit", "0"), "limit")


def test_other_weights_under_the_same_name_are_another_run(identity, copy_of, stand_ins):
    model = copy_of("unit-35b")
    before = identity(planned(model, stand_ins.path), model)
    assert identity(planned(model, stand_ins.path), model) == before
    shard = next(model.glob("model*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert identity(planned(model, stand_ins.path), model) != before


def test_another_k_or_other_data_is_another_run(identity, checkpoints, stand_ins, tmp_path):
    model = checkpoints["unit-35b"]
    before = identity(planned(model, stand_ins.path), model)
    assert identity(planned(model, stand_ins.path, "--k", "8"), model) != before
    root = shutil.copytree(stand_ins.path, tmp_path / "root")
    assert identity(planned(model, root), model) == before
    path = root / BENCHMARKS["aime2026"].file
    path.write_text(path.read_text().replace('"answer": "', '"answer": "1', 1))
    assert identity(planned(model, root), model) != before
