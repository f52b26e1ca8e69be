"""What a prompt costs by each way of reading its experts, cold and warm: `MODEL OUT_DIR [--lengths 27 512] [...]`.

A sample is a fresh process: open the engine (an empty bank), bring the page cache into its condition and verify it,
run one prompt, choose the first token. Within a round the ways run side by side, every other round backwards; where
several are compared, the first runs twice (A/A). Writes rows; ratios are made from the files. Each row is kept as soon
as its sample ends: the same command goes on after an interruption, if options, code, checkpoint and boot are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pandas as pd
from rich.console import Console
from rich.progress import track

from edge0 import Engine, EngineOptions
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import read_config
from edge0.telemetry.memory import process_device_bytes
from edge0.tokens import load_tokenizer
from experiments.alone import alone
from experiments.conditions import Condition, prepare
from experiments.processes import run_python
from experiments.publish import open_pages, publish, run_command
from experiments.resume import identity_of

PROMPT_TIMEOUT_S = 6 * 3600  # a long prompt, cold, on a slow disk
WAYS = ("ondemand", "whole-layer", "auto")
UNFINISHED = ".unfinished.jsonl"
IDENTIFYING = ("k", "ways", "conditions", "lengths", "rounds", "tier")  # options that decide what the rows are of
TEXT = (
    "Once upon a time there was a reader who asked how long it takes until the first word of an answer appears. "
    "Nobody could tell, for it depends on what has to be fetched before, on where it lies, and on who asked last. "
)


@dataclass(frozen=True)
class Sample:
    """One prompt of `tokens` tokens in one process."""

    model: str
    k: int
    way: str
    condition: str
    tokens: int


def measure(sample: Sample) -> dict[str, Any]:
    """The row of one sample.

    Raises:
        Edge0Error: PROBE_UNAVAILABLE when the condition cannot be reached or read; SESSION_VOID when the prompt was not
            read in the way that the sample names.
    """
    tokenizer = load_tokenizer(Path(sample.model))
    prompt = tokenizer.encode(TEXT)
    prompt = (prompt * (sample.tokens // len(prompt) + 1))[: sample.tokens]
    # What a process does once, for its first prompt of any engine, is not what is asked for.
    with Engine(sample.model, EngineOptions(k=sample.k)) as first:
        first.prefill(first.new_request(), prompt[:2])
        slots = max(first.plan.bank_slots, 2 * first.config.experts)  # so that every way has room
        options = EngineOptions(k=sample.k, prefill=sample.way, bank_bytes=slots * first.plan.slot_bytes)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(sample.model, options))
        files = stack.enter_context(open_pages(engine.layout.paths))
        cached = prepare(Condition.parse(sample.condition), files)
        before, device = asdict(engine.recorder.totals), process_device_bytes()
        start = time.perf_counter_ns()
        logits = engine.prefill(engine.new_request(), prompt)
        token = int(mx.argmax(logits).item())
        took = time.perf_counter_ns() - start
        after = asdict(engine.recorder.totals)
        moved = None if device is None else process_device_bytes() - device
        chunks = -(-len(prompt) // engine.plan.prefill_chunk)
        whole = chunks * sum(len(engine.layout.layer_ranges(layer)) for layer in engine.layout.layers)
        every = chunks * len(engine.layout.records())
    spent = {key: after[key] - before[key] for key in after}
    if sample.way == "whole-layer" and (spent["loads"], spent["calls"]) != (every, whole):
        raise Edge0Error(
            ErrorKind.SESSION_VOID,
            "the prompt was not read by whole layers",
            expected=f"{every} experts in {whole} calls",
            found=f"{spent['loads']} in {spent['calls']}",
        )
    return asdict(sample) | {
        "ttft_ms": took / 1e6,
        "first_token": token,
        "device_bytes": moved,
        "cached_before_bytes": cached,
        "experts_read": spent["loads"],
        "asked_bytes": spent["asked_bytes"],
        "read_calls": spent["calls"],
        "wait_ms": spent["loads_wait_ns"] / 1e6,
        "layers": len(engine.layout.layers),
        "experts": engine.layout.experts,
    }


def plan(
    rounds: int, lengths: list[int], conditions: list[str], ways: Sequence[str] = WAYS
) -> list[tuple[str, int, str, int, str]]:
    """(role, round, condition, tokens, way) of every sample, in order; within a round no way is always the later."""
    order = []
    for number in range(rounds):
        here = []
        for condition in conditions:
            for tokens in lengths:
                shift = number // 2 % len(ways)
                for way in (*ways[shift:], *ways[:shift]):
                    here.append(("arm", number, condition, tokens, way))
                    if way == ways[0] and len(ways) > 1:
                        here.append(("aa", number, condition, tokens, way))
        order += here if number % 2 == 0 else here[::-1]
    return order


class Unfinished:
    """The rows of a run that is not over, in a file that says of which run; those that an earlier try left are `rows`.

    Args:
        identity: what two tries must share for one to go on with the other's rows.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path, self.identity, self.rows = path, identity, []
        with suppress(OSError, ValueError):  # there is none, or nothing that this wrote
            found, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            self.rows = rows if found == identity else []

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row. Raises Edge0Error OUTPUT_UNWRITABLE."""
        self.rows.append(row)
        partial = self.path.with_suffix(".partial")
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(
                "".join(json.dumps(line) + "\n" for line in (self.identity, *self.rows)), encoding="utf-8"
            )
            partial.replace(self.path)

    def remove(self) -> None:
        """The run is over, one way or the other."""
        self.path.unlink(missing_ok=True)


def run(options: argparse.Namespace, kept: Unfinished) -> pd.DataFrame:
    """All samples that are not kept yet, each in a process of its own; returns the rows of all.

    Raises:
        Edge0Error: SESSION_VOID when a process failed (its message is told), or ways chose different tokens.
    """
    samples, console = plan(options.rounds, options.lengths, options.conditions, options.ways), Console(stderr=True)
    if kept.rows:
        console.print(f"kept: {len(kept.rows)} of {len(samples)} prompts, of a run that was interrupted")
    for role, number, condition, tokens, way in track(samples[len(kept.rows) :], "prompts", console=console):
        sample = Sample(str(options.model), options.k, way, condition, tokens)
        printed = run_python(
            ["-m", "experiments.prefill_cost", "--sample", json.dumps(asdict(sample))],
            f"prompt of {tokens} tokens, {way}, {condition}",
            options.timeout,
        )
        kept.add({"role": role, "round": number} | json.loads(printed.splitlines()[-1]))
    frame = pd.DataFrame(kept.rows)
    for tokens, here in frame.groupby("tokens"):
        if here.first_token.nunique() > 1:
            kept.remove()
            raise Edge0Error(ErrorKind.SESSION_VOID, f"ways chose different tokens after {tokens}")
    return frame


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.prefill_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="directory of a checkpoint")
    parser.add_argument("out", type=Path, nargs="?", help="folder that gets SESSION/prefill.parquet and .json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[27, 512], help="tokens of the prompts")
    parser.add_argument("--conditions", nargs="+", default=["cold", "warm"], help="page-cache conditions")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to read (default all)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way (default 5)")
    parser.add_argument("--k", type=int, default=4, help="experts per token (default 4)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=PROMPT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"of one sample (default {PROMPT_TIMEOUT_S})",
    )
    parser.add_argument("--tier", help="name under which results are kept (default: the directory's)")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample is not None:
        return run_command(lambda: print(json.dumps(measure(Sample(**json.loads(options.sample))))))
    if options.model is None or options.out is None:
        parser.error("MODEL and OUT_DIR are needed")

    @alone("prompts")
    def command() -> None:
        about = {"k": options.k, "rounds": options.rounds, "tier": options.tier or options.model.resolve().name}
        about["family"] = read_config(options.model).family.tag
        identity = identity_of({key: getattr(options, key) for key in IDENTIFYING}, [options.model])
        kept = Unfinished(options.out / UNFINISHED, identity)
        publish(options.out, "prefill", run(options, kept), options.model, about)
        kept.remove()

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
