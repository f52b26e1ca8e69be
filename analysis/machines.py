"""Machine files and result folders of several machines: who measured what, and what each machine is.

Reads what `edge0 doctor` wrote, what is known of the paper's machines, and where each machine's tables lie. Compares
nothing. Looks for files in the current folder, the project's, unless told of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jsonschema import Draft202012Validator

from analysis.units import GIB, MIB, require

MACHINES = Path("experiments/machines")
SCHEMA = Path("experiments/machine.schema.yaml")
RESULTS = Path("results")


@dataclass(frozen=True)
class Machine:
    """One checked machine file. `source`: measured, paper or reported; `values`: everything in the file."""

    id: str
    name: str
    source: str
    values: Mapping[str, Any]

    @property
    def serving(self) -> Mapping[str, Any]:
        """What the paper measured there (load cost, compute by K as text); empty for machines that can measure."""
        return self.values.get("serving", {})

    def facts(self) -> str:
        """One line: memory, system, storage with its random reads, what lies below, MLX; only what is known."""
        values = self.values
        storage, mlx = values.get("storage", {}), values.get("mlx", {})
        parts = [
            self.name,
            f"{values['ram_bytes'] / GIB:.0f} GiB of memory",
            " ".join(filter(None, (values.get("os"), values.get("kernel")))),
            f"{storage['filesystem']} on {storage['device']}" if storage.get("filesystem") else "",
            _reads(storage),
            'a cache below the page cache is suspected, so cold is "guest-cold"'
            if storage.get("lower_cache") == "suspected"
            else "",
            f"mlx {mlx['version']}, device {mlx['device']}" if mlx else "",
            {"paper": "as the paper states it", "reported": "reported, without raw rows"}.get(self.source, ""),
        ]
        return "; ".join(part for part in parts if part)


def load_machine(id_or_path: str | Path, folder: Path = MACHINES, schema: Path = SCHEMA) -> Machine:
    """The machine file of an id in `folder`, or a path to one (with a slash, or ending in .yaml).

    Raises ValueError, one line: an unknown id lists the known ones; else file and key, expected and found.
    """
    text = str(id_or_path)
    path = Path(id_or_path) if "/" in text or text.endswith(".yaml") else folder / f"{text}.yaml"
    if not path.exists():
        if path.parent == folder:
            raise ValueError(f"{path}: no machine of that id; known: {', '.join(known_machines(folder)) or 'none'}")
        raise ValueError(f"{path}: no such machine file")
    values = _yaml(path)
    found = sorted(Draft202012Validator(_yaml(schema)).iter_errors(values), key=lambda e: list(map(str, e.path)))
    for error in found:
        where = ": ".join(filter(None, (str(path), ".".join(map(str, error.path)))))
        raise ValueError(f"{where}: {' '.join(error.message.split())}")
    if values["id"] != path.stem:
        raise ValueError(f"{path}: id: expected {path.stem!r}, the file's own name; found {values['id']!r}")
    return Machine(values["id"], values["name"], values["source"], values)


def known_machines(folder: Path = MACHINES) -> list[str]:
    """Ids of the machine files in a folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def experiment_folders(machine: str, experiment: str, results: Path = RESULTS) -> list[Path]:
    """Folders of one machine's finished experiment, one per tier: those that hold a summary.csv."""
    return sorted(path.parent for path in (results / machine).glob(f"*/{experiment}/summary.csv"))


def read_table(path: Path, columns: list[str]) -> pd.DataFrame:
    """A CSV table of a result folder. Raises ValueError naming the file: unreadable, missing columns, no row."""
    try:
        rows = pd.read_csv(path, dtype={"session": str})
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable table ({str(error).splitlines()[0]})") from error
    require(path, rows.columns, columns)
    if rows.empty:
        raise ValueError(f"{path}: holds no row")
    return rows


def only(rows: pd.DataFrame, column: str, path: Path, expected: str | None = None) -> str:
    """The one value of a column. Raises ValueError where rows differ in it, or where it is not the expected one.

    Two tiers, conditions, machines or sessions in one table would become one row: they are never joined.
    """
    values = sorted(set(rows[column].astype(str)))
    if len(values) > 1:
        raise ValueError(
            f"{path}: {column}: expected one value, found {', '.join(values)}; they are never put in one row"
        )
    if expected is not None and values[0] != expected:
        raise ValueError(f"{path}: {column}: expected {expected}, as its folder says; found {values[0]}")
    return values[0]


def _reads(storage: Mapping[str, Any]) -> str:
    rows = storage.get("random_reads", [])
    if not rows:
        return ""
    best = max(rows, key=lambda row: row["mib_s"])
    rates = [f"{row['mib_s']:.0f} MiB/s with {row['threads']}" for row in (rows[0], best)]
    told = rates[0] if best is rows[0] else " and ".join(rates)
    return f"random reads of {storage['read_bytes'] / MIB:.2f} MiB: {told} thread(s)"


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
