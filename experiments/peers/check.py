"""Whether GGUF files are the same model: `python -m experiments.peers.check MODEL OUT.json FILE.json...`.

Both engines answer the same tokens, one at a time: stock mlx-lm on the checkpoint, llama.cpp on the file. Of each
position the relative error of the logits, their correlation, and whether the greedy choice is one. With an fp32 or a
Q4_1 file the weights are equal, so what is left is arithmetic: of Q4_1 llama.cpp multiplies activations rounded to 8
bits, which turns a route here and there, and a wrong route changes all that follows where weights are random. A
FILE.json may say that there is no file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from edge0 import models
from edge0.checkpoint.header import CheckpointIndex
from edge0.families import ModelConfig, read_config
from experiments.peers.llama import LlamaDecoder
from experiments.publish import run_command, write_document

TOKENS = 64


def compare(model: Path, file: Path, library: Path, tokens: int = TOKENS, seed: int = 0) -> dict[str, Any]:
    """What both say to `tokens` random tokens.

    Raises:
        Edge0Error: as `LlamaDecoder` and `models.load`.
    """
    config = read_config(model)
    given = np.random.default_rng(seed).integers(config.vocab, size=tokens).tolist()
    ours, theirs = stock(model, config, given), peer(file, config, given, library)
    errors = np.linalg.norm(theirs - ours, axis=1) / np.linalg.norm(ours, axis=1)
    alike = [float(np.corrcoef(a, b)[0, 1]) for a, b in zip(ours, theirs, strict=True)]
    return {
        "tokens": tokens,
        "relative_error": errors.tolist(),
        "correlation": alike,
        "median_relative_error": float(np.median(errors)),
        "median_correlation": float(np.median(alike)),
        "same_choice": float(np.mean(ours.argmax(1) == theirs.argmax(1))),
    }


def stock(model: Path, config: ModelConfig, tokens: list[int]) -> np.ndarray:
    """Logits of mlx-lm's own model after each token, fp32 `[tokens, vocab]`."""
    network = models.load(model, config, CheckpointIndex.open(model), streamed=False)
    cache = network.make_cache()
    rows = (network(mx.array([[token]]), cache)[0, -1].astype(mx.float32) for token in tokens)
    return np.stack([np.array(row) for row in rows])


def peer(file: Path, config: ModelConfig, tokens: list[int], library: Path) -> np.ndarray:
    """The same of llama.cpp."""
    k = config.text["num_experts_per_tok"]
    decoder = LlamaDecoder(file, config, k, "mapped", len(tokens), library)
    try:
        rows = []
        decoder.begin(tokens[:1])
        rows.append(decoder.logits().copy())
        for token in tokens[1:]:
            decoder.step(token)
            rows.append(decoder.logits().copy())
        return np.stack(rows)
    finally:
        decoder.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.peers.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json", help="what experiments.peers.gguf said")
    options = parser.parse_args()

    def command() -> None:
        checks = []
        for path in options.files:
            made = json.loads(path.read_text(encoding="utf-8"))
            checks.append({key: made[key] for key in ("kind", "reason")})
            if made["gguf"] is not None:
                checks[-1] |= compare(options.model, Path(made["gguf"]), Path(made["library"]))
        write_document(options.out, options.model, {"checks": checks})

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
