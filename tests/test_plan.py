"""The memory plan against what it plans: parameters, caches and the bank exactly, temporaries as a bound; its rules."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0 import Engine, EngineOptions, find_tier, models, synthesise
from edge0.checkpoint.schema import is_linear_attention
from edge0.cli import main
from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.opening import Opening
from edge0.plan import PROCESS_BYTES, MemoryPlan, kv_bytes, layer_cache_bytes, temporaries

FP32 = 4
OPENINGS: dict[tuple, Opening] = {}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """The published shapes, as headers."""
    root = tmp_path_factory.mktemp("sparse")
    return {name: synthesise(find_tier(name), root / name, sparse=True) for name in ("shape-35b", "shape-8b")}


def opened(directory, **options):
    """An opening, made once per directory and what is opened; `memory_bytes` and the like do not open anything."""
    wanted = EngineOptions(**options)
    key = (directory, wanted.k, wanted.lora, wanted.prerouter)
    if key not in OPENINGS:
        OPENINGS[key] = Opening.of(directory, EngineOptions(k=wanted.k, lora=wanted.lora, prerouter=wanted.prerouter))
    return replace(OPENINGS[key], options=wanted)


def planned(directory, **options):
    return MemoryPlan.of(opened(directory, **options))


# --- what is loaded, to the byte -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prerouter", ["route", "advise", "off"])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("k", [2, 8])
def test_resident_part_of_an_engine(checkpoint, lora, prerouter, k):
    with Engine(checkpoint, EngineOptions(k=k, lora=lora, prerouter=prerouter)) as engine:
        plan = planned(checkpoint, k=k, lora=lora, prerouter=prerouter)
        assert plan.resident_bytes + plan.lora_bytes + plan.heads_bytes == engine.resident_bytes
        assert plan.bank_bytes == engine.store.nbytes and plan.bank_slots == engine.store.capacity
        assert (plan.lora_bytes > 0, plan.heads_bytes > 0) == (lora, prerouter != "off")


def test_resident_part_of_a_model_without_adapters(checkpoint):
    opening = opened(checkpoint, lora=False, prerouter="off", k=2)
    model = models.load(checkpoint, opening.config, opening.index, streamed=True)
    assert MemoryPlan.of(opening).resident_bytes == models.parameter_bytes(model)


@pytest.mark.parametrize("arguments", [{"assembly": "stack", "io": "mmap"}, {"native": "exact", "launch_groups": 1}])
def test_capacity_of_other_arms(checkpoint, arguments):
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=2 << 20, **arguments)) as engine:
        plan = planned(checkpoint, k=2, bank_bytes=2 << 20, **arguments)
        assert plan.bank_slots == engine.store.capacity and plan.bank_bytes == engine.store.nbytes
        assert plan.whole_layer == (plan.bank_slots >= 64 and "assembly" not in arguments)


def test_the_published_shapes(sparse):
    """Byte arithmetic of the released files, and of the same weights in memory on CPU."""
    opening = opened(sparse["shape-35b"])
    assert opening.layout.total_bytes == 18_119_393_280
    everything = sum(entry.nbytes for entry in opening.index.tensors.values())
    assert everything - opening.layout.total_bytes == 1_389_394_176
    assert planned(sparse["shape-35b"]).slot_bytes == 1_769_472 + 6 * 32_768  # scales and biases are widened
    assert opened(sparse["shape-8b"]).layout.total_bytes == 3_906_994_176
    assert planned(sparse["shape-8b"]).slot_bytes == 1_327_104 + 6 * 24_576


# --- caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [(1,), (5, 3), (255,), (256,), (30, 230)])
def test_caches_of_a_request(checkpoint, prompts):
    with Engine(checkpoint, EngineOptions(k=2)) as engine:
        request = engine.new_request()
        for tokens in prompts:
            engine.prefill(request, [token % 256 for token in range(tokens)])
        for token in range(3):
            engine.step(request, token)
        mx.eval([cache.state for cache in request.cache])
        held = 0
        for layer, cache in enumerate(request.cache):
            room = 0 if is_linear_attention(engine.config, layer) else cache.keys.shape[2]
            assert layer_cache_bytes(engine.config, layer, room, FP32) == cache.nbytes
            assert room < sum(prompts) + 3 + 256
            held += cache.nbytes
        growing = layer_cache_bytes(engine.config, 3, sum(prompts) + 3 + 255, FP32)
        bound = kv_bytes(engine.config, sum(prompts) + 3, FP32)
        assert held + growing <= bound < held + 3 * growing


# --- temporaries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "k"), [(64, 2), (64, 8), (256, 2), (256, 8), (512, 8)])
def test_temporaries_of_a_chunk_are_bounded(checkpoint, k, tokens):
    """By what the plan sets aside, 1.25 times the formula, which in turn is no more than about three times the peak."""
    with Engine(checkpoint, EngineOptions(k=k, prefill_chunk=tokens)) as engine:
        engine.prefill(engine.new_request(), [1, 2, 3])
        request = engine.new_request()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.prefill(request, [token % 256 for token in range(tokens)])
        peak = mx.get_peak_memory() - before - sum(cache.nbytes for cache in request.cache)
        bound = temporaries(engine.config, k, tokens, tokens, FP32) * 5 // 4
        assert peak <= bound <= 3 * peak + (2 << 20)
        # Nothing but the caches outlives the chunk.
        left = mx.get_active_memory() - before - sum(cache.nbytes for cache in request.cache)
        assert left < bound / 8 + (1 << 18)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
def test_a_process_is_within_its_allowance(checkpoint):
    code = (
        "import sys, mlx.core as mx; mx.set_default_device(mx.cpu)\n"
        "from pathlib import Path; from edge0 import Engine, EngineOptions; from edge0.tokens import load_tokenizer\n"
        "engine = Engine(sys.argv[1], EngineOptions(k=2)); load_tokenizer(Path(sys.argv[1]))\n"
        "request = engine.new_request(); engine.prefill(request, [1, 2, 3]); engine.step(request, 4)\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(int(status['RssAnon'].split()[0]) * 1024 - mx.get_active_memory() - mx.get_cache_memory())\n"
    )
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    run = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=True, env=environment
    )
    assert PROCESS_BYTES / 4 < int(run.stdout) < PROCESS_BYTES


# --- the budget ----------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(["unit-35b", "unit-8b"]),
    k=st.sampled_from([2, 4, 8]),
    lora=st.booleans(),
    prerouter=st.sampled_from(["route", "off"]),
    context=st.sampled_from([None, 1, 300, 4096]),
    chunk=st.integers(1, 4096),
    stack=st.booleans(),
)
def test_the_floor_is_accepted_and_a_byte_less_refused(checkpoints, name, k, lora, prerouter, context, chunk, stack):
    arguments = dict(k=k, lora=lora, prerouter=prerouter, context=context, prefill_chunk=chunk)
    arguments |= {"assembly": "stack", "io": "mmap"} if stack else {}
    opening = opened(checkpoints[name], **arguments)

    def plan(memory_bytes):
        return MemoryPlan.of(replace(opening, options=replace(opening.options, memory_bytes=memory_bytes)))

    with pytest.raises(Edge0Error) as caught:
        plan(1)
    floor = int(re.search(r"at least (\d+) bytes", str(caught.value))[1])
    lowest = plan(floor)
    assert lowest.total_bytes == lowest.floor_bytes == floor == plan(floor * 4).floor_bytes
    assert lowest.bank_slots == lowest.floor_slots == opening.floor_slots
    assert lowest.prefill_chunk == min(chunk, lowest.context, 64)
    with pytest.raises(Edge0Error) as caught:
        plan(floor - 1)
    message = str(caught.value)
    assert caught.value.kind is ErrorKind.MEMORY_TOO_SMALL and message.isprintable()
    assert f"at least {floor} bytes" in message and f"found {floor - 1} bytes" in message
    assert ("--prerouter off" in message) == (prerouter == "route") and "K below" in message


@given(
    name=st.sampled_from(["unit-35b", "unit-8b", "shape-35b", "shape-8b"]),
    first=st.integers(0, 1 << 40),
    more=st.integers(0, 1 << 40),
    prefill_chunk=st.sampled_from([48, 64, 100, 2048]),
)
def test_more_memory_is_never_worse(checkpoints, sparse, name, first, more, prefill_chunk):
    """Never a smaller chunk, never fewer slots beside the same chunk; two whole layers, once they fit, always do."""
    opening = opened((checkpoints | sparse)[name], context=1024, prefill_chunk=prefill_chunk, k=served(name))
    lowest = MemoryPlan.of(opening)
    span = lowest.slot_bytes * len(opening.layout.records()) // 8 + lowest.scratch_bytes

    def plan(extra):
        memory = lowest.floor_bytes + extra % span
        return MemoryPlan.of(replace(opening, options=replace(opening.options, memory_bytes=memory)))

    small, large = sorted((plan(first), plan(more)), key=lambda plan: plan.memory_bytes)
    assert (small.prefill_chunk, small.bank_slots) <= (large.prefill_chunk, large.bank_slots)
    assert small.whole_layer <= large.whole_layer
    for found in (small, large):
        left = found.memory_bytes - found.total_bytes
        assert found.floor_slots <= found.bank_slots
        assert 0 <= left < found.slot_bytes or found.bank_slots == len(opening.layout.records())
        assert found.whole_layer == (found.bank_slots >= 2 * opening.config.experts)


def served(name):
    return 2 if name.startswith("unit") else find_tier(name).ks[0]


def test_where_the_memory_goes_first(sparse):
    """To the smallest chunk that touches nearly all experts, then to two whole layers, then to larger chunks."""
    found = [planned(sparse["shape-35b"], memory_bytes=mib << 20) for mib in range(3050, 4600, 10)]
    stages = list(dict.fromkeys((plan.prefill_chunk, plan.whole_layer) for plan in found))
    assert stages == [
        *((chunk, False) for chunk in (64, 128, 256)),
        *((chunk, True) for chunk in (256, 512, 1024, 2048)),
    ]


def test_without_a_budget_the_bank_follows_its_own_options(checkpoint, refused):
    plan = planned(checkpoint, k=2)
    assert plan.bank_slots == 2 * plan.floor_slots and plan.context == 4096 and plan.prefill_chunk == 2048
    sized = planned(checkpoint, k=2, bank_bytes=plan.floor_slots * plan.slot_bytes, prefill_chunk=100, context=7)
    assert (sized.bank_slots, sized.context, sized.prefill_chunk) == (plan.floor_slots, 7, 7)
    assert sized.kv_bytes < plan.kv_bytes and sized.floor_bytes < plan.floor_bytes
    less = plan.floor_slots * plan.slot_bytes - 1
    refused(ErrorKind.BANK_TOO_SMALL, lambda: planned(checkpoint, k=2, bank_bytes=less), less)
    assert planned(checkpoint, k=2, bank_bytes=1 << 40).bank_slots == len(opened(checkpoint, k=2).layout.records())


def test_context(checkpoint, sparse, refused):
    refused(ErrorKind.OPTION_INVALID, lambda: planned(checkpoint, k=2, context=4097), "context", "4096", "4097")
    assert planned(checkpoint, k=2, context=4096).context == 4096
    assert planned(checkpoint, k=2, memory_bytes=1 << 30).context == 4096
    assert planned(sparse["shape-35b"]).context == 262144
    assert planned(sparse["shape-35b"], memory_bytes=8 << 30).context == 8192
    assert planned(sparse["shape-35b"], memory_bytes=16 << 30, context=100_000).context == 100_000


def test_what_lowers_the_floor(sparse):
    for name, budget in (("shape-35b", 4 << 30), ("shape-8b", 2 << 30)):
        floor = planned(sparse[name], memory_bytes=budget).floor_bytes
        for change in ({"context": 1024}, {"prerouter": "off"}, {"lora": False}):
            assert planned(sparse[name], memory_bytes=budget, **change).floor_bytes < floor
        tier = find_tier(name)
        fewer = planned(sparse[name], memory_bytes=budget, k=tier.ks[0] - 1, prerouter="off", lora=False)
        assert fewer.floor_bytes < planned(sparse[name], memory_bytes=budget, prerouter="off", lora=False).floor_bytes


def test_a_tokenizer_counts(copy_of):
    directory = copy_of("unit-35b")
    plan = planned(directory, k=2)
    path = directory / "tokenizer.json"
    assert plan.tokenizer_bytes == 6 * path.stat().st_size > 0
    path.unlink()
    assert planned(directory, k=2).tokenizer_bytes == 0


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "memory"), [("shape-35b", "4GiB"), ("shape-8b", "2GiB")])
def test_the_command_reads_headers_only(sparse, monkeypatch, capsys, name, memory):
    def unexpected(*arguments, **options):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(mx, "load", unexpected)
    monkeypatch.setattr(os, "preadv", unexpected)
    assert main(["plan", str(sparse[name]), "--memory", memory]) == 0
    lines = capsys.readouterr().out.splitlines()
    sizes = {
        line.split("  ")[0].strip(): float(re.search(r"([\d,.]+) MiB", line)[1].replace(",", "")) for line in lines
    }
    parts = ["process", "tokenizer", "resident", "lora", "heads", "kv", "scratch", "bank"]
    assert list(sizes) == [*parts, "together", "left over", "floor"]
    assert sum(sizes[part] for part in parts) == pytest.approx(sizes["together"], abs=0.5)
    assert sizes["together"] + sizes["left over"] == pytest.approx(1024 * int(memory[0]), abs=0.2)
    assert len({line.index(" MiB") for line in lines}) == 1


def test_the_command_refuses_in_one_line(checkpoint, capsys):
    assert main(["plan", str(checkpoint), "--memory", "1MiB", "--k", "2"]) == EXIT_CODE
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and "floor" in captured.err


def test_without_a_budget_nothing_is_left_over(checkpoint, capsys):
    assert main(["plan", str(checkpoint), "--k", "2", "--no-lora", "--prerouter", "off"]) == 0
    assert "left over" not in capsys.readouterr().out
