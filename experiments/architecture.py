"""What the paper's Table 1 says of the two models, counted: `OUT.json [MODEL ...]`.

The released checkpoints are counted from their shapes alone, so it takes a second and no download; of a MODEL directory
the headers and the sizes of its real files are counted, and they take the place of the shapes where they are of the
released model. Knows nothing of the paper's numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from edge0.checkpoint.adapters import open_adapter
from edge0.checkpoint.header import ITEM_BYTES, CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.checkpoint.schema import (
    LORA_ALPHA,
    LORA_RANK,
    Tensor,
    checkpoint_tensors,
    feature_width,
    find_tensor,
    head_tensors,
    lora_tensors,
)
from edge0.checkpoint.synth import released_config
from edge0.families import ModelConfig, parse_config, read_config
from edge0.prerouter.schedule import Schedule, predicted_layers
from edge0.tiers import Tier, find_tier
from experiments.publish import run_command, write_document

RELEASED = ("shape-35b", "shape-8b")
SPARE_BYTES = 8 << 20  # for what computing holds for a moment, beside weights and bank
EMBEDDINGS = (".embed_tokens.", ".word_embeddings.")


def of_shapes(tier: Tier) -> dict[str, Any]:
    """Everything that is counted of a tier, from its shapes; bytes are those of tensors, without file headers."""
    config = _config(tier)
    lora, heads = lora_tensors(config), head_tensors(config, tier.owners, tier.head_hidden)
    files = {
        "base_bytes": _payload(checkpoint_tensors(config)),
        "lora_bytes": _payload(lora),
        "heads_bytes": _payload(heads),
    }
    return {"source": f"shapes of {tier.name}"} | files | _counted(config, tier.owners, tier.head_hidden)


def of_directory(directory: Path) -> dict[str, Any]:
    """The same of a checkpoint directory, from its headers; bytes are those of its files.

    Raises:
        Edge0Error: whatever the checkpoint or its adapters of the served K are refused for.
    """
    config, index = read_config(directory), CheckpointIndex.open(directory)
    layout = ExpertLayout.of(index, config)
    for tensor in checkpoint_tensors(config):
        if not tensor.is_left_over and (layout.stacked or not tensor.is_expert):
            find_tensor(index, tensor)
    lora, heads = (
        open_adapter(directory, config.family, kind, config.family.k_served) for kind in ("lora", "prerouter")
    )
    lora.find(lora_tensors(config))
    heads.find(head_tensors(config, heads.owners, heads.inner_width))
    paths = {shard.path for shard in index.shards} | set(layout.paths)
    files = {
        "base_bytes": sum(path.stat().st_size for path in paths),
        "lora_bytes": lora.header.file_bytes,
        "heads_bytes": heads.header.file_bytes,
    }
    return (
        {"source": f"files of {directory.resolve().name}"} | files | _counted(config, heads.owners, heads.inner_width)
    )


def floor_share(model: Tier | Path, k: int | None = None) -> float:
    """The smallest bank that serves a tier or a directory at K, by default its served one, as a share of all experts.

    Raises:
        Edge0Error: whatever the directory is refused for.
    """
    config = _config(model)
    if isinstance(model, Tier):
        owners = model.owners
    else:
        owners = open_adapter(model, config.family, "prerouter", config.family.k_served).owners
    slots = Schedule.of(config, owners, 1).floor_slots(config, config.family.k_served if k is None else k)
    return slots / (len(config.moe_layers) * config.experts)


def room_share(model: Tier | Path, share: float, k: int) -> float:
    """The bank, as a share of all experts, of a process that may have `share` of its checkpoint's bytes for weights
    (`budgets.memory_limit`): what is left beside those that always stay in memory, but a bank that serves K.

    Raises:
        Edge0Error: whatever the directory is refused for.
    """
    checkpoint = (of_shapes(model) if isinstance(model, Tier) else of_directory(model))["base_bytes"]
    tensors = [tensor for tensor in checkpoint_tensors(_config(model)) if not tensor.is_left_over]
    experts = _payload(tensor for tensor in tensors if tensor.is_expert)
    left = share * checkpoint - (_payload(tensors) - experts) - SPARE_BYTES
    return min(max(left / experts, floor_share(model, k)), 1.0)


def _config(model: Tier | Path) -> ModelConfig:
    if isinstance(model, Tier):
        return parse_config(released_config(model), Path("config.json"))
    return read_config(model)


def _counted(config: ModelConfig, owners: tuple[int, ...], inner: int) -> dict[str, Any]:
    text, family = config.text, config.family
    tensors = [tensor for tensor in checkpoint_tensors(config) if _counts(tensor)]
    stacks = [tensor for tensor in checkpoint_tensors(config) if tensor.is_expert]
    parameters = {tensor.name: _parameters(tensor) for tensor in tensors}
    routed = sum(parameters[tensor.name] for tensor in tensors if tensor.is_expert)
    left_over = sum(parameters[tensor.name] for tensor in tensors if tensor.is_left_over)
    embedding = sum(count for name, count in parameters.items() if any(part in name for part in EMBEDDINGS))
    always = sum(parameters.values()) - routed - left_over - embedding
    head = sum(count for name, count in parameters.items() if name.endswith("lm_head.weight"))
    native, served = text["num_experts_per_tok"], family.k_served
    adapters = sum(prod(tensor.shape) for tensor in (*lora_tensors(config), *head_tensors(config, owners, inner)))
    return {
        "family": family.tag,
        "layers": config.layers,
        "moe_layers": len(config.moe_layers),
        "experts": config.experts,
        "shared_experts": text.get("num_shared_experts", 1),
        "hidden": config.hidden,
        "k_native": native,
        "k_served": served,
        "expert_bytes": sum(_bytes(tensor) for tensor in stacks) // (config.experts * len(config.moe_layers)),
        "stack_tensors": len(stacks) // len(config.moe_layers),
        "predicted_layers": len(predicted_layers(config, owners)),
        "owners": [owners[0], owners[-1]],
        "heads": len(owners),
        "head_input": feature_width(config),
        "head_hidden": inner,
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "parameters": sum(parameters.values()),
        "active": {
            "embedding": embedding,
            "lm_head": head,
            "always": always - head,
            "adapters": adapters,
            "routed_native": routed * native // config.experts,
            "routed_served": routed * served // config.experts,
        },
    }


def _counts(tensor: Tensor) -> bool:
    """Of the three pieces of a quantised matrix only the codes are parameters."""
    return tensor.linear is None or tensor.name.endswith(".weight")


def _parameters(tensor: Tensor) -> int:
    linear = tensor.linear
    return prod(tensor.shape) if linear is None else linear.out * linear.inp * (linear.experts or 1)


def _bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _payload(tensors: Iterable[Tensor]) -> int:
    return sum(map(_bytes, tensors))


def count(directories: Iterable[Path]) -> dict[str, Any]:
    """The released models by tag ("35b", "8b"), and each given checkpoint by the name of its directory.

    Raises:
        Edge0Error: as `of_directory`.
    """
    released = {find_tier(name).family.tag: of_shapes(find_tier(name)) for name in RELEASED}
    checkpoints = {directory.resolve().name: of_directory(directory) for directory in directories}
    for found in checkpoints.values():
        if found["parameters"] == released[found["family"]]["parameters"]:
            released[found["family"]] = found
    return {"released": released, "checkpoints": checkpoints}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.architecture", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL", help="directories of checkpoints")
    options = parser.parse_args()

    return run_command(lambda: write_document(options.out, Path(), count(options.models)))


if __name__ == "__main__":
    sys.exit(main())
