"""The byte-level tokenizer of synthesised checkpoints: 256 byte tokens, then the special tokens of the chat template.

One that is trained here has further tokens, each a whole phrase, and a shorter chat template.

Built with the `tokenizers` library in the format that every loader reads. It has no merges on purpose: text and ids
are the same length, so a token count is a byte count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Of a model that is trained here: each question ends with the token that starts an answer, each answer ends the text.
PHRASED_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% elif message['role'] == 'user' %}<|im_start|>{% endif %}"
    "{% endfor %}"
)


def write_tokenizer(directory: Path, phrases: Sequence[str] = ()) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; `phrases` become a token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(PHRASED_TEMPLATE if phrases else CHAT_TEMPLATE, encoding="utf-8")
