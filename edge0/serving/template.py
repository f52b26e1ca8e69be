"""Messages to token ids with the checkpoint's chat template.

A template is code that comes with a checkpoint. transformers renders it in Jinja's immutable sandbox; text of the
messages that looks like a control token stays text, so that a message cannot end its own turn. Nothing here runs code
of the checkpoint outside that sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge0.errors import Edge0Error, ErrorKind
from edge0.serving.vocabulary import Vocabulary

Message = dict[str, str]  # "role" and "content"


def render(vocabulary: Vocabulary, messages: Sequence[Message], thinking: bool = False) -> list[int]:
    """The ids of a conversation, up to where the assistant begins to speak.

    Args:
        thinking: whether the template, if it has such a switch, asks the model to think first.

    Raises:
        Edge0Error: TEMPLATE_INVALID, PROMPT_INVALID.
    """
    tokenizer = vocabulary.tokenizer
    if not tokenizer.has_chat_template:
        raise Edge0Error(
            ErrorKind.TEMPLATE_INVALID,
            "the checkpoint has no chat template",
            path=vocabulary.directory,
            hint="send a plain prompt",
        )
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            detail = f"the message of the {message['role']} is not valid Unicode"
            raise Edge0Error(ErrorKind.PROMPT_INVALID, detail) from error
    try:
        tokens = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, enable_thinking=thinking, sanitize_control_tokens=True
        )
    except Exception as error:  # whatever a template does, it is the template that failed
        raise Edge0Error(
            ErrorKind.TEMPLATE_INVALID,
            f"the chat template cannot render these messages ({type(error).__name__}: {error})",
            path=vocabulary.directory,
        ) from error
    return list(tokens)
