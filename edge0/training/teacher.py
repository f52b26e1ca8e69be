"""A teacher from scratch: a tiny tier trained on seeded problems, then written as an int4 checkpoint.

Two cores train one in well under an hour, so that the whole ladder of quality can be climbed where no released model
fits. Router balance is part of the loss (both families select experts by more than their probability). What was trained
is kept in bf16 as one file of the model's own parameters; from it `write` makes the checkpoint that is served.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from edge0 import models
from edge0.checkpoint.header import ShardHeader, read_header
from edge0.checkpoint.quantise import write_checkpoint
from edge0.checkpoint.strict import plain
from edge0.checkpoint.synth import released_config
from edge0.checkpoint.tokenizer import write_tokenizer
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import ModelConfig, parse_config
from edge0.serving.vocabulary import Vocabulary
from edge0.tiers import Tier, find_tier
from edge0.training import losses
from edge0.training.corpus import Batch, Sample, chat_sample
from edge0.training.files import save_arrays, sha256
from edge0.training.loop import Run
from edge0.training.schedule import SCHEDULES, Schedule
from edge0.training.student import Student
from edge0.training.tasks import PHRASES, TASKS, Problem, held_out

BALANCE = 0.01  # weight of the routers' load balancing
TEACHER_K = 8
# Groups of tasks with sequences of about one length, since a batch is padded to its longest: the group's share of all
# batches, and how often each task is drawn within it. What is learnt last is drawn most.
GROUPS: tuple[tuple[float, Mapping[str, int]], ...] = (
    (0.35, {"addition": 3, "copy": 1, "reverse": 1, "modulo": 3}),
    (0.50, {"chain": 4, "choice-of-4": 3, "function": 1, "instruction": 3}),
    (0.15, {"choice-of-10": 1}),
)
SOURCE = "edge0 train base"
KEPT = "name what `edge0 train base` wrote"
# In a kept file's metadata and a checkpoint's: sha256 of the tokenizer.json that it speaks through.
TOKENIZER = "tokenizer"
ORIGINAL = "original_sha256"  # in a checkpoint's metadata: the kept file that it was quantised from


def sample_of(problem: Problem, vocabulary: Vocabulary) -> Sample:
    messages = [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": problem.answer}]
    return chat_sample(messages, vocabulary)


def drawn(vocabulary: Vocabulary, batch: int, seed: int) -> Callable[[int, int], Batch]:
    """(step, micro-batch) to a batch of fresh problems of one group, none of them held out."""
    pad = vocabulary.tokenizer.eos_token_id

    def make(step: int, part: int) -> Batch:
        return Batch.of([sample_of(problem, vocabulary) for problem in _some(batch, seed, step, part)], pad)

    return make


def _some(batch: int, seed: int, step: int, part: int) -> list[Problem]:
    shares, groups = zip(*GROUPS, strict=True)
    rng = np.random.default_rng([seed, step, part])
    weights = groups[rng.choice(len(groups), p=shares)]
    names, chances = list(weights), np.array(list(weights.values())) / sum(weights.values())
    found: list[Problem] = []
    while len(found) < batch:
        problem = TASKS[names[rng.choice(len(names), p=chances)]](rng)
        if not held_out(problem.prompt):
            found.append(problem)
    return found


def data_digest(schedule: Schedule, seed: int) -> str:
    """What tells the problems of two trainings apart: 64 hexadecimal digits, of all prompts and answers in order."""
    found = hashlib.sha256()
    for step, part in product(range(schedule.steps), range(schedule.accumulate)):
        for problem in _some(schedule.batch, seed, step, part):
            found.update(f"{problem.prompt}\0{problem.answer}\0".encode())
    return found.hexdigest()


def train(
    tier: Tier,
    folder: Path,
    seed: int,
    schedule: Schedule,
    watch: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[Student, Run]:
    """Train `tier` in `folder`, or go on there; the model with what was trained, and its run.

    Raises:
        Edge0Error: TRAINING_MISMATCH, TRAINING_DIVERGED, OUTPUT_UNWRITABLE.
    """
    config = config_of(tier, folder)
    vocabulary = vocabulary_in(folder)
    mx.random.seed(seed)
    model = models.build(config, folder, streamed=False)
    student = Student.of(model, config, TEACHER_K)
    model.train()
    frozen = {name for name, _ in tree_flatten(model.parameters()) if name.endswith("expert_bias")}

    def loss(trained: dict[str, mx.array], batch: Batch) -> tuple[mx.array, dict[str, mx.array]]:
        model.update(tree_unflatten(list(trained.items())))
        logits = student.forward(batch.tokens, batch.prompt_lengths)
        present = mx.arange(batch.tokens.shape[1])[None] < batch.lengths
        task = losses.next_token(logits, batch.tokens, batch.answers)
        spread = [losses.balance(seen.logits, seen.indices, present) for seen in student.executor.seen.values()]
        balance = sum(spread) / len(spread)
        return task + BALANCE * balance, {"task": task, "balance": balance}

    def start() -> dict[str, mx.array]:
        return {n: v.astype(mx.float32) for n, v in tree_flatten(model.parameters()) if n not in frozen}

    identity = {"tier": tier.name, "seed": seed, "schedule": dataclasses.asdict(schedule), "text": dict(tier.text)}
    run = Run(folder, schedule, start, identity)
    run.advance(loss, drawn(vocabulary, schedule.batch, seed), watch)
    model.update(tree_unflatten(list(run.trained.items())))
    model.eval()
    return student, run


def config_of(tier: Tier, folder: Path) -> ModelConfig:
    return parse_config(released_config(tier), folder / "config.json")


def vocabulary_in(folder: Path) -> Vocabulary:
    """The tiny tiers' tokenizer, written into `folder`.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, PHRASES)
    return Vocabulary(folder)


def weights_of(student: Student) -> dict[str, mx.array]:
    """Every parameter by its name, the experts' among them."""
    return dict(tree_flatten(student.model.parameters()))


def keep(student: Student, path: Path, tier: Tier, seed: int, folder: Path) -> None:
    """Save all parameters in bf16 as one file, which names the tokenizer in `folder`.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    arrays = {name: value.astype(mx.bfloat16) for name, value in weights_of(student).items()}
    about = {"source": SOURCE, "tier": tier.name, "seed": str(seed), TOKENIZER: sha256(folder / "tokenizer.json")}
    save_arrays(path, arrays, {"format": "mlx", **about})


def write(kept: Path, directory: Path) -> Path:
    """The int4 checkpoint of a teacher that `keep` saved.

    Raises:
        Edge0Error: what the file is refused for, TIER_UNKNOWN when it names no tier that is trained here,
            TRAINING_MISMATCH when its weights are not the tier's; as `quantise.write_checkpoint`.
    """
    said = _header(kept).metadata
    name, seed = said.get("tier"), said.get("seed")
    if name not in SCHEDULES:
        found = "none" if name is None else plain(name)
        detail, expected = "it is not a kept teacher: its metadata names no tier that is trained", ", ".join(SCHEDULES)
        where = {"path": kept, "tensor": "tier", "expected": expected, "found": found, "hint": KEPT}
        raise Edge0Error(ErrorKind.TIER_UNKNOWN, detail, **where)
    tier = find_tier(name)
    weights = kept_weights(kept)
    config = config_of(tier, directory)
    _check_weights(Student.of(models.build(config, directory, streamed=False), config, TEACHER_K), weights, kept)
    about = {"source": f"{SOURCE} {name} --seed {seed}", ORIGINAL: sha256(kept), TOKENIZER: said.get(TOKENIZER, "")}
    return write_checkpoint(tier, directory, weights, about, PHRASES)


def kept_weights(path: Path) -> dict[str, mx.array]:
    """What `keep` saved, in fp32.

    Raises:
        Edge0Error: what the file is refused for.
    """
    _header(path)  # names what is wrong with the file
    return {name: value.astype(mx.float32) for name, value in mx.load(str(path)).items()}


def _header(kept: Path) -> ShardHeader:
    """As `read_header`, with what helps with a file of one's own."""
    try:
        return read_header(kept)
    except Edge0Error as error:
        said = {"tensor": error.tensor, "expected": error.expected, "found": error.found}
        raise Edge0Error(error.kind, error.detail, path=kept, hint=KEPT, **said) from error


def _check_weights(student: Student, weights: Mapping[str, mx.array], kept: Path) -> None:
    """That names and shapes are those of the student's parameters, or TRAINING_MISMATCH."""
    ours, held = ({name: value.shape for name, value in part.items()} for part in (weights_of(student), weights))
    for name in sorted(ours | held):
        if ours.get(name) != held.get(name):
            expected, found = (list(part[name]) if name in part else "no such tensor" for part in (ours, held))
            _refuse(kept, f"it is of another model: {plain(name)}", expected, found)


def _refuse(kept: Path, detail: str, expected: object, found: object) -> NoReturn:
    raise Edge0Error(ErrorKind.TRAINING_MISMATCH, detail, path=kept, expected=expected, found=found, hint=KEPT)


def check_tokenizer(folder: Path) -> None:
    """That a checkpoint which names its tokenizer has that one; of others nothing is known.

    Raises:
        Edge0Error: TRAINING_MISMATCH.
    """
    weights, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    if not weights.is_file():
        return
    said = read_header(weights).metadata.get(TOKENIZER)
    if said is not None and said != (found := sha256(tokenizer)):
        detail, hint = "it is not the tokenizer that the checkpoint speaks through", "quantise the kept teacher again"
        raise Edge0Error(ErrorKind.TRAINING_MISMATCH, detail, path=tokenizer, expected=said, found=found, hint=hint)


def original(config: ModelConfig, kept: Path, k: int, folder: Path) -> Student:
    """The teacher of a checkpoint before it was quantised: fp32 values of the kept bf16 file.

    Args:
        folder: the checkpoint.

    Raises:
        Edge0Error: what the file is refused for; TRAINING_MISMATCH when it is of another model or another tokenizer.
    """

    model = models.build(config, folder, streamed=False)
    student = Student.of(model, config, k)
    weights = kept_weights(kept)
    _check_weights(student, weights, kept)
    if (said := _header(kept).metadata.get(TOKENIZER)) != (expected := sha256(folder / "tokenizer.json")):
        _refuse(kept, "it speaks through another tokenizer than the checkpoint", expected, said)
    quantised_from = read_header(folder / "model.safetensors").metadata.get(ORIGINAL)
    if quantised_from != (found := sha256(kept)):
        _refuse(kept, "the checkpoint was quantised from another file", quantised_from, found)
    model.update(tree_unflatten(list(weights.items())))
    mx.eval(model.parameters())
    model.eval()
    return student
