"""A whole engine on the kernels: near MLX's fp32 where activations are exact, and one set of bits on every path."""

import functools
import logging
import weakref

import numpy as np
import pytest
from reference import PROMPT, TOKENS, engine_logits, floor_bytes, relative_l2, same_bits

from edge0 import Engine, EngineOptions, ErrorKind
from edge0.families import read_config
from edge0.kernels import choice, library, runner
from edge0.kernels.choice import kernel_name, resolve
from edge0.kernels.library import Library, load
from edge0.kernels.modules import KernelExperts
from experiments.resident import logits_of, open_resident

needed = pytest.mark.skipif(load().loaded is None, reason=load().reason)
EVERYTHING = 1 << 30
STEPS = 5


@functools.cache
def run(checkpoint, steps=STEPS, **options):
    with Engine(checkpoint, EngineOptions(**({"k": 4} | options))) as engine:
        logits = engine_logits(engine, PROMPT, TOKENS[:steps])
        assert engine.recorder.dropped == 0
        assert engine.store.available == engine.store.capacity
    return logits


@needed
@pytest.mark.parametrize("prerouter", ["off", "route"])
def test_exact_kernels_are_near_mlx_and_choose_the_same_tokens(checkpoint, prerouter):
    exact, mlx = (run(checkpoint, 12, prerouter=prerouter, kernels=kernels) for kernels in ("exact", "mlx"))
    assert relative_l2(exact, mlx) < 1e-4
    assert np.array_equal(exact.argmax(-1), mlx.argmax(-1))


PATHS = {
    "hot": {"prerouter": "off", "native": "hot"},
    "stack": {"prerouter": "off", "assembly": "stack"},
    "patch": {"prerouter": "off", "assembly": "patch"},
    "mmap": {"prerouter": "off", "assembly": "stack", "io": "mmap"},
    "advise": {"prerouter": "advise"},
    "one-thread": {"prerouter": "off", "kernel_threads": 1},
    "chunks": {"prerouter": "off", "prefill_chunk": 7},
    "single": {"prerouter": "off", "prefill_chunk": 1},
    "whole-layer": {"prerouter": "off", "prefill": "whole-layer", "bank_bytes": EVERYTHING},
    "ondemand": {"prerouter": "off", "prefill": "ondemand", "bank_bytes": EVERYTHING},
}


@needed
@pytest.mark.parametrize("kernels", ["int8", "exact"])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_bits_of_the_exact_one(checkpoint, kernels, path):
    reference = run(checkpoint, prerouter="off", native="exact", kernels=kernels)
    assert same_bits(run(checkpoint, kernels=kernels, **PATHS[path]), reference)


@needed
def test_stacks_of_a_step_do_not_outlive_it(checkpoint, monkeypatch):
    """A layer once kept those that it had applied last, which may be more than the bank."""
    kept, later = [], KernelExperts.later

    def seen(experts, *arguments):
        routed = later(experts, *arguments)
        kept.extend(weakref.ref(matrix) for matrix in routed.matrices)
        return routed

    monkeypatch.setattr(KernelExperts, "later", seen)
    options = EngineOptions(k=4, prerouter="off", lora=False, assembly="stack", kernels="int8")
    with Engine(checkpoint, options) as engine:
        engine_logits(engine, PROMPT, TOKENS[:2])
        assert kept and not any(matrix() for matrix in kept)


@needed
@pytest.mark.parametrize("kernels", ["int8", "exact"])
@pytest.mark.parametrize("way", [{"launch_groups": 1}, {"fill": "engine"}, {"assembly": "stack"}, {"bank_bytes": None}])
def test_predicted_routes_give_one_set_of_bits(checkpoint, kernels, way):
    if way == {"bank_bytes": None}:
        way = {"bank_bytes": floor_bytes(checkpoint, k=4, kernels=kernels)}
    assert same_bits(run(checkpoint, kernels=kernels, **way), run(checkpoint, kernels=kernels, bank_bytes=EVERYTHING))


@needed
@pytest.mark.parametrize("kernels", ["int8", "exact"])
def test_stock_mlx_lm_by_the_same_kernels_gives_the_engines_bits(checkpoint, kernels):
    model, handle = open_resident(checkpoint, read_config(checkpoint), 4, kernels)
    cache = model.make_cache()
    logits = [np.array(logits_of(model, tokens, cache)) for tokens in (PROMPT, *([token] for token in TOKENS[:STEPS]))]
    handle.close()
    assert same_bits(np.stack(logits), run(checkpoint, prerouter="off", lora=False, kernels=kernels))


@needed
def test_scales_stay_as_files_hold_them(checkpoint):
    """A slot has the bytes of its expert, and the plan counts what is loaded."""
    sizes = {}
    for kernels in ("mlx", "exact"):
        with Engine(checkpoint, EngineOptions(k=4, kernels=kernels)) as engine:
            sizes[kernels] = engine.plan.slot_bytes
            heads = engine.heads.nbytes
            assert engine.plan.resident_bytes + engine.plan.lora_bytes + heads == engine.resident_bytes
            expert = engine.layout.expert_bytes
    assert sizes["exact"] == expert < sizes["mlx"]


@needed
def test_an_engine_that_is_closed_ends_its_threads(checkpoint):
    with Engine(checkpoint, EngineOptions(k=4, kernels="exact")) as engine:
        kernels = engine.kernels
        assert kernels.handle and kernels.threads >= 1
    assert kernels.handle is None


# --- without a library -----------------------------------------------------------------------------------------------


@pytest.fixture
def absent(tmp_path, monkeypatch):
    """No library was built."""
    choice._warn.cache_clear()
    library.load.cache_clear()
    real = library.load
    find = functools.cache(lambda: real(tmp_path))
    for module in (choice, library, runner):
        monkeypatch.setattr(module, "load", find)
    return find


def test_without_a_library_mlx_computes_after_one_warning(checkpoint, caplog, request):
    reference = run(checkpoint, prerouter="off", kernels="mlx")
    request.getfixturevalue("absent")
    with caplog.at_level(logging.WARNING):
        assert resolve("auto") == kernel_name("auto") == "mlx"
        with Engine(checkpoint, EngineOptions(k=4, prerouter="off", kernels="auto")) as engine:
            assert same_bits(engine_logits(engine, PROMPT, TOKENS[:STEPS]), reference)
    assert len([record for record in caplog.records if "no CPU kernels" in record.message]) == 1


def test_kernels_asked_for_by_name_must_be_there(checkpoint, refused, absent):
    assert absent() == Library(None, "none", absent().reason)
    for kernels in ("int8", "exact"):
        call = functools.partial(Engine, checkpoint, EngineOptions(k=4, kernels=kernels))
        refused(ErrorKind.OPTION_INVALID, call, "option kernels", "not built", "kernels=auto or mlx")
