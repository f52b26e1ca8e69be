"""Other engines: the blocks and names of their files, what is said where they are not there, and an arm of one.

What needs a package of `snakemake peers-lib` is skipped where it was not built; the rest is held to numpy alone.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.schema import checkpoint_tensors
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.telemetry.loads import Recorder
from experiments import run_arm
from experiments.arms import ARMS
from experiments.options import SessionOptions
from experiments.peers import blocks, check, gguf, library, names, ready
from experiments.peers.blocks import Affine
from experiments.preflight import preflight
from experiments.run_arm import RunSpec, measure

PACKAGES = Path(__file__).parents[2] / ".peers/packages"


def there(name):
    try:
        with library.importable(PACKAGES, name):
            return True
    except Edge0Error:
        return False


needs_gguf = pytest.mark.skipif(not there("gguf"), reason="no gguf package: `snakemake peers-lib` installs it")
needs_llama = pytest.mark.skipif(not there("llama_cpp"), reason="no llama.cpp: `snakemake peers-lib` builds it")


def quantised(rows=6, columns=128, bits=4, seed=0):
    """The three tensors of a matrix that mlx quantised, scales and biases as bf16 holds them."""
    weight = mx.array(np.random.default_rng(seed).normal(0, 0.02, (rows, columns)).astype(np.float32))
    parts = mx.quantize(weight.astype(mx.bfloat16), 64, bits)
    return [np.array(part if part.dtype == mx.uint32 else part.astype(mx.float32)) for part in parts]


def q4_1_values(packed):
    """Q4_1 by its definition, byte by byte."""
    values = []
    for block in packed.reshape(-1, 20):
        d, m = block[:4].view(np.float16).astype(np.float32)
        values.append([d * code + m for code in [*(block[4:] & 15), *(block[4:] >> 4)]])
    return np.array(values, np.float32).reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_matrix_has_the_values_that_mlx_gives_it(bits):
    words, scales, biases = quantised(bits=bits)
    expected = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), 64, bits)
    assert np.allclose(Affine.of(words, scales, biases, bits).values, np.array(expected), rtol=0, atol=1e-7)


def test_q4_1_is_the_same_matrix_number_for_number():
    weights = Affine.of(*quantised(), 4)
    assert (np.abs(weights.scales) > 2**-14).all() and (q4_1_values(blocks.q4_1(weights)) == weights.values).all()


def test_a_scale_that_fp16_cannot_hold_is_refused(refused):
    words, scales, biases = quantised()
    refused(ErrorKind.NUMERIC, lambda: blocks.q4_1(Affine.of(words, scales * 1e8, biases, 4)), "fp16")


def test_rows_and_whole_blocks_of_columns_move_with_their_scales(refused):
    weights = Affine.of(*quantised(), 4)
    order = np.array([3, 0, 5, 1, 2, 4])
    assert (weights.rows(order).values == weights.values[order]).all()
    swapped = np.concatenate([np.arange(96, 128), np.arange(0, 96)])
    assert (weights.columns(swapped).values == weights.values[:, swapped]).all()
    refused(ErrorKind.LAYOUT_MALFORMED, lambda: weights.columns(np.roll(np.arange(128), 1)), "whole blocks")
    assert (weights.stacked(2).values == weights.values.reshape(2, 3, 128)).all()


def test_every_tensor_of_a_checkpoint_has_a_place_of_its_own(checkpoint, refused):
    config = read_config(checkpoint)
    wanted = {t.linear.name if t.linear else t.name for t in checkpoint_tensors(config) if not t.is_left_over}
    found = [place for name in sorted(wanted) for place, _ in names.places(config, name)]
    assert len(found) == len(set(found)) == len(wanted) + sum("kv_b" in name for name in wanted)
    stray = f"{config.family.layer_prefix}.0.mlp.other"
    refused(ErrorKind.TENSOR_MISMATCH, lambda: names.places(config, stray), stray, "no place")


def test_value_heads_are_tiled_over_the_key_heads(checkpoints):
    """Two key heads with two value heads each: grouped 0 0 1 1 here, tiled 0 1 0 1 there."""
    config = read_config(checkpoints["unit-35b"])
    at = f"{config.family.layer_prefix}.0.linear_attn"
    ((_, change),) = names.places(config, f"{at}.dt_bias")
    assert change(np.arange(4.0)).tolist() == [0, 2, 1, 3]
    ((name, change),) = names.places(config, f"{at}.A_log")
    assert name == "blk.0.ssm_a" and change(np.zeros(4)).tolist() == [-1] * 4


def test_a_model_that_its_graph_cannot_be_is_told(copy_of, tmp_path):
    model = copy_of("unit-8b")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"kda_safe_gate": False}))
    with pytest.raises(Edge0Error, match="bounded gate"):
        dict(names.metadata(read_config(model)))


@needs_gguf
@pytest.mark.parametrize("kind", gguf.KINDS)
def test_a_file_holds_every_tensor_and_q4_1_the_very_values(checkpoint, tmp_path, kind):
    """Through the reader and the decoders of the `gguf` package, which are not ours."""
    config, index = read_config(checkpoint), CheckpointIndex.open(checkpoint)
    out = tmp_path / f"{kind}.gguf"
    gguf.make(checkpoint, out, kind, PACKAGES)
    about = json.loads(out.with_suffix(".json").read_text())
    assert about["gguf"] == str(out) and about["bytes"] == out.stat().st_size and not about["reason"]
    with library.importable(PACKAGES, "gguf") as package:
        reader = package.GGUFReader(out)
        assert reader.get_field("general.architecture").contents() == names.architecture(config)
        assert reader.get_field(f"{names.architecture(config)}.expert_count").contents() == config.experts
        written = {tensor.name: tensor for tensor in reader.tensors}
        seen, worst = set(), 0.0
        for name, values, _ in expected(config, index):
            tensor = written[name]
            got = package.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
            assert list(tensor.shape) == list(values.shape[::-1])
            if kind != "q4_0":
                assert (got == values).all(), name
            else:
                worst = max(worst, np.linalg.norm(got - values) / np.linalg.norm(values))
            seen.add(name)
        assert seen == set(written) and worst < 0.2
    active = about["active"]
    assert active["checkpoint"]["expert"] > 0
    if kind == "q4_0":
        assert active["gguf"]["expert"] == active["checkpoint"]["expert"]
        assert active["gguf"]["fixed"] == pytest.approx(active["checkpoint"]["fixed"], rel=0.06)


def expected(config, index):
    """(name, fp32 values, bytes) of each tensor, without any encoding."""

    class Plain:
        class GGMLQuantizationType:
            F32 = Q4_0 = Q4_1 = Q8_0 = BF16 = 0

        class quants:
            quantize = staticmethod(lambda values, kind: values)

    return ((name, array, nbytes) for name, (array, _), nbytes in gguf.tensors(config, index, "q4_0", Plain))


def test_without_the_package_there_is_a_reason_and_no_file(checkpoint, tmp_path):
    out = tmp_path / "q4_0.gguf"
    gguf.make(checkpoint, out, "q4_0", tmp_path / "nothing")
    about = json.loads(out.with_suffix(".json").read_text())
    if about["gguf"] is None:  # else the package is installed for everybody
        assert "peers-lib" in about["reason"] and not out.exists()
        assert ready.arguments({"built": True, "folder": "x"}, about) == ""


def test_what_can_run_is_told_as_arguments_of_a_session():
    file = {"gguf": "a file.gguf"}
    assert ready.arguments({"built": False, "folder": "lib"}, file) == ""
    told = ready.arguments({"built": True, "folder": "lib"}, file)
    assert told == "llama-cpp llama-cpp-repacked --gguf 'a file.gguf' --peers lib"


def test_a_library_that_cannot_be_built_or_run_says_why(tmp_path, monkeypatch):
    ended = []

    def run(command, **_):
        code, error = ended.pop(0)
        return type("Done", (), {"returncode": code, "stderr": error, "stdout": "AVX2 = 1\n"})

    monkeypatch.setattr(library.subprocess, "run", run)
    assert len(library.missing(tmp_path)) == len(library.pinned()) == 3
    ended[:] = [(1, "lines\nerror: no compiler\n")]
    assert library.build(tmp_path)["reason"] == "pip could not build it: error: no compiler"
    ended[:] = [(0, ""), (-4, "")]
    assert library.build(tmp_path)["reason"] == "it does not run here: exit code -4"
    ended[:] = [(0, ""), (0, "")]
    about = library.build(tmp_path)
    assert about["built"] and about["system"] == "AVX2 = 1" and not about["reason"]


def options(model, **changes):
    given = {"ks": (4,), "bank": 0.5, "arms": ("ondemand", "llama-cpp"), "condition": "warm"}
    return SessionOptions(str(model), "unit", **given | changes)


def test_a_session_with_a_peer_needs_its_file_and_a_condition_that_it_can_be_held_to(unit_35b, tmp_path, refused):
    def check(changes, *parts):
        refused(ErrorKind.OPTION_INVALID, lambda: preflight(options(unit_35b, **changes)), *parts)

    file, folder = tmp_path / "q4_0.gguf", tmp_path / "packages"
    file.touch()
    check({"peers": str(tmp_path)}, "option gguf", "llama-cpp")
    check({"gguf": str(file), "peers": str(folder)}, "option peers", "peers-lib")
    folder.mkdir()
    both = {"gguf": str(file), "peers": str(folder)}
    check(both | {"condition": "budget:0.5"}, "option condition", "warm or limit")
    check(both | {"condition": "limit"}, "option memory_limit_bytes")
    assert preflight(options(unit_35b, **both)).layout.total_bytes


class Stub:
    """What stands in for llama.cpp: it reads its file and says the token that it is given."""

    bank_bytes = bank_slots = 0
    window = "lowered"

    def __init__(self, file, config, k, weights, positions, folder):
        assert (k, weights, positions, folder) == (4, "mapped", 8, Path("packages"))
        self.recorder, self.resident_bytes = Recorder(rows=True), file.stat().st_size

    def begin(self, prompt):
        self.recorder.step += 0

    def step(self, token):
        self.recorder.step += 1
        return token

    def close(self):
        """Nothing is open."""


def test_a_run_of_a_peer_has_the_rows_of_any_other_and_no_number_that_is_not_its_own(unit_35b, tmp_path, monkeypatch):
    monkeypatch.setattr(run_arm, "LlamaDecoder", Stub)
    file = tmp_path / "q4_0.gguf"
    file.write_bytes(b"\1" * (1 << 20))
    spec = RunSpec(
        *("x", "llama-cpp", 4, str(unit_35b), "warm", [1, 2, 3], [4, 5, 6], [7, 8], 64, False, None, 1, 1, 1, 0),
        gguf=str(file),
        peers="packages",
    )
    row, steps, loads = measure(spec)
    assert not row["void"] and row["reader"] == "mmap" and row["fault_window"] == "lowered"
    assert row["checkpoint_bytes"] == row["cached_after_bytes"] == row["resident_bytes"] == 1 << 20
    assert all(row[key] is None for key in row if key.startswith("alloc_")) and row["rss_anon_bytes"]
    assert len(steps) == 2 and steps.hits.isna().all() and len(loads) == 0
    ours = measure(RunSpec(**{**vars(spec), "arm": "ondemand", "gguf": None, "peers": None}))[0]
    assert set(ours) == set(row)


def test_arms_of_peers_are_not_held_to_each_others_tokens():
    assert {ARMS[arm].route for arm in ("llama-cpp", "llama-cpp-repacked")} == {"llama-cpp", "llama-cpp-repacked"}


@needs_gguf
@needs_llama
def test_llama_cpp_answers_as_mlx_lm_does_on_equal_weights(checkpoint, tmp_path):
    """In plain arithmetic; a wrong head order, norm or rope would leave nothing alike. Its KV cache is fp16."""
    out = tmp_path / "f32.gguf"
    gguf.make(checkpoint, out, "f32", PACKAGES)
    found = check.compare(checkpoint, out, PACKAGES, tokens=12)
    assert max(found["relative_error"]) < 0.005 and found["same_choice"] == 1


def test_what_is_too_large_as_fp32_is_told_and_not_written(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "MOST_F32_BYTES", 1 << 20)
    gguf.make(checkpoints["unit-35b"], tmp_path / "f32.gguf", "f32", PACKAGES)
    assert "too large as fp32" in json.loads((tmp_path / "f32.json").read_text())["reason"]
    assert not (tmp_path / "f32.gguf").exists()


@needs_llama
def test_what_is_no_gguf_file_is_refused_with_the_librarys_word(unit_35b, tmp_path, refused):
    from experiments.peers.llama import LlamaDecoder

    file = tmp_path / "no.gguf"
    file.write_bytes(b"nothing of the kind")
    config = read_config(unit_35b)
    refused(ErrorKind.READ_FAILED, lambda: LlamaDecoder(file, config, 4, "mapped", 8, PACKAGES), "llama.cpp")


@contextmanager
def no_limit(limit_bytes):
    yield type("Limited", (), {"prefix": (), "killed": staticmethod(lambda code: False)})


def test_a_run_that_its_limit_makes_too_slow_is_void_like_one_that_it_kills(monkeypatch, refused):
    from experiments import processes

    monkeypatch.setattr(processes, "limited_command", no_limit)
    sleep = ["-c", "import time; time.sleep(60)"]
    refused(
        ErrorKind.MEMORY_TOO_SMALL,
        lambda: processes.run_python_limited(sleep, "arm x", 300, timeout_s=0.5),
        *("arm x", "longer than 0.5 s", "under its limit of 300 bytes"),
    )
