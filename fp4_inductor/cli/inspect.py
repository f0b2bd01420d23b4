"""``fp4-inductor inspect FOLDER``."""

from __future__ import annotations

import argparse
from typing import Any

from .options import command
from .screen import Screen, columns
from .status import FAILED, OK

_DESCRIPTION = """\
Say which format a checkpoint is in, what is in it, and whether it is damaged. No model is built. Reads native, Transformers, ModelOpt,
compressed-tensors, GGUF, gpt-oss MXFP4 and torchao checkpoints, and dense ones. Exit status 1 if there is damage."""
_EXAMPLE = """\
  fp4-inductor inspect qwen3-8b-nvfp4
  fp4-inductor inspect model.gguf --json | jq '.tensors[].format'"""


def add(subparsers: Any) -> None:
    parser = command(subparsers, "inspect", "FOLDER", run, "say what is in a checkpoint, and whether it is damaged", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="a folder with a checkpoint, or a .gguf file")
    parser.add_argument("--every", action="store_true", help="one line for each tensor, also where layers are alike")
    parser.add_argument("--headers", action="store_true", help="look at names, shapes, sizes and indexes only, and read no value")


def run(args: argparse.Namespace, screen: Screen) -> int:
    from .. import inspect_checkpoint

    with screen.working():
        found = inspect_checkpoint(args.folder, read=not args.headers, progress=not screen.quiet)
    screen.result(found.table(args.every, columns()), {**vars(found), "quantized_params": found.params, "bits_per_weight": found.bits_per_weight})
    return FAILED if found.damage else OK
