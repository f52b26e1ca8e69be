"""The command line: `edge0 synth` makes a checkpoint, `edge0 generate` writes text with one.

Expected failures are one line on stderr and exit code 2. Knows nothing of measuring; that is the workflow's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.tiers import TIERS, find_tier, read_config


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edge0", description="Serve mixture-of-experts models from SSD.")
    commands = parser.add_subparsers(dest="command", required=True)

    synth = commands.add_parser("synth", help="make a seeded random checkpoint in the released layout")
    synth.add_argument("tier", help=f"one of {', '.join(TIERS)}")
    synth.add_argument("directory", type=Path, help="new directory; it appears when complete")
    synth.add_argument("--seed", type=int, default=0)
    synth.add_argument("--log", type=Path, help="write a line about the result to this file")
    synth.set_defaults(run=_synth)

    generate = commands.add_parser("generate", help="write text after a prompt")
    generate.add_argument("directory", type=Path, help="a checkpoint")
    generate.add_argument("prompt", help="text; with --chat the user's message")
    generate.add_argument("--chat", action="store_true", help="render the prompt with the checkpoint's chat template")
    generate.add_argument("--max-tokens", type=int, default=64, help="tokens to write at the most (default 64)")
    generate.add_argument("--k", type=int, help="experts per token (default: what the family serves)")
    generate.add_argument(
        "--prerouter",
        choices=("route", "advise", "off"),
        default="route",
        help="the prediction is the route (default), only starts reads early, or is not made",
    )
    generate.add_argument("--adapter-k", type=int, help="use the adapter set of another K, knowingly")
    generate.add_argument("--no-lora", action="store_true", help="without the recovery LoRA")
    generate.add_argument("--bank-mib", type=float, help="memory for experts (default: twice the floor)")
    generate.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    generate.add_argument("--top-p", type=float, default=0.95, help="nucleus share (default 0.95)")
    generate.add_argument(
        "--top-k", type=int, default=64, help="most likely tokens to choose from, 0: all (default 64)"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    generate.set_defaults(run=_generate)

    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except Edge0Error as error:
        print(f"edge0: {error}", file=sys.stderr)
        return EXIT_CODE
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("edge0: interrupted", file=sys.stderr)
        return 130
    return 0


def _synth(options: argparse.Namespace) -> None:
    from edge0.checkpoint.synth import synthesise

    tier = find_tier(options.tier)
    if options.log is not None:
        try:
            options.log.parent.mkdir(parents=True, exist_ok=True)
            options.log.touch()
        except OSError as error:
            raise Edge0Error(
                ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=options.log
            ) from error
    columns = [TextColumn("synthesising {task.description}"), BarColumn(), DownloadColumn(binary_units=True)]
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(tier.name, total=None)
        synthesise(
            tier,
            options.directory,
            options.seed,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    line = f"{tier.name} with seed {options.seed} in {options.directory}"
    print(line)
    if options.log is not None:
        options.log.write_text(line + "\n")


def _generate(options: argparse.Namespace) -> None:
    from edge0.engine import Engine
    from edge0.options import EngineOptions
    from edge0.sampling import Sampling
    from edge0.tokens import load_tokenizer

    if options.max_tokens < 1:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option max-tokens", expected=">= 1", found=options.max_tokens)
    if options.bank_mib is not None and not 0 < options.bank_mib < 2**40:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option bank-mib", expected="MiB above 0", found=options.bank_mib)
    read_config(options.directory)  # so that a wrong directory is told as such, and not by its tokenizer
    tokenizer = load_tokenizer(options.directory)
    engine_options = EngineOptions(
        k=options.k,
        adapter_k=options.adapter_k,
        prerouter=options.prerouter,
        lora=not options.no_lora,
        bank_bytes=None if options.bank_mib is None else int(options.bank_mib * 2**20),
    )
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    if options.chat:
        messages = [{"role": "user", "content": options.prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    else:
        prompt = tokenizer.encode(options.prompt)
    text = tokenizer.detokenizer
    with Engine(options.directory, engine_options) as engine:
        for token in engine.generate(list(prompt), options.max_tokens, sampling, tuple(tokenizer.eos_token_ids)):
            text.add_token(token)
            print(text.last_segment, end="", flush=True)
        text.finalize()
        print(text.last_segment)


if __name__ == "__main__":
    sys.exit(main())
