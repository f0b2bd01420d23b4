"""The command line, ``fp4-inductor`` and ``python -m fp4_inductor``: arguments in, functions of the package called, text or JSON out.

One file a subcommand. Each has ``add(subparsers)`` and ``run(args, screen) -> exit status``; what takes long to import is imported
in ``run``. Exit statuses are those of :mod:`.status`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from . import explain, export, generate, inspect, quantize, recover, verify
from .options import Parser
from .screen import PROGRAM, Screen
from .status import MISTAKE, STATUSES, run_guarded

_COMMANDS = (quantize, inspect, verify, recover, export, explain, generate)
_DESCRIPTION = """\
Quantize language models to NVFP4; look into checkpoints, verify, convert and
run them. "fp4-inductor COMMAND --help" has the options and an example."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    epilog = "exit status:\n" + "\n".join(f"  {status:<4} {meaning}" for status, meaning in STATUSES.items())
    top = Parser(PROGRAM, description=_DESCRIPTION, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process if None.

    Returns:
        The exit status. A wrong argument ends the process with status 2, as argparse does.
    """
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser().print_help(sys.stderr)
        return MISTAKE
    args, unknown = parser().parse_known_args(given)
    if unknown:  # argparse would show the usage of the program, not that of the command
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings are errors of load_dense, or of no use here
    screen = Screen(as_json=args.json, quiet=args.quiet)
    return run_guarded(lambda: args.run(args, screen), screen, args)
