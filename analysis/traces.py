"""Route traces as files: what `edge0 trace` wrote, read again and checked. Knows nothing of what is asked of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

FORMAT = {"format": "edge0-route-trace", "version": "1"}
GENERATED = ("reuse", "zipf", "seed")  # what a generated trace says of itself


@dataclass(frozen=True)
class Trace:
    """Routes `[tokens, layers, K]`, and where they come from. `name`: the first digits of the file's SHA-256."""

    routes: np.ndarray
    layers: tuple[int, ...]
    experts: int
    about: Mapping[str, str]
    name: str

    @property
    def k(self) -> int:
        return self.routes.shape[2]

    @property
    def chance(self) -> float:
        """Share of a layer's set that the next token repeats when experts are drawn blindly."""
        return self.k / self.experts

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.experts

    @property
    def machine(self) -> str:
        return self.about.get("machine", "none (generated)")

    @property
    def source(self) -> str:
        """The model, or how the trace was generated, in words."""
        if self.about.get("source") == "recorded":
            return self.about.get("model", "a model that is not named")
        return f"generated ({', '.join(f'{key} {self.about[key]}' for key in GENERATED if key in self.about)})"

    def chosen(self) -> np.ndarray:
        """`[tokens, layers, experts]`: whether a token routes to an expert."""
        hot = np.zeros((*self.routes.shape[:2], self.experts), bool)
        np.put_along_axis(hot, self.routes, True, axis=-1)
        return hot


def load_trace(path: Path) -> Trace:
    """Read and check a trace. Raises ValueError, one line naming the file."""
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            found = {key: metadata.get(key) for key in FORMAT}
            if found != FORMAT or list(file.keys()) != ["routes"]:
                raise ValueError(f"{path}: expected a file of {FORMAT}, found {found}")
            routes = file.get_tensor("routes")
        name = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable route trace ({str(error).splitlines()[0]})") from error
    layers, experts, about = (
        _decoded(path, metadata, key, kind) for key, kind in (("layers", list), ("experts", int), ("about", dict))
    )
    if routes.ndim != 3 or routes.shape[1] != len(layers) or routes.size == 0 or routes.dtype != np.uint16:
        expected = f"U16 routes [tokens, {len(layers)} layers, K]"
        raise ValueError(f"{path}: expected {expected}, found {routes.dtype} {list(routes.shape)}")
    trace = Trace(routes.astype(np.int64), tuple(layers), experts, about, name)
    if routes.max() >= experts or (trace.chosen().sum(axis=-1) != trace.k).any():
        raise ValueError(f"{path}: expected {trace.k} distinct experts below {experts} per token and layer")
    return trace


def stream(routes: np.ndarray, experts: int) -> np.ndarray:
    """Every (layer, expert) that routes `[tokens, layers, K]` ask for, in turn, as column x experts + expert.

    A bank is asked for a layer's set at once: none of it makes room for another of it. So each set is in the order in
    which its experts were used last, the latest first.
    """
    columns = np.arange(routes.shape[1])[:, None]
    last = np.full((routes.shape[1], experts), -1)
    ordered = np.empty_like(routes)
    for token, chosen in enumerate(routes):
        order = np.argsort(-last[columns, chosen], axis=1, kind="stable")
        ordered[token] = np.take_along_axis(chosen, order, axis=1)
        last[columns, chosen] = token
    return (columns * experts + ordered).reshape(-1)


def _decoded(path: Path, metadata: Mapping[str, str], key: str, kind: type) -> Any:
    text = metadata.get(key, "")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if type(value) is not kind:
        raise ValueError(f"{path}: {key}: expected a JSON {kind.__name__}, found {text[:60]!r}")
    return value
