"""What tells two checkpoints of one shape apart, without reading all of either: their routers and their first layer.

Adapters that were trained here name by it the base that they correct; the released ones name none. Experts take no
part, so that a repacked checkpoint is still the same base.
"""

from __future__ import annotations

import hashlib

from edge0.checkpoint.header import CheckpointIndex
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig


def fingerprint(index: CheckpointIndex, config: ModelConfig) -> str:
    """64 hexadecimal digits, from 20 MB of the largest model.

    Raises:
        Edge0Error: READ_FAILED.
    """
    first, experts = f"{config.family.layer_prefix}.0.", f".{config.family.experts_key}."
    digest = hashlib.sha256()
    for name, entry in sorted(index.tensors.items()):
        if ".mlp.gate." in name or name.startswith(first) and experts not in name:
            try:
                with entry.path.open("rb") as file:
                    file.seek(entry.offset)
                    digest.update(f"{name}:{entry.dtype}:{entry.shape}\0".encode() + file.read(entry.nbytes))
            except OSError as error:
                detail = f"cannot be read ({error.strerror})"
                raise Edge0Error(ErrorKind.READ_FAILED, detail, path=entry.path, tensor=name) from error
    return digest.hexdigest()
