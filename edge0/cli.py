"""The command line: `edge0 COMMAND`. Every command is a module of `edge0.commands` or one that a package adds.

Packages above the engine (the harness and its analysis) add theirs through the entry-point group `edge0.commands`, so
that nothing here imports them. One that lacks its own packages (a base installation has none of the harness's) is
absent. Expected failures are one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from types import ModuleType

from edge0.commands import chat, generate, plan, repack, serve, synth, trace, verify
from edge0.errors import EXIT_CODE, Edge0Error
from edge0.pages import restart_with_large_pages

COMMANDS: dict[str, ModuleType] = {
    "synth": synth,
    "verify": verify,
    "plan": plan,
    "repack": repack,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "trace": trace,
}


def all_commands() -> dict[str, ModuleType]:
    """Commands by name: the engine's own, then those that other packages add and that can be imported here."""
    commands = dict(COMMANDS)
    for point in sorted(entry_points(group="edge0.commands")):
        with suppress(ImportError):
            commands[point.name] = point.load()
    return commands


def command_parser() -> argparse.ArgumentParser:
    """The parser of every command; what it parsed has `run`, to be called with it."""
    parser = argparse.ArgumentParser(prog="edge0", description="Serve mixture-of-experts models from SSD.")
    commands = parser.add_subparsers(dest="command", required=True)
    modules = all_commands()
    # A package above may know what decodes fastest on this machine.
    defaults = next((m.engine_defaults for m in modules.values() if hasattr(m, "engine_defaults")), None)
    parser.set_defaults(engine_defaults=defaults)
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = command_parser().parse_args(arguments)
    if arguments is None and getattr(options, "large_pages", False):
        restart_with_large_pages()
    _open_standard_descriptors()
    try:
        options.run(options)
    except Edge0Error as error:
        print(f"edge0: {error}", file=sys.stderr)
        return EXIT_CODE
    except ModuleNotFoundError as error:
        if options.command in COMMANDS:
            raise
        print(f"edge0: {options.command} needs the package {error.name}: install edge0[harness]", file=sys.stderr)
        return EXIT_CODE
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # of stdout; whatever belongs to a file of ours is an Edge0Error
        print(f"edge0: cannot write: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CODE
    except KeyboardInterrupt:
        print("edge0: interrupted", file=sys.stderr)
        return 130
    return 0


def _open_standard_descriptors() -> None:
    """Where a descriptor below 3 is closed, the next file that is opened would get it, and be taken for a terminal."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    sys.exit(main())
