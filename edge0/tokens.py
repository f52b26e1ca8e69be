"""Text to token ids and back, with the checkpoint's own tokenizer, never with remote code."""

from __future__ import annotations

from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_wrapped
from transformers.utils import logging

from edge0.errors import Edge0Error, ErrorKind


def load_tokenizer(directory: Path) -> TokenizerWrapper:
    """mlx-lm's wrapper: `encode`, `decode`, `apply_chat_template`, `eos_token_ids`, an incremental detokenizer.

    Raises:
        Edge0Error: FILE_MISSING, FILE_UNREADABLE.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise Edge0Error(ErrorKind.FILE_MISSING, "no tokenizer", path=path)
    logging.set_verbosity_error()  # what it warns of, such as long prompts, is an Edge0Error here
    try:
        return load_wrapped(directory, {"trust_remote_code": False, "local_files_only": True})
    except Exception as error:  # whatever the tokenizer libraries raise, the file is at fault
        raise Edge0Error(ErrorKind.FILE_UNREADABLE, f"not a tokenizer ({error})", path=path) from error
