"""Whether an engine that lives long stays what it was: `MODEL OUT_DIR [--tokens 2000] [--requests 50]`.

One process, page cache warm. First one request of many tokens, greedy, with the memory counters every few tokens and
the bytes of its own caches beside them; then many short requests of two kinds in turn, each of which must give the
tokens that its kind gave first. Writes rows; what they mean is said from the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from edge0 import Engine, EngineOptions, Sampling
from edge0.request import Request
from edge0.telemetry.memory import memory_counters
from experiments.alone import alone
from experiments.conditions import prepare_warm
from experiments.publish import open_pages, publish, run_command

EVERY_TOKENS = 50
PROMPT_TOKENS = 16
SHORT_TOKENS = 12


def measure(model: Path, k: int, tokens: int, requests: int) -> pd.DataFrame:
    """Rows of both parts: `part` is "long" (one row per `EVERY_TOKENS`) or "short" (one row per request).

    Raises:
        Edge0Error: PROBE_UNAVAILABLE when the page cache cannot be read or made warm.
    """
    rows = []
    console = Console(stderr=True)
    with Engine(model, EngineOptions(k=k)) as engine:
        with open_pages(engine.layout.paths) as files:
            prepare_warm(files)
        prompts = np.random.default_rng(0).integers(0, min(256, engine.config.vocab), (2, PROMPT_TOKENS)).tolist()
        request = engine.new_request()
        logits = engine.prefill(request, prompts[0])
        for number in track(range(1, tokens + 1), "one long request", console=console):
            logits = engine.step(request, int(mx.argmax(logits).item()))
            if number % EVERY_TOKENS == 0:
                rows.append(_row(engine, "long", number, request))
        request.release()
        del request, logits
        for number in track(range(requests), "short requests", console=console):
            kind = number % 2
            sampling = Sampling(temperature=0.8, top_p=0.95, seed=kind)
            text = list(engine.generate(prompts[kind], SHORT_TOKENS, sampling))
            rows.append(_row(engine, "short", number, None) | {"kind": kind, "tokens": _digest(text)})
    return pd.DataFrame(rows)


def _row(engine: Engine, part: str, number: int, request: Request | None) -> dict[str, object]:
    counters = memory_counters()
    return {
        "part": part,
        "number": number,
        "request_bytes": 0 if request is None else request.nbytes,
        "rss_anon_bytes": counters.rss_anon_bytes,
        "alloc_active_bytes": counters.alloc_active_bytes,
        "alloc_cache_bytes": counters.alloc_cache_bytes,
        "alloc_peak_bytes": counters.alloc_peak_bytes,
        "dropped": engine.recorder.dropped,
        "pinned": engine.store.capacity - engine.store.available,
    }


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.endurance", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument("out", type=Path, help="folder that gets SESSION/endurance.parquet and .json")
    parser.add_argument("--tokens", type=int, default=2000, help="of the long request (default 2000)")
    parser.add_argument("--requests", type=int, default=50, help="short requests (default 50)")
    parser.add_argument("--k", type=int, default=4, help="experts per token (default 4)")
    options = parser.parse_args()

    @alone("endurance")
    def command() -> None:
        rows = measure(options.model, options.k, options.tokens, options.requests)
        publish(options.out, "endurance", rows, options.model, {"k": options.k})

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
