"""`edge0 trace`: record which experts a model routes to, generate such a trace, or show one.

An engine that replays a trace reads the same experts whichever way it serves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.layout import part_specs
from edge0.checkpoint.strict import shown
from edge0.commands.engine import add_engine_arguments, engine_options
from edge0.commands.generate import add_sampling_arguments, at_least
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig, parse_config, read_config
from edge0.prerouter.schedule import predicted_layers
from edge0.tiers import find_tier
from edge0.trace import RouteTrace, free_path, generate, multi_hot, numbers

if TYPE_CHECKING:
    from edge0.engine import Engine
    from edge0.sampling import Sampling

HELP = "record, generate or show a trace of routes"
TOP_SHARE = 0.1  # of a layer's experts: those whose share of all routes is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)

    record_parser = actions.add_parser("record", help="write down what a model routes to")
    record_parser.add_argument("directory", metavar="MODEL", type=Path, help="a checkpoint")
    record_parser.add_argument("output", metavar="OUT", type=Path, help="new file")
    prompt = record_parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text that the model goes on from")
    prompt.add_argument(
        "--tokens-file", type=Path, help='or JSON {"tokens": [...]}, of which --prompt-tokens are the prompt'
    )
    record_parser.add_argument(
        "--prompt-tokens", type=int, default=16, help="else length of the prompt, of random tokens (default 16)"
    )
    record_parser.add_argument("--tokens", type=int, default=256, help="decode steps to record (default 256)")
    add_sampling_arguments(record_parser)
    add_engine_arguments(record_parser)

    generate_parser = actions.add_parser("generate", help="make a trace with a stated reuse and popularity")
    generate_parser.add_argument("output", metavar="OUT", type=Path, help="new file")
    shape = generate_parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--model", type=Path, help="a checkpoint of the shape wanted")
    shape.add_argument("--tier", help="or a tier that `edge0 synth` knows")
    generate_parser.add_argument("--k", type=int, help="experts per token (default: what the family serves)")
    generate_parser.add_argument("--tokens", type=int, default=256, help="decode steps (default 256)")
    generate_parser.add_argument(
        "--reuse", type=float, default=0.25, help="mean share of a layer's set that the next token repeats (0.25)"
    )
    generate_parser.add_argument(
        "--zipf", type=float, default=0.0, help="exponent of the popularity of experts, 0: all alike (default 0)"
    )
    generate_parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    generate_parser.add_argument(
        "--recall", type=float, default=1.0, help="share of a route that advice names, where it is replayed (default 1)"
    )

    show_parser = actions.add_parser("show", help="say what a trace holds")
    show_parser.add_argument("file", metavar="FILE", type=Path)


def run(options: argparse.Namespace) -> None:
    if options.action == "show":
        print(summary(RouteTrace.load(options.file)))
        return
    free_path(options.output)
    trace = recorded(options) if options.action == "record" else generated(options)
    trace.save(options.output)
    print(f"{options.output}: {shape_line(trace)}")


def recorded(options: argparse.Namespace) -> RouteTrace:
    """What `edge0 trace record` writes."""
    from edge0.engine import Engine
    from edge0.sampling import Sampling
    from edge0.serving.vocabulary import Vocabulary

    at_least("tokens", options.tokens, 1)
    at_least("prompt-tokens", options.prompt_tokens, 1)
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    config = read_config(options.directory)
    forced = None
    if options.tokens_file is not None:
        given = tokens_of(options.tokens_file)
        if len(given) <= options.prompt_tokens:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "no token is left to decode after the prompt",
                path=options.tokens_file,
                tensor="tokens",
                expected=f"more than {options.prompt_tokens} (--prompt-tokens)",
                found=len(given),
            )
        prompt, forced = given[: options.prompt_tokens], given[options.prompt_tokens :]
    elif options.prompt is None:
        prompt = np.random.default_rng(options.seed).integers(0, config.vocab, options.prompt_tokens).tolist()
    else:
        prompt = Vocabulary(options.directory).encode(options.prompt)
    with Engine(options.directory, engine_options(options)) as engine:
        return record(engine, prompt, options.tokens, sampling, forced)


def tokens_of(path: Path) -> list[int]:
    """What `--tokens-file` holds: a session's tokens.json is one.

    Raises:
        Edge0Error: FILE_MISSING, FILE_UNREADABLE.
    """
    expected = '{"tokens": [...]} with whole numbers, such as a session\'s tokens.json'
    if not path.is_file():
        raise Edge0Error(ErrorKind.FILE_MISSING, "no such file", path=path, expected=expected)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        detail = f"cannot be read as JSON ({error})"
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, detail, path=path, expected=expected) from error
    tokens = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        found = shown(document)
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, "not a list of tokens", path=path, expected=expected, found=found)
    return tokens


def record(
    engine: Engine, prompt: Sequence[int], tokens: int, sampling: Sampling, forced: Sequence[int] | None = None
) -> RouteTrace:
    """The routes that an engine executes in `tokens` decode steps after a prompt, whatever tokens are chosen.

    `forced`: the tokens to decode, one by one, in place of `tokens` chosen ones.

    Raises:
        Edge0Error: OPTION_INVALID when these are more tokens than the context has, and what a step raises.
    """
    tokens = tokens if forced is None else len(forced)
    at_least("tokens", tokens, 1)
    room = engine.context_tokens - len(prompt)
    if tokens > room:
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "option tokens",
            expected=f"up to {max(0, room)} beside the prompt's {len(prompt)} in a context of {engine.context_tokens}",
            found=tokens,
            hint="raise --context, or record fewer tokens",
        )
    from edge0.telemetry.host import describe_host

    sample, request, steps = sampling.sampler(), engine.new_request(), []
    try:
        logits = engine.prefill(request, prompt)
        for number in range(tokens):
            logits = engine.step(request, sample(logits) if forced is None else forced[number])
            routes = engine.executed_routes()
            steps.append([np.array(routes[layer]).reshape(-1) for layer in engine.config.moe_layers])
    finally:
        request.release()
    host = describe_host(engine.directory)
    about = {
        "source": "recorded",
        "machine": host["machine_id"],
        "commit": host["git_commit"] or "unknown",
        "model": engine.directory.resolve().name,
        "k": engine.k,
        "prerouter": engine.options.prerouter,
        "lora": "yes" if engine.options.lora else "no",
        "prompt_tokens": len(prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }
    if forced is not None:
        about = {key: value for key, value in about.items() if key not in ("temperature", "top_p", "top_k", "seed")}
        about["tokens"] = "given"
    about = {key: str(value) for key, value in about.items()}
    adapter_k = engine.options.adapter_k or engine.k
    about |= serving_facts(engine.config, heads_of(engine.directory, engine.config, adapter_k))
    return RouteTrace(np.array(steps), engine.config.moe_layers, engine.config.experts, about)


def generated(options: argparse.Namespace) -> RouteTrace:
    """What `edge0 trace generate` writes."""
    config = shape_of(options)
    k = config.check_k(config.family.k_served if options.k is None else options.k)
    made = generate(config.moe_layers, config.experts, k, options.tokens, options.reuse, options.zipf, options.seed)
    owners = heads_of(options.model, config, k) if options.model is not None else find_tier(options.tier).owners
    return replace(made, about=dict(made.about) | serving_facts(config, owners), recall=float(options.recall))


def heads_of(directory: Path, config: ModelConfig, k: int) -> tuple[int, ...]:
    """The layers whose heads a checkpoint has at a K; none where it has no heads for that K."""
    try:
        return open_adapter(directory, config.family, "prerouter", k).owners
    except Edge0Error as error:
        if error.kind is not ErrorKind.ADAPTER_MISSING:
            raise
        return ()


def serving_facts(config: ModelConfig, owners: Sequence[int]) -> Mapping[str, str]:
    """What a prediction of speed has to know of the model besides its routes, as text."""
    expert_bytes = sum(spec.nbytes for spec in part_specs(config.hidden, config.expert_width))
    facts = {"expert_bytes": str(expert_bytes)}
    return facts | ({"predicted": json.dumps(predicted_layers(config, owners))} if owners else {})


def shape_of(options: argparse.Namespace) -> ModelConfig:
    if options.model is not None:
        return read_config(options.model)
    from edge0.checkpoint.synth import released_config

    return parse_config(released_config(find_tier(options.tier)), Path("config.json"))


def shape_line(trace: RouteTrace) -> str:
    return f"{trace.tokens} tokens, layers {numbers(trace.layers)}, K={trace.k} of {trace.experts} experts"


def summary(trace: RouteTrace) -> str:
    """Shape, source, and how far neighbours and popular experts repeat, line by line."""
    lines = [shape_line(trace), ", ".join(f"{key} {value}" for key, value in sorted(trace.about.items()))]
    chance = trace.k / trace.experts
    if trace.tokens > 1:
        reuse = trace.reuse()
        lines.append(
            f"repeated by the next token: {reuse.mean():.1%} of a layer's set "
            f"(layers {reuse.min():.1%} to {reuse.max():.1%}; by chance {chance:.1%})"
        )
    chosen = multi_hot(trace.routes, trace.experts)
    counts = sorted({trace.tokens, *(2**power for power in range(trace.tokens.bit_length()))})
    touched = [f"{count}: {_touched(chosen, count):.1f}" for count in counts]
    lines.append(f"distinct experts of a layer in n tokens: {', '.join(touched)}")
    top = max(1, round(TOP_SHARE * trace.experts))
    shares = np.sort(chosen.sum(axis=0), axis=1)[:, -top:].sum(axis=1) / (trace.tokens * trace.k)
    lines.append(
        f"the {top} most used experts of a layer get {shares.mean():.1%} of its routes "
        f"(layers {shares.min():.1%} to {shares.max():.1%}; all alike: {top / trace.experts:.1%})"
    )
    return "\n".join(line for line in lines if line)


def _touched(chosen: np.ndarray, count: int) -> float:
    """Different experts of a layer in `count` tokens, the mean over windows side by side and over layers."""
    windows = chosen[: len(chosen) // count * count].reshape(-1, count, *chosen.shape[1:])
    return float(windows.any(axis=1).sum(axis=-1).mean())
