"""``fp4-inductor export FOLDER OUT --format FORMAT``."""

from __future__ import annotations

import argparse
from typing import Any

from . import models
from .options import add_loading, add_writing, command, hub_of
from .quantize import FORMATS
from .screen import Screen
from .status import OK

_DESCRIPTION = """\
Write a quantized model in another format, with its tokenizer. Codes and scales are kept bit for bit, except where layers that a server
fuses (q/k/v, gate/up) have different global scales: a warning says what that changed. OUT is complete, or it is not there."""
_EXAMPLE = """\
  fp4-inductor export qwen3-8b-nvfp4 for-vllm --format modelopt"""


def add(subparsers: Any) -> None:
    parser = command(subparsers, "export", "FOLDER OUT --format FORMAT", run, "write a quantized model in another format", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="a quantized model: a folder, a .gguf file or a hub id")
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    parser.add_argument("--format", choices=FORMATS, required=True, help="of OUT")
    add_loading(parser)
    add_writing(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    with screen.working():
        return _run(args, screen)


def _run(args: argparse.Namespace, screen: Screen) -> int:
    from .. import inspect_checkpoint
    from ..integrations.pretrained.write import check_target, write_model

    check_target(args.out, args.format, source=args.folder, overwrite=args.overwrite)
    what = models.identify(args.folder, args)
    models.refuse_dense(args.folder, what)
    model = models.load(args.folder, what, args, screen)
    screen.say(f"writing {args.out} ({args.format}) ...")
    write_model(model, args.out, args.format, source=args.folder, overwrite=args.overwrite, max_shard_size=args.max_shard_size, **hub_of(args))
    written = inspect_checkpoint(args.out, read=False)
    size = sum(written.files.values())
    text = f"{args.out}: {args.format}, {len(written.quantized)} weights in FP4, {written.bits_per_weight:.2f} bits a weight, {size / 1e6:.1f} MB"
    screen.result(text, {"out": args.out, "format": args.format, "from": what.format, "weights": len(written.quantized), "bytes": size})
    return OK
