"""What `rules/report.smk` asks of the workflow. Knows nothing of what a table says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from snakemake.io import is_flagged

# Headings of the report: those under which each target puts its own files.
HEADINGS = {
    "tab1": "Table 1",
    "tab2": "Table 2",
    "tab3": "Table 3",
    "tab4": "Table 4",
    "fit": "Load cost",
    "regress": "Load cost",
    "appxB": "Appendix B",
    "resident": "Stock mlx-lm",
    "reuse": "Reuse of experts",
    "math": "Arithmetic",
}


def heading(wildcards: Any) -> str:
    """The heading under which a target's page stands."""
    return HEADINGS.get(wildcards.target, wildcards.target.capitalize())


def reportable(rules: Iterable[Any]) -> list[str]:
    """What rules without wildcards mark for the report, where all that a rule marks is there.

    The report is of what exists: a file that is marked and missing would end it.
    """
    found = []
    for rule in rules:
        marked = [str(path) for path in rule.output if is_flagged(path, "report")]
        if not rule.wildcard_names and all(Path(path).exists() for path in marked):
            found += marked
    return found


def same_configuration(values: Mapping[str, Any]) -> list[str]:
    """The configuration as KEY=VALUE arguments of another call of Snakemake; keys without a value are left out."""
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
        if value not in (None, "")
    ]
