"""An arm as a model of OpenCompass, in its own process: no port, no tokenizer folder, no truncation behind its back.

OpenCompass hands over chat messages; the arm applies the checkpoint's template to them, once. What was answered before
is not asked again. One thread owns MLX: the one that made the model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opencompass.models.base import BaseModel
from opencompass.models.base_api import APITemplateParser
from opencompass.registry import MODELS

from experiments.quality.arms import Arm, open_arm
from experiments.quality.journal import Entry, Journal
from experiments.quality.messages import messages_of

_TEMPLATE = {
    "round": [{"role": "HUMAN", "api_role": "HUMAN"}, {"role": "BOT", "api_role": "BOT", "generate": True}],
    "reserved_roles": [{"role": "SYSTEM", "api_role": "SYSTEM"}],
}


@MODELS.register_module()
class ArmModel(BaseModel):
    """One arm of the comparison.

    Args:
        path: the checkpoint; OpenCompass shows it.
        arm: the values of `open_arm`; it is opened with the first question that has no answer yet.
        answers: file of the journal.
    """

    is_api = True  # prompts stay chat messages, and no tokenizer is asked for

    def __init__(
        self,
        path: str,
        arm: Mapping[str, Any],
        answers: str,
        max_seq_len: int,
        meta_template: Mapping[str, Any] | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ):
        self.path, self.max_seq_len = path, max_seq_len
        self.generation_kwargs = dict(generation_kwargs or {})  # the inferencer reads it
        self.template_parser = APITemplateParser(dict(meta_template or _TEMPLATE))
        self.journal = Journal(Path(answers))
        self._settings, self._arm, self._thread = dict(arm), None, threading.get_ident()

    def generate(self, inputs: Sequence[Any], max_out_len: int, **unused: Any) -> list[str]:
        """The answers' texts.

        Raises:
            Edge0Error: whatever the arm refuses.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("an arm is asked on the thread that made it")
        return [self._one(messages_of(item), max_out_len) for item in inputs]

    def _one(self, messages: list[dict[str, str]], limit: int) -> str:
        known = self.journal.find(messages, limit)
        if known is None:
            arm = self._open()
            start = time.perf_counter()
            answer = arm.answer(messages, limit)
            known = Entry(answer, time.perf_counter() - start)
            self.journal.add(messages, limit, known)
        return known.answer.text

    def _open(self) -> Arm:
        if self._arm is None:
            self._arm = open_arm(self._settings)
        return self._arm

    def get_token_len(self, prompt: str) -> int:
        """Bytes: nothing is truncated by it."""
        return len(prompt.encode())

    def close(self) -> None:
        if self._arm is not None:
            self._arm.close()
            self._arm = None
