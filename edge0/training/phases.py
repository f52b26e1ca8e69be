"""The three phases of an adapter set (paper section 4), and the controls that leave one out or change their order.

1  heads      imitate the next layer's own router at the next token; the base is only looked at.
2  sft        a LoRA on answers, with every served position routed by the heads, which are frozen.
3  on-policy  the student speaks, the full-precision original at its full K scores; reverse KL, top tokens and a tail.

Each phase is a function of what came before, a corpus and a seed, and returns tensors in the files' own names and
shapes. Phase 2 may also be trained on native routes, or together with the heads: these are controls, and what the
order of phases is worth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from edge0.checkpoint.schema import lora_tensors
from edge0.families import ModelConfig
from edge0.prerouter.heads import head_logits
from edge0.training import losses
from edge0.training.corpus import Batch, Corpus, Sample, epochs
from edge0.training.loop import Run, digest
from edge0.training.sampling import sampled
from edge0.training.schedule import Schedule
from edge0.training.scoring import teacher_forced
from edge0.training.student import Student, Tensors, warm_start

Watch = Callable[[int, float], None]
RECALL = "held_recall"  # in the rows of steps whose state is saved: mean over predicted layers
PATIENCE = 2  # looks at held-out recall without a gain, after which phase 1 ends
TOP = 8  # tokens of the teacher that phase 3 tells apart


@dataclass(frozen=True)
class Task:
    """What a phase works on. `held` is never trained on; phase 1 stops by it."""

    student: Student
    corpus: Corpus
    held: tuple[Sample, ...]
    folder: Path
    seed: int
    schedule: Schedule
    watch: Watch = lambda step, loss: None
    checkpointing: bool = False  # recompute each layer in the backward pass: memory for time

    @property
    def pad(self) -> int:
        return int(self.student.config.text["eos_token_id"])

    def batches(self) -> Callable[[int, int], Batch]:
        schedule = self.schedule
        return epochs(self.corpus.samples, schedule.batch, schedule.accumulate, self.seed, self.pad)

    def run(self, phase: str, start: Callable[[], dict[str, mx.array]], **more: Any) -> Run:
        identity = {
            "phase": phase,
            "k": self.student.executor.router.k,
            "base": self.student.fingerprint(),
            "corpus": self.corpus.digest,
            "seed": self.seed,
            "schedule": dataclasses.asdict(self.schedule),
            **more,
        }
        return Run(self.folder, self.schedule, start, identity)


def train_heads(
    task: Task, inner: int, own_features: bool = False, lora: Tensors | None = None
) -> tuple[dict[str, mx.array], Run]:
    """Phase 1, `inner` being the heads' hidden width.

    With `own_features` the one-hots are those of routes that the heads themselves predict, not the base's. With `lora`
    the base carries that correction: the control that trains heads last.
    """
    student = task.student
    executor, owners = student.executor, student.executor.owners

    def loss(heads: Tensors, batch: Batch) -> tuple[mx.array, dict[str, mx.array]]:
        frozen = {name: mx.stop_gradient(value) for name, value in heads.items()} if own_features else None
        student.forward(batch.tokens, batch.prompt_lengths, frozen, lora)
        total = {}
        # A prediction made at t serves t + 1; the last position of a sequence serves none.
        served = executor.served & (executor.positions < batch.lengths)
        counted = mx.concatenate([served[:, 1:], mx.zeros_like(served[:, :1])], axis=1)
        for owner in owners:
            features = mx.stop_gradient(executor.features(owner))
            target = executor.seen[owner + 1].logits
            ahead = mx.concatenate([target[:, 1:], target[:, :1]], axis=1)
            predicted = head_logits(heads, owner, features)
            total[f"layer {owner + 1}"] = losses.imitation(executor.router.law, ahead, predicted, counted)
        return sum(total.values()) / len(total), total

    def start() -> dict[str, mx.array]:
        return warm_start(student, owners, inner, task.seed)

    def look(run: Run) -> dict[str, float]:
        _, recall = teacher_forced(student, task.held, run.trained, lora, task.pad)
        return {RECALL: sum(recall.values()) / len(recall)}

    def stop(rows: list[dict[str, float]]) -> bool:
        seen = [row[RECALL] for row in rows if RECALL in row]
        return len(seen) > PATIENCE and max(seen[:-PATIENCE]) >= max(seen[-PATIENCE:])

    run = task.run("heads", start, inner=inner, own_features=own_features, lora=digest(lora))
    run.advance(loss, task.batches(), task.watch, look, stop)
    return run.trained, run


def train_lora(
    task: Task, heads: Tensors | None, jointly: bool = False, lora: Tensors | None = None
) -> tuple[dict[str, mx.array], Run]:
    """Phase 2 on the student's path; without `heads` on native routes, a control.

    With `jointly` the heads are trained too, by the same loss: a control for "heads first". The result then holds the
    tensors of both files.
    """
    student = task.student

    def loss(trained: Tensors, batch: Batch) -> tuple[mx.array, dict[str, mx.array]]:
        used = trained if jointly else heads
        logits = student.forward(
            batch.tokens, batch.prompt_lengths, heads=used, lora=trained, checkpointing=task.checkpointing
        )
        return losses.next_token(logits, batch.tokens, batch.answers), {}

    def start() -> dict[str, mx.array]:
        return {**(lora or fresh_lora(student.config, task.seed)), **(heads if jointly else {})}

    route = "native" if heads is None else "joint" if jointly else "predicted"
    student.use_lora()
    student.model.train()  # on a GPU the recurrent kernel has no gradient in eval mode
    run = task.run("sft", start, route=route, heads=digest(heads), lora=digest(lora))
    run.advance(loss, task.batches(), task.watch)
    student.model.eval()
    return run.trained, run


def train_on_policy(
    task: Task, teacher: Student, heads: Tensors, lora: Tensors | None, longest: int
) -> tuple[dict[str, mx.array], Run]:
    """Phase 3: the student answers prompts of the corpus by its own sampling, the teacher scores every token of it."""
    student = task.student
    prompts = task.batches()
    run: Run | None = None

    def spoken(step: int, part: int) -> tuple[Batch, mx.array]:
        asked = prompts(step, part)
        key = mx.random.key(task.seed << 40 | step << 8 | part)
        batch = sampled(student, asked, heads, run.trained, longest, task.pad, key)
        scores = teacher.forward(batch.tokens, batch.prompt_lengths)
        mx.eval(scores)
        return batch, scores

    def loss(trained: Tensors, given: tuple[Batch, mx.array]) -> tuple[mx.array, dict[str, mx.array]]:
        batch, scores = given
        logits = student.forward(
            batch.tokens, batch.prompt_lengths, heads=heads, lora=trained, checkpointing=task.checkpointing
        )
        return losses.reverse_kl(logits, scores, batch.answers, TOP), {}

    student.use_lora()
    student.model.train()
    on = {"heads": digest(heads), "lora": digest(lora), "teacher": teacher.fingerprint()}
    run = task.run("on-policy", lambda: dict(lora or fresh_lora(student.config, task.seed)), longest=longest, **on)
    run.advance(loss, spoken, task.watch)
    student.model.eval()
    return run.trained, run


def fresh_lora(config: ModelConfig, seed: int) -> dict[str, mx.array]:
    """A correction that is zero: A is random, B is not there yet."""
    tensors, made = list(lora_tensors(config)), {}
    for tensor, key in zip(tensors, mx.random.split(mx.random.key(seed), len(tensors)), strict=True):
        width = tensor.shape[-1]
        down = tensor.name.endswith("lora_A")
        made[tensor.name] = mx.random.normal(tensor.shape, key=key) / width**0.5 if down else mx.zeros(tensor.shape)
    mx.eval(made)
    return made


def as_stored(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors as an adapter file will give them back: rounded to F16."""
    return {name: value.astype(mx.float16).astype(mx.float32) for name, value in tensors.items()}
