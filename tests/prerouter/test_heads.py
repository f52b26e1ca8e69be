"""Heads: the formula, the batch against one by one, the warm start, and files that do not fit."""

import math

import mlx.core as mx
import numpy as np
import pytest
from reference import PROMPT, same_bits
from safetensors.numpy import load_file

from edge0 import Engine, EngineOptions
from edge0.checkpoint.adapters import adapter_path, open_adapter
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.prerouter.heads import Heads

RNG = np.random.default_rng(5)


def heads_of(checkpoint, groups=None, k=4):
    """(heads, owners, the file's arrays)."""
    config = read_config(checkpoint)
    adapter = open_adapter(checkpoint, config.family, "prerouter", k)
    groups = groups or (adapter.owners,)
    return Heads(adapter, config, groups, mx.float32), adapter.owners, load_file(adapter.header.path)


def features(heads, config, count, positions=1):
    """Features `[count, positions, D + 2E]` as they occur: a hidden state and two multi-hots of 8."""
    rows = []
    for _ in range(count):
        x = mx.array(RNG.standard_normal((1, positions, config.hidden), np.float32))
        chosen = [
            mx.array(np.stack([RNG.permutation(config.experts)[:8] for _ in range(positions)])[None]) for _ in range(2)
        ]
        rows.append(heads.features([x], *([heads.one_hot(indices)] for indices in chosen)))
    return mx.concatenate(rows)


def gelu(values):
    """The exact one."""
    return values * 0.5 * (1 + np.vectorize(math.erf)(values / math.sqrt(2)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batched_heads_equal_one_by_one(checkpoint, size):
    _, owners, _ = heads_of(checkpoint)
    groups = tuple(owners[start : start + size] for start in range(0, len(owners), size))
    batched, _, _ = heads_of(checkpoint, groups)
    single, _, _ = heads_of(checkpoint, tuple((owner,) for owner in owners))
    for group in groups:
        rows = features(batched, read_config(checkpoint), len(group))
        logits = np.array(batched(group, rows))
        for number, owner in enumerate(group):
            assert same_bits(logits[number : number + 1], np.array(single((owner,), rows[number : number + 1])))


def test_formula(checkpoint):
    config = read_config(checkpoint)
    heads, owners, arrays = heads_of(checkpoint)
    rows = features(heads, config, len(owners), positions=3)
    logits = np.array(heads(owners, rows), np.float64)
    assert logits.shape == (len(owners), 3, config.experts)
    for number, owner in enumerate(owners):
        fc1, fc2, linear = (
            arrays[f"layers.{owner}.{part}.weight"].astype(np.float64) for part in ("fc1", "fc2", "linear_init")
        )
        feature = np.array(rows[number], np.float64)
        expected = feature @ linear.T + gelu(feature @ fc1.T) @ fc2.T
        np.testing.assert_allclose(logits[number], expected, rtol=1e-5, atol=1e-5)


def test_feature_is_hidden_state_then_this_token_then_the_one_before(checkpoint):
    config = read_config(checkpoint)
    heads, _, _ = heads_of(checkpoint)
    x = mx.array(RNG.standard_normal((1, 1, config.hidden), np.float32))
    now, before = mx.array([[[3, 0, 7]]]), mx.array([[[1, 2, 30]]])
    feature = np.array(heads.features([x], [heads.one_hot(now)], [heads.one_hot(before)]))[0, 0]
    assert feature.shape == (config.hidden + 2 * config.experts,)
    assert np.array_equal(feature[: config.hidden], np.array(x)[0, 0])
    assert np.flatnonzero(feature[config.hidden : -config.experts]).tolist() == [0, 3, 7]
    assert np.flatnonzero(feature[-config.experts :]).tolist() == [1, 2, 30]
    assert set(feature[config.hidden :]) == {0.0, 1.0}
    assert not np.array(heads.no_history()).any() and heads.no_history().shape == (1, 1, config.experts)


def test_warm_started_heads_without_their_correction_are_the_next_layers_router(copy_of, tier, rewrite_adapter):
    """Synthesis starts a head's linear part as the next router, rounded to fp16; the one-hots get zeros."""
    checkpoint = copy_of(tier.name)
    path = adapter_path(checkpoint, tier.family, "prerouter", 4)
    arrays = load_file(path)
    rewrite_adapter(path, arrays={name: np.zeros_like(a) for name, a in arrays.items() if name.endswith("fc2.weight")})
    with Engine(checkpoint, EngineOptions(k=4, lora=False)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        seen = dict(engine.executor.running.executed)
        request.release()
        for owners in engine.schedule.owner_groups:
            one_hots = [engine.heads.one_hot(seen[owner].indices[:, -1:]) for owner in owners]
            rows = engine.heads.features([seen[owner].x[:, -1:] for owner in owners], one_hots, one_hots)
            logits = np.array(engine.heads(owners, rows))
            for number, owner in enumerate(owners):
                x = seen[owner].x[:, -1:]
                native = np.array(engine.blocks[owner + 1].logits(x))[0, 0]
                weight = np.abs(arrays[f"layers.{owner}.linear_init.weight"][:, : engine.config.hidden])
                rounding = weight.astype(np.float64) @ np.abs(np.array(x)[0, 0]) * 2**-11
                assert (np.abs(logits[number, 0] - native) <= rounding * 1.01 + 1e-5).all()
                assert np.abs(native).max() > 1


def test_a_group_of_no_owners_has_no_weights(checkpoint):
    config = read_config(checkpoint)
    _, owners, arrays = heads_of(checkpoint)
    heads, _, _ = heads_of(checkpoint, (owners[:2], ()))
    per_owner = sum(a.size for name, a in arrays.items() if name.startswith(f"layers.{owners[0]}."))
    assert heads.nbytes == 2 * per_owner * 4
    assert config.experts * (config.hidden + 2 * config.experts) < per_owner


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a: None, ErrorKind.TENSOR_MISSING),
        (lambda a: a[:, :-1].copy(), ErrorKind.TENSOR_MISMATCH),
        (lambda a: a.astype(np.float32), ErrorKind.TENSOR_MISMATCH),
    ],
)
@pytest.mark.parametrize("part", ["fc1", "fc2", "linear_init"])
def test_files_that_do_not_fit(copy_of, tier, rewrite_adapter, refused, change, kind, part):
    checkpoint = copy_of(tier.name)
    path = adapter_path(checkpoint, tier.family, "prerouter", 4)
    name = f"layers.{tier.owners[-1]}.{part}.weight"
    rewrite_adapter(path, arrays={name: change(load_file(path)[name])})
    refused(kind, lambda: heads_of(checkpoint), path, name)


def test_a_tensor_without_a_place(copy_of, tier, rewrite_adapter, refused):
    checkpoint = copy_of(tier.name)
    path = adapter_path(checkpoint, tier.family, "prerouter", 4)
    rewrite_adapter(path, arrays={"layers.99.fc1.weight": np.zeros((2, 2), np.float16)})
    refused(ErrorKind.ADAPTER_MISMATCH, lambda: heads_of(checkpoint), path, "layers.99.fc1.weight")
