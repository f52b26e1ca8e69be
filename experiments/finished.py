"""The finished sessions under one root, and latest.json, which names the one that tables are made from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from edge0.errors import Edge0Error, ErrorKind
from experiments.conditions import Condition
from experiments.options import SessionOptions

POINTER = "latest.json"
# Options that do not say what is measured: where something lies, which may have moved since, and patience.
BESIDE = ("model", "records", "gguf", "peers", "trace", "run_timeout_s")


def point(root: Path, session: str) -> None:
    """Make `session` the one that latest.json names. OSError passes."""
    write_json(root / POINTER, {"session": session})


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all. OSError passes."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def reuse(options: SessionOptions, root: Path) -> tuple[Path, str]:
    """Point at the newest finished session of this experiment and tier; returns it, and what to know of it.

    Raises:
        Edge0Error: FILE_MISSING when there is none, OUTPUT_UNWRITABLE.
    """
    alike = [
        (path.parent, about)
        for path in sorted(root.glob("[!.]*/session.json"))
        if (about := read_json(path)) is not None
        and (about.get("experiment"), about.get("tier")) == (options.experiment, options.tier)
    ]
    if not alike:
        raise Edge0Error(
            ErrorKind.FILE_MISSING,
            f"no finished session of {options.experiment} on {options.tier}",
            path=root,
            hint="measure one: leave out remeasure=false (or --reuse)",
        )
    folder, about = alike[-1]  # folders are named by time
    try:
        point(root, folder.name)
    except OSError as error:
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=root) from error
    return folder, _differences(options, about)


def _differences(options: SessionOptions, about: dict[str, Any]) -> str:
    """Options in which a finished session differs from what is asked for now, in words; "" where in none."""
    asked = dataclasses.asdict(options) | {"condition": str(Condition.parse(options.condition))}
    asked = json.loads(json.dumps(asked))
    keys = [key for key in asked if key in about and key not in BESIDE]
    return ", ".join(f"{key} {about[key]} and not {asked[key]}" for key in keys if about[key] != asked[key])
