"""Which of a session's arms can run here: `python -m experiments.peers.ready LIBRARY.json FILE.json`.

Prints the arms of llama.cpp and the options that they need, for the end of a session's `--arms`; nothing where the
library was not built or the model has no file, of which the two documents say why.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge0.tiers import find_tier
from experiments.architecture import floor_share, room_share
from experiments.arms import ARMS
from experiments.config import Workflow


def arguments(library: Mapping[str, Any], file: Mapping[str, Any]) -> str:
    """Arms and options of `experiments.session`, quoted; "" where there are none."""
    if not library["built"] or file["gguf"] is None:
        return ""
    arms = [name for name, arm in ARMS.items() if arm.peer]
    return shlex.join([*arms, "--gguf", file["gguf"], "--peers", library["folder"]])


def was_built(document: Path) -> bool:
    """Whether a library's document says that it was built; one that could not be is tried again by every call."""
    with suppress(OSError, ValueError):
        return bool(json.loads(document.read_text(encoding="utf-8"))["built"])
    return False


def limited_arguments(workflow: Workflow, share: float, k: int) -> str:
    """Arguments of a session under a limit on the whole process: the bank that the limit leaves room for; where stacks
    are built beside it, the smallest that serves K."""
    model = find_tier(workflow.name) if workflow.synthesised else Path(workflow.model)
    banks = {"bank": room_share(model, share, k), "stack_bank": floor_share(model, k)}
    banks = {name: min(math.ceil(share * 1e4) / 1e4, 1.0) for name, share in banks.items()}
    return workflow.session_arguments(condition="limit", ks=[k], kernels="auto", lora=False, trace=None, **banks)


def main() -> int:
    print(arguments(*(json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:3])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
