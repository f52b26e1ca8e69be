"""The ladder of quality of one tier and seed: `python -m experiments.training.ladder MODEL --original FILE ...`.

From the teacher before it was quantised down to int4 at fewer experts, then up again: untrained heads, trained heads,
recovery LoRA, on-policy distillation; at last the trained set is served by the streaming engine. Each rung is scored on
the same held-out problems, one row per rung and problem. `--controls` adds what the paper says must not be done, and
what the heads' features and the route's authority are worth. Makes rows and files; what they mean is said by
`analysis.ladder.table`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from edge0 import blas

BLAS = blas.load()  # before anything imports MLX

import pandas as pd  # noqa: E402

from edge0.checkpoint.synth import released_config  # noqa: E402
from edge0.engine import Engine  # noqa: E402
from edge0.errors import Edge0Error, ErrorKind  # noqa: E402
from edge0.families import read_config  # noqa: E402
from edge0.options import EngineOptions  # noqa: E402
from edge0.prerouter.predictor import TEACHER  # noqa: E402
from edge0.serving.vocabulary import Vocabulary  # noqa: E402
from edge0.tiers import find_tier  # noqa: E402
from edge0.training import phases, teacher  # noqa: E402
from edge0.training.adapters import save_adapter  # noqa: E402
from edge0.training.corpus import Corpus, read_corpus, write_corpus  # noqa: E402
from edge0.training.sampling import own_lines  # noqa: E402
from edge0.training.schedule import PHASE1, PHASE2, PHASE3, Schedule  # noqa: E402
from edge0.training.scoring import Score, answer_limit, score  # noqa: E402
from edge0.training.student import Student, Tensors, warm_start  # noqa: E402
from edge0.training.tasks import TASKS, Problem, problems  # noqa: E402
from experiments.publish import publish, run_command  # noqa: E402
from experiments.training.arguments import positive, seed  # noqa: E402
from experiments.training.records import described, record  # noqa: E402
from experiments.training.watching import watching  # noqa: E402

LONGEST = 64  # tokens of an answer
STOPPING = 20  # held-out problems of each task that phase 1 stops by


@dataclass(frozen=True)
class Options:
    """What a ladder depends on. `held`: problems of each task that score; `prompts`: of each task that train."""

    tier: str
    k: int
    seed: int
    held: int = 60
    prompts: int = 800
    phase1: int = PHASE1.steps
    phase2: int = PHASE2.steps
    phase3: int = PHASE3.steps
    controls: bool = False


def held_problems(count: int) -> list[Problem]:
    """The problems that score, alike for all seeds, each once."""
    return [problem for task in TASKS for problem in distinct(task, 0, True, count)]


def distinct(task: str, seed: int, held: bool, count: int) -> Iterator[Problem]:
    """Problems with different prompts; fewer than `count` where the task has no more."""
    seen: set[str] = set()
    for problem in islice(problems(task, seed, held), 20 * count):
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            yield problem
        if len(seen) == count:
            return


class Ladder:
    """The rungs of one tier and seed, climbed one after the other.

    Args:
        model: the int4 checkpoint.
        original: what it was quantised from, bf16.
        work: folder of training runs, the corpus and the trained set; a run that is there goes on.
    """

    def __init__(self, options: Options, model: Path, original: Path, work: Path):
        self.options, self.model, self.work = options, model, work
        self.tier = find_tier(options.tier)
        self.vocabulary = Vocabulary(model)
        self.end = self.vocabulary.tokenizer.eos_token_id
        config = read_config(model)
        if dict(config.raw) != released_config(self.tier):
            detail, hint = "option tier", "name the tier that the checkpoint is of"
            raise Edge0Error(ErrorKind.OPTION_INVALID, detail, path=model, expected=options.tier, hint=hint)
        teacher.check_tokenizer(model)
        self.original = {k: teacher.original(config, original, k, model) for k in {options.k, teacher.TEACHER_K}}
        self.problems = held_problems(options.held)
        self.samples = tuple(teacher.sample_of(problem, self.vocabulary) for problem in self.problems)
        asked = {problem.prompt for problem in self.problems}
        others = (problem for task in TASKS for problem in distinct(task, 1, True, STOPPING))
        # Phase 1 ends by these, which no rung is scored on.
        self.stopping = tuple(teacher.sample_of(p, self.vocabulary) for p in others if p.prompt not in asked)
        self.rows: list[dict[str, Any]] = []
        self.recalls: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self.corpus = self.timed("corpus", self._corpus)

    def climb(self) -> None:
        """Score every rung, training where there is something to train."""
        k, full, seed = self.options.k, teacher.TEACHER_K, self.options.seed
        for experts in sorted({k, full}, reverse=True):
            self.rung("fp", self.original[experts], experts)
        for experts in sorted({k, full}, reverse=True):
            self.rung("int4", Student(self.model, experts), experts)
        untrained = warm_start(self.student(), self.tier.owners, self.tier.head_hidden, seed)
        self.rung("untrained-heads", self.student(), k, untrained)
        heads = self.heads("phase1")
        self.rung("phase1", self.student(), k, heads)
        lora = self.lora("phase2", heads)
        self.rung("phase2", self.student(), k, heads, lora)
        final = self.on_policy("phase3", heads, lora)
        self.rung("final", self.student(), k, heads, final)
        self.deploy(heads, final)
        if self.options.controls:
            self.control(untrained, heads)

    def control(self, untrained: Tensors, heads: Tensors) -> None:
        """What the paper says of the order of phases, of features and of authority, as arms of their own."""
        k, full = self.options.k, teacher.TEACHER_K
        self.rung("advisory", self.student(advisory=True), k, heads)
        self.rung("base-features", self.student(feature=TEACHER), k, heads)
        self.rung("own-features", self.student(), k, self.heads("own-features", own_features=True))
        native = self.lora("native-path", None)
        self.rung("lora-native-path", self.student(), k, heads, native)
        first = self.lora("sft-first", untrained)
        self.rung("sft-first", self.student(), k, self.heads("sft-first-heads", lora=first), first)
        joint = self.lora("joint", untrained, jointly=True)
        self.rung("joint", self.student(), k, joint, joint)
        self.rung("distil-alone", self.student(), k, heads, self.on_policy("distil-alone", heads, None))
        if k != full:
            wide = self.heads("full-k-heads", k=full)
            corrected = self.lora("full-k-lora", wide, k=full)
            for experts in (full, k):
                self.rung("full-k-set", self.student(experts), experts, wide, corrected)

    def student(self, k: int | None = None, **more: Any) -> Student:
        return Student(self.model, k or self.options.k, self.tier.owners, **more)

    def rung(self, name: str, student: Student, k: int, heads: Tensors | None = None, lora: Tensors | None = None):
        """Score a student, its adapters as a file would give them back."""
        heads, lora = (None if part is None else phases.as_stored(part) for part in (heads, lora))
        if lora is not None:
            student.use_lora()
        scores, recalls = self.timed(f"score {name} K={k}", lambda: score(student, self.samples, heads, lora, self.end))
        self.note(name, k, scores)
        about = {"rung": name, "k": k, "seed": self.options.seed}
        self.recalls += [{**about, "layer": layer, "recall": value} for layer, value in recalls.items()]

    def note(self, name: str, k: int, scores: list[Score]) -> None:
        for number, (problem, found) in enumerate(zip(self.problems, scores, strict=True)):
            said = self.vocabulary.tokenizer.decode(list(found.answer))
            about = {"rung": name, "k": k, "seed": self.options.seed, "task": problem.task, "problem": number}
            self.rows.append(about | {"exact": found.exact, "cross_entropy": found.cross_entropy, "answer": said})
        exact = sum(found.exact for found in scores) / len(scores)
        print(f"{name} K={k}: exact match {exact:.3f}", file=sys.stderr, flush=True)

    def deploy(self, heads: Tensors, lora: Tensors) -> None:
        """Put the trained set beside a copy of the checkpoint, and let the streaming engine answer every problem."""
        served = self.work / "served"
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(self.model, served, ignore=shutil.ignore_patterns("artifacts", "training"))
        for kind, tensors in (("prerouter", heads), ("lora", lora)):
            save_adapter(served, kind, self.options.k, tensors, self.tier.owners, "edge0 ladder")
        self.note("deployed", self.options.k, self.timed("score deployed", lambda: self._served_scores(served)))

    def _served_scores(self, served: Path) -> list[Score]:
        """Exact match of the engine's own answers; cross-entropy is not known of them."""
        found, longest = [], answer_limit(self.samples)
        with Engine(served, EngineOptions(k=self.options.k)) as engine:
            for sample in self.samples:
                asked, expected = list(sample.tokens[: sample.prompt_length]), sample.tokens[sample.prompt_length :]
                request, said = engine.new_request(), []
                logits = engine.prefill(request, asked)
                while len(said) < longest:
                    said.append(int(logits.argmax().item()))
                    if said[-1] == self.end:
                        break
                    logits = engine.step(request, said[-1])
                request.release()
                answer = tuple(token for token in said if token != self.end)
                found.append(Score(tuple(said) == expected, float("nan"), answer))
        return found

    def heads(self, name: str, k: int | None = None, **more: Any) -> dict[str, Any]:
        student = self.student(k)
        if more.get("lora") is not None:
            student.use_lora()
        task = self.task(name, student, PHASE1, self.options.phase1)
        return self.trained(task, lambda task: phases.train_heads(task, self.tier.head_hidden, **more))

    def lora(self, name: str, heads: Tensors | None, k: int | None = None, jointly: bool = False) -> dict[str, Any]:
        student = self.student(k) if heads is not None else Student(self.model, self.options.k)
        task = self.task(name, student, PHASE2, self.options.phase2)
        return self.trained(task, lambda task: phases.train_lora(task, heads, jointly))

    def on_policy(self, name: str, heads: Tensors, lora: Tensors | None) -> dict[str, Any]:
        task = self.task(name, self.student(), PHASE3, self.options.phase3)
        full = self.original[teacher.TEACHER_K]
        return self.trained(task, lambda task: phases.train_on_policy(task, full, heads, lora, LONGEST))

    def task(self, name: str, student: Student, schedule: Schedule, steps: int) -> phases.Task:
        schedule = dataclasses.replace(schedule, steps=steps)
        return phases.Task(student, self.corpus, self.stopping, self.work / "runs" / name, self.options.seed, schedule)

    def trained(self, task: phases.Task, work: Any) -> dict[str, Any]:
        with watching(task.folder.name, task.schedule.steps) as watch:
            watched = dataclasses.replace(task, watch=watch)
            tensors, run = self.timed(f"train {task.folder.name}", lambda: work(watched))
        self.steps[task.folder.name] = run.step
        record(task, run, BLAS, {"ladder": dataclasses.asdict(self.options), "run": task.folder.name})
        return tensors

    def timed(self, name: str, work: Any) -> Any:
        begin = time.monotonic()
        found = work()
        self.seconds[name] = round(time.monotonic() - begin, 1)
        return found

    def _corpus(self) -> Corpus:
        """The teacher's own answers to prompts that are not held out; those that it never ended are left out."""
        about = json.dumps([self.options.seed, self.options.prompts, self.original[teacher.TEACHER_K].fingerprint()])
        path = self.work / f"corpus-{hashlib.sha256(about.encode()).hexdigest()[:12]}.jsonl"
        if not path.is_file():
            asked = [p for task in TASKS for p in distinct(task, 1 + self.options.seed, False, self.options.prompts)]
            samples = [teacher.sample_of(problem, self.vocabulary) for problem in asked]
            write_corpus(path, own_lines(self.original[teacher.TEACHER_K], self.vocabulary, samples, LONGEST))
        corpus = read_corpus(path, self.vocabulary, self.original[self.options.k].config.positions)
        corpus.check_apart(Corpus(Path("the held-out problems"), self.samples, "", 0))
        return corpus


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m experiments.training.ladder", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="the teacher's int4 checkpoint")
    parser.add_argument("--original", type=Path, required=True, help="bf16 weights that it was quantised from")
    parser.add_argument("--root", type=Path, required=True, help="folder of the rows, one folder below it per run")
    parser.add_argument("--work", type=Path, required=True, help="folder of runs, corpus and trained set; kept")
    for field in dataclasses.fields(Options):
        name = f"--{field.name}"
        if field.name == "controls":
            parser.add_argument(name, action="store_true", help="also the arms that the paper warns of")
        elif field.default is dataclasses.MISSING:
            kind = {"tier": str, "seed": seed}.get(field.name, positive)
            parser.add_argument(name, type=kind, required=True)
        else:
            parser.add_argument(name, type=positive, default=field.default, help=f"default {field.default}")
    given = parser.parse_args(argv)
    options = Options(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Options)})
    return run_command(lambda: _run(options, given.model, given.original, given.root, given.work))


def _run(options: Options, model: Path, original: Path, root: Path, work: Path) -> None:
    ladder = Ladder(options, model, original, work)
    ladder.climb()
    about = {
        "tier": options.tier,
        "options": dataclasses.asdict(options),
        "recall": ladder.recalls,
        "seconds": ladder.seconds,
        "steps": ladder.steps,
        "batches": {"phase1": PHASE1.batch, "phase2": PHASE2.batch, "phase3": PHASE3.batch},
        "corpus": described(ladder.corpus),
        "blas": BLAS,
    }
    publish(root, "ladder", pd.DataFrame(ladder.rows), model, about)


if __name__ == "__main__":
    sys.exit(main())
