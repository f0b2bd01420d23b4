"""``fp4-inductor recover FOLDER OUT --source MODEL``."""

from __future__ import annotations

import argparse
from typing import Any

from . import models
from .options import add_loading, add_writing, command, hub_of, positive, read_text
from .quantize import FORMATS
from .screen import Screen
from .status import OK

_DESCRIPTION = """\
Train a quantized model to predict what the model that it was made from predicts: its codes, block scales, biases and norms, which cost nothing
at run time. The text is written by MODEL, and taken from FILE if there is one. OUT is complete, or it is not there."""
_EXAMPLE = """\
  fp4-inductor recover qwen3-8b-nvfp4 recovered --source Qwen/Qwen3-8B"""
_WINDOW = 256


def add(subparsers: Any) -> None:
    parser = command(subparsers, "recover", "FOLDER OUT --source MODEL", run, "train a quantized model to predict as its source does", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="a quantized model: a folder, a .gguf file or a hub id")
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    parser.add_argument("--source", metavar="MODEL", required=True, help="the model that it was quantized from: a folder or a hub id")
    parser.add_argument("--format", choices=FORMATS, default="native", help="of OUT (default: %(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--text", metavar="FILE", help="text to train on, besides what MODEL writes: like that which the model will see")
    training.add_argument("--text-tokens", type=positive, default=65536, metavar="N", help="how much of FILE is used (default: %(default)s)")
    training.add_argument("--steps", type=positive, metavar="N", help="how many steps at most (default: as many as there is time for)")
    training.add_argument("--minutes", type=float, default=15.0, metavar="M", help="how long at most (default: %(default)s)")
    training.add_argument(
        "--batch", type=positive, metavar="N", help=f"rows of {_WINDOW} tokens in a step (default: 8, on a GPU 64, of a billion weights or more 32)"
    )
    training.add_argument(
        "--own-tokens",
        type=positive,
        metavar="N",
        help="how many tokens MODEL writes (default: 65536, on a GPU as many as a quarter of the time allows, up to 67108864)",
    )
    add_loading(parser)
    add_writing(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    with screen.working():
        return _run(args, screen)


def _run(args: argparse.Namespace, screen: Screen) -> int:
    from .. import recover
    from ..integrations.pretrained.text import windows_of_text
    from ..integrations.pretrained.write import check_target, write_model

    text = None if args.text is None else read_text(args.text)
    check_target(args.out, args.format, source=args.folder, overwrite=args.overwrite)
    what, other = models.identify(args.folder, args), models.identify(args.source, args)
    models.refuse_dense(args.folder, what)
    models.refuse_quantized(args.source, other)
    model, source = models.load(args.folder, what, args, screen), models.load(args.source, other, args, screen)
    rows = None
    if text is not None:
        tokenizer = models.tokenizer_of(args.folder, model, args)
        rows = windows_of_text(tokenizer, text, max(1, args.text_tokens // _WINDOW), _WINDOW)[:, :-1]
    screen.say("training ...")
    found = recover(model, source, rows, own_text=args.own_tokens or True, steps=args.steps, minutes=args.minutes, batch=args.batch, progress=not screen.quiet)
    screen.say(f"writing {args.out} ({args.format}) ...")
    write_model(model, args.out, args.format, source=args.folder, overwrite=args.overwrite, max_shard_size=args.max_shard_size, **hub_of(args))
    screen.result(f"{found}\nwritten to {args.out}", {"out": args.out, "format": args.format, **vars(found)})
    return OK
