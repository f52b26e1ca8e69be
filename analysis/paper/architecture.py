"""The exact claims of Table 1: what the shapes (or the files) of the two models give, beside what the paper states.

Reads the document of counts and judges. What was counted from shapes rests on this project's own constants, and says
so: only a released checkpoint's files are evidence beside them. A size that was rounded may differ by
half a unit of its last digit, one that is stated as "about" by `ABOUT`; everything else must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.paper.claims import Claim, Claims
from analysis.paper.findings import Finding, Status, exact
from analysis.rows import read_json

TAGS = ("35b", "8b")
ABOUT = 0.05
GB, MB = 1e9, 1e6
OF_SHAPES = "shapes of "  # how the source of counts begins that come from no file
FROM_FILES = "counted from the files"  # how the reason of a finding begins that comes from files
ROUNDED = ("disk", "adapters_disk", "lora_disk")
Counts = Mapping[str, Any]

# Last part of a claim's id to the count that answers it.
ANSWERS = {
    "layers": lambda counts: counts["layers"],
    "experts": lambda counts: counts["experts"],
    "active": lambda counts: active(counts) / 1e9,
    "k_native": lambda counts: counts["k_native"],
    "k_served": lambda counts: counts["k_served"],
    "disk": lambda counts: counts["base_bytes"] / GB,
    "adapters_disk": lambda counts: (counts["lora_bytes"] + counts["heads_bytes"]) / GB,
    "lora_disk": lambda counts: counts["lora_bytes"] / MB,
    "heads": lambda counts: counts["heads"],
    "predicted_layers": lambda counts: counts["predicted_layers"],
    "head_input": lambda counts: counts["head_input"],
    "head_hidden": lambda counts: counts["head_hidden"],
}


def load_counts(path: Path) -> dict[str, Any]:
    """The document of counts. Raises ValueError, one line, when it is not one."""
    document = read_json(path)
    if not isinstance(document, dict) or set(TAGS) - set(document.get("released", {})):
        raise ValueError(f"{path}: expected the counts of the released models {' and '.join(TAGS)}")
    return document


def active(counts: Counts, served: bool = False) -> int:
    """Parameters of the base that take part in one token: no embedding table, of which one row is read; the output
    head; `k` routed experts per layer, the model's own or the served number."""
    parts = counts["active"]
    return parts["always"] + parts["lm_head"] + parts["routed_served" if served else "routed_native"]


def active_words(counts: Counts) -> str:
    """The same under other definitions, for a reader who counts otherwise."""
    parts = counts["active"]
    billions = {
        f"at the served K={counts['k_served']}": active(counts, served=True),
        "with heads and LoRA": active(counts) + parts["adapters"],
        "with the embedding table": active(counts) + parts["embedding"],
        "without the output head": active(counts) - parts["lm_head"],
    }
    return ", ".join(f"{words} {count / 1e9:.2f}" for words, count in billions.items())


def findings(document: Mapping[str, Any], claims: Claims) -> list[Finding]:
    """One finding for every claim `arch.*` and for `staged.stack_tensors`.

    Raises ValueError for an `arch.*` claim that nothing here answers.
    """
    released = document["released"]
    found = []
    for claim in claims.by_id.values():
        if claim.id == "arch.lora":
            found.append(_lora(claim, released))
        elif claim.id == "staged.stack_tensors":
            found.append(_stacks(claim, released))
        elif claim.id.startswith("arch."):
            _, tag, name = claim.id.split(".")
            if tag not in TAGS or name not in ANSWERS:
                raise ValueError(f"claim {claim.id}: no count answers it")
            found.append(_judge(claim, name, released[tag]))
    return found


def _judge(claim: Claim, name: str, counts: Counts) -> Finding:
    about = name == "active"
    tolerance = ABOUT if about else half_unit(claim.value) / float(claim.value) if name in ROUNDED else 0.0
    finding = exact(claim, ANSWERS[name](counts), tolerance)
    why = [counted_from(counts)]
    if about:
        why.append(
            f"stated as about, so {ABOUT:.0%} are allowed; counted are all weights but the embedding table, with "
            f"{counts['k_native']} routed experts per layer (otherwise, in 1e9: {active_words(counts)})"
        )
    elif name in ROUNDED:
        why.append(f"half a unit of the stated digit is {half_unit(claim.value):g}")
    return replace(finding, why="; ".join(why))


def counted_from(counts: Counts) -> str:
    """What the counts rest on, in words: a checkpoint's files, or nothing but our own constants."""
    source = str(counts["source"])
    if not source.startswith(OF_SHAPES):
        return f"counted from the {source}"
    return "counted from edge0's shape constants; a released checkpoint given with model= is counted from its files"


def half_unit(value: float) -> float:
    """Half a unit of the last digit that a number is stated with."""
    return 0.5 * 10 ** -len(str(value).partition(".")[2])


def _lora(claim: Claim, released: Mapping[str, Counts]) -> Finding:
    texts = {f"r={counts['lora_rank']} alpha={counts['lora_alpha']}" for counts in released.values()}
    status = Status.REPRODUCED if texts == {claim.value} else Status.DIFFERS
    return Finding(claim, status, " and ".join(sorted(texts)), _of_both("both models", released))


def _stacks(claim: Claim, released: Mapping[str, Counts]) -> Finding:
    """Both models have as many; one finding speaks for both."""
    numbers = {counts["stack_tensors"] for counts in released.values()}
    worst = max(numbers, key=lambda number: abs(number - float(claim.value)))
    why = _of_both("stacked expert tensors in each layer of both models", released)
    return replace(exact(claim, worst), why=why)


def _of_both(words: str, released: Mapping[str, Counts]) -> str:
    return "; ".join([*dict.fromkeys(map(counted_from, released.values())), words])
