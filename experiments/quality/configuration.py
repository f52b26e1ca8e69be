"""The OpenCompass configuration of one run as literal text: the shipped benchmarks and our arms.

It is a file that OpenCompass's own command line could run. Our classes stand there by dotted names; nothing of ours is
imported by it.
"""

from __future__ import annotations

import hashlib
import json
import pprint
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from edge0.families import read_config
from experiments.quality.arms import Served
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.data import Data

MODEL = "experiments.quality.model.ArmModel"
INT4, FP, SERVER = "int4", "fp", "server"
# Of a model that thinks first: what it thinks is no answer, and no code block is taken from there.
_AFTER_THINKING = {"type": "extract-non-reasoning-content"}


@dataclass(frozen=True)
class ArmPlan:
    """An arm before it is opened: `settings` are those of `arms.open_arm`, `words` what it is."""

    name: str
    k: int
    words: str
    settings: Mapping[str, Any]

    def model(self, tier: str, answers: str, limit: int, positions: int) -> dict[str, Any]:
        """Its entry in `models`. `answers`: file of its journal, below the work folder."""
        entry = {
            "type": MODEL,
            "abbr": f"{tier}-{self.name}-k{self.k}",
            "path": str(self.settings["model"]),
            "arm": dict(self.settings),
            "answers": answers,
            "max_out_len": limit,
            "max_seq_len": positions,
            "batch_size": 1,
            "run_cfg": {"num_gpus": 0},
        }
        return entry | ({"pred_postprocessor": _AFTER_THINKING} if self.settings["thinking"] else {})


def plan_arms(
    model: Path, original: Path | None, k: int | None, fp_k: int | None, thinking: bool, server: bool
) -> dict[str, ArmPlan]:
    """The arms of a run by name: the original first where there is one, then int4, then the server where it is asked.

    Args:
        original: a directory for mlx-lm, or the bf16 file that is kept of a tier that was trained here.
        k, fp_k: experts per token; None: what the family serves, and what the model was made with.

    Raises:
        Edge0Error: FILE_MISSING, OPTION_INVALID, and what the checkpoint is refused for.
    """
    config = read_config(model)
    served = Served.of(model, k, thinking)
    arms: dict[str, ArmPlan] = {}
    own_k = config.check_k(int(config.text.get("num_experts_per_tok", config.family.k_served)))
    if original is not None:
        if not original.exists():
            raise Edge0Error(ErrorKind.FILE_MISSING, "no original to compare with", path=original)
        kind = "mlx-lm" if original.is_dir() else "teacher"
        if kind == "mlx-lm" and fp_k not in (None, own_k):
            detail, hint = "option fp-k: mlx-lm runs a model with the K of its own config", "leave it out"
            raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=own_k, found=fp_k, hint=hint)
        at = config.check_k(own_k if fp_k is None else fp_k)
        how = "through stock mlx-lm" if kind == "mlx-lm" else "bf16 values computed in fp32"
        words = f"the model before it was quantised, {how}, K={at}, every layer routes for itself"
        settings = {"kind": kind, "model": str(model), "original": str(original), "k": at, "thinking": thinking}
        arms[FP] = ArmPlan(FP, at, words, settings)
    same = {
        "model": str(model),
        "k": served.k,
        "heads": served.heads,
        "lora": served.lora,
        "thinking": thinking,
    }
    arms[INT4] = ArmPlan(INT4, served.k, served.words, {"kind": "int4", **same})
    if server:
        words = f"the int4 checkpoint behind edge0 serve, K={served.k}"
        arms[SERVER] = ArmPlan(SERVER, served.k, words, {"kind": "server", **same})
    return arms


def configuration(tier: str, arms: Mapping[str, ArmPlan], data: Mapping[str, Data], positions: int) -> str:
    """The text of the file. `data`: what is asked, by benchmark; `positions`: tokens that the model can hold."""
    lines = ["# Written by experiments.quality; every value is literal.", "from mmengine.config import read_base", ""]
    lines.append("with read_base():")
    for name in data:
        lines.append(f"    from {BENCHMARKS[name].module} import {BENCHMARKS[name].variable}")
    for name, one in data.items():
        variable = BENCHMARKS[name].variable
        if name == "mmlu-pro":  # an absent category would stop the run
            lines.append(f"\n{variable} = [item for item in {variable} if item['category'] in {one.categories!r}]")
        lines.append(f"\nfor item in {variable}:")
        lines.append(f"    item['infer_cfg']['inferencer']['max_out_len'] = {one.limit}")
        if BENCHMARKS[name].evaluator is not None:
            lines.append(f"    item['eval_cfg']['evaluator'] = {{'type': {BENCHMARKS[name].evaluator!r}}}")
    limit = max(one.limit for one in data.values())
    models = [arm.model(tier, f"answers-{arm.name}.jsonl", limit, positions) for arm in arms.values()]
    lines.append(f"\nmodels = {pprint.pformat(models, width=110, sort_dicts=False)}")
    return "\n".join(lines) + "\n"


def digest_of(identity: Mapping[str, Any]) -> str:
    """16 hexadecimal digits: of configuration, weights and data."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def abbreviations(name: str, data: Data) -> Sequence[str]:
    """OpenCompass's names of a benchmark's data sets."""
    abbr = BENCHMARKS[name].abbr
    return [f"{abbr}{category.replace(' ', '_')}" for category in data.categories] if name == "mmlu-pro" else [abbr]
