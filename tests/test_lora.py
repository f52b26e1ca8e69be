"""LoRA: exactly the published targets, the effect of each of them, and the split of MLA's kv_b_proj."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from reference import unpack
from safetensors.numpy import load_file

from edge0 import models
from edge0.checkpoint.adapters import adapter_path, open_adapter
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.schema import lora_targets
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.lora import LoRAMultiLinear, apply_lora

K = 4
RNG = np.random.default_rng(11)


def load(checkpoint, streamed=True):
    config = read_config(checkpoint)
    return config, models.load(Path(checkpoint), config, CheckpointIndex.open(checkpoint), streamed=streamed)


def with_lora(checkpoint, streamed=True):
    """(config, model, number of targets, the file's arrays)."""
    config, model = load(checkpoint, streamed)
    adapter = open_adapter(checkpoint, config.family, "lora", K)
    count = apply_lora(model, config, adapter, mx.float32)
    return config, model, count, load_file(adapter.header.path)


def expected_targets(config):
    """Names, written out from the published list."""
    names = set()
    for layer in range(config.layers):
        at = f"{config.family.layer_prefix}.{layer}"
        full = layer % 4 == 3
        if config.family.tag == "35b":
            if full:
                names |= {f"{at}.self_attn.{name}_proj" for name in "qkvo"}
            else:
                inner = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
                names |= {f"{at}.linear_attn.{name}" for name in inner}
            names |= {f"{at}.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
        else:
            inner = ("q_b_proj", "kv_b_proj", "g_proj", "dense") if full else tuple(f"{n}_proj" for n in "qkvfgbo")
            names |= {f"{at}.attention.{name}" for name in inner}
            if layer == 0:
                names |= {f"{at}.mlp.{name}_proj" for name in ("gate", "up", "down")}
    return names


def test_targets_are_the_published_ones(checkpoint):
    config, _, count, arrays = with_lora(checkpoint)
    names = [target.name for target in lora_targets(config)]
    assert len(names) == len(set(names)) == count
    assert set(names) == expected_targets(config)
    assert set(arrays) == {f"{name}.{part}" for name in names for part in ("lora_A", "lora_B")}
    linear, full = config.layers // 4 * 3, config.layers // 4
    formula = linear * 5 + full * 4 + config.layers * 3 if config.family.tag == "35b" else linear * 7 + full * 4 + 3
    assert count == formula


def test_nothing_else_is_wrapped(checkpoint):
    config, model, _, _ = with_lora(checkpoint, streamed=False)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, LoRALinear | LoRAMultiLinear)}
    names = expected_targets(config)
    split = {name for name in names if name.endswith("kv_b_proj")}
    halves = {name.replace("kv_b_proj", half) for name in split for half in ("embed_q", "unembed_out")}
    assert wrapped == names - split | halves
    assert not any("switch_mlp" in name or name.endswith("mlp.gate") for name in wrapped)


def test_effect_of_every_target(checkpoint):
    """y = W x + 2 B (A x) with W unpacked, in fp64; and the adapter does something."""
    config, model, _, arrays = with_lora(checkpoint)
    modules = dict(model.named_modules())
    plain = [name for name in sorted(expected_targets(config)) if not name.endswith("kv_b_proj")]
    for name in plain:
        wrapped = modules[name]
        a, b = (arrays[f"{name}.{part}"].astype(np.float64) for part in ("lora_A", "lora_B"))
        base = wrapped.linear
        weight = unpack(base.weight, base.scales, base.biases, base.bits).astype(np.float64)
        x = RNG.standard_normal((1, 3, weight.shape[1])).astype(np.float32)
        native = x @ weight.T
        expected = native + 2 * (x @ a.T) @ b.T
        found = np.array(wrapped(mx.array(x)))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        assert np.abs(found - native).max() > 100 * np.abs(found - expected).max()


def test_eight_bit_modules_and_experts_are_left_alone(checkpoints):
    config, model, _, _ = with_lora(checkpoints["unit-35b"])
    for layer in model.decoder_layers:
        for module in (layer.mlp.gate, layer.mlp.shared_expert_gate):
            assert isinstance(module, nn.QuantizedLinear) and module.bits == 8


@pytest.mark.parametrize("length", [1, 5], ids=["absorbed form", "expanded form"])
@pytest.mark.parametrize("with_cache", [False, True])
def test_split_kv_b_equals_lora_on_the_whole_matrix(checkpoints, length, with_cache):
    """A plain MLA layer whose kv_b matrix has the delta added before it is split gives the same attention."""
    checkpoint = checkpoints["unit-8b"]
    config, adapted, _, arrays = with_lora(checkpoint)
    _, plain = load(checkpoint)
    number = 3
    name = f"model.layers.{number}.attention.kv_b_proj"
    one, two = (model.decoder_layers[number].attention for model in (adapted, plain))
    for leaf in ("q_b_proj", "g_proj", "dense"):
        two[leaf] = one[leaf]

    packed = mx.load(str(checkpoint / "model.safetensors"))
    weight = unpack(*(packed[f"{name}.{part}"] for part in ("weight", "scales", "biases")), 4).astype(np.float64)
    a, b = (arrays[f"{name}.{part}"].astype(np.float64) for part in ("lora_A", "lora_B"))
    whole = (weight + 2 * b @ a).reshape(one.num_heads, one.qk_nope_head_dim + one.v_head_dim, -1).astype(np.float32)
    before = np.array(two.embed_q.weight)
    two.embed_q.weight = mx.array(whole[:, : one.qk_nope_head_dim].swapaxes(1, 2).copy())
    two.unembed_out.weight = mx.array(whole[:, one.qk_nope_head_dim :].copy())
    assert np.abs(np.array(two.embed_q.weight) - before).max() > 1e-3

    results = []
    for attention, model in ((one, adapted), (two, plain)):
        cache = model.make_cache()[number] if with_cache else None
        rng = np.random.default_rng(0)
        outputs = []
        for _ in range(2 if with_cache else 1):
            x = mx.array(rng.standard_normal((1, length, config.hidden), np.float32))
            outputs.append(np.array(attention(x, cache=cache)))
        results.append(np.concatenate(outputs, axis=1))
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5)
    assert np.abs(results[0]).max() > 0.01


# --- files that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a: None, ErrorKind.TENSOR_MISSING),
        (lambda a: a[:, :-1].copy(), ErrorKind.TENSOR_MISMATCH),
        (lambda a: a.astype(np.float32), ErrorKind.TENSOR_MISMATCH),
    ],
)
def test_tensors_that_do_not_fit(copy_of, tier, rewrite_adapter, refused, change, kind):
    checkpoint = copy_of(tier.name)
    path = adapter_path(checkpoint, tier.family, "lora", K)
    name = sorted(load_file(path))[3]
    rewrite_adapter(path, arrays={name: change(load_file(path)[name])})
    refused(kind, lambda: with_lora(checkpoint), path, name)


def test_a_target_that_the_model_does_not_have(copy_of, tier, rewrite_adapter, refused):
    checkpoint = copy_of(tier.name)
    path = adapter_path(checkpoint, tier.family, "lora", K)
    extra = f"{tier.family.layer_prefix}.1.mlp.gate.lora_A"
    rewrite_adapter(path, arrays={extra: np.zeros((16, 128), np.float16)})
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: with_lora(checkpoint), path, extra)


@pytest.mark.parametrize("fields", [{"r": "8"}, {"alpha": "16"}])
def test_another_rank_or_alpha(copy_of, tier, rewrite_adapter, refused, fields):
    checkpoint = copy_of(tier.name)
    path = adapter_path(checkpoint, tier.family, "lora", K)
    rewrite_adapter(path, fields=fields)
    key, value = next(iter(fields.items()))
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: with_lora(checkpoint), path, "r=16 alpha=32", f"{key}={value}")
