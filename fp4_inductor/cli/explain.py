"""``fp4-inductor explain MODEL --tokens M``."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from typing import Any

from ..errors import ConfigError
from . import models
from .options import add_loading, command, device_of, positive
from .screen import Screen
from .status import OK

_DESCRIPTION = """\
Say which kernel computes which layer when the model reads M tokens at once, and why. The model runs once for each M, on the device that
is asked about. A model that is not quantized yet is quantized in memory first, quickly; nothing is written."""
_EXAMPLE = """\
  fp4-inductor explain qwen3-8b-nvfp4 --tokens 1 --tokens 2048 --device cuda
  fp4-inductor explain Qwen/Qwen3-8B --tokens 1,16,256 --compile"""


def add(subparsers: Any) -> None:
    parser = command(subparsers, "explain", "MODEL --tokens M", run, "say which kernel runs, and why", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a hub id; quantized or not")
    parser.add_argument(
        "--tokens",
        type=numbers,
        action="append",
        required=True,
        metavar="M",
        help="tokens read at once: 1 is a decode step; a number, or several with commas; may be repeated",
    )
    parser.add_argument("--not-taken", action="store_true", help="say for each reason which kernels do not serve the calls")
    parser.add_argument("--compile", action="store_true", help="as under torch.compile, where layers are merged and fused; takes longer")
    add_loading(parser)


def numbers(text: str) -> list[int]:
    """``"1,16"``: numbers above zero."""
    return [positive(part) for part in text.split(",")]


def run(args: argparse.Namespace, screen: Screen) -> int:
    sizes = list(dict.fromkeys(m for group in args.tokens for m in group))
    with screen.working():
        explanations = _explain(args, screen, sizes)
    how = "compiled" if args.compile else "eager"
    text = "\n\n".join(f"M = {m}, {how}, {device_of(args)}\n{_told(found, args.not_taken)}" for m, found in explanations.items())
    screen.result(text, {"model": args.model, "compiled": args.compile, "calls": [{"tokens": m, **vars(found)} for m, found in explanations.items()]})
    return OK


def _told(found: Any, not_taken: bool) -> str:
    return "\n".join(filter(None, [found.text(hint="--not-taken"), found.not_taken() if not_taken else ""]))


def _explain(args: argparse.Namespace, screen: Screen, sizes: list[int]) -> dict[int, Any]:
    import torch

    from .. import NVFP4Config, explain, quantize_model

    what = models.identify(args.model, args)
    if what.quantized:
        model = models.load(args.model, what, args, screen)
    else:
        model = models.load_to_quantize(args.model, args, screen)
        screen.say("it is not quantized: quantizing it in memory ...")
        with redirect_stdout(io.StringIO()):
            model = quantize_model(model, NVFP4Config("amax"), device=device_of(args), strict=False, progress=not screen.quiet)
    if getattr(model, "main_input_name", "") != "input_ids" or getattr(model.config, "is_encoder_decoder", False):
        limit = "a model that takes input_ids alone"
        raise ConfigError("the model does not read tokens alone", value=type(model).__name__, limit=limit, remedy="Call fp4_inductor.explain in Python.")
    explanations = {}
    for m in sizes:
        screen.say(f"running {m} {'token' if m == 1 else 'tokens'} ...")
        ids = torch.zeros(1, m, dtype=torch.int64, device=device_of(args))
        explanations[m] = explain(torch.compile(model) if args.compile else model, ids)
    return explanations
