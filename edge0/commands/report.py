"""What an answer cost, as one line for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge0.options import EngineOptions
    from edge0.serving.completion import Finished, Phase


def cost_line(finished: Finished, options: EngineOptions) -> str:
    """Prefill and decode of one answer: tokens per second, bytes of experts read, where they came from, and by which
    kernels and reads."""
    from edge0.kernels.choice import kernel_name

    prefill, decode = finished.prefill, finished.decode
    line = f"prefill {prefill.tokens} tokens in {prefill.duration_ns / 1e9:.2f} s"
    line += f" ({prefill.tokens_per_second:.1f} tok/s), {_reads(prefill)}; decode {finished.completion_tokens} tokens"
    if decode.tokens:
        line += f", {decode.tokens_per_second:.1f} tok/s, {_reads(decode)}"
    return f"{line}; kernels {kernel_name(options.kernels)}, io {options.io}"


def _reads(phase: Phase) -> str:
    told = f"{phase.loads} expert loads ({phase.asked_bytes / 2**20:.1f} MiB"
    if phase.device_bytes is not None and phase.asked_bytes:
        told += f", {min(1, phase.device_bytes / phase.asked_bytes):.0%} of it from the device"
    used = phase.loads + phase.hits
    return told + ")" + (f", {phase.hits / used:.0%} of experts found in memory" if used else "")
