"""Route traces: which experts each MoE layer of a model routed to, decode step by decode step.

A trace is recorded from a run or generated with a stated reuse between neighbouring tokens and a stated popularity. An
engine that replays one reads the same experts whichever way it serves, so that ways can be compared on equal reads and
with reuse that random weights do not have. Files are safetensors with one tensor, `routes`. Knows nothing of engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from edge0.checkpoint.header import LENGTH_FIELD_BYTES, FileIdentity, ShardHeader, read_header
from edge0.checkpoint.output import Output
from edge0.checkpoint.strict import plain, regular_file, shown
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import ModelConfig

FORMAT, VERSION, TENSOR = "edge0-route-trace", "1", "routes"
MOST_EXPERTS = 2**16  # ids are stored in 16 bits
MAKE_ONE = "make one with `edge0 trace record` or `edge0 trace generate`"
NO_SAFETENSORS = {
    *(ErrorKind.HEADER_TOO_SHORT, ErrorKind.HEADER_LENGTH),
    *(ErrorKind.HEADER_UTF8, ErrorKind.HEADER_JSON),
}


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """Routes of consecutive decode steps.

    Args:
        routes: integers `[tokens, layers, K]`, distinct along the last axis, in the order in which they were routed;
            kept as a read-only uint16 copy.
        layers: the model's layer number of each column, ascending.
        experts: of each layer; ids lie below.
        about: where the trace comes from, as text.
        recall: share of a route that advice made of the trace names, in expectation; below 1 it may be wrong.

    Raises:
        Edge0Error: TRACE_INVALID.
    """

    routes: np.ndarray
    layers: tuple[int, ...]
    experts: int
    about: Mapping[str, str] = field(default_factory=dict)
    recall: float = 1.0

    def __post_init__(self) -> None:
        routes, layers = np.asarray(self.routes), tuple(self.layers)
        require(type(self.experts) is int and 1 <= self.experts <= MOST_EXPERTS, "experts", "1 to 65536", self.experts)
        holds = bool(layers) and all(type(layer) is int for layer in layers) and layers[0] >= 0
        require(holds and all(a < b for a, b in zip(layers, layers[1:], strict=False)), "layers", "ascending", layers)
        texts = isinstance(self.about, Mapping) and all(isinstance(t, str) for item in self.about.items() for t in item)
        require(texts, "about", "a map of texts", self.about)
        require(routes.ndim == 3 and routes.dtype.kind in "iu", TENSOR, "integers in three dimensions", routes.shape)
        tokens, columns, k = routes.shape
        require(columns == len(layers), TENSOR, f"{len(layers)} columns, one per layer", columns)
        require(tokens >= 1, TENSOR, "one token at the least", tokens)
        require(1 <= k <= self.experts, TENSOR, f"1 to {self.experts} experts per token", k)
        most = "0 to 1, and 1 where less than K experts are wrong ones"
        holds = type(self.recall) in (int, float) and (
            self.recall == 1 or 0 <= self.recall < 1 and 2 * k <= self.experts
        )
        require(holds, "recall", most, str(self.recall))
        low, high = int(routes.min()), int(routes.max())
        require(0 <= low and high < self.experts, TENSOR, f"ids of 0 to {self.experts - 1}", high if low >= 0 else low)
        ids = np.array(routes, np.uint16, order="C")
        ordered = np.sort(ids, axis=-1)
        twice = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))
        found = f"one twice at token {twice[0][0]}, layer {layers[twice[0][1]]}" if len(twice) else None
        require(not len(twice), TENSOR, "distinct experts", found)
        ids.setflags(write=False)
        for name, value in (("routes", ids), ("layers", layers), ("about", MappingProxyType(dict(self.about)))):
            object.__setattr__(self, name, value)

    @property
    def tokens(self) -> int:
        return self.routes.shape[0]

    @property
    def k(self) -> int:
        return self.routes.shape[2]

    def check(self, config: ModelConfig, k: int) -> None:
        """Whether a model of this shape that routes to `k` experts can replay the trace.

        Raises:
            Edge0Error: TRACE_INVALID.
        """
        for what, expected, found in (
            ("MoE layers", config.moe_layers, self.layers),
            ("experts per layer", config.experts, self.experts),
            ("K", k, self.k),
        ):
            if expected != found:
                raise Edge0Error(
                    ErrorKind.TRACE_INVALID,
                    "the route trace was made for another model or K",
                    tensor=what,
                    expected=numbers(expected),
                    found=numbers(found),
                    hint=f"{MAKE_ONE}, for this model and K",
                )

    def step(self, number: int) -> Mapping[int, np.ndarray]:
        """Layer -> the ids `[K]` of one decode step, counted from 0.

        Raises:
            Edge0Error: TRACE_INVALID beyond the end.
        """
        if number >= self.tokens:
            raise Edge0Error(
                ErrorKind.TRACE_INVALID,
                "the request goes on beyond the end of the route trace",
                expected=f"up to {self.tokens} tokens after the prompt",
                found=f"token {number + 1}",
                hint="decode fewer tokens, or make a longer trace (`edge0 trace record` or `edge0 trace generate`)",
            )
        return dict(zip(self.layers, self.routes[number], strict=True))

    def advice(self, number: int) -> Mapping[int, np.ndarray]:
        """Layer -> `[K]` ids that a predictor of this `recall` might name for a decode step: each expert of the route
        with that probability, else one that the layer does not use then. The same in every run. Raises like `step`."""
        right = np.stack([*self.step(number).values()])
        if self.recall == 1:
            return self.step(number)
        rng = np.random.default_rng([number, self.tokens])
        keys = rng.random((len(self.layers), self.experts))
        np.put_along_axis(keys, right.astype(np.intp), -1, axis=1)
        wrong = np.argsort(-keys, axis=1)[:, : self.k]
        named = np.where(rng.random(right.shape) < self.recall, right, wrong).astype(right.dtype)
        return dict(zip(self.layers, named, strict=True))

    def reuse(self) -> np.ndarray:
        """`[layers]`: the mean share of a layer's set that the next token repeats; NaN where there is no next token."""
        if self.tokens == 1:
            return np.full(len(self.layers), np.nan)
        chosen = multi_hot(self.routes, self.experts)
        return np.array([(layer[1:] & layer[:-1]).sum(axis=1).mean() for layer in chosen.swapaxes(0, 1)]) / self.k

    # --- files -----------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Write a new file, whole or not at all.

        Raises:
            Edge0Error: OUTPUT_UNWRITABLE, also where something is there already.
        """
        path = free_path(path)
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "layers": json.dumps(self.layers),
            "experts": str(self.experts),
            "about": json.dumps(dict(self.about), sort_keys=True),
        }
        if self.recall != 1:
            metadata["recall"] = json.dumps(self.recall)
        data = self.routes.astype("<u2").tobytes()
        entry = {"dtype": "U16", "shape": self.routes.shape, "data_offsets": [0, len(data)]}
        header = json.dumps({"__metadata__": metadata, TENSOR: entry}).encode()
        header += b" " * (-len(header) % LENGTH_FIELD_BYTES)  # the data begin on a multiple of 8, as the format wants
        raw = len(header).to_bytes(LENGTH_FIELD_BYTES, "little") + header + data
        Output(path.name, len(raw), raw, lambda: iter(())).write(path.parent, lambda done: None)

    @classmethod
    def load(cls, path: Path | str) -> RouteTrace:
        """
        Raises:
            Edge0Error: what `read_header` raises, TRACE_INVALID, FILE_CHANGED.
        """
        header = _header(path)
        form, version = (header.metadata.get(key) for key in ("format", "version"))
        found = "none" if form is None else f"{plain(form)} version {plain(version or 'unknown')}"
        require((form, version) == (FORMAT, VERSION), "format", f"{FORMAT} version {VERSION}", found, path)
        shape = {name: (entry.dtype, len(entry.shape)) for name, entry in header.tensors.items()}
        require(shape == {TENSOR: ("U16", 3)}, TENSOR, "one U16 tensor of three dimensions", list(shape.items()), path)
        kinds = [("layers", list), ("experts", int), ("about", dict)]
        kinds += [("recall", float)] if "recall" in header.metadata else []
        fields = {key: _decoded(header, key, kind) for key, kind in kinds}
        try:
            return cls(_routes(header), **fields)
        except Edge0Error as error:
            if error.path is not None:
                raise
            sides = {"expected": error.expected, "found": error.found, "hint": error.hint}
            raise Edge0Error(error.kind, error.detail, path=path, tensor=error.tensor, **sides) from error


def generate(
    layers: Sequence[int], experts: int, k: int, tokens: int, reuse: float, zipf: float, seed: int
) -> RouteTrace:
    """A seeded trace. Of each layer's set the next token keeps a share `reuse` in expectation, any of its experts
    alike; the others are drawn without replacement from the experts that the set did not hold, the one of popularity
    rank r with a weight of r to the power -`zipf` (0: all alike). Each layer ranks its experts in an order of its own.

    Raises:
        Edge0Error: OPTION_INVALID, where too few experts are left to draw from as well; TRACE_INVALID.
    """
    for name, value, holds, expected in (
        ("k", k, 1 <= k <= experts, f"1 to {experts}"),
        ("tokens", tokens, tokens >= 1, ">= 1"),
        ("reuse", reuse, 0 <= reuse <= 1, "0 to 1"),
        ("zipf", zipf, 0 <= zipf <= 10, "0 to 10"),
        ("seed", seed, seed >= 0, ">= 0"),
    ):
        require_option(name, value, holds, expected)
    least = max(0, 2 * k - experts)  # a set and the new experts of the next are distinct
    require_option("reuse", reuse, int(reuse * k) >= least, f"at least {least / k:g} with K={k} of {experts} experts")
    rng = np.random.default_rng(seed)
    shape = (len(layers), experts)
    ranks = np.argsort(rng.random(shape), axis=1) + 1
    log_weights = -zipf * np.log(ranks)
    place = np.arange(k)
    sets = [np.argsort(-log_weights - rng.gumbel(size=shape), axis=1)[:, :k]]
    for _ in range(tokens - 1):
        # Largest keys of log weight plus Gumbel noise: draws without replacement, one after another.
        keys = log_weights + rng.gumbel(size=shape)
        np.put_along_axis(keys, sets[-1], -np.inf, axis=1)
        fresh = np.argsort(-keys, axis=1)[:, :k]
        old = rng.permuted(sets[-1], axis=1)
        kept = (int(reuse * k) + (rng.random(len(layers)) < reuse * k - int(reuse * k)))[:, None]
        sets.append(np.where(place < kept, old, np.take_along_axis(fresh, np.maximum(place - kept, 0), axis=1)))
    about = {"source": "generated", "k": k, "reuse": reuse, "zipf": zipf, "seed": seed}
    return RouteTrace(np.stack(sets), tuple(layers), experts, {key: str(value) for key, value in about.items()})


def multi_hot(routes: np.ndarray, experts: int, dtype: type = bool) -> np.ndarray:
    """`[..., K]` ids to `[..., experts]` ones and zeros. Called per head and token: the plainest is the quickest."""
    chosen = np.zeros((*routes.shape[:-1], experts), dtype)
    rows = chosen.reshape(-1, experts)
    rows[np.arange(len(rows))[:, None], routes.reshape(len(rows), -1)] = 1
    return chosen


def free_path(path: Path | str) -> Path:
    """The path, if nothing is there yet, in a folder that is.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE,
            "something is there already",
            path=path,
            hint="remove it, or name another place",
        )
    if not path.parent.is_dir():
        raise Edge0Error(
            ErrorKind.OUTPUT_UNWRITABLE,
            f"there is no folder {path.parent}",
            path=path,
            hint="make it, or name another place",
        )
    return path


def numbers(values: int | Sequence[int]) -> str:
    """A number, or ascending numbers with their runs in short: `1 to 7, 9`."""
    if isinstance(values, int):
        return str(values)
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


def require_option(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise Edge0Error(ErrorKind.OPTION_INVALID, f"option {name}", expected=expected, found=value)


def require(holds: bool, key: str, expected: str, found: object, path: Path | str | None = None) -> None:
    if not holds:
        raise Edge0Error(
            ErrorKind.TRACE_INVALID,
            "not a valid route trace",
            path=path,
            tensor=key,
            expected=expected,
            found=found if isinstance(found, int | str) else shown(found),
            hint=MAKE_ONE,
        )


def _header(path: Path | str) -> ShardHeader:
    """The header of a trace's file. What is wrong with it is said of a trace, which nobody downloads."""
    try:
        return read_header(path)
    except Edge0Error as error:
        if error.kind is ErrorKind.FILE_UNREADABLE:
            raise
        detail, expected, found = f"not a valid route trace: {error.detail}", error.expected, error.found
        if error.kind is ErrorKind.FILE_MISSING:
            detail = "no such route trace"
        elif error.kind in NO_SAFETENSORS:
            empty = error.kind is ErrorKind.HEADER_TOO_SHORT
            found = f"{error.found} bytes" if empty else "a file of another format, or a damaged one"
            detail, expected = "not a route trace", f"a safetensors file of {FORMAT}"
        sides = {"expected": expected, "found": found, "hint": MAKE_ONE}
        raise Edge0Error(error.kind, detail, path=path, tensor=error.tensor, **sides) from error


def _decoded(header: ShardHeader, key: str, kind: type) -> object:
    """A metadata value that is JSON of one type."""
    text = header.metadata.get(key, "")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    require(type(value) is kind, key, f"a JSON {kind.__name__}", shown(text), header.path)
    return value


def _routes(header: ShardHeader) -> np.ndarray:
    entry = header.tensors[TENSOR]
    with regular_file(header.path, MAKE_ONE) as (file, status):
        file.seek(entry.offset)
        raw = file.read(entry.nbytes)
    if FileIdentity.of(status) != header.identity or len(raw) != entry.nbytes:
        raise Edge0Error(
            ErrorKind.FILE_CHANGED, "the file was written to while it was read", path=header.path, hint="read it again"
        )
    return np.frombuffer(raw, "<u2").reshape(entry.shape)
