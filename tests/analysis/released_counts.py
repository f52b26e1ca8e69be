"""Counts of both released models, as numbers that were published or follow from published shapes by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
SHARED = {"head_hidden": 512, "lora_rank": 16, "lora_alpha": 32, "stack_tensors": 9, "k_native": 8}
COUNTS = {
    "35b": SHARED
    | {
        "source": "shapes of shape-35b",
        "layers": 40,
        "experts": 256,
        "k_served": 4,
        "base_bytes": 19_508_787_456,
        "lora_bytes": 42_332_160,
        "heads_bytes": 138_412_032,
        "heads": 33,
        "predicted_layers": 32,
        "head_input": 2560,
        "expert_bytes": 1_769_472,
        "parameters": 34_660_610_688,
        "active": {
            "embedding": 508_559_360,
            "lm_head": 508_559_360,
            "always": 1_431_237_248,
            "adapters": 90_372_096,
            "routed_native": 1_006_632_960,
            "routed_served": 503_316_480,
        },
    },
    "8b": SHARED
    | {
        "source": "shapes of shape-8b",
        "layers": 24,
        "experts": 128,
        "k_served": 8,
        "base_bytes": 4_508_556_096,
        "lora_bytes": 16_379_904,
        "heads_bytes": 38_797_312,
        "heads": 16,
        "predicted_layers": 16,
        "head_input": 1792,
        "expert_bytes": 1_327_104,
        "parameters": 7_923_998_112,
        "active": {
            "embedding": 241_434_624,
            "lm_head": 241_434_624,
            "always": 464_756_128,
            "adapters": 27_588_608,
            "routed_native": 434_110_464,
            "routed_served": 434_110_464,
        },
    },
}


def write_counts(path: Path, change: Callable[[dict], None] | None = None) -> Path:
    """Write a document of counts; `change(document)` edits it first."""
    checkpoints = {"mini-35b": COUNTS["35b"] | {"source": "files of mini-35b", "base_bytes": 363_575_040}}
    document = {"session": "counted", "released": copy.deepcopy(COUNTS), "checkpoints": checkpoints}
    if change is not None:
        change(document)
    path.write_text(json.dumps(document))
    return path
