"""Route traces: what is accepted, what files survive, whether generated ones keep what they state, and the command."""

import json
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.cli import main
from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.families import read_config
from edge0.trace import RouteTrace, generate, multi_hot, numbers

METADATA = {"format": "edge0-route-trace", "version": "1", "layers": "[2, 3]", "experts": "9", "about": "{}"}
ROUTES = np.array([[[1, 0], [2, 3]], [[8, 1], [3, 2]], [[5, 8], [0, 1]]], np.uint16)


def small(**changes):
    return RouteTrace(**{"routes": ROUTES, "layers": (2, 3), "experts": 9, "about": {"source": "test"}} | changes)


@st.composite
def traces(draw):
    experts = draw(st.integers(1, 40))
    k = draw(st.integers(1, experts))
    layers = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    tokens = draw(st.integers(1, 5))
    routes = np.stack([np.stack([rng.permutation(experts)[:k] for _ in layers]) for _ in range(tokens)])
    return RouteTrace(routes, tuple(layers), experts, draw(st.dictionaries(st.text(), st.text(), max_size=2)))


# --- what is a trace -----------------------------------------------------------------------------------------------


@given(traces())
def test_whatever_is_accepted_comes_back_from_its_file(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    trace.save(path)
    again = RouteTrace.load(path)
    assert np.array_equal(again.routes, trace.routes) and again.routes.dtype == np.uint16
    assert (again.layers, again.experts, dict(again.about)) == (trace.layers, trace.experts, dict(trace.about))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    reuse = trace.reuse()
    assert reuse.shape == (len(trace.layers),)
    assert np.isnan(reuse).all() if trace.tokens == 1 else ((0 <= reuse) & (reuse <= 1)).all()


def test_a_trace_is_a_copy_that_cannot_be_changed():
    routes = ROUTES.copy()
    trace = small(routes=routes)
    routes[0, 0, 0] = 7
    assert trace.routes[0, 0, 0] == 1
    with pytest.raises(ValueError):
        trace.routes[0, 0, 0] = 7
    with pytest.raises(TypeError):
        trace.about["source"] = "other"


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        ({"experts": 8}, "routes", "found 8"),
        ({"experts": 0}, "experts", "found 0"),
        ({"experts": 2**16 + 1}, "experts", "65537"),
        ({"layers": (2,)}, "routes", "found 2"),
        ({"layers": (3, 2)}, "layers", "(3, 2)"),
        ({"layers": (2, 2)}, "layers", "(2, 2)"),
        ({"layers": (-1, 2)}, "layers", "(-1, 2)"),
        ({"layers": (0, True)}, "layers", "True"),
        ({"layers": (), "routes": ROUTES[:, :0]}, "layers", "()"),
        ({"routes": ROUTES[0]}, "routes", "(2, 2)"),
        ({"routes": ROUTES[:0]}, "routes", "found 0"),
        ({"routes": ROUTES[..., :0]}, "routes", "found 0"),
        ({"routes": ROUTES.astype(float)}, "routes", "integers"),
        ({"routes": ROUTES.astype(int) - 1}, "routes", "found -1"),
        ({"routes": np.where(ROUTES == 3, 2, ROUTES)}, "routes", "one twice at token 0, layer 3"),
        ({"about": {"seed": 1}}, "about", "seed"),
    ],
)
def test_what_is_no_trace(refused, changes, key, found):
    refused(ErrorKind.TRACE_INVALID, lambda: small(**changes), f"{key}: ", found)


def test_reuse_by_hand():
    assert small().reuse().tolist() == [0.5, 0.5]  # layer 2: {0,1} {1,8} {5,8}; layer 3: {2,3} {2,3} {0,1}


def test_steps_and_the_end(refused):
    trace = small()
    assert {layer: ids.tolist() for layer, ids in trace.step(1).items()} == {2: [8, 1], 3: [3, 2]}
    refused(ErrorKind.TRACE_INVALID, lambda: trace.step(3), "3 tokens", "token 4")


def test_a_trace_of_another_model_or_k(checkpoints, refused):
    config = read_config(checkpoints["unit-8b"])
    trace = generate(config.moe_layers, config.experts, 4, 2, 0, 0, 0)
    trace.check(config, 4)
    refused(ErrorKind.TRACE_INVALID, lambda: trace.check(config, 8), "K: ", "expected 8, found 4")
    other = read_config(checkpoints["unit-35b"])
    refused(ErrorKind.TRACE_INVALID, lambda: trace.check(other, 4), "MoE layers", "0 to 7", "1 to 7")
    wide = generate(config.moe_layers, 64, 4, 2, 0, 0, 0)
    refused(ErrorKind.TRACE_INVALID, lambda: wide.check(config, 4), "experts per layer", "expected 32, found 64")


@pytest.mark.parametrize(
    ("values", "text"), [((3,), "3"), ((1, 2, 3, 7), "1 to 3, 7"), ((0, 2, 3), "0, 2 to 3"), (5, "5")]
)
def test_runs_of_layers_in_short(values, text):
    assert numbers(values) == text


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "tensors", "key"),
    [
        ({"format": "other"}, {}, "format"),
        ({"format": None}, {}, "format"),
        ({"version": "2"}, {}, "format"),
        ({"layers": "[2, 3"}, {}, "layers"),
        ({"layers": "{}"}, {}, "layers"),
        ({"layers": '["a", "b"]'}, {}, "layers"),
        ({"layers": "[" * 100_000}, {}, "layers"),
        ({"experts": "true"}, {}, "experts"),
        ({"experts": "9" * 5000}, {}, "experts"),
        ({"experts": "8"}, {}, "routes"),
        ({"about": "[]"}, {}, "about"),
        ({"about": '{"a": 1}'}, {}, "about"),
        ({}, {"routes": ROUTES.astype(np.int32)}, "routes"),
        ({}, {"routes": ROUTES[0]}, "routes"),
        ({}, {"more": ROUTES}, "routes"),
        ({}, {"routes": ROUTES * 0}, "routes"),
    ],
)
def test_files_that_are_no_traces(tmp_path, refused, metadata, tensors, key):
    path = tmp_path / "trace"
    fields = {name: text for name, text in (METADATA | metadata).items() if text is not None}
    save_file({"routes": ROUTES} | tensors, path, fields)
    refused(ErrorKind.TRACE_INVALID, lambda: RouteTrace.load(path), path, f"{key}: ")


@given(data=st.data())
def test_a_damaged_file_is_refused_or_still_a_valid_trace(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("trace") / "trace"
    small().save(path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        assert RouteTrace.load(path).routes.shape == ROUTES.shape
    except Edge0Error as error:
        assert str(error).isprintable() and str(path) in str(error)


def test_a_header_that_lies_about_its_length(tmp_path, refused):
    path = tmp_path / "trace"
    path.write_bytes(struct.pack("<Q", 10) + b"{}")
    refused(ErrorKind.HEADER_LENGTH, lambda: RouteTrace.load(path), path)
    refused(ErrorKind.FILE_MISSING, lambda: RouteTrace.load(tmp_path / "none"), tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "kind", "parts"),
    [
        (None, ErrorKind.FILE_MISSING, ["no such route trace"]),
        (b"", ErrorKind.HEADER_TOO_SHORT, ["not a route trace", "found 0 bytes"]),
        (
            b'{"a": 1}',
            ErrorKind.HEADER_LENGTH,
            ["not a route trace", "expected a safetensors file of edge0-route-trace", "another format"],
        ),
        (struct.pack("<Q", 2) + b"[]", ErrorKind.HEADER_JSON, ["not a route trace", "another format"]),
        (slice(-2), ErrorKind.FILE_TRUNCATED, ["routes: not a valid route trace", "expected", "found"]),
    ],
)
def test_a_bad_file_is_said_to_be_made_anew_and_not_to_be_downloaded(tmp_path, refused, content, kind, parts):
    path = tmp_path / "trace"
    if isinstance(content, slice):
        small().save(path)
        content = path.read_bytes()[content]
    if content is not None:
        path.write_bytes(content)
    error = refused(kind, lambda: RouteTrace.load(path), path, "`edge0 trace record` or `edge0 trace generate`", *parts)
    assert "download" not in str(error)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, refused):
    path = tmp_path / "trace"
    path.write_text("mine")
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: small().save(path), path, "already")
    assert path.read_text() == "mine"
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: small().save(path / "below"), path / "below", f"no folder {path}")
    deep = tmp_path / "no" / "folder"
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: small().save(deep / "trace"), deep / "trace", f"no folder {deep}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace"]


# --- generated traces ----------------------------------------------------------------------------------------------


@given(
    experts=st.integers(8, 64),
    k=st.integers(1, 8),
    reuse=st.floats(0, 1),
    zipf=st.floats(0, 3),
    seed=st.integers(0, 2**32),
)
def test_a_generated_trace_keeps_the_reuse_that_it_states(experts, k, reuse, zipf, seed):
    """Of a set of K the whole part of reuse x K is always kept, one more with the chance of the rest."""
    if int(reuse * k) < 2 * k - experts:
        with pytest.raises(Edge0Error) as caught:
            generate(range(4), experts, k, 3, reuse, zipf, seed)
        assert caught.value.kind is ErrorKind.OPTION_INVALID and "at least" in str(caught.value)
        return
    trace = generate(range(4), experts, k, 120, reuse, zipf, seed)
    chosen = multi_hot(trace.routes, experts)
    kept = (chosen[1:] & chosen[:-1]).sum(axis=-1)
    whole, rest = int(reuse * k), reuse * k - int(reuse * k)
    assert set(np.unique(kept)) <= {whole, whole + 1}
    # Five standard errors of the 476 draws, and five draws, since near 0 and 1 they are no normal distribution.
    assert abs(kept.mean() - reuse * k) <= 5 * np.sqrt(rest * (1 - rest) / kept.size) + 5 / kept.size
    assert trace.reuse().mean() == pytest.approx(kept.mean() / k)


def test_generation_is_seeded():
    first, again, other = (generate(range(3), 32, 4, 20, 0.3, 1, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.routes, again.routes) and not np.array_equal(first.routes, other.routes)
    assert first.about == {"source": "generated", "k": "4", "reuse": "0.3", "zipf": "1", "seed": "1"}


def test_popularity_is_that_of_zipf_and_each_layer_has_its_own_order():
    """K=1 of many: draws are independent but for the experts just left, so that counts follow the weights."""
    trace = generate(range(6), 64, 1, 6000, 0, 1, 3)
    counts = multi_hot(trace.routes, 64).sum(axis=0)
    orders = {tuple(np.argsort(-layer)[:3]) for layer in counts}
    assert len(orders) == 6
    ranked = np.sort(counts, axis=1)[:, ::-1].mean(axis=0)
    slope = np.polyfit(np.log(np.arange(4, 33)), np.log(ranked[3:32]), 1)[0]
    assert slope == pytest.approx(-1, abs=0.1)
    even = multi_hot(generate(range(6), 64, 1, 6000, 0, 0, 3).routes, 64).sum(axis=0)
    assert even.min() > 6000 / 64 - 5 * np.sqrt(6000 / 64) and even.max() < 6000 / 64 + 5 * np.sqrt(6000 / 64)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"k": 0}, "k"),
        ({"k": 9}, "k"),
        ({"tokens": 0}, "tokens"),
        ({"reuse": -0.1}, "reuse"),
        ({"reuse": 1.1}, "reuse"),
        ({"reuse": float("nan")}, "reuse"),
        ({"zipf": -1}, "zipf"),
        ({"zipf": float("inf")}, "zipf"),
        ({"seed": -1}, "seed"),
        ({"k": 6, "reuse": 0.5}, "reuse"),
    ],
)
def test_what_cannot_be_generated(refused, changes, name):
    options = {"layers": range(2), "experts": 8, "k": 2, "tokens": 3, "reuse": 0, "zipf": 0, "seed": 0} | changes
    refused(ErrorKind.OPTION_INVALID, lambda: generate(**options), f"option {name} ")


# --- the command ---------------------------------------------------------------------------------------------------


def test_recorded_shown_and_the_same_again(checkpoint, tmp_path, capsys):
    files = [tmp_path / name for name in ("one", "two", "three")]
    command = ["trace", "record", str(checkpoint)]
    options = ["--tokens", "12", "--k", "4", "--prerouter", "off", "--prompt-tokens", "5"]
    for path in files[:2]:
        assert main([*command, str(path), *options]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    trace, config = RouteTrace.load(files[0]), read_config(checkpoint)
    trace.check(config, 4)
    assert trace.tokens == 12 and trace.about["prerouter"] == "off" and trace.about["prompt_tokens"] == "5"
    assert trace.about["source"] == "recorded" and trace.about["temperature"] == "0.7"
    assert main([*command, str(files[2]), "--tokens", "2", "--k", "2", "--prompt", "a text"]) == 0
    assert RouteTrace.load(files[2]).about["prompt_tokens"] == "6"
    capsys.readouterr()
    assert main(["trace", "show", str(files[0])]) == 0
    text = capsys.readouterr().out
    share = re.search(r"repeated by the next token: ([\d.]+)% of a layer's set \(layers .*; by chance 12\.5%\)", text)
    assert float(share[1]) == pytest.approx(100 * trace.reuse().mean(), abs=0.06)
    assert "12 tokens" in text and " 1: 4.0, 2: " in text and "the 3 most used experts" in text
    assert main(["trace", "record", str(checkpoint), str(tmp_path / "x"), "--tokens", "1", "--k", "2"]) == 0
    assert main(["trace", "show", str(tmp_path / "x")]) == 0


def test_given_tokens_are_replayed(checkpoint, tmp_path):
    """Decoded one by one after whatever prompt, and routed as the same tokens are in a longer prompt's steps."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"tokens": [3, 1, 4, 1, 5, 9, 2, 6]}))
    command = ["trace", "record", str(checkpoint), "--k", "4", "--prerouter", "off", "--tokens-file", str(tokens)]
    traces = []
    for length in (1, 5):
        path = tmp_path / str(length)
        assert main([*command[:3], str(path), *command[3:], "--prompt-tokens", str(length)]) == 0
        traces.append(RouteTrace.load(path))
    assert [trace.tokens for trace in traces] == [7, 3] and traces[0].about["tokens"] == "given"
    assert traces[1].about["prompt_tokens"] == "5" and "seed" not in traces[1].about
    assert np.array_equal(np.sort(traces[0].routes[4:]), np.sort(traces[1].routes))


def test_what_a_prediction_of_speed_needs_is_told(checkpoint, tier, tmp_path):
    recorded, made = tmp_path / "recorded", tmp_path / "made"
    options = ["--tokens", "1", "--k", "4", "--prerouter", "off"]
    assert main(["trace", "record", str(checkpoint), str(recorded), *options]) == 0
    assert main(["trace", "generate", str(made), "--tier", tier.name, "--k", "4"]) == 0
    config = read_config(checkpoint)
    layers = [owner + 1 for owner in tier.owners if owner + 1 < config.layers - (tier.family.name == "qwen")]
    layout = ExpertLayout.of(CheckpointIndex.open(checkpoint), config)
    for path in (recorded, made):
        about = RouteTrace.load(path).about
        assert json.loads(about["predicted"]) == layers and int(about["expert_bytes"]) == layout.expert_bytes


def test_generated_for_a_checkpoint_and_for_a_tier(checkpoint, tier, tmp_path):
    paths = tmp_path / "model", tmp_path / "tier"
    for path, shape in zip(paths, (["--model", str(checkpoint)], ["--tier", tier.name]), strict=True):
        assert main(["trace", "generate", str(path), *shape, "--tokens", "5", "--zipf", "1.5"]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    RouteTrace.load(paths[0]).check(read_config(checkpoint), tier.family.k_served)
    with safe_open(paths[0], "np") as file:
        assert json.loads(file.metadata()["about"])["zipf"] == "1.5"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["record", "{model}", "{new}", "--tokens", "0"], "tokens"),
        (["record", "{model}", "{new}", "--tokens", "5000"], "context"),
        (["record", "{model}", "{new}", "--prompt-tokens", "0"], "prompt-tokens"),
        (["record", "{model}", "{new}", "--temperature", "-1"], "temperature"),
        (["record", "{model}", "{old}"], "already"),
        (["record", "{model}", "{new}/trace"], "there is no folder"),
        (["record", "{model}", "{new}", "--tokens-file", "{tokens}"], "more than 16 (--prompt-tokens), found 2"),
        (["record", "{model}", "{new}", "--tokens-file", "{model}/config.json"], "not a list of tokens"),
        (["record", "no/such", "{new}"], "no/such"),
        (["record", "{model}", "{new}", "--tokens-file", "no/tokens"], "no/tokens"),
        (["record", "{model}", "{new}", "--tokens-file", "{old}"], "as JSON"),
        (["generate", "{new}", "--tier", "giga"], "giga"),
        (["generate", "{new}", "--tier", "unit-35b", "--k", "33"], "K=33"),
        (["generate", "{new}", "--tier", "unit-35b", "--reuse", "2"], "reuse"),
        (["generate", "{old}", "--tier", "unit-35b"], "already"),
        (["show", "{new}"], "no such route trace"),
        (["show", "{old}"], "another format"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(checkpoints, tmp_path, capsys, arguments, word):
    (tmp_path / "old").write_text("mine, and longer than eight bytes")
    (tmp_path / "tokens").write_text('{"tokens": [1, 2]}')
    places = {name: tmp_path / name for name in ("new", "old", "tokens")} | {"model": checkpoints["unit-35b"]}
    assert main(["trace", *(argument.format(**places) for argument in arguments)]) == EXIT_CODE
    error = capsys.readouterr().err.strip()
    assert error.startswith("edge0: ") and word in error and len(error.splitlines()) == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"old", "tokens"}


def test_distinct_experts_are_counted_over_windows_of_the_whole_trace(capsys, tmp_path):
    """Tokens 0 and 1 repeat, 2 and 3 do not: in two tokens 2 and 4 experts, so 3 on average."""
    routes = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[4, 5]]], np.uint16)
    path = tmp_path / "t.trace"
    RouteTrace(routes, experts=8, layers=(0,), about={"k": "2"}).save(path)
    assert main(["trace", "show", str(path)]) == 0
    assert "distinct experts of a layer in n tokens: 1: 2.0, 2: 3.0, 4: 6.0" in capsys.readouterr().out
