"""The workflow's configuration: checked against its schema, then turned into what a session is told."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from edge0.checkpoint.layout import RECORDS_FOLDER, has_records
from edge0.checkpoint.synth import released_config
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig, parse_config, read_config
from edge0.options import EngineOptions
from edge0.tiers import TIERS, Tier, find_tier
from edge0.trace import RouteTrace
from experiments.architecture import floor_share
from experiments.arms import ARMS
from experiments.conditions import Condition
from experiments.host.calibration import chosen

CONFIG = Path(__file__).with_name("config.yaml")
SCHEMA = Path(__file__).with_name("config.schema.yaml")
PLACE = "experiments/config.yaml or --config"
LISTS = (
    "ks",
    "prefill_tokens",
    "tab1_tiers",
    "full_tiers",
    "full_ks",
    "ladder_tiers",
    "ladder_seeds",
    "ladder_controls",
    "quality_tiers",
    "peers_limits",
    "peers_limit_ks",
)
NULLABLE = (  # or boolean: on the command line both arrive as text
    *("remeasure", "strict", "model", "machine", "adapter_k", "trace", "quality_data", "quality_fp"),
    *("launch_groups", "reader_threads", "full_direct"),
)
SESSION_KEYS = (
    *("condition", "budget_by", "rounds", "bank", "ks", "adapter_k", "trace"),
    *("timed_steps", "warmup_steps", "launch_groups", "reader_threads", "kernels", "seed", "probe_every"),
)


@dataclass(frozen=True)
class Workflow:
    """A checked configuration. `name` is the folder of results; `model` the checkpoint directory."""

    name: str
    model: str
    synthesised: bool
    values: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Workflow:
        """
        Raises:
            Edge0Error: OPTION_INVALID, TIER_UNKNOWN, CONDITION_UNKNOWN, FILE_MISSING, CONFIG_FAMILY, K_INVALID; of a
                tier that is synthesised also ADAPTER_MISSING and BANK_TOO_SMALL.
        """
        values = dict(values)
        # On the command line, `ks=8` is one number, the items of `ks=[2,8]` arrive as text, and so does `false`.
        for key in LISTS:
            items = values.get(key)
            items = items if isinstance(items, list) else [items]
            values[key] = [yaml.safe_load(item) if isinstance(item, str) else item for item in items]
        for key in NULLABLE:
            if values.get(key) in ("true", "false", "null"):
                values[key] = yaml.safe_load(values[key])
        schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
        _refuse_unknown(values, schema["properties"])
        for error in sorted(Draft202012Validator(schema).iter_errors(values), key=lambda error: list(error.path)):
            key = ".".join(map(str, error.path)) or None
            raise Edge0Error(ErrorKind.OPTION_INVALID, error.message, path=PLACE, tensor=key)
        for key in ("condition", "tab1_condition"):
            values[key] = str(_of_key(key, Condition.parse, values[key]))
        if values.get("trace") is not None:
            RouteTrace.load(values["trace"])
        _check_tab1(values["tab1_tiers"])
        limits, ks = values["peers_limits"], values["peers_limit_ks"]
        if len(limits) != len(ks):
            sides = {"expected": f"one K for each of {len(limits)} limits", "found": len(ks)}
            raise Edge0Error(
                ErrorKind.OPTION_INVALID, "lists that go together", path=PLACE, tensor="peers_limit_ks", **sides
            )
        _check_records(values.get("records"))
        model = values.get("model")
        if model is None:
            tier = _of_key("tier", find_tier, values["tier"])
            config = parse_config(released_config(tier), Path("config.json"))
            _check_widths(config, values)
            _check_adapters(tier, values["ks"], values.get("adapter_k"))
            _check_bank(tier, max(values["ks"]), values["bank"])
            values |= _chosen(values, config)
            return cls(tier.name, f"models/{tier.name}", True, values)
        config = read_config(model)
        _check_widths(config, values)
        values |= _chosen(values, config)
        name = values["tier"] if values["tier"] not in TIERS else Path(model).resolve().name
        return cls(name, str(model), False, values)

    def session_arguments(self, **changes: Any) -> str:
        """Command-line arguments of `experiments.session`, with some of them changed.

        Every rule that measures a session takes them from here: they say what is measured, and with remeasure=false
        that nothing is.
        """
        values = {key: self.values.get(key) for key in SESSION_KEYS} | changes
        parts = [] if self.values.get("remeasure", True) else ["--reuse"]
        for key, value in values.items():
            flag = key.replace("_", "-")
            if isinstance(value, bool):
                parts.append(f"--{'' if value else 'no-'}{flag}")
            elif isinstance(value, list | tuple):
                parts += [f"--{flag}", *(shlex.quote(str(item)) for item in value)]
            elif value is not None:
                parts += [f"--{flag}", shlex.quote(str(value))]
        return " ".join(parts)


def _chosen(values: Mapping[str, Any], config: ModelConfig) -> dict[str, int]:
    """What the configuration leaves open: as this machine was calibrated for such a model, else the engine's own."""
    found = chosen(config)
    return {
        key: found.get(key, getattr(EngineOptions(), key))
        for key in ("launch_groups", "reader_threads")
        if values.get(key) is None
    }


def _of_key(key: str, read: Callable[[Any], Any], value: Any) -> Any:
    """What `read` makes of a value; a refusal names the configuration and the key."""
    try:
        return read(value)
    except Edge0Error as error:
        sides = {"expected": error.expected, "found": error.found, "hint": error.hint}
        raise Edge0Error(error.kind, error.detail, path=PLACE, tensor=key, **sides) from error


def _check_widths(config: ModelConfig, values: Mapping[str, Any]) -> None:
    """Every K that is asked for can be routed."""
    for key in ("ks", "peers_limit_ks"):
        for k in values[key]:
            _of_key(key, config.check_k, k)


def _check_records(records: str | None) -> None:
    """A repacked copy is one: else a target fails after what it measured."""
    if records is not None and not has_records(Path(records)):
        raise Edge0Error(
            ErrorKind.FILE_MISSING,
            f"no repacked checkpoint in {records}",
            path=PLACE,
            tensor="records",
            expected=f"a directory with {RECORDS_FOLDER}",
            hint=f"edge0 repack MODEL {shlex.quote(records)} writes one",
        )


def _check_adapters(tier: Tier, ks: list[int], adapter_k: int | None) -> None:
    """Every K has an adapter set, its own or the one of `adapter_k`."""
    key, asked = ("ks", ks) if adapter_k is None else ("adapter_k", [adapter_k])
    if unknown := sorted(set(asked) - set(tier.ks)):
        raise Edge0Error(
            ErrorKind.ADAPTER_MISSING,
            f"{tier.name} is synthesised without adapters for that",
            path=PLACE,
            tensor=key,
            expected=", ".join(map(str, tier.ks)),
            found=", ".join(map(str, unknown)),
            hint="name one of these"
            + ("" if adapter_k is not None else ", or set adapter_k to use its adapters at another K"),
        )


def _check_bank(tier: Tier, k: int, bank: float) -> None:
    """The smallest bank depends on nothing that is measured: no session needs to find it out."""
    needed = math.ceil(floor_share(tier, k) * 1e4) / 1e4
    if bank < min(needed, 1):
        raise Edge0Error(
            ErrorKind.BANK_TOO_SMALL,
            f"{tier.name} at K={k} cannot be served: one token's experts and the prefetch for the next do not fit",
            path=PLACE,
            tensor="bank",
            expected=f"a share of at least {needed:g}",
            found=f"{bank:g}",
            hint=f"set bank={needed:g}, or a smaller K",
        )


def _check_tab1(names: list[str]) -> None:
    """Tiers of two models, each of which the arms' own bank can serve: else Table 1 fails after what it measured."""
    tiers = [_of_key("tab1_tiers", find_tier, name) for name in names]
    if len({tier.family for tier in tiers}) < len(tiers):
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "one tier of each model",
            path=PLACE,
            tensor="tab1_tiers",
            expected="one of 35b and one of 8b",
            found=names,
        )
    large = ARMS["prerouter-large"].bank
    for tier in tiers:
        if floor_share(tier) > large:
            raise Edge0Error(
                ErrorKind.OPTION_INVALID,
                f"{tier.name} cannot be served from the large bank of Table 1",
                path=PLACE,
                tensor="tab1_tiers",
                expected=f"a tier that needs at most {large:.2f} of its experts in memory",
                found=f"{floor_share(tier):.2f}",
            )


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the keys are {', '.join(known)}"
            raise Edge0Error(ErrorKind.OPTION_INVALID, "unknown key", path=PLACE, tensor=str(key), hint=hint)
