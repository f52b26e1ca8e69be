"""Which of a session's arms can run here: `python -m experiments.peers.ready LIBRARY.json FILE.json`.

Prints the arms of llama.cpp and the options that they need, for the end of a session's `--arms`; nothing where the
library was not built or the model has no file, of which the two documents say why.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.arms import ARMS


def arguments(library: Mapping[str, Any], file: Mapping[str, Any]) -> str:
    """Arms and options of `experiments.session`, quoted; "" where there are none."""
    if not library["built"] or file["gguf"] is None:
        return ""
    arms = [name for name, arm in ARMS.items() if arm.peer]
    return shlex.join([*arms, "--gguf", file["gguf"], "--peers", library["folder"]])


def main() -> int:
    print(arguments(*(json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:3])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
