"""Synthesis of checkpoints that need no download: seeded random weights in exactly the released layout.

Every tensor is a function of (seed, its name), so a file can be re-made bit by bit and in any order, and no more than
one tensor of one layer is ever in memory. The weights are scaled so that activations stay finite; they mean nothing:
text from a synthesised model is noise, and its routers hardly repeat experts from token to token.

A *sparse* checkpoint has every header and every file size, and holes for weights: for arithmetic on shapes and bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge0.checkpoint.adapters import adapter_metadata, adapter_path
from edge0.checkpoint.schema import (
    ROUTER_BITS,
    Linear,
    Tensor,
    checkpoint_tensors,
    head_tensors,
    lora_tensors,
    raw,
)
from edge0.checkpoint.tokenizer import write_tokenizer
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import GROUP_SIZE, QWEN, ModelConfig, parse_config
from edge0.tiers import Tier

ITEM_BYTES = {"U32": 4, "BF16": 2, "F16": 2}
CODE_SPREAD = {4: 4.61, 8: 73.9}  # standard deviation of uniform codes of so many bits
ROUTER_GAIN = 2.0  # router logits with a standard deviation of about two: choices are clear, not tied
PIECE_BYTES = 16 << 20  # random codes made at a time; a multiple of 8, what the generator draws at a time
RESIDUAL_GAIN = 0.5  # what a layer adds to the residual stream, so that depth does not blow it up

EPOCH = "1970-01-01T00:00:00Z"  # a synthesised file is the same whenever it is made

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


def synthesise(
    tier: Tier, directory: Path | str, seed: int = 0, progress: Progress | None = None, sparse: bool = False
) -> Path:
    """Write a whole checkpoint of `tier`: shards, index, config, tokenizer, and adapters for each K of the tier.

    The directory appears under its name only when it is complete. With `sparse`, tensors are holes in the files, which
    read as zeros; their metadata says so.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE when it exists already, does not fit on the disk, or cannot be written;
            OUTPUT_BUSY when another process made it meanwhile.
    """
    target = Path(directory)
    if target.exists():
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE, "is there already", path=target, hint="remove it or name another directory"
        )
    unfinished = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        _write_all(tier, unfinished, seed, progress, sparse)
        _give_name(unfinished, target)
    except OSError as error:
        detail = f"cannot be written ({error.strerror or error})"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=target) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _give_name(unfinished: Path, target: Path) -> None:
    try:
        unfinished.rename(target)
    except OSError as error:
        if not target.exists():
            raise
        raise Edge0Error(
            ErrorKind.OUTPUT_BUSY,
            "another process made it meanwhile",
            path=target,
            hint="use that one, or name another directory",
        ) from error


def _write_all(tier: Tier, directory: Path, seed: int, progress: Progress | None, sparse: bool) -> None:
    raw_config = released_config(tier)
    config = parse_config(raw_config, directory / "config.json")
    shards = _split(list(checkpoint_tensors(config)), tier.shards)
    adapters = [
        (adapter_path(directory, tier.family, kind, k), kind, k, tensors)
        for k in tier.ks
        for kind, tensors in (
            ("lora", list(lora_tensors(config))),
            ("prerouter", list(head_tensors(config, tier.owners, tier.head_hidden))),
        )
    ]
    total = sum(_nbytes(t) for t in [t for shard in shards for t in shard] + [t for a in adapters for t in a[3]])
    if not sparse:
        _check_room(directory, total)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {tensor.name: name for tensor in tensors}
        metadata = {"format": "mlx"} | ({"source": _source(tier, sparse)} if sparse else {})
        contents = None if sparse else partial(checkpoint_bytes, seed)
        write_shard(directory / name, tensors, metadata, contents, advance)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(_nbytes(t) for shard in shards for t in shard)}}
        _write_json(
            directory / "model.safetensors.index.json", index | {"weight_map": dict(sorted(weight_map.items()))}
        )
    for path, kind, k, tensors in adapters:
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"source": _source(tier, sparse), "source_md5": _md5(f"{tier.name}:{seed}:{k}"), "converted": EPOCH}
        metadata = adapter_metadata(tier.family, kind, k, tier.owners, **said)
        write_shard(path, tensors, metadata, None if sparse else partial(adapter_bytes, config, seed, k), advance)
    _write_json(directory / "config.json", raw_config)
    _write_json(directory / "generation_config.json", {"temperature": 1.0, "top_p": 0.95, "top_k": 20})
    write_tokenizer(directory)


def released_config(tier: Tier) -> dict:
    """config.json with the released fields: nested text model and 8-bit overrides on 35b, no model_type on 8b."""
    quantization: dict = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    if tier.family is QWEN:
        for layer in range(tier.text["num_hidden_layers"]):
            for name in ("gate", "shared_expert_gate"):
                key = f"{tier.family.layer_prefix}.{layer}.mlp.{name}"
                quantization[key] = {"group_size": GROUP_SIZE, "bits": ROUTER_BITS}
        return {
            "architectures": [tier.family.architecture],
            "model_type": "qwen3_5_moe",
            "text_config": dict(tier.text),
            "vision_config": {"model_type": "qwen3_5_moe"},
            "tie_word_embeddings": False,
            "quantization": quantization,
            "quantization_config": quantization,
        }
    return {"architectures": [tier.family.architecture], **tier.text, "quantization": quantization}


def _check_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE,
            "the disk is too full",
            path=directory.parent,
            expected=f"{nbytes} bytes free",
            found=free,
            hint="free some space, or make fewer layers",
        )


def _source(tier: Tier, sparse: bool) -> str:
    """What a file says of where it comes from."""
    return f"edge0 synth {tier.name}" + (" --sparse: tensors are holes" if sparse else "")


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def write_shard(
    path: Path,
    tensors: Sequence[Tensor],
    metadata: dict[str, str],
    contents: Callable[[Tensor], Iterator[bytes]] | None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write one safetensors file piece by piece, under a temporary name until it is complete.

    `contents` yields the bytes of a tensor in order; their sum must be the tensor's size. None: all are holes.
    """
    header: dict = {"__metadata__": metadata}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + _nbytes(tensor)],
        }
        offset += _nbytes(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if contents is None:
            file.truncate(8 + len(text) + offset)
            advance(offset)
        else:
            for tensor in tensors:
                _write_tensor(file, tensor, contents, advance)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _write_tensor(
    file: BinaryIO, tensor: Tensor, contents: Callable[[Tensor], Iterator[bytes]], advance: Callable[[int], None]
) -> None:
    start = file.tell()
    for piece in contents(tensor):
        file.write(piece)
        advance(len(piece))
    if file.tell() - start != _nbytes(tensor):
        raise Edge0Error(
            ErrorKind.TENSOR_MISMATCH,
            "the generator gave another length",
            tensor=tensor.name,
            expected=_nbytes(tensor),
            found=file.tell() - start,
        )


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers that depend on the seed and the tensor's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(np.frombuffer(digest, np.uint32)))


def checkpoint_bytes(seed: int, tensor: Tensor) -> Iterator[bytes]:
    """The bytes of one checkpoint tensor, one expert at a time where experts are stacked."""
    if tensor.linear is None:
        yield bf16(raw_values(seed, tensor)).tobytes()
        return
    linear = tensor.linear
    piece = tensor.shape[-2:]
    rng = generator(seed, tensor.name)
    for expert in range(linear.experts or 1):
        if tensor.dtype == "U32":
            left = 4 * prod(piece)
            while left:
                yield rng.bytes(min(left, PIECE_BYTES))
                left -= min(left, PIECE_BYTES)
        else:
            # Scales and biases are drawn from one stream, so that zero stays in the middle of the codes.
            scales = _scales(seed, linear, expert, piece)
            middle = (2**linear.bits - 1) / 2
            yield bf16(scales if tensor.name.endswith(".scales") else -middle * scales).tobytes()


def _scales(seed: int, linear: Linear, expert: int, shape: tuple[int, ...]) -> np.ndarray:
    gain = ROUTER_GAIN if linear.name.endswith("mlp.gate") else 1.0
    if linear.name.endswith(("o_proj", "out_proj", "dense", "down_proj")):
        gain *= RESIDUAL_GAIN
    size = gain / (CODE_SPREAD[linear.bits] * linear.inp**0.5)
    jitter = generator(seed, f"{linear.name}:{expert}").uniform(0.75, 1.25, shape)
    return (size * jitter).astype(np.float32)


def raw_values(seed: int, tensor: Tensor) -> np.ndarray:
    """fp32 values of an unquantised tensor: norms near one, routers and convolutions scaled, biases not zero."""
    rng, name = generator(seed, tensor.name), tensor.name
    normal = rng.standard_normal(tensor.shape, dtype=np.float32)
    if "norm" in name:
        return 1 + 0.05 * normal
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 8, tensor.shape)).astype(np.float32)
    if name.endswith("conv1d.weight"):
        return 0.5 * normal
    if name.endswith("expert_bias"):
        return 0.1 * normal
    if name.endswith("dt_bias"):
        return normal - 1
    return normal * np.float32((ROUTER_GAIN if name.endswith("mlp.gate.weight") else 1.0) / tensor.shape[-1] ** 0.5)


def router_values(config: ModelConfig, seed: int, layer: int) -> np.ndarray:
    """The fp32 router matrix `[experts, hidden]` of a synthesised layer, as the model will see it."""
    name = f"{config.family.layer_prefix}.{layer}.mlp.gate"
    if config.family is not QWEN:
        values = raw_values(seed, raw(f"{name}.weight", config.experts, config.hidden))
        return from_bf16(bf16(values))
    weight, scales, biases = (
        np.frombuffer(b"".join(checkpoint_bytes(seed, t)), np.uint8 if t.dtype == "U32" else np.uint16)
        for t in Linear(name, config.experts, config.hidden, ROUTER_BITS).tensors()
    )
    scale, bias = (np.repeat(from_bf16(v).reshape(config.experts, -1), GROUP_SIZE, axis=1) for v in (scales, biases))
    return weight.reshape(config.experts, config.hidden) * scale + bias


def adapter_bytes(config: ModelConfig, seed: int, k: int, tensor: Tensor) -> Iterator[bytes]:
    """The bytes of one adapter tensor; a head starts from the next layer's router (warm start, paper section 4)."""
    normal = generator(seed, f"k{k}:{tensor.name}").standard_normal(tensor.shape, dtype=np.float32)
    if tensor.name.endswith("linear_init.weight"):
        owner = int(tensor.name.split(".")[1])
        values = np.zeros(tensor.shape, np.float32)
        if owner + 1 < config.layers:
            values[:, : config.hidden] = router_values(config, seed, owner + 1)
    elif tensor.name.endswith((".lora_B", ".fc2.weight")):
        values = 0.02 * normal
    else:
        values = normal / tensor.shape[-1] ** 0.5
    yield values.astype(np.float16).tobytes()


def bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 to bf16, to nearest even, as uint16 bit patterns."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(patterns: np.ndarray) -> np.ndarray:
    """fp32 values of uint16 bf16 bit patterns."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def _nbytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _split(tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """Cut the list into `shards` runs of about equal bytes."""
    total, filled, cut = sum(map(_nbytes, tensors)), 0, []
    for tensor in tensors:
        if not cut or (filled >= total * len(cut) / shards and len(cut) < shards):
            cut.append([])
        cut[-1].append(tensor)
        filled += _nbytes(tensor)
    return cut


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
