"""What is known of a checkpoint and its options before a byte of a weight is read: headers, adapters, schedule.

Opening is where everything is refused that can be refused early; planning memory and loading the engine both start
from it. Knows nothing of how the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge0.checkpoint.adapters import Adapter, open_adapter
from edge0.checkpoint.fingerprint import fingerprint
from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import ModelConfig, read_config
from edge0.options import EngineOptions
from edge0.prerouter.schedule import Schedule


@dataclass(frozen=True)
class Opening:
    """A checkpoint that was checked as far as headers go. `heads` and `lora` are None where they are switched off."""

    directory: Path
    options: EngineOptions
    config: ModelConfig
    index: CheckpointIndex
    layout: ExpertLayout
    k: int
    heads: Adapter | None
    lora: Adapter | None
    schedule: Schedule

    @classmethod
    def of(cls, directory: Path | str, options: EngineOptions) -> Opening:
        """
        Raises:
            Edge0Error: whatever the checkpoint, its adapters or the options are refused for.
        """
        directory = Path(directory)
        config = read_config(directory)
        index = CheckpointIndex.open(directory)
        layout = ExpertLayout.of(index, config)
        k = config.check_k(options.k if options.k is not None else config.family.k_served)
        adapter_k = options.adapter_k if options.adapter_k is not None else k
        routes = options.prerouter != "off"
        heads = open_adapter(directory, config.family, "prerouter", adapter_k) if routes else None
        lora = open_adapter(directory, config.family, "lora", adapter_k) if options.lora else None
        if bound := [adapter for adapter in (heads, lora) if adapter is not None and adapter.base is not None]:
            found = fingerprint(index, config)
            for adapter in bound:
                adapter.check_base(found)
        schedule = (
            Schedule.of(config, heads.owners, options.launch_groups, heads.header.path)
            if heads
            else Schedule.without_heads(config)
        )
        return cls(directory, options, config, index, layout, k, heads, lora, schedule)

    @property
    def floor_slots(self) -> int:
        """Experts that the bank must hold at the least: a token's working set and the next one's prefetch set."""
        return self.schedule.floor_slots(self.config, self.k)
