"""The paper's claims as claims.yaml states them, digit for digit.

Knows nothing of our numbers: each experiment sets its own rows beside the claims (`findings`), and
`source_checks` sets the claims beside each other. A number keeps the digits it was stated with, because 0.20 leaves
less room for rounding than 0.2.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

# absolute: a value measured on the paper's machine; relation: a sign, an ordering or a ratio that should hold wherever
# its regime holds; exact: arithmetic that must come out on any machine.
KINDS = ("absolute", "relation", "exact")


class Stated(float):
    """A number with a decimal point as it was written: prints its own digits, 0.20 and not 0.2."""

    def __new__(cls, text: str) -> Stated:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text

    @property
    def decimals(self) -> int:
        """Digits after the decimal point."""
        return len(self.text.partition(".")[2])


@dataclass(frozen=True)
class Claim:
    """One number or ordering that the paper states. `machine` is the paper's machine id, "" where none is named."""

    id: str
    value: Any
    unit: str
    kind: str
    where: str
    experiment: str
    machine: str = ""
    source: str = ""
    regime: str = ""


KEYS = {field.name: field.default is MISSING for field in fields(Claim)}  # to whether it must be there


@dataclass(frozen=True)
class Claims:
    """Every claim by id, and the paper's machines in words by their id."""

    by_id: dict[str, Claim]
    machines: dict[str, str]

    def machine_name(self, claim: Claim) -> str:
        """The claim's machine in words, its id where the file does not describe it, "" where it names none."""
        return self.machines.get(claim.machine, claim.machine)


class _Loader(yaml.SafeLoader):
    """Floats keep their digits. (A loader of its own: constructors are registered on the class.)"""


def _stated(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    try:
        return Stated(node.value)
    except ValueError:  # 1_000.5 and .inf are YAML, but not Python
        return loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:float", _stated)


def load_claims(path: Path) -> Claims:
    """Read claims.yaml. Raises ValueError, one line naming the claim and the key, when it is not such a file."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(document, dict) or not isinstance(document.get("claims"), list):
        raise ValueError(f"{path}: expected a mapping with a list 'claims'")
    by_id: dict[str, Claim] = {}
    for number, entry in enumerate(document["claims"], start=1):
        claim = _claim(entry, number, path)
        if claim.id in by_id:
            raise ValueError(f"{path}: claim {claim.id} is stated twice")
        by_id[claim.id] = claim
    machines = {key: f"{entry['name']}, {entry['ram_gb']} GB" for key, entry in document.get("machines", {}).items()}
    return Claims(by_id, machines)


def _claim(entry: Any, number: int, path: Path) -> Claim:
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: claim number {number} is not a mapping (found {type(entry).__name__})")
    name = f"claim {entry['id']}" if isinstance(entry.get("id"), str) else f"claim number {number}"
    for key in entry:
        if key not in KEYS:
            hint = near(str(key), KEYS) or "a unit with a comma must be quoted"
            raise ValueError(f"{path}: {name} has an unknown key {str(key)!r} ({hint})")
    missing = [key for key, needed in KEYS.items() if needed and key not in entry]
    if missing:
        raise ValueError(f"{path}: {name} lacks {', '.join(missing)}")
    for key in KEYS.keys() - {"value"}:
        if not isinstance(entry.get(key, ""), str):
            raise ValueError(f"{path}: {name}: {key} must be text, found {entry[key]!r}")
    if entry["kind"] not in KINDS:
        raise ValueError(f"{path}: {name} has kind {entry['kind']!r}, expected one of {', '.join(KINDS)}")
    return Claim(**entry)


def near(word: str, known: Collection[str]) -> str:
    """`did you mean X?` for a word that is nearly one of the known ones, else ""."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {found[0]}?" if found else ""
