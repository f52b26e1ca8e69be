"""The one-token-ahead schedule: which layers are predicted, and in which groups a step is launched (section 3.2).

Outputs of one launch appear together at its end. A step is therefore cut into groups of layers; as soon as a group's
head outputs are there, the reads for the next token can start while later groups still compute. This module knows
layer numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig


@dataclass(frozen=True)
class LaunchGroup:
    """Consecutive layers that are launched together; `owners` are those whose heads run at the group's end."""

    layers: range
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    groups: tuple[LaunchGroup, ...]
    predicted: tuple[int, ...]  # layers that consume a prediction

    @classmethod
    def without_heads(cls, config: ModelConfig) -> Schedule:
        """Every layer routes for itself: one group."""
        return cls((LaunchGroup(range(config.layers), ()),), ())

    @classmethod
    def of(cls, config: ModelConfig, owners: Sequence[int], launch_groups: int, path: Path | None = None) -> Schedule:
        """Cut a model at its first and last predicted layer, and what lies between into `launch_groups` groups.

        Raises:
            Edge0Error: OPTION_INVALID when `launch_groups` is not between 1 and the number of predicted layers;
                ADAPTER_MISMATCH when the owners are not one run of expert layers.
        """
        predicted = predicted_layers(config, owners, path)
        if not 1 <= launch_groups <= len(predicted):
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                "launch groups",
                expected=f"1 to {len(predicted)} (the predicted layers)",
                found=launch_groups,
            )
        start, stop = predicted[0], predicted[-1] + 1
        cuts = [start + round(part * len(predicted) / launch_groups) for part in range(launch_groups + 1)]
        edges = [0, *cuts, *([config.layers] if stop < config.layers else [])]
        used = {layer - 1 for layer in predicted}
        groups = tuple(
            LaunchGroup(range(low, high), tuple(owner for owner in range(low, high) if owner in used))
            for low, high in zip(edges, edges[1:], strict=False)
        )
        return cls(groups, predicted)

    @property
    def owner_groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(group.owners for group in self.groups if group.owners)

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(owner for group in self.groups for owner in group.owners)

    def floor_slots(self, config: ModelConfig, k: int) -> int:
        """Experts that memory must hold at the least: a token's working set and the next one's prefetch set."""
        return k * (len(config.moe_layers) + len(self.predicted))


def predicted_layers(config: ModelConfig, owners: Sequence[int], path: Path | None = None) -> tuple[int, ...]:
    """The layers that consume a prediction: each owner's next; 35b never predicts its last layer. `path`: for errors.

    Raises:
        Edge0Error: ADAPTER_MISMATCH when the owners are not one run of expert layers.
    """
    last = config.layers if config.family.last_layer_predicted else config.layers - 1
    layers = tuple(sorted(owner + 1 for owner in owners if owner + 1 < last))
    run = range(layers[0], layers[-1] + 1) if layers else range(0)
    if not layers or layers != tuple(run) or layers[0] - 1 < config.dense_layers:
        raise Edge0Error(
            ErrorKind.ADAPTER_MISMATCH,
            "the heads do not belong to one run of this model's expert layers",
            path=path,
            tensor="owners",
            expected=f"layers within {config.dense_layers} to {config.layers - 1}",
            found=sorted(owners),
        )
    return layers
