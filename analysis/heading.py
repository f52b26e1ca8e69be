"""What stands above a table: its list of facts, and what takes a table's verdict away. Knows nothing of any table."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.rows import Session

GUEST_COLD = "guest-cold: times of cold reads are of a guest whose host may hold the file"


def guest_cold(lower_cache: str | None) -> list[str]:
    """The label of cold times, where a cache below this machine's is suspected; else nothing."""
    return [GUEST_COLD] if lower_cache == "suspected" else []


def own_kernels(*sessions: Session) -> list[str]:
    """A fact where some of our runs were not computed by MLX's operations."""
    used = {name for session in sessions for name in session.kernels} - {"mlx", "llama.cpp"}
    return [f"kernels: {', '.join(sorted(used))}, in place of MLX's operations"] if used else []


def heading(facts: Iterable[str], *sessions: Session) -> list[str]:
    """The facts and own kernels as a list, then a line for each session that drifted: what it gives is no verdict."""
    drifted = [
        f"**Session {session.name} has no verdict: the machine drifted. Its ratios are shown, not claimed.**"
        for session in sessions
        if session.drift().void_verdict
    ]
    return ["\n".join(f"- {fact}" for fact in (*facts, *own_kernels(*sessions))), *drifted]
