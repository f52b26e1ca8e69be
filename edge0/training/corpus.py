"""Corpora: JSONL files of chat messages or plain text, as token sequences that know where their answer begins.

A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, whose last message is the answer that is trained, or
`{"text": ...}`, of which every token is. A broken line is named; it is skipped only on demand, and counted. What is
kept for evaluation never enters training: neither inside what a user says nor inside a text (`apart` says how they are
compared). A chat whose answer merely quotes a question is not looked into.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from edge0.checkpoint.strict import shown
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.serving.vocabulary import Vocabulary
from edge0.training.apart import Questions
from edge0.training.files import partial_of

SHOWN_LINES = 5  # broken lines that an error names
REPAIR = "mend the lines, or leave them out with --skip-broken"


@dataclass(frozen=True)
class Sample:
    """One sequence. `prompt_length` tokens come before the answer; `prompt` is their text, for comparing.

    `messages` are those that ask, where the sample is a chat.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    prompt: str
    messages: tuple[Mapping[str, str], ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Everything that a user says in it; of a text all of it."""
        return tuple(one["content"] for one in self.messages if one["role"] == "user") or (self.prompt,)

    @property
    def question(self) -> str:
        """What other samples may not hold of it: the longest message of a user, or a text itself."""
        return max(self.asked, key=len)


@dataclass(frozen=True)
class Batch:
    """Padded sequences. `tokens` `[B, T]`, `lengths` and `prompt_lengths` `[B, 1]`."""

    tokens: mx.array
    lengths: mx.array
    prompt_lengths: mx.array

    @classmethod
    def of(cls, samples: Sequence[Sample], pad: int) -> Batch:
        longest = max(len(sample.tokens) for sample in samples)
        tokens = [[*sample.tokens, *[pad] * (longest - len(sample.tokens))] for sample in samples]
        lengths, prompts = ([[length] for length in column] for column in
                            ([len(s.tokens) for s in samples], [s.prompt_length for s in samples]))  # fmt: skip
        return cls(mx.array(tokens), mx.array(lengths), mx.array(prompts))

    @property
    def answers(self) -> mx.array:
        """`[B, T]`: positions whose next token belongs to the answer."""
        positions = mx.arange(self.tokens.shape[1])[None]
        return (positions >= self.prompt_lengths - 1) & (positions < self.lengths - 1)


@dataclass(frozen=True)
class Corpus:
    """Samples of one file. `digest` is of its bytes; `skipped` the broken lines that were left out, `texts` those that
    were no prompts."""

    path: Path
    samples: tuple[Sample, ...]
    digest: str
    skipped: int
    texts: int = 0

    def check_apart(self, kept: Corpus) -> None:
        """That nothing which this corpus asks, and no text of it, holds a question of those `kept` for evaluation.

        Raises:
            Edge0Error: CORPUS_INVALID.
        """
        questions = Questions(sample.question for sample in kept.samples)
        shared = [sample for sample in self.samples if any(map(questions.stands_in, sample.asked))]
        if shared:
            raise Edge0Error(
                ErrorKind.CORPUS_INVALID,
                "holds prompts that are kept for evaluation",
                path=self.path,
                expected=f"none of {kept.path}",
                found=f"{len(shared)} of {len(self.samples)} samples, the first {shown(shared[0].question)}",
                hint="make it without the held-out prompts",
            )


def read_corpus(path: Path, vocabulary: Vocabulary, longest: int, skip_broken: bool = False) -> Corpus:
    """Read a JSONL file and make tokens of it by the checkpoint's own tokenizer and chat template.

    Args:
        longest: tokens of a sequence; a longer one counts as broken.

    Raises:
        Edge0Error: FILE_MISSING, FILE_UNREADABLE; CORPUS_INVALID, with the lines, when some are broken or none is good.
    """
    return _read(path, lambda line: _sample(line, vocabulary), longest, skip_broken)


def read_prompts(path: Path, vocabulary: Vocabulary, longest: int, skip_broken: bool = False) -> Corpus:
    """The chats of a JSONL file as prompts alone, with or without an answer at their end; texts ask nothing: they count
    as `texts`. Arguments and errors are those of `read_corpus`."""
    return _read(path, lambda line: _asked(line, vocabulary), longest, skip_broken)


def _read(path: Path, parse: Callable[[object], Sample | None], longest: int, skip_broken: bool) -> Corpus:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise Edge0Error(ErrorKind.FILE_MISSING, "no corpus", path=path) from error
    except OSError as error:
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, f"cannot be read ({error.strerror})", path=path) from error
    samples, broken, texts = [], [], 0
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            sample = parse(json.loads(line))
            if sample is None:
                texts += 1
                continue
            if len(sample.tokens) > longest:
                raise ValueError(f"{len(sample.tokens)} tokens, more than {longest}")
            samples.append(sample)
        except (ValueError, TypeError, RecursionError, Edge0Error) as error:
            broken.append(f"line {number}: {str(error)[:80]}")
    if not samples or broken and not skip_broken:
        lines = "; ".join(broken[:SHOWN_LINES]) + (" ..." if len(broken) > SHOWN_LINES else "")
        what = f"{len(broken)} of {len(broken) + len(samples) + texts} lines are no samples: {lines}"
        empty = f"holds no chat, only {texts} texts" if texts else "is empty"
        hint = REPAIR if broken else "give it lines with messages" if texts else "give it lines"
        raise Edge0Error(ErrorKind.CORPUS_INVALID, what if broken else empty, path=path, hint=hint)
    return Corpus(path, tuple(samples), hashlib.sha256(data).hexdigest(), len(broken), texts)


def _sample(line: object, vocabulary: Vocabulary) -> Sample:
    """Raises ValueError with what a person can mend."""
    if (messages := _messages(line)) is None:
        tokens = vocabulary.encode(line["text"])
        return Sample((*tokens, vocabulary.tokenizer.eos_token_id), 1, line["text"])
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not an assistant's answer to another")
    return chat_sample(messages, vocabulary)


def _asked(line: object, vocabulary: Vocabulary) -> Sample | None:
    """A sample without an answer, None of a text."""
    if (messages := _messages(line)) is None:
        return None
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not asked or asked[-1]["role"] == "assistant":
        raise ValueError("no message asks for an answer")
    prompt, tokens = _prompt(asked, vocabulary)
    return Sample(tuple(tokens), len(tokens), prompt, tuple(asked))


def _messages(line: object) -> list[dict[str, str]] | None:
    """The messages of a line, at least one, or None of a text."""
    if not isinstance(line, dict) or ("messages" in line) == ("text" in line):
        raise ValueError("expected an object with either messages or text")
    if "text" in line:
        if not isinstance(line["text"], str) or not line["text"]:
            raise ValueError("text is no string, or empty")
        return None
    messages = line["messages"]
    for message in messages if isinstance(messages, list) and messages else [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError("messages is no list of objects with role and content")
    return messages


def _prompt(asked: Sequence[Mapping[str, str]], vocabulary: Vocabulary) -> tuple[str, list[int]]:
    prompt = vocabulary.tokenizer.apply_chat_template(list(asked), add_generation_prompt=True, tokenize=False)
    return prompt, vocabulary.encode(prompt)


def chat_sample(messages: Sequence[dict[str, str]], vocabulary: Vocabulary) -> Sample:
    """The answer is the last message, ended by the tokenizer's own end of text."""
    prompt, asked = _prompt(messages[:-1], vocabulary)
    said = vocabulary.encode(messages[-1]["content"])
    end = vocabulary.tokenizer.eos_token_id
    return Sample((*asked, *said, end), len(asked), prompt, tuple(messages[:-1]))


def answered(asked: Sequence[Mapping[str, str]], answer: str) -> dict[str, object]:
    """A line of a corpus: messages that ask, and an answer to them."""
    return {"messages": [*asked, {"role": "assistant", "content": answer}]}


def write_corpus(path: Path, lines: Iterable[dict[str, object]]) -> None:
    """Write a JSONL file, whole or not at all.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_of(path).open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial_of(path).replace(path)


def epochs(samples: Sequence[Sample], batch: int, accumulate: int, seed: int, pad: int) -> Callable[[int, int], Batch]:
    """(step, micro-batch) to a batch: each epoch in an order of its own, sequences of like length together."""
    per_epoch = max(1, len(samples) // batch)
    by_length = sorted(range(len(samples)), key=lambda n: len(samples[n].tokens))

    def make(step: int, part: int) -> Batch:
        number = step * accumulate + part
        rng = np.random.default_rng([seed, number // per_epoch])
        # A little noise on the lengths, then cut: neighbours are alike, and no epoch has another's batches.
        lengths = np.array([len(samples[n].tokens) for n in by_length])
        order = np.argsort(lengths + rng.uniform(0, 4, len(lengths)), kind="stable")
        order = order[rng.integers(0, len(order) % batch + 1 if len(order) > batch else 1) :]  # not ever the longest
        cut = rng.permutation(per_epoch)[number % per_epoch]
        return Batch.of([samples[by_length[n]] for n in order[cut * batch : (cut + 1) * batch]], pad)

    return make
