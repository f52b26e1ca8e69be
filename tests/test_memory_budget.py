"""`memory_bytes` is a promise about a process: its anonymous memory stays within it, at the floor and above."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from edge0 import Engine, EngineOptions
from edge0.opening import Opening
from edge0.plan import MemoryPlan

PROC = Path("/proc/self/task").exists()
PROGRAM = """
import json, sys, threading, time
import mlx.core as mx
from edge0 import Engine, EngineOptions
from edge0.tokens import load_tokenizer
from pathlib import Path

mx.set_default_device(mx.cpu)
directory, options = sys.argv[1], json.loads(sys.argv[2])
peak, over = 0, threading.Event()

def watch():
    global peak
    while not over.is_set():
        with open("/proc/self/status") as status:
            peak = max(peak, *(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")))
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
load_tokenizer(Path(directory))
with Engine(directory, EngineOptions(**options)) as engine:
    request = engine.new_request()
    room = engine.context_tokens
    logits = engine.prefill(request, [n % 250 for n in range(room - 40)])
    for _ in range(40):
        logits = engine.step(request, int(mx.argmax(logits).item()))
    refused = None
    try:
        engine.step(request, 1)
    except Exception as error:
        refused = error.kind.name
    over.set()
    watcher.join()
    print(json.dumps({"peak": peak, "slots": engine.store.capacity, "refused": refused}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("room", ["floor", "two layers"])
def test_a_process_stays_within_its_budget(checkpoint, room):
    options = {"k": 4, "context": 450}
    floor = MemoryPlan.of(Opening.of(checkpoint, EngineOptions(**options, memory_bytes=1 << 40)))
    memory = floor.floor_bytes + (0 if room == "floor" else 64 * floor.slot_bytes + (32 << 20))
    plan = MemoryPlan.of(Opening.of(checkpoint, EngineOptions(**options, memory_bytes=memory)))
    assert plan.whole_layer == (room != "floor") and plan.total_bytes <= memory
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), json.dumps({**options, "memory_bytes": memory})],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    found = json.loads(done.stdout)
    assert 50 << 20 < found["peak"] <= memory
    assert found["slots"] == plan.bank_slots and found["refused"] == "PROMPT_INVALID"


def test_the_allocators_own_limit_is_that_of_the_budget_and_is_put_back(checkpoint):
    before = mx.set_cache_limit(1 << 30)
    try:
        memory = {"k": 2, "context": 300, "memory_bytes": 1 << 29}
        with Engine(checkpoint, EngineOptions(**memory)) as engine:
            assert mx.set_cache_limit(engine.plan.cache_bytes) == engine.plan.cache_bytes
        assert mx.set_cache_limit(1 << 30) == 1 << 30
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize("kernels", ["mlx", "auto"])
def test_an_engine_that_does_not_open_leaves_nothing_behind(checkpoint, monkeypatch, kernels):
    def broken(*arguments):
        raise RuntimeError("no store")

    monkeypatch.setattr("edge0.engine.open_store", broken)
    before, threads = mx.set_cache_limit(1 << 30), len(os.listdir("/proc/self/task")) if PROC else 0
    files = len(os.listdir("/dev/fd"))
    try:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no store"):
                Engine(checkpoint, EngineOptions(k=2, context=300, memory_bytes=1 << 29, kernels=kernels))
        assert mx.set_cache_limit(1 << 30) == 1 << 30 and len(os.listdir("/dev/fd")) == files
        assert not PROC or len(os.listdir("/proc/self/task")) == threads
    finally:
        mx.set_cache_limit(before)
