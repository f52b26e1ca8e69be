"""Everything that keeps a checkpoint directory from being served: its files first, then what only the libraries know.

Whether mlx-lm can build the model of config.json, and whether the tokenizer can be served, is found by asking for both,
as opening does. No weight is read and nothing is computed.
"""

from __future__ import annotations

from pathlib import Path

from edge0 import models
from edge0.checkpoint.verify import Progress, Report, verify_files
from edge0.errors import ErrorKind
from edge0.families import read_config
from edge0.serving.template import render
from edge0.serving.vocabulary import Vocabulary


def verify(directory: Path | str, sha256: bool = False, progress: Progress | None = None) -> Report:
    """Check the files of a checkpoint in either layout, then its model and its tokenizer; checksums if asked.

    Never raises for what is wrong with the checkpoint. `progress` is that of the checksums.
    """
    directory = Path(directory)
    report = verify_files(directory, sha256, progress)
    _check_libraries(directory, report)
    return report


def _check_libraries(directory: Path, report: Report) -> None:
    """The libraries believe config.json, which can ask for any size: they see it when the tensors are as it says.

    The tokenizer comes last, for its library reads config.json too, and would blame the tokenizer for a fault there.
    """
    config = report.attempt(lambda: read_config(directory))
    told = {problem.kind for problem in report.problems}
    if config is None or told & {ErrorKind.TENSOR_MISSING, ErrorKind.TENSOR_MISMATCH}:
        return
    model = report.attempt(lambda: models.build(config, directory, streamed=True))
    if model is not None and not any(problem.path == directory / "tokenizer.json" for problem in report.problems):
        vocabulary = report.attempt(lambda: Vocabulary(directory))
        if vocabulary is not None:
            _check_template(vocabulary, report)


def _check_template(vocabulary: Vocabulary, report: Report) -> None:
    if vocabulary.tokenizer.has_chat_template:
        report.attempt(lambda: render(vocabulary, [{"role": "user", "content": "Hello"}]))
    else:
        report.notes.append(f"{vocabulary.directory}: no chat template; it can complete prompts and not chat")
