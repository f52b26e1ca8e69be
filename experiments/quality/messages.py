"""OpenCompass's prompts as chat messages: what an arm is asked, and how a prediction's prompt is recognised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}


def messages_of(prompt: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """A text is one message of the user's; items are OpenCompass's (role, prompt) or ready ones (role, content)."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [
        {
            "role": ROLES.get(item["role"], item["role"]),
            "content": item["prompt"] if "prompt" in item else item["content"],
        }
        for item in prompt
    ]
