"""OpenCompass, driven without its command line: one import, no time stamps, and every failure is one.

Its own runner starts a process for each task and ends with 0 when one fails; and it takes any result that is there for
one of this run, by name. Here tasks run one by one in this process, in a folder that holds nothing of another run. Of
its environment variables `run` takes care before this is imported.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import nltk
from mmengine.config import Config
from opencompass.tasks import OpenICLEvalTask, OpenICLInferTask
from opencompass.utils import build_model_from_cfg, get_logger

from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.configuration import ArmPlan
from experiments.quality.data import Data, Question
from experiments.quality.journal import Entry
from experiments.quality.model import ArmModel
from experiments.quality.rows import answered, verdicts

_DETAILS = {"runner": {"task": {"dump_details": True}}}


class Compass:
    """One configuration file. `folder`: where OpenCompass writes; `answers`: folder of the arms' journals."""

    def __init__(self, config: Path, arms: Mapping[str, ArmPlan], folder: Path, answers: Path, nltk_data: Path):
        self.folder = folder
        nltk.data.path.insert(0, str(nltk_data))
        datasets.disable_progress_bars()
        self._log = folder / "opencompass.log"
        _log_to(self._log)
        self._config = Config.fromfile(str(config))
        self._models = dict(zip(arms, self._config["models"], strict=True))
        for entry in self._models.values():
            entry["answers"] = str(answers / entry["answers"])

    @contextlib.contextmanager
    def model(self, arm: str) -> Iterator[ArmModel]:
        """The arm, open until the end of the block."""
        model = build_model_from_cfg(self._models[arm])
        try:
            yield model
        finally:
            model.close()

    def ask(self, model: ArmModel, arm: str, benchmark: str, data: Data) -> list[tuple[Question, Entry]]:
        """Every question of a benchmark and the arm's answer.

        Raises:
            Edge0Error: whatever the arm refuses; SESSION_VOID.
        """
        abbr = self._models[arm]["abbr"]
        with self._bar():
            OpenICLInferTask(self._task(arm, benchmark)).run(cur_model=model, cur_model_abbr=abbr)
        return list(answered(self.folder, abbr, model.journal, benchmark, data))

    def score(self, arm: str, benchmark: str, data: Data) -> tuple[dict[str, bool], dict[str, Any]]:
        """As `rows.verdicts`.

        Raises:
            Edge0Error: SESSION_VOID.
        """
        OpenICLEvalTask(self._task(arm, benchmark)).run()
        return verdicts(self.folder, self._models[arm]["abbr"], benchmark, data)

    @contextlib.contextmanager
    def _bar(self) -> Iterator[None]:
        """OpenCompass's bars go to the terminal; where there is none, to the log."""
        if sys.stderr.isatty():
            yield
        else:
            with self._log.open("a") as log, contextlib.redirect_stderr(log):
                yield

    def _task(self, arm: str, benchmark: str) -> Config:
        asked = list(self._config[BENCHMARKS[benchmark].variable])
        for one in asked:  # else an empty folder appears wherever the run was started
            one["infer_cfg"]["inferencer"]["output_json_filepath"] = str(self.folder)
        work = {"work_dir": str(self.folder), "eval": _DETAILS}
        return Config({"models": [self._models[arm]], "datasets": [asked], **work})


def _log_to(path: Path) -> None:
    """What OpenCompass and the libraries below it tell goes to a file."""
    handler = logging.FileHandler(path)
    logging.root.addHandler(handler)
    get_logger().handlers[:] = [handler]
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("opencompass.") and isinstance(logger, logging.Logger):
            logger.handlers.clear()  # each has one of its own for stderr
