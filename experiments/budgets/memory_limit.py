"""How much memory a process may have when a checkpoint does not fit: `MODEL SHARE OUT.json`.

The limit is SHARE of the bytes of the checkpoint's files plus `BASE_BYTES`, what a measuring process holds before it
opens one. It counts everything: weights, bank, caches of the request, and the page cache of what the process reads.
Says also whether such a limit can be enforced here, and if not why; nothing is limited by this command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from experiments.architecture import of_directory
from experiments.budgets.cgroups import limited_command
from experiments.publish import run_command, write_document

BASE_BYTES = 128 << 20  # interpreter and libraries: 92 MiB anonymous measured on Linux with Python 3.11; rest is slack


def memory_limit(model: Path, share: float) -> dict[str, Any]:
    """The limit in bytes with its parts, whether it can be enforced, and the reason where it cannot.

    Raises:
        Edge0Error: OPTION_INVALID for a share outside 0 to 1; whatever the checkpoint is refused for.
    """
    if not 0 < share < 1:
        raise Edge0Error(ErrorKind.OPTION_INVALID, "share of the checkpoint", expected="between 0 and 1", found=share)
    checkpoint = of_directory(model)["base_bytes"]
    about = {
        "tier": model.resolve().name,
        "share": share,
        "checkpoint_bytes": checkpoint,
        "base_bytes": BASE_BYTES,
        "limit_bytes": int(share * checkpoint) + BASE_BYTES,
    }
    try:
        with limited_command(about["limit_bytes"]) as limited:
            return about | {"enforced": True, "method": limited.method, "reason": ""}
    except Edge0Error as error:
        return about | {"enforced": False, "method": None, "reason": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.budgets.memory_limit", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("share", type=float, metavar="SHARE")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()

    def command() -> None:
        about = memory_limit(options.model, options.share)
        write_document(options.out, options.model, about)
        print(about["limit_bytes"] if about["enforced"] else 0)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
