"""`edge0 generate`: write text after one prompt, and say on stderr what it cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge0.commands.engine import add_engine_arguments, engine_options
from edge0.commands.report import cost_line
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config

HELP = "write text after a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a checkpoint")
    parser.add_argument("prompt", help="text; with --chat the user's message")
    parser.add_argument("--chat", action="store_true", help="render the prompt with the checkpoint's chat template")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to write at the most (default 64)")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    group.add_argument("--top-p", type=float, default=0.95, help="nucleus share (default 0.95)")
    group.add_argument("--top-k", type=int, default=64, help="most likely tokens to choose from, 0: all (default 64)")
    group.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")


def at_least(name: str, value: int, least: int) -> int:
    """
    Raises:
        Edge0Error: OPTION_INVALID.
    """
    if value < least:
        raise Edge0Error(ErrorKind.OPTION_INVALID, f"option {name}", expected=f">= {least}", found=value)
    return value


def run(options: argparse.Namespace) -> None:
    from edge0.engine import Engine
    from edge0.sampling import Sampling
    from edge0.serving.completion import Order, complete
    from edge0.serving.template import render
    from edge0.serving.vocabulary import Vocabulary

    at_least("max-tokens", options.max_tokens, 1)
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    read_config(options.directory)  # so that a wrong directory is told as such, and not by its tokenizer
    vocabulary = Vocabulary(options.directory)
    if options.chat:
        prompt = render(vocabulary, [{"role": "user", "content": options.prompt}])
    else:
        prompt = vocabulary.encode(options.prompt)
    with Engine(options.directory, engine_options(options)) as engine:
        order = Order(tuple(prompt), options.max_tokens, sampling)
        for event in complete(engine, vocabulary, order):
            if isinstance(event, str):
                print(event, end="", flush=True)
            else:
                print()
                print(cost_line(event, engine.options), file=sys.stderr)
