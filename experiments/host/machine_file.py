"""Machine files: checked against their schema, written whole, and free of what tells whose machine it is.

No host name, user, path or serial number: devices are named by kind, and reasons that others word lose their paths.
Does not know how the facts are found (`experiments.host.examination`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from jsonschema import Draft202012Validator

from edge0.errors import Edge0Error, ErrorKind
from edge0.telemetry.host import cpu_model, machine_id

SCHEMA = Path(__file__).parents[1] / "machine.schema.yaml"
MACHINES = Path(__file__).parents[1] / "machines"

_SAME_MEMORY = 0.01  # what a kernel keeps for itself differs from version to version by less
_BLOCK_DEVICE = re.compile(r"(nvme\d+n\d+|mmcblk\d+|[hsv]d[a-z]+|xvd[a-z]+|disk\d+|dm-|md|loop|zd)[\ds]*(p\d+)?")


def check(values: Mapping[str, Any], path: Path) -> None:
    """Raise Edge0Error OPTION_INVALID, naming file and key, for the first thing that the schema refuses."""
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    for error in sorted(Draft202012Validator(schema).iter_errors(values), key=lambda error: list(map(str, error.path))):
        key = ".".join(map(str, error.path)) or None
        raise Edge0Error(ErrorKind.OPTION_INVALID, error.message, path=path, tensor=key)


def write(values: Mapping[str, Any], folder: Path) -> Path:
    """Write `folder`/<id>.yaml, whole or not at all; returns its path. Of a file that is there its `serving` is kept,
    which nobody can measure, and its `calibrations` of other shapes than these values have.

    Raises:
        Edge0Error: OPTION_INVALID when the schema refuses, or the file that is there is none; OUTPUT_UNWRITABLE.
    """
    path = folder / f"{values['id']}.yaml"
    values = dict(values) | _serving(path)
    own = values.get("calibrations", [])
    kept = [entry for entry in calibrations(path) if entry["shape"] not in {one["shape"] for one in own}]
    if own or kept:
        values["calibrations"] = [*kept, *own]
    check(values, path)
    head = f"# Written by `edge0 doctor` on {values['created']}; schema: experiments/{SCHEMA.name}.\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
        partial.write_text(head + text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True) if folder.is_dir() else None
        detail = f"cannot be written ({error.strerror or error})"
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=path, hint="name a folder with --out") from error
    return path


def other_machine(values: Mapping[str, Any], folder: Path) -> str:
    """One line, where `folder` has a file of this id that is of another machine; "" where it has none.

    An id names a kind of machine, so two machines may share one and with it a folder of results. They are told apart by
    `cpu_model` and `ram_bytes`, which an update of the kernel leaves as they are, or nearly. Machines that agree in
    both are not told apart.

    Args:
        values: this machine's `id`, `cpu_model` and `ram_bytes`; a machine file's will do.

    Raises:
        Edge0Error: OPTION_INVALID, when the file that is there is none.
    """
    path = folder / f"{values['id']}.yaml"
    there = _there(path)
    models, sizes = ([side.get(key) for side in (there, values)] for key in ("cpu_model", "ram_bytes"))
    differs = []
    if None not in models and models[0] != models[1]:
        differs.append(f"cpu_model: {models[0]} there, {models[1]} here")
    if None not in sizes and abs(sizes[0] - sizes[1]) > _SAME_MEMORY * sizes[1]:
        differs.append(f"ram_bytes: {sizes[0]} there, {sizes[1]} here")
    if not differs:
        return ""
    told = f"{path} is of another machine ({'; '.join(differs)}): its results stand under the same id"
    return f"{told}; --config machine=NAME names another folder of results"


def this_machine() -> dict[str, Any]:
    """What `other_machine` compares."""
    return {"id": machine_id(), "cpu_model": cpu_model(), "ram_bytes": psutil.virtual_memory().total}


def _serving(path: Path) -> dict[str, Any]:
    """The `serving` section of a machine file, by that name; nothing where there is no file, or no such section."""
    there = _there(path)
    return {"serving": there["serving"]} if "serving" in there else {}


def calibrations(path: Path) -> list[dict[str, Any]]:
    """The `calibrations` of a machine file; none where there is no file, or no such section.

    Raises:
        Edge0Error: OPTION_INVALID, for a file that is none.
    """
    there = _there(path)
    if "calibrations" in there:
        check(there, path)
    return there.get("calibrations", [])


def _there(path: Path) -> dict[str, Any]:
    """What a machine file holds; nothing where there is none. Raises Edge0Error OPTION_INVALID for what is none."""
    detail, hint = "the machine file that is there cannot be read", "mend it or move it away"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Edge0Error(ErrorKind.OPTION_INVALID, detail, path=path, hint=hint) from error
    if not isinstance(found, dict):
        sides = {"expected": "keys with values", "found": type(found).__name__}
        raise Edge0Error(ErrorKind.OPTION_INVALID, detail, path=path, hint=hint, **sides)
    return found


def device_kind(device: str | None) -> str | None:
    """A block device's name; "other" for names that a person or an administrator chose, such as volumes and shares."""
    return device if device is None or _BLOCK_DEVICE.fullmatch(device) else "other"


def without_paths(text: str, files: Sequence[Path] = ()) -> str:
    """The text with the names of some files, and everything that looks like an absolute path, taken out."""
    for file in files:
        text = text.replace(str(file), "the file").replace(file.name, "the file")
    return re.sub(r"(?<![\w.])/[\w.@%+:-]+(?:/[\w.@%+:-]*)*", "(a path)", text)
