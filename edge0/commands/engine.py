"""The arguments that say how a checkpoint is served, shared by every command that opens an engine or plans one."""

from __future__ import annotations

import argparse
import logging
import re

from edge0.checkpoint.layout import has_records
from edge0.errors import Edge0Error, ErrorKind
from edge0.options import EngineOptions

log = logging.getLogger(__name__)
UNITS = {"": 1} | {
    prefix + kind: base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for kind, base in (("", 1000), ("i", 1024))
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(large_pages=True)  # a command that opens an engine wants them (`edge0.pages`)
    group = parser.add_argument_group("how the checkpoint is served")
    group.add_argument("--k", type=int, help="experts per token (default: what the family serves)")
    group.add_argument(
        "--prerouter",
        choices=("route", "advise", "off"),
        default="route",
        help="the prediction is the route (default), only starts reads early, or is not made",
    )
    group.add_argument("--adapter-k", type=int, help="use the adapter set of another K, knowingly")
    group.add_argument("--no-lora", action="store_true", help="without the recovery LoRA")
    group.add_argument("--memory", help="all memory of this process, such as 3GiB (default: a bank of twice the floor)")
    group.add_argument(
        "--kernels",
        choices=("auto", "int8", "exact", "mlx"),
        default="auto",
        help="what computes on a CPU: own kernels with 8-bit or fp32 activations, MLX, or the fastest here (default)",
    )
    group.add_argument(
        "--io",
        choices=("pread", "direct"),
        default="pread",
        help="how experts are read; direct: past the page cache, for a repacked checkpoint in a process that is held to"
        " a limit on all its memory (default: pread)",
    )
    group.add_argument("--context", type=int, help="tokens of a request, prompt included, that memory is planned for")


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """
    Raises:
        Edge0Error: OPTION_INVALID.
    """
    if options.io == "direct" and options.directory.is_dir() and not has_records(options.directory):
        log.warning(
            "%s is not repacked: a direct read takes nine pieces for an expert, which is slower than the default; "
            "`edge0 repack` writes a copy with one record for each",
            options.directory,
        )
    return EngineOptions(
        k=options.k,
        adapter_k=options.adapter_k,
        prerouter=options.prerouter,
        lora=not options.no_lora,
        memory_bytes=None if options.memory is None else parse_bytes(options.memory, "memory"),
        context=options.context,
        kernels=options.kernels,
        io=options.io,
        **(options.engine_defaults(options.directory) if getattr(options, "engine_defaults", None) else {}),
    )


def parse_bytes(text: str, option: str) -> int:
    """`3GiB`, `512 MiB`, `2e9`, `800MB` to bytes.

    Raises:
        Edge0Error: OPTION_INVALID.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    nbytes = float(match[1]) * UNITS[(match[2] or "").lower()] if match else 0.0  # infinite from some 300 digits on
    if not 1 <= nbytes < 2**63:
        raise Edge0Error(
            ErrorKind.OPTION_INVALID, f"option {option}", expected="a size such as 3GiB or 800MB", found=repr(text)
        )
    return int(nbytes)
