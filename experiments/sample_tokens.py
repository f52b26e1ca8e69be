"""Sample the token sequence that a session replays: `MODEL PROMPT_TOKENS COUNT SEED OUT.json`.

The prompt is a fixed English text, cut to length; what follows is sampled from the model with its own routing, so that
routes are those of text the model would write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edge0 import Edge0Error, Engine, EngineOptions, Sampling
from edge0.errors import EXIT_CODE
from edge0.tokens import load_tokenizer

TEXT = (
    "A mixture of experts keeps most of its weights idle for any one token. If the idle ones stay on disk, what "
    "matters is how early one knows which of them the next token will need, and how long a read takes. "
)


def main() -> int:
    model, prompt_tokens, count, seed, out = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    try:
        tokenizer = load_tokenizer(Path(model))
        text = TEXT
        while len(prompt := tokenizer.encode(text)) < prompt_tokens:
            text += TEXT
        prompt = list(prompt[:prompt_tokens])
        with Engine(model, EngineOptions(prerouter="off", lora=False)) as engine:
            sampling = Sampling(temperature=0.7, top_p=0.95, seed=seed)
            tokens = prompt + list(engine.generate(prompt, count, sampling))
    except Edge0Error as error:
        print(f"edge0: {error}", file=sys.stderr)
        return EXIT_CODE
    out.write_text(json.dumps({"tokens": tokens}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
