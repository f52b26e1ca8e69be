"""Two evaluators in place of OpenCompass's own; only it imports them, by their dotted names in a configuration.

AIME: the shipped one asks a judging model about what its rule rejects, and its rule forks a process for each answer,
which loses verdicts where a device must not be forked. Here the same rule runs in this process. HumanEval: see there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from opencompass.evaluator import math_evaluator
from opencompass.openicl.icl_evaluator import BaseEvaluator
from opencompass.registry import ICL_EVALUATORS

from experiments.quality.humaneval import passes


@ICL_EVALUATORS.register_module()
class RuleScored(BaseEvaluator):
    """OpenCompass's rule of mathematical equality; an answer that it cannot read is wrong, a gold one is an error."""

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        details = []
        for said, right in zip(predictions, references, strict=True):
            told: SimpleQueue = SimpleQueue()
            math_evaluator._verify_worker(said, str(right), told)
            verdict, *rest = told.get_nowait()
            if verdict == "empty":
                return {"error": f"the right answer {right!r} is no number or formula"}
            correct = verdict == "ok" and bool(rest[0])
            details.append({"pred": rest[1] if verdict == "ok" else "", "answer": str(right), "correct": correct})
        return {"accuracy": 100 * sum(one["correct"] for one in details) / len(details), "details": details}


@ICL_EVALUATORS.register_module()
class LocalHumanEval(BaseEvaluator):
    """pass@1 of whatever problems the data set holds."""

    def score(
        self, predictions: Sequence[str], references: Sequence[str], test_set: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        details = [
            {"task_id": task, "is_correct": passes(problem, said)}
            for said, task, problem in zip(predictions, references, test_set, strict=True)
        ]
        return {"pass@1": 100 * sum(one["is_correct"] for one in details) / len(details), "details": details}
