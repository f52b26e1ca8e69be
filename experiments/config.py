"""The workflow's configuration: checked against its schema, then turned into what a session is told."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from edge0.errors import Edge0Error, ErrorKind
from edge0.tiers import TIERS, find_tier, read_config
from experiments.architecture import floor_share
from experiments.arms import ARMS
from experiments.conditions import Condition

CONFIG = Path(__file__).with_name("config.yaml")
SCHEMA = Path(__file__).with_name("config.schema.yaml")
SESSION_KEYS = (
    *("condition", "budget_by", "rounds", "bank", "ks", "adapter_k", "trace"),
    *("timed_steps", "warmup_steps", "launch_groups", "reader_threads", "seed", "probe_every"),
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
            Edge0Error: OPTION_INVALID, TIER_UNKNOWN, CONDITION_UNKNOWN, FILE_MISSING, CONFIG_FAMILY, K_INVALID.
        """
        values = dict(values)
        # On the command line, `ks=8` is one number, the items of `ks=[2,8]` arrive as text, and so does `false`.
        for key in ("ks", "prefill_tokens", "tab1_tiers"):
            items = values.get(key)
            items = items if isinstance(items, list) else [items]
            values[key] = [yaml.safe_load(item) if isinstance(item, str) else item for item in items]
        for key in ("remeasure", "strict", "model", "machine", "adapter_k", "trace"):
            if values.get(key) in ("true", "false", "null"):
                values[key] = yaml.safe_load(values[key])
        schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
        _refuse_unknown(values, schema["properties"])
        for error in sorted(Draft202012Validator(schema).iter_errors(values), key=lambda error: list(error.path)):
            key = ".".join(map(str, error.path)) or None
            raise Edge0Error(ErrorKind.OPTION_INVALID, error.message, path="configuration", tensor=key)
        values["condition"] = str(Condition.parse(values["condition"]))
        _check_tab1(values["tab1_tiers"])
        model = values.get("model")
        if model is None:
            tier = find_tier(values["tier"])
            unknown = sorted(set(values["ks"]) - set(tier.ks))
            if unknown and values.get("adapter_k") is None:
                raise Edge0Error(
                    ErrorKind.ADAPTER_MISSING,
                    f"{tier.name} is synthesised with one adapter set for each of these K",
                    tensor="ks",
                    expected=list(tier.ks),
                    found=unknown,
                    hint="set adapter_k to use one of them knowingly",
                )
            return cls(tier.name, f"models/{tier.name}", True, values)
        config = read_config(model)
        for k in values["ks"]:
            config.check_k(k)
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


def _check_tab1(names: list[str]) -> None:
    """Tiers of two models, each of which the arms' own bank can serve: else Table 1 fails after what it measured."""
    tiers = [find_tier(name) for name in names]
    if len({tier.family for tier in tiers}) < len(tiers):
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "one tier of each model",
            path="configuration",
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
                path="configuration",
                tensor="tab1_tiers",
                expected=f"a tier that needs at most {large:.2f} of its experts in memory",
                found=f"{floor_share(tier):.2f}",
            )


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the keys are {', '.join(known)}"
            raise Edge0Error(ErrorKind.OPTION_INVALID, "unknown key", path="configuration", tensor=str(key), hint=hint)
