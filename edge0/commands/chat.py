"""`edge0 chat`: talk to a checkpoint in a terminal, or through a pipe.

After each answer stderr says what it cost. `/reset` forgets the conversation, `/exit` or Ctrl-D leaves, Ctrl-C ends
the answer that is being written. Every turn is a request of its own that reads the whole conversation.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from edge0.commands.engine import add_engine_arguments, engine_options
from edge0.commands.generate import add_sampling_arguments, at_least
from edge0.commands.report import cost_line
from edge0.errors import Edge0Error
from edge0.families import read_config

if TYPE_CHECKING:
    from edge0.engine import Engine
    from edge0.sampling import Sampling
    from edge0.serving.vocabulary import Vocabulary

HELP = "talk to a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a checkpoint")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--thinking", action="store_true", help="let a model that can think first do so")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens of an answer (default 2048)")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> None:
    from edge0.engine import Engine
    from edge0.sampling import Sampling
    from edge0.serving.vocabulary import Vocabulary

    at_least("max-tokens", options.max_tokens, 1)
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    read_config(options.directory)  # so that a wrong directory is told as such, and not by its tokenizer
    vocabulary = Vocabulary(options.directory)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text become U+FFFD
    with Engine(options.directory, engine_options(options)) as engine:
        chat = Chat(engine, vocabulary, sampling, options.max_tokens, options.system, options.thinking)
        if sys.stdin.isatty():
            chat.say("/reset forgets the conversation, /exit leaves, Ctrl-C ends an answer")
        while (line := read_line()) is not None and line.strip() != "/exit":
            if line.strip() == "/reset":
                chat.reset()
            elif line.strip():
                chat.turn(line)


def read_line() -> str | None:
    """One line of the user; None at the end. Ctrl-C drops the line."""
    terminal = sys.stdin.isatty()
    try:
        return input("> " if terminal else "")
    except EOFError:
        if terminal:
            print()
        return None
    except KeyboardInterrupt:
        if not terminal:
            raise
        print()
        return ""


class Chat:
    """A conversation with one checkpoint, printed as it goes."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        sampling: Sampling,
        max_tokens: int,
        system: str | None,
        thinking: bool,
    ):
        self._engine, self._vocabulary, self._sampling = engine, vocabulary, sampling
        self._max_tokens, self._thinking = max_tokens, thinking
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._console = Console(stderr=True)
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._opening)

    def say(self, line: str) -> None:
        """A remark beside the conversation."""
        self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    def turn(self, text: str) -> None:
        """Answer; an error or nothing said takes the user's message back."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            self._answer(pieces)
        except Edge0Error as error:
            pieces = []
            print()
            self.say(f"edge0: {error}")
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()

    def _answer(self, pieces: list[str]) -> None:
        from edge0.serving.completion import Cancelled, Order, complete
        from edge0.serving.template import render

        prompt = render(self._vocabulary, self.messages, self._thinking)
        order = Order(tuple(prompt), self._max_tokens, self._sampling)
        with Interrupt() as interrupt:
            try:
                for event in complete(self._engine, self._vocabulary, order, lambda: interrupt.seen):
                    if isinstance(event, str):
                        pieces.append(event)
                        print(event, end="", flush=True)
                    else:
                        print()
                        self.say(cost_line(event, self._engine.options))
            except Cancelled:
                print()
                self.say("interrupted")


class Interrupt:
    """Takes Ctrl-C as a wish while a step runs, so that the engine is never left half way; a second one insists."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _see(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
