"""Verification: whatever is wrong is found, all of it in one run, and nothing is found where nothing is wrong."""

import hashlib
import json
import os
import shutil

import pytest
import released

from edge0.checkpoint import verify as module
from edge0.checkpoint.adapters import adapter_name, adapter_path
from edge0.checkpoint.header import INDEX_NAME, CheckpointIndex, read_header
from edge0.checkpoint.layout import records_path
from edge0.checkpoint.repack import repack
from edge0.checkpoint.schema import Tensor, checkpoint_tensors
from edge0.checkpoint.synth import write_shard
from edge0.checkpoint.tokenizer import write_tokenizer
from edge0.cli import main
from edge0.errors import EXIT_CODE, ErrorKind
from edge0.families import read_config
from edge0.verification import verify


@pytest.fixture
def private(copy_of, tier):
    return copy_of(tier.name)


@pytest.fixture
def sharded(copy_of):
    return copy_of("unit-35b")


@pytest.fixture(params=["released", "repacked"])
def either(request, copy_of, tier, tmp_path):
    """A private checkpoint in each layout."""
    directory = copy_of(tier.name)
    return directory if request.param == "released" else repack(directory, tmp_path / "repacked").directory


def found(report):
    """(kind, file name, tensor) of every problem."""
    return {(problem.kind, os.path.basename(problem.path), problem.tensor) for problem in report.problems}


def shards(directory):
    return [shard.path for shard in CheckpointIndex.open(directory).shards]


def cut(path, nbytes=1):
    os.truncate(path, path.stat().st_size - nbytes)


def edit_json(path, edit):
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def edit_header(path, edit):
    """Change the header of a file; its data stays."""
    data_offset, raw = read_header(path).data_offset, path.read_bytes()
    document = json.loads(raw[8:data_offset])
    edit(document)
    text = json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[data_offset:])


def rename(old, new):
    def edit(document):
        document[new] = document.pop(old)

    return edit


def add_shard(directory, *names):
    """One more shard, of empty tensors; with an index it is entered there."""
    write_shard(directory / "model-more.safetensors", [Tensor(name, "BF16", (0,)) for name in names], {}, lambda t: ())
    if (directory / INDEX_NAME).exists():
        more = dict.fromkeys(names, "model-more.safetensors")
        edit_json(directory / INDEX_NAME, lambda document: document["weight_map"].update(more))


# --- nothing wrong -------------------------------------------------------------------------------------------------


def test_a_clean_checkpoint_of_either_layout(either, tier):
    report = verify(either, sha256=True)
    assert not report.problems
    left = sum(".mlp.pregate." in tensor.name for tensor in checkpoint_tensors(read_config(either)))
    assert bool(left) == (tier.name == "unit-8b") == bool(report.notes)
    assert not left or report.notes == [f"{left} tensors mlp.pregate.* of the prerouter's predecessor are not used"]
    index = CheckpointIndex.open(either)
    files = sorted(either.rglob("*.safetensors"))
    assert report.tensors == len(index.tensors) and report.files == len(files)
    assert report.digests == {
        path.relative_to(either).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


@pytest.mark.parametrize(
    ("tag", "count", "experts", "rest"),
    [("35b", 1757, 18_119_393_280, 1_389_394_176), ("8b", 1196, 3_906_994_176, 530_178_048 + 10_173_248 + 61_210_624)],
)
def test_published_headers_at_full_shape(tmp_path, tag, count, experts, rest):
    raw = released.config_35b() if tag == "35b" else released.config_8b()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    parts = released.in_shards(released.table_35b(raw) if tag == "35b" else released.table_8b(raw), tag)
    for name, part in parts.items():
        released.write_sparse(tmp_path / name, part, {"format": "mlx"})
    if tag == "35b":
        released.write_index(tmp_path, parts, experts + rest)
    write_tokenizer(tmp_path)
    report = verify(tmp_path)
    assert not report.problems
    assert (report.files, report.tensors) == (len(parts), count)
    assert (report.expert_bytes, report.other_bytes) == (experts, rest)
    assert any("total_size" in note if tag == "35b" else note.startswith("66 tensors") for note in report.notes)
    assert sum(f"adapter for K={4 if tag == '35b' else 8}" in note for note in report.notes) == 2


def test_other_forms_of_released_tensors(tier, tmp_path):
    directory = released.write_replica(
        tmp_path / "replica", tier, "conv1d.conv.weight", lambda channels, kernel: (channels, 1, kernel), "F32"
    )
    assert not verify(directory).problems
    assert not verify(repack(directory, tmp_path / "out").directory).problems


def test_both_layouts_count_the_same_bytes(checkpoint, tmp_path):
    config = read_config(checkpoint)
    stacks = {tensor.name for tensor in checkpoint_tensors(config) if tensor.linear and tensor.linear.experts}
    entries = CheckpointIndex.open(checkpoint).tensors.values()
    experts = sum(entry.nbytes for entry in entries if entry.name in stacks)
    rest = sum(entry.nbytes for entry in entries) - experts
    for directory in (checkpoint, repack(checkpoint, tmp_path / "out").directory):
        report = verify(directory)
        assert (report.expert_bytes, report.other_bytes) == (experts, rest)


def test_the_command(checkpoint, private, capsys):
    assert main(["verify", str(checkpoint), "--sha256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[:7]] == ["sha256"] * 7 and lines[-1].startswith(f"{checkpoint}: ")
    (private / "tokenizer.json").unlink()
    shard = shards(private)[0]
    cut(shard)
    assert main(["verify", str(private)]) == EXIT_CODE
    output = capsys.readouterr()
    assert output.err == f"edge0: {private}: 2 problems found, each on a line of its own\n"
    first, second = (line for line in output.out.splitlines() if line.startswith("problem: "))
    assert str(shard) in first and str(private / "tokenizer.json") in second


# --- many things wrong at once -------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_found_in_one_run(sharded):
    first, second, third, fourth = shards(sharded)
    config = read_config(sharded)
    norm, renamed = "language_model.model.norm.weight", "language_model.model.layers.6.input_layernorm.weight"
    cut(first, 4096)
    second.unlink()
    edit_header(third, lambda document: document[max(document)].update(dtype="F13"))
    edit_header(fourth, rename(norm, "stranger"))
    adapters = [adapter_path(sharded, config.family, kind, k) for kind in ("lora", "prerouter") for k in (2, 4, 8)]
    cut(adapters[0])
    shutil.copy(adapters[2], adapters[1])
    adapters[3].write_bytes(b"")
    shutil.copy(adapters[4], sharded / adapters[4].name)  # found second, after a file that is told of already
    edit_header(adapters[4], lambda document: document.pop("__metadata__"))
    (sharded / "tokenizer.json").write_text("{")
    (sharded / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n{'0' * 64}  absent\nnonsense\n")
    report = verify(sharded, sha256=True)
    assert {kind for kind, _, _ in found(report)} == {
        ErrorKind.FILE_TRUNCATED,
        ErrorKind.FILE_MISSING,
        ErrorKind.TENSOR_DTYPE,
        ErrorKind.INDEX_MISMATCH,
        ErrorKind.TENSOR_MISSING,
        ErrorKind.TENSOR_MISMATCH,
        ErrorKind.ADAPTER_MISMATCH,
        ErrorKind.HEADER_TOO_SHORT,
        ErrorKind.ADAPTER_METADATA,
        ErrorKind.FILE_UNREADABLE,
        ErrorKind.FILE_CHANGED,
        ErrorKind.CHECKPOINT_INVALID,
    }
    assert {
        (ErrorKind.FILE_MISSING, second.name, None),
        (ErrorKind.INDEX_MISMATCH, INDEX_NAME, norm),
        (ErrorKind.INDEX_MISMATCH, INDEX_NAME, "stranger"),
        (ErrorKind.TENSOR_MISSING, sharded.name, norm),
        (ErrorKind.TENSOR_MISMATCH, fourth.name, "stranger"),
        (ErrorKind.ADAPTER_MISMATCH, adapters[1].name, "K"),
        (ErrorKind.HEADER_TOO_SHORT, adapters[3].name, None),
        (ErrorKind.FILE_CHANGED, "config.json", None),
        (ErrorKind.FILE_MISSING, "absent", None),
        (ErrorKind.CHECKPOINT_INVALID, "SHA256SUMS", "line 3"),
    } < found(report)
    assert (ErrorKind.TENSOR_MISSING, sharded.name, renamed) not in found(report)
    assert len(set(map(str, report.problems))) == len(report.problems)
    assert any("not looked for: their shards cannot be read" in note for note in report.notes)
    assert not any("total_size" in note for note in report.notes)


def test_every_bad_layer_of_records_is_found(checkpoint, tmp_path):
    directory = repack(checkpoint, tmp_path / "out").directory
    layers = [records_path(directory, layer) for layer in read_config(directory).moe_layers]
    cut(layers[0], 16384)
    layers[1].unlink()
    shutil.copy(layers[4], layers[2])
    edit_header(layers[3], lambda document: document["records"].update(dtype="I8"))
    shutil.copy(layers[5], layers[5].with_name("layer-077.safetensors"))
    expected = {
        (ErrorKind.FILE_TRUNCATED, layers[0].name, "records"),
        (ErrorKind.FILE_MISSING, layers[1].name, None),
        (ErrorKind.LAYOUT_MALFORMED, layers[2].name, "records"),
        (ErrorKind.LAYOUT_MALFORMED, layers[3].name, "records"),
    }
    report = verify(directory)
    assert found(report) == expected
    assert all(str(problem).endswith("; repack the checkpoint again") for problem in report.problems)
    assert [note for note in report.notes if "layer-077" in note]
    cut(directory / "model.safetensors")
    assert expected < found(verify(directory))
    (directory / "config.json").unlink()
    kinds = {kind for kind, _, _ in found(verify(directory))}
    assert kinds == {ErrorKind.FILE_TRUNCATED, ErrorKind.FILE_MISSING}


# --- one thing wrong -----------------------------------------------------------------------------------------------


def test_no_checkpoint_at_all(tmp_path):
    for directory in (tmp_path, tmp_path / "absent"):
        kinds = [problem.kind for problem in verify(directory, sha256=True).problems]
        assert kinds == [ErrorKind.FILE_MISSING] * 3


def test_config(private):
    edit_json(private / "config.json", lambda document: document.get("text_config", document).pop("hidden_size"))
    assert found(verify(private)) == {(ErrorKind.CONFIG_MALFORMED, "config.json", "hidden_size")}


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("vocab_size", 1024, ErrorKind.TENSOR_MISMATCH),
        ("num_experts", 64, ErrorKind.TENSOR_MISMATCH),
        ("num_hidden_layers", 9, ErrorKind.TENSOR_MISSING),
        ("num_hidden_layers", 2**62, ErrorKind.CONFIG_MALFORMED),
    ],
)
def test_a_config_of_another_shape(private, field, value, kind):
    edit_json(private / "config.json", lambda document: document.get("text_config", document).update({field: value}))
    problems = [problem for problem in verify(private).problems if problem.kind is kind]
    assert len(problems) >= {"vocab_size": 6, "num_experts": 9}.get(field, 1)
    assert len({str(problem) for problem in problems}) == len(problems)


def test_tensors_of_another_name_dtype_and_shape(private):
    config, path = read_config(private), shards(private)[0]
    names = sorted(name for name in read_header(path).tensors if name.endswith("layernorm.weight"))
    first, second = names[:2]

    def edit(document):
        document["with\x1b[31mcolour"] = document.pop(first)
        document[second].update(shape=[config.hidden // 2, 2])

    edit_header(path, edit)
    report = verify(private)
    assert {
        (ErrorKind.TENSOR_MISSING, private.name, first),
        (ErrorKind.TENSOR_MISMATCH, path.name, second),
        (ErrorKind.TENSOR_MISMATCH, path.name, repr("with\x1b[31mcolour")),
    } <= found(report)
    assert all(str(problem).isprintable() for problem in report.problems)


def test_a_tensor_that_two_shards_hold(private):
    name = next(iter(read_header(shards(private)[0]).tensors))
    add_shard(private, name, "model.extra")
    assert (ErrorKind.TENSOR_DUPLICATE, name) in {(kind, tensor) for kind, _, tensor in found(verify(private))}


def test_notes_are_no_problems(sharded):
    add_shard(sharded, "language_model.mtp.layer", "language_model.model.layers.3.mlp.pregate.fc1.weight")
    (sharded / "model-old.safetensors").write_bytes(b"")
    edit_json(sharded / INDEX_NAME, lambda document: document["metadata"].update(total_size=7))
    lora = adapter_path(sharded, read_config(sharded).family, "lora", 4)
    shutil.copy(lora, sharded / lora.name)
    shutil.copy(lora, sharded / "artifacts" / "lora_other.safetensors")
    report = verify(sharded)
    assert not report.problems
    for part in (
        "1 tensors of vision or multi-token heads",
        "1 tensors mlp.pregate.*",
        "model-old",
        "total_size says 7 bytes",
    ):
        assert len([note for note in report.notes if part in note]) == 1, part
    assert any(str(sharded / lora.name) in note and "not used" in note for note in report.notes)
    assert any("lora_other" in note and "not looked for" in note for note in report.notes)


def test_two_swapped_shards_are_one_problem_per_pair_of_places(sharded):
    first, second = shards(sharded)[:2]
    other = first.rename(first.with_suffix(".other"))
    second.rename(first)
    other.rename(second)
    report = verify(sharded)
    assert [problem.kind for problem in report.problems] == [ErrorKind.INDEX_MISMATCH] * 2
    assert {(problem.expected, problem.found) for problem in report.problems} == {
        (first.name, second.name),
        (second.name, first.name),
    }
    assert all(" more to one place" in problem.detail for problem in report.problems)


def test_a_malformed_index_still_lets_the_shards_be_checked(sharded):
    cut(shards(sharded)[2])
    (sharded / INDEX_NAME).write_text("[]")
    assert {kind for kind, _, _ in found(verify(sharded))} == {ErrorKind.INDEX_MALFORMED, ErrorKind.FILE_TRUNCATED}


def test_adapters_where_released_files_lie(private, tier, rewrite_adapter):
    """At the top level for the K that the file states; none of them is a note."""
    k = tier.family.k_served
    for kind in ("lora", "prerouter"):
        os.rename(adapter_path(private, tier.family, kind, k), private / adapter_name(tier.family, kind))
    shutil.rmtree(private / "artifacts")
    assert not verify(private).problems
    lora = private / adapter_name(tier.family, "lora")
    rewrite_adapter(lora, {"r": "8", "model": "edge0-99b"})
    assert found(verify(private)) == {(ErrorKind.ADAPTER_MISMATCH, lora.name, "model")}
    rewrite_adapter(lora, {"r": "8", "model": lora.stem})
    assert [problem.detail for problem in verify(private).problems] == ["rank and alpha"]
    lora.unlink()
    report = verify(private)
    assert not report.problems and any(f"no lora adapter for K={k}" in note for note in report.notes)


def test_an_adapter_for_more_experts_than_there_are(private, tier, rewrite_adapter):
    path = adapter_path(private, tier.family, "lora", 99)
    path.parent.mkdir()
    shutil.copy(adapter_path(private, tier.family, "lora", 4), path)
    assert found(verify(private)) == {(ErrorKind.ADAPTER_MISMATCH, path.name, "K")}
    rewrite_adapter(path, {"K": "99"})
    assert found(verify(private)) == {(ErrorKind.K_INVALID, path.name, "K")}


def test_every_wrong_tensor_of_an_adapter(private, tier, rewrite_adapter):
    path = adapter_path(private, tier.family, "prerouter", 4)
    names = sorted(read_header(path).tensors)
    edit_header(path, rename(names[0], "layers.99.fc1.weight"))
    edit_header(path, lambda document: document[names[4]].update(shape=document[names[4]]["shape"][::-1]))
    assert {
        (ErrorKind.TENSOR_MISSING, path.name, names[0]),
        (ErrorKind.TENSOR_MISMATCH, path.name, names[4]),
        (ErrorKind.ADAPTER_MISMATCH, path.name, "layers.99.fc1.weight"),
    } <= found(verify(private))
    rewrite_adapter(path, {"owners": "[0, 5]"})
    assert (ErrorKind.ADAPTER_MISMATCH, path.name, "owners") in found(verify(private))


# --- checksums -----------------------------------------------------------------------------------------------------


def test_a_list_of_checksums(private):
    lines = [f"{digest}  {name}" for name, digest in verify(private, sha256=True).digests.items()]
    lines.append(hashlib.sha256((private / "config.json").read_bytes()).hexdigest().upper() + " *config.json")
    (private / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    seen = []
    report = verify(private, sha256=True, progress=lambda done, total: seen.append((done, total)))
    assert not report.problems and "config.json" in report.digests
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    path = shards(private)[-1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with (private / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  ../outside\n{'0' * 64}  /outside\n")
    assert found(verify(private, sha256=True)) == {
        (ErrorKind.FILE_CHANGED, path.name, None),
        (ErrorKind.CHECKPOINT_INVALID, "SHA256SUMS", f"line {len(lines) + 1}"),
        (ErrorKind.CHECKPOINT_INVALID, "SHA256SUMS", f"line {len(lines) + 2}"),
    }
    assert not verify(private).problems


def test_published_files(copy_of, monkeypatch):
    directory = copy_of("unit-8b")
    path = directory / "model.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for prefix, verdict in (("0" * 8, "not the published file"), (digest[:8], f"{path}: the published file")):
        monkeypatch.setattr(module, "PUBLISHED", {(path.name, path.stat().st_size): prefix})
        report = verify(directory, sha256=True)
        assert not report.problems and any(verdict in note for note in report.notes)
