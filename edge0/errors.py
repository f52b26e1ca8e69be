"""The error kinds of Edge0: one enum that is the documentation, the test list and the taxonomy.

Knows nothing of how an error is shown. Every error is one line that names the file, the tensor or key, what was
expected, what was found and what to do; commands print that line and leave with `EXIT_CODE`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 2


class ErrorKind(enum.Enum):
    """Why Edge0 refuses. Each member is expected of a call by at least one test; a test of its own looks for these."""

    # --- safetensors files -------------------------------------------------------------------------------------
    FILE_MISSING = "a file that the checkpoint needs is not there"
    FILE_UNREADABLE = "a file is there but cannot be opened or read"
    HEADER_TOO_SHORT = "the file ends before its 8-byte header length"
    HEADER_LENGTH = "the header length is zero, above the cap of 100,000,000 bytes, or beyond the end of the file"
    HEADER_UTF8 = "the header is not UTF-8"
    HEADER_JSON = "the header is not a JSON object, or holds a duplicate key"
    HEADER_METADATA = "__metadata__ is not a map of strings to strings"
    TENSOR_COUNT = "the header lists more tensors than the cap"
    TENSOR_ENTRY = "a tensor entry lacks dtype, shape or data_offsets, or holds something of another type"
    TENSOR_DTYPE = "a tensor has a dtype that safetensors does not define"
    TENSOR_SHAPE = "a tensor shape has a negative or non-integer dimension, or overflows"
    TENSOR_OFFSETS = "a tensor's offsets are negative, reversed, or disagree with dtype and shape"
    TENSOR_OVERLAP = "two tensors share bytes"
    TENSOR_HOLE = "bytes of the data section belong to no tensor"
    FILE_TRUNCATED = "the file is shorter than its header says"
    FILE_TRAILING = "the file is longer than its header says"
    # --- checkpoints -------------------------------------------------------------------------------------------
    INDEX_MALFORMED = "model.safetensors.index.json is not JSON, or its weight_map is not a map of strings"
    INDEX_MISMATCH = "the index and the shards disagree about which file holds a tensor"
    TENSOR_DUPLICATE = "two shards hold a tensor of the same name"
    CONFIG_MALFORMED = "config.json is not a JSON object or lacks a field that the family needs"
    CONFIG_FAMILY = "config.json names an architecture that Edge0 does not serve"
    TENSOR_MISSING = "a tensor that the config calls for is not in the checkpoint"
    TENSOR_MISMATCH = "a tensor's dtype or shape disagrees with the config"
    LAYOUT_MALFORMED = "a repacked file of expert records is not what the config calls for"
    FILE_CHANGED = "a file is no longer the one whose header was checked"
    CHECKPOINT_INVALID = "edge0 verify found problems, each on a line of its own"
    # --- adapters ----------------------------------------------------------------------------------------------
    ADAPTER_MISSING = "no LoRA or prerouter file where the tier looks for one"
    ADAPTER_METADATA = "an adapter's metadata is absent or malformed"
    ADAPTER_MISMATCH = "an adapter was made for another model, kind, K or format version"
    # --- options -----------------------------------------------------------------------------------------------
    TIER_UNKNOWN = "no tier of that name"
    CONDITION_UNKNOWN = "no page-cache condition of that name"
    OPTION_INVALID = "an option has a value outside its range"
    K_INVALID = "K is not between 1 and the number of routed experts (or the groups that may be selected)"
    BANK_TOO_SMALL = "the bank cannot hold a token's working set and the prefetch, two whole layers, or one more expert"
    MEMORY_TOO_SMALL = "the memory budget is below the floor of this checkpoint and these options"
    OUTPUT_UNWRITABLE = "an output cannot be written"
    OUTPUT_BUSY = "another process is writing the same output"
    MACHINE_BUSY = "another measurement is running on this machine"
    # --- training ----------------------------------------------------------------------------------------------
    CORPUS_INVALID = "a corpus holds lines that are no samples, or none at all"
    TRAINING_MISMATCH = "a folder holds a training run of something else, or a teacher is of another model"
    TRAINING_DIVERGED = "a loss is not a finite number"
    # --- while serving -----------------------------------------------------------------------------------------
    READ_FAILED = "the storage returned an error or fewer bytes than asked for while weights were read"
    EXPERT_ABSENT = "a layer routed to an expert that is not in memory; it is never replaced by a zero"
    ENGINE_CLOSED = "a request was made to an engine that was closed"
    PROMPT_INVALID = "a prompt is empty, too long, or holds a token outside the vocabulary"
    NUMERIC = "a logit is not a finite number"
    REQUEST_INVALID = "a request to the server is malformed, or asks for what is not served"
    TRACE_INVALID = "a route trace is malformed, was made for another model or K, or is shorter than a request"
    TEMPLATE_INVALID = "a chat template cannot be rendered, or reached for what its sandbox forbids"
    PROBE_UNAVAILABLE = "the page-cache state of the checkpoint cannot be read on this machine"
    SESSION_VOID = "a session has no valid run left to speak from"


class Edge0Error(Exception):
    """An expected failure, told in one line.

    Args:
        kind: which rule was broken.
        detail: the sentence that says what happened, without the file name.
        path: the file concerned, if one is.
        tensor: the tensor or key concerned, if one is.
        expected, found: the two sides of the disagreement, as far as there are two.
        hint: what the reader can do.
    """

    def __init__(
        self,
        kind: ErrorKind,
        detail: str,
        *,
        path: os.PathLike[str] | str | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ):
        self.kind, self.detail, self.path, self.tensor = kind, detail, path, tensor
        self.expected, self.found, self.hint = expected, found, hint
        super().__init__(self._line())

    def _line(self) -> str:
        where = ": ".join(str(part) for part in (self.path, self.tensor) if part is not None)
        line = f"{where}: {self.detail}" if where else self.detail
        sides = [
            (name, side) for name, side in (("expected", self.expected), ("found", self.found)) if side is not None
        ]
        if sides:
            line += " (" + ", ".join(f"{name} {side}" for name, side in sides) + ")"
        if self.hint:
            line += f"; {self.hint}"
        return " ".join(line.split())


@contextmanager
def writing(path: os.PathLike[str] | str, hint: str | None = None, also: type[Exception] = OSError) -> Iterator[None]:
    """What fails to be written is OUTPUT_UNWRITABLE with this path. `also`: how a library says so. Wraps no reads."""
    try:
        yield
    except (OSError, also) as error:
        detail = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=path, hint=hint) from error
