"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import ConfigError
from .screen import wrapped

_WIDTH = 78
DTYPES = ("auto", "bfloat16", "float16", "float32")


class Parser(argparse.ArgumentParser):
    """Its messages fit the terminal, too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, wrapped(f"{self.prog}: error: {message}") + "\n")


def command(subparsers: Any, name: str, usage: str, run: Callable[..., int], help: str, description: str, example: str) -> argparse.ArgumentParser:
    """A subparser with the options that every command has. ``usage``: its arguments; ``example``: shown at the end of its help."""
    parser = subparsers.add_parser(
        name,
        usage=f"%(prog)s {usage} [options]",
        help=help,
        description=textwrap.fill(description, _WIDTH),
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the result as one JSON object")
    output.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    output.add_argument("--traceback", action="store_true", help="show where in the program an error was raised")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_loading(parser: argparse.ArgumentParser, dtype: str = "of what is not quantized, and of activations") -> None:
    """``--device``, ``--dtype``, ``--revision``."""
    loading = parser.add_argument_group("loading")
    loading.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: cuda if there is a GPU, else cpu)")
    loading.add_argument("--dtype", choices=DTYPES, default="auto", help=f"dtype {dtype} (default: what the model says)")
    loading.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of a model on the hub")


def add_writing(parser: argparse.ArgumentParser) -> None:
    """``--overwrite``, ``--max-shard-size``."""
    writing = parser.add_argument_group("writing")
    writing.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is in OUT; files that belong to none stay")
    writing.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="largest file of weights (default: %(default)s)")


def device_of(args: argparse.Namespace) -> str:
    """The device that was asked for, or the default."""
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def hub_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of ``from_pretrained`` about the hub."""
    return {} if args.revision is None else {"revision": args.revision}


def positive(text: str) -> int:
    """An integer above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def read_text(path: str) -> str:
    """A file of UTF-8 text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("this file is no text", value=f"{path}: {error.reason} at byte {error.start}", limit="UTF-8", remedy="Name a text file.") from error
