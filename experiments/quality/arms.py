"""Who answers: the int4 checkpoint as it is served, its original, or the server. All say the same things of an answer.

Every prompt goes through the chat template of the checkpoint, once, and decoding is greedy, one question at a time, so
that no answer depends on its neighbours. An arm belongs to the thread that opened it. Imports MLX only when one opens.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edge0.checkpoint.adapters import open_adapter
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.options import EngineOptions

Messages = Sequence[Mapping[str, str]]
END, LENGTH = "end", "length"
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Answer:
    """`answer_tokens` counts the token that ended it, too; `stop` is "length" where the limit did."""

    text: str
    prompt_tokens: int
    answer_tokens: int
    stop: str


class Arm(Protocol):
    def answer(self, messages: Messages, limit: int) -> Answer:
        """
        Raises:
            Edge0Error: what the model refuses a prompt for.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """How the checkpoint is served: experts per token, and the adapters that there are for them."""

    model: str
    k: int
    heads: bool
    lora: bool
    thinking: bool

    @classmethod
    def of(cls, model: Path, k: int | None, thinking: bool) -> Served:
        """
        Raises:
            Edge0Error: what the checkpoint or an adapter is refused for; one that is absent is not.
        """
        config = read_config(model)
        k = config.check_k(k if k is not None else config.family.k_served)
        heads, lora = (_there(model, kind, k) for kind in ("prerouter", "lora"))
        return cls(str(model), k, heads, lora, thinking)

    @property
    def words(self) -> str:
        parts = [f"the int4 checkpoint through the streaming engine, K={self.k}"]
        parts.append("routes predicted by its heads" if self.heads else "no heads: every layer routes for itself")
        parts.append("recovery LoRA unmerged" if self.lora else "no LoRA")
        return ", ".join(parts)

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(k=self.k, prerouter="route" if self.heads else "off", lora=self.lora)


def _there(model: Path, kind: str, k: int) -> bool:
    try:
        open_adapter(model, read_config(model).family, kind, k)
    except Edge0Error as error:
        if error.kind is ErrorKind.ADAPTER_MISSING:
            return False
        raise
    return True


class Int4Arm:
    """The engine, in this process."""

    def __init__(self, served: Served):
        from edge0.engine import Engine
        from edge0.serving.vocabulary import Vocabulary

        self._served = served
        self._vocabulary = Vocabulary(Path(served.model))
        self._engine = Engine(served.model, served.options)

    def answer(self, messages: Messages, limit: int) -> Answer:
        from edge0.sampling import Sampling
        from edge0.serving.completion import Finished, Order, complete
        from edge0.serving.template import render

        prompt = tuple(render(self._vocabulary, messages, self._served.thinking))
        text = []
        for piece in complete(self._engine, self._vocabulary, Order(prompt, limit, Sampling())):
            if isinstance(piece, Finished):
                stop = END if piece.reason == "stop" else LENGTH
                return Answer("".join(text), piece.prompt_tokens, piece.completion_tokens, stop)
            text.append(piece)
        raise AssertionError("an answer ends with Finished")

    def close(self) -> None:
        self._engine.close()


class TeacherArm:
    """A tier that was trained here, before it was quantised: the bf16 file that is kept of it, computed in fp32."""

    def __init__(self, model: Path, kept: Path, k: int, thinking: bool):
        from edge0.serving.vocabulary import Vocabulary
        from edge0.training import teacher

        self._vocabulary, self._thinking = Vocabulary(model), thinking
        self._student = teacher.original(read_config(model), kept, k, model)

    def answer(self, messages: Messages, limit: int) -> Answer:
        from edge0.serving.template import render
        from edge0.training import sampling

        prompt = render(self._vocabulary, messages, self._thinking)
        end = self._vocabulary.tokenizer.eos_token_id
        (said,) = sampling.answers(self._student, [prompt], None, None, limit, end)
        return _answer(self._vocabulary, len(prompt), said)

    def close(self) -> None:
        del self._student


class MlxArm:
    """A full-precision model of one's own, as stock mlx-lm runs it; prompts are those of the checkpoint."""

    def __init__(self, model: Path, original: Path, thinking: bool):
        from mlx_lm.utils import load_model

        from edge0 import models
        from edge0.serving.vocabulary import Vocabulary

        self._vocabulary, self._thinking = Vocabulary(model), thinking
        try:
            self._model, config = load_model(original)
            self._model.set_dtype(models.activation_dtype())  # a CPU is slow in bf16, and inexact
        except (OSError, ValueError, KeyError) as error:
            detail = f"mlx-lm cannot load it ({error})"
            raise Edge0Error(ErrorKind.FILE_UNREADABLE, detail, path=original) from error
        vocab = read_config(model).vocab
        held = config.get("text_config", config).get("vocab_size")
        if held != vocab:
            raise Edge0Error(
                ErrorKind.CONFIG_MALFORMED,
                "not the original of this checkpoint: its vocabulary differs",
                path=original / "config.json",
                tensor="vocab_size",
                expected=vocab,
                found=held,
            )

    def answer(self, messages: Messages, limit: int) -> Answer:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        from edge0.serving.template import render

        prompt, said = render(self._vocabulary, messages, self._thinking), []
        for token, _ in generate_step(mx.array(prompt), self._model, max_tokens=limit):
            said.append(int(token))
            if said[-1] in self._vocabulary.ends:
                break
        return _answer(self._vocabulary, len(prompt), said)

    def close(self) -> None:
        del self._model


class ServerArm:
    """The int4 checkpoint behind `edge0 serve`, in a process of its own: what a client of the server is told."""

    def __init__(self, served: Served):
        serve = ["serve", served.model, "--port", "0", "--k", str(served.k), "--request-seconds", "86400"]
        serve += ["--kernels", served.options.kernels]
        serve += [] if served.heads else ["--prerouter", "off"]
        serve += [] if served.lora else ["--no-lora"]
        command = [sys.executable, "-m", "experiments.child", str(os.getpid()), "-m", "edge0.cli", *serve]
        self._thinking = served.thinking
        self._said = tempfile.TemporaryFile("w+")  # not a pipe, which would fill
        self._process = subprocess.Popen(command, stderr=self._said, stdout=subprocess.DEVNULL)
        self._url = f"{self._address()}/chat/completions"

    def _address(self) -> str:
        while True:
            ended = self._process.poll() is not None
            self._said.seek(0)
            said = self._said.read()
            if match := re.search(r" at (http://\S+/v1) ", said):
                return match[1]
            if ended:
                self.close()
                last = (said.strip().splitlines() or ["it said nothing"])[-1]
                raise Edge0Error(ErrorKind.SESSION_VOID, f"the server did not start: {last}")
            time.sleep(_LOOK_EVERY_S)

    def answer(self, messages: Messages, limit: int) -> Answer:
        body = {"messages": list(messages), "max_tokens": limit, "temperature": 0}
        body["chat_template_kwargs"] = {"enable_thinking": self._thinking}
        header = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url, json.dumps(body).encode(), header)) as reply:
                told = json.load(reply)
        except urllib.error.HTTPError as error:
            detail = f"the server refused a request: {error.read().decode('utf-8', 'replace')[:200]}"
            raise Edge0Error(ErrorKind.SESSION_VOID, detail, path=self._url) from error
        except OSError as error:
            raise Edge0Error(ErrorKind.SESSION_VOID, f"the server failed ({error})", path=self._url) from error
        (choice,), usage = told["choices"], told["usage"]
        stop = END if choice["finish_reason"] == "stop" else LENGTH
        return Answer(choice["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"], stop)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._said.close()


def open_arm(settings: Mapping[str, Any]) -> Arm:
    """The arm that the literal values of a configuration name.

    Raises:
        Edge0Error: whatever its files are refused for.
    """
    settings = dict(settings)
    kind = settings.pop("kind")
    if kind in ("int4", "server"):
        return {"int4": Int4Arm, "server": ServerArm}[kind](Served(**settings))
    model, original = Path(settings["model"]), Path(settings["original"])
    if kind == "teacher":
        return TeacherArm(model, original, settings["k"], settings["thinking"])
    return MlxArm(model, original, settings["thinking"])


def _answer(vocabulary: Any, prompt_tokens: int, said: Iterable[int]) -> Answer:
    """Token ids as a text that stops before the first one that ends an answer."""
    from edge0.serving.text import TextStream

    stream, text = TextStream(vocabulary.token_bytes), []
    for number, token in enumerate(said, 1):
        if token in vocabulary.ends:
            return Answer("".join([*text, stream.finish()]), prompt_tokens, number, END)
        text.append(stream.add(token))
    return Answer("".join([*text, stream.finish()]), prompt_tokens, number, LENGTH)
