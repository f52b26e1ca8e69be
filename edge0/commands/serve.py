"""`edge0 serve`: an OpenAI-compatible server for one checkpoint, one request at a time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge0.commands.engine import add_engine_arguments, engine_options, parse_bytes
from edge0.commands.generate import at_least
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config

HELP = "serve a checkpoint over HTTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a checkpoint")
    group = parser.add_argument_group("where and to whom")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="0: any free one (default 8000)")
    group.add_argument("--api-key-file", type=Path, help="file of one line: the key that clients must send")
    group.add_argument("--insecure", action="store_true", help="serve other machines without a key, knowingly")
    group.add_argument("--model-id", help="name of the model (default: that of the directory)")
    group = parser.add_argument_group("limits")
    group.add_argument("--queue", type=int, default=8, help="requests that may wait for their turn (default 8)")
    group.add_argument("--max-body", default="1MiB", help="size of a request (default 1MiB)")
    group.add_argument("--max-tokens-limit", type=int, help="tokens that a request may ask for (default: the context)")
    group.add_argument(
        "--request-seconds",
        type=float,
        default=600,
        help="time that a request may take, waiting included (default 600)",
    )
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> None:
    at_least("queue", options.queue, 1)
    if options.max_tokens_limit is not None:
        at_least("max-tokens-limit", options.max_tokens_limit, 1)
    if not 0 < options.request_seconds <= 86400:
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "option request-seconds",
            expected="above 0, up to a day",
            found=options.request_seconds,
        )
    max_body_bytes = parse_bytes(options.max_body, "max-body")
    how = engine_options(options)
    key = None if options.api_key_file is None else read_key(options.api_key_file)
    read_config(options.directory)  # so that a wrong directory is told as such, and not by its tokenizer

    from edge0.serving.app import Service, ServiceOptions
    from edge0.serving.server import Server, allowed_hosts, is_loopback, listen
    from edge0.serving.vocabulary import Vocabulary
    from edge0.serving.worker import Worker

    if key is None and not options.insecure and not is_loopback(options.host):
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "option host: other machines could use this server without a key",
            expected="a loopback address",
            found=options.host,
            hint="give it --api-key-file, or say --insecure",
        )
    vocabulary = Vocabulary(options.directory)
    model = options.model_id or options.directory.resolve().name
    offered = ServiceOptions(
        model,
        key,
        allowed_hosts(options.host),
        max_body_bytes,
        options.max_tokens_limit,
        options.request_seconds,
    )
    with listen(options.host, options.port) as listener:
        worker = Worker(options.directory, how, vocabulary, options.queue)
        worker.start()
        host, port = f"[{options.host}]" if ":" in options.host else options.host, listener.getsockname()[1]
        line = (
            f"serving {model} at http://{host}:{port}/v1 (K={worker.engine.k}, context "
            f"{worker.engine.context_tokens} tokens, {worker.engine.store.nbytes / 2**20:.0f} MiB for experts)"
        )
        try:
            Server(Service(worker, vocabulary, offered), lambda: print(line, file=sys.stderr, flush=True)).run(
                [listener]
            )
        finally:
            worker.close()


def read_key(path: Path) -> str:
    """
    Raises:
        Edge0Error: FILE_MISSING, FILE_UNREADABLE, OPTION_INVALID.
    """
    try:
        key = path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise Edge0Error(ErrorKind.FILE_MISSING, "no API key", path=path) from error
    except (OSError, ValueError) as error:
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, f"not an API key ({error})", path=path) from error
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise Edge0Error(ErrorKind.OPTION_INVALID, "option api-key-file", path=path, expected="one line without spaces")
    return key
