"""Two processes on one checkpoint directory: nobody writes there, so nobody feels the other."""

import json
import subprocess
import sys
import textwrap

from edge0 import Engine, EngineOptions
from edge0.checkpoint.layout import has_records

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 16
SERVING = """
    import json, sys
    import mlx.core as mx
    from edge0 import Engine, EngineOptions

    mx.set_default_device(mx.cpu)
    directory, prompt, tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    with Engine(directory, EngineOptions(k=4)) as engine:
        print("open", flush=True)
        sys.stdin.readline()
        print(json.dumps(list(engine.generate(prompt, tokens))), flush=True)
"""


def child(*arguments):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_engines_at_once(checkpoint):
    with Engine(checkpoint, EngineOptions(k=4)) as engine:
        alone = list(engine.generate(PROMPT, TOKENS))
    script = textwrap.dedent(SERVING)
    engines = [child("-c", script, checkpoint, json.dumps(PROMPT), TOKENS) for _ in range(2)]
    assert [engine.stdout.readline() for engine in engines] == ["open\n"] * 2
    for engine in engines:
        engine.stdin.write("\n")
        engine.stdin.flush()
    answers = [engine.communicate() for engine in engines]
    assert [json.loads(out) for out, _ in answers] == [alone, alone], answers


def test_a_repack_beside_an_engine(checkpoint, tmp_path):
    target = tmp_path / "out"
    with Engine(checkpoint, EngineOptions(k=4)) as engine:
        before = list(engine.generate(PROMPT, TOKENS))
        repacking = child("-m", "edge0.cli", "repack", checkpoint, target)
        meanwhile = [list(engine.generate(PROMPT, TOKENS))]
        while repacking.poll() is None:
            meanwhile.append(list(engine.generate(PROMPT, TOKENS)))
        assert repacking.returncode == 0, repacking.stderr.read()
        meanwhile.append(list(engine.generate(PROMPT, TOKENS)))
    assert all(tokens == before for tokens in meanwhile)
    assert has_records(target)
    with Engine(target, EngineOptions(k=4)) as engine:
        assert list(engine.generate(PROMPT, TOKENS)) == before
