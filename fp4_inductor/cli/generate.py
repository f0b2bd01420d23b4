"""``fp4-inductor run MODEL --prompt TEXT``."""

from __future__ import annotations

import argparse
import io
import sys
import time
from contextlib import redirect_stdout
from typing import Any

from . import models
from .options import add_loading, command, device_of, positive
from .screen import Screen
from .status import OK

_DESCRIPTION = """\
Continue a prompt, or answer it if the model has a chat template. The text is printed as it comes. A model that is not quantized runs as
it is, or in NVFP4 with --quantize; nothing is written."""
_EXAMPLE = """\
  fp4-inductor run qwen3-8b-nvfp4 --prompt "Why is the sky blue?"
  fp4-inductor run qwen3-8b-nvfp4 --prompt - --max-new-tokens 500 < question.txt"""


def add(subparsers: Any) -> None:
    parser = command(subparsers, "run", "MODEL --prompt TEXT", run, "generate text", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads it from stdin")
    parser.add_argument("--raw", action="store_true", help="give the prompt to the model as it is, without its chat template")
    parser.add_argument("--quantize", action="store_true", help="quantize a model that is not: to NVFP4, in memory")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="tokens to generate at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample at this temperature; 0 takes the likeliest token (default: as the model says)")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the sampling")
    parser.add_argument(
        "--static-cache",
        action="store_true",
        help="a cache of fixed size, with which decode steps are compiled on a GPU: faster, but the first call takes longer",
    )
    add_loading(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with screen.working():
        text, tokens, seconds = _generate(args, screen, prompt)
    screen.say(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s, the prompt and the first call included")
    if screen.as_json:
        screen.result("", {"model": args.model, "prompt": prompt, "text": text, "tokens": tokens, "seconds": seconds})
    return OK


def _generate(args: argparse.Namespace, screen: Screen, prompt: str) -> tuple[str, int, float]:
    import torch

    from .. import quantize_model
    from ..integrations.pretrained.text import prompt_tokens, stream_text

    what = models.identify(args.model, args)
    if args.quantize:
        models.refuse_quantized(args.model, what)
        model = models.load_to_quantize(args.model, args, screen)
        with redirect_stdout(io.StringIO()):
            model = quantize_model(model, device=device_of(args), progress=not screen.quiet)
    else:
        model = models.load(args.model, what, args, screen)
    tokenizer = models.tokenizer_of(args.model, model, args)
    chat = not args.raw and bool(getattr(tokenizer, "chat_template", None))
    if chat:
        screen.say("the prompt stands in the model's chat template (--raw: it does not)")
    ids = prompt_tokens(tokenizer, prompt, chat)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.temperature is not None:
        options |= {"do_sample": args.temperature > 0} | ({"temperature": args.temperature} if args.temperature > 0 else {})
    if args.static_cache:
        options["cache_implementation"] = "static"
    if args.seed is not None:
        torch.manual_seed(args.seed)
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if not screen.as_json:
            print(piece, end="", file=screen.out, flush=True)

    begin = time.perf_counter()
    tokens = stream_text(model, tokenizer, ids, write, **options)
    seconds = time.perf_counter() - begin
    if not screen.as_json:
        print(file=screen.out, flush=True)
    return "".join(pieces), tokens, seconds
