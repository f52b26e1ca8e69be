"""The loop that all training shares: steps, warm-up, clipping, accumulation, a state on disk, one row per step.

What is trained is a tree of arrays; the loss is a function of that tree and one micro-batch; the batch of a step is a
function of its number. So nothing but the tree, the optimiser and the step make up a state, and a run that was
interrupted goes on to the same bits, from its last step where it was told to end, else from the last one saved. Knows
nothing of models, heads or tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.training.files import save_arrays
from edge0.training.schedule import Schedule

Tree = Any  # arrays in dictionaries and lists
Loss = Callable[[Tree, Any], tuple[mx.array, dict[str, mx.array]]]  # (what is trained, micro-batch) -> loss, figures
STATE, LOSSES = "state.safetensors", "losses.jsonl"
# The package's files that a run computes with.
COMPUTES = ("training", "models", "prerouter", "streaming/moe.py", "routing.py", "lora.py", "families.py")


class Run:
    """One training run in a folder: what is trained, its optimiser, the step it is at, and the rows so far.

    A row is of one step: step, rate, gradient_norm, loss and what else the loss told; losses.jsonl holds them.

    Args:
        identity: what the run depends on beside code and MLX's version; a folder of another identity is refused.

    Raises:
        Edge0Error: TRAINING_MISMATCH when the folder holds a run of another identity; OUTPUT_UNWRITABLE.
    """

    def __init__(self, folder: Path, schedule: Schedule, start: Callable[[], Tree], identity: dict[str, Any]):
        self.folder, self.schedule = folder, schedule
        self.identity = identity | {"code": code(), "mlx": mx.__version__}
        self._optimizer = optim.AdamW(0.0, betas=list(schedule.betas), weight_decay=schedule.weight_decay)
        self.rows: list[dict[str, float]] = []
        self.trained, self.step = start(), 0
        self._optimizer.init(self.trained)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if (folder / STATE).exists():
            self._resume(folder / STATE)

    def advance(
        self,
        loss: Loss,
        batches: Callable[[int, int], Any],
        watch: Callable[[int, float], None] = lambda step, loss: None,
        look: Callable[[Run], dict[str, float]] = lambda run: {},
        stop: Callable[[list[dict[str, float]]], bool] = lambda rows: False,
    ) -> None:
        """Train to the schedule's end, or until `stop` says so of the rows. A run that stopped stays where it is.

        Args:
            batches: (step, micro-batch) to what `loss` takes.
            watch: told each step and its loss. What it raises ends the run, with the state of that step saved.
            look: figures of the run at every `save_every`-th step and the last, kept in the row of that step.

        Raises:
            Edge0Error: TRAINING_DIVERGED, OUTPUT_UNWRITABLE.
        """
        compute = mx.value_and_grad(loss)
        while self.step < self.schedule.steps and not stop(self.rows):
            grads, figures = None, {}
            for part in range(self.schedule.accumulate):
                (value, told), new = compute(self.trained, batches(self.step, part))
                grads = new if grads is None else tree_map(mx.add, grads, new)
                for name, figure in {"loss": value, **told}.items():
                    figures[name] = figures.get(name, 0) + figure / self.schedule.accumulate
                mx.eval(grads, figures)
            if self.schedule.accumulate > 1:
                grads = tree_map(lambda grad: grad / self.schedule.accumulate, grads)
            grads, norm = optim.clip_grad_norm(grads, self.schedule.clip)
            rate = self.schedule.rate(self.step)
            self._optimizer.learning_rate = rate
            self.trained = self._optimizer.apply_gradients(grads, self.trained)
            mx.eval(self.trained, self._optimizer.state, norm)
            row = {name: float(figure) for name, figure in figures.items()}
            if not (math.isfinite(row["loss"]) and math.isfinite(float(norm))):
                raise Edge0Error(
                    ErrorKind.TRAINING_DIVERGED,
                    f"the loss of step {self.step} is {row['loss']}, its gradient's norm {float(norm)}",
                    path=self.folder,
                    hint="lower the learning rate; the state before it is kept",
                )
            self.rows.append({"step": self.step, "rate": rate, "gradient_norm": float(norm), **row})
            self.step += 1
            if due := self.step % self.schedule.save_every == 0 or self.step == self.schedule.steps:
                self.rows[-1] |= look(self)
                self.save()
            try:
                watch(self.step, row["loss"])
            except BaseException:
                if not due:
                    self.save()
                raise
        with writing(path := self.folder / LOSSES), path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)

    def save(self) -> None:
        """Make the state on disk this one, whole or not at all.

        Raises:
            Edge0Error: OUTPUT_UNWRITABLE.
        """
        arrays = {f"trained.{name}": value for name, value in tree_flatten(self.trained)}
        arrays |= {f"optimizer.{name}": value for name, value in tree_flatten(self._optimizer.state)}
        identity = json.dumps(self.identity, sort_keys=True)
        metadata = {"step": str(self.step), "identity": identity, "rows": json.dumps(self.rows)}
        save_arrays(self.folder / STATE, arrays, metadata)

    def _resume(self, state: Path) -> None:
        arrays, metadata = mx.load(str(state), return_metadata=True)
        ours, held = json.loads(json.dumps(self.identity)), json.loads(metadata["identity"])
        if ours != held:
            differing = sorted(key for key in ours | held if ours.get(key) != held.get(key))
            raise Edge0Error(
                ErrorKind.TRAINING_MISMATCH,
                f"the folder holds a run with another {', '.join(differing)}",
                path=state,
                expected=json.dumps({key: ours.get(key) for key in differing}),
                found=json.dumps({key: held.get(key) for key in differing}),
                hint="name another folder, or remove this one",
            )
        self.trained, self._optimizer.state = (
            tree_map_with_path(lambda path, _, name=name: arrays[f"{name}.{path}"], tree)
            for name, tree in (("trained", self.trained), ("optimizer", self._optimizer.state))
        )
        mx.eval(self.trained, self._optimizer.state)
        self.step, self.rows = int(metadata["step"]), json.loads(metadata["rows"])


@cache
def code() -> str:
    """What tells two versions of the computing code apart: 64 hexadecimal digits."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for place in COMPUTES:
        for path in sorted((package / place).rglob("*.py")) or [package / place]:
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def digest(tensors: Mapping[str, mx.array] | None) -> str | None:
    """What tells two sets of tensors apart: 64 hexadecimal digits, None for none."""
    if tensors is None:
        return None
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(f"{name}:{value.shape}\0".encode() + np.array(value.astype(mx.float32)).tobytes())
    return found.hexdigest()
