"""What `rules/report.smk` asks of the workflow. Knows nothing of what a table says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Headings of the report, one for each target; one that is not here has its own name.
HEADINGS = {
    "tab1": "Table 1",
    "tab2": "Table 2",
    "tab3": "Table 3",
    "tab4": "Table 4",
    "fit": "Load cost",
    "regress": "Load cost of given reads",
    "appxB": "Appendix B",
    "resident": "Stock mlx-lm",
    "peers": "Other engines",
    "reuse": "Reuse of experts",
    "math": "Arithmetic",
    "predict": "Prediction",
    "compare": "Several machines",
}
KINDS = {".html": "table", ".svg": "figure", ".png": "figure", ".csv": "rows"}


def heading(wildcards: Any) -> str:
    """The heading under which all files of a target stand."""
    return HEADINGS.get(wildcards.target, wildcards.target.capitalize())


def labels(wildcards: Any) -> dict[str, str]:
    """What one of its files is, by the columns of the report's lists."""
    return {"what": KINDS[Path(wildcards.file).suffix], "file": wildcards.file}


def captions(folder: Path | str) -> dict[str, str]:
    """Each target's caption."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.rst"))}


def same_configuration(values: Mapping[str, Any]) -> list[str]:
    """The configuration as KEY=VALUE arguments of another call of Snakemake; keys without a value are left out."""
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
        if value not in (None, "")
    ]
