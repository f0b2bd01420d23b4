"""``fp4-inductor verify FOLDER``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, CoverageError
from . import models
from .options import add_loading, command, positive, read_text
from .screen import Screen
from .status import FAILED, OK

_DESCRIPTION = """\
Check a quantized model: read every byte, load it, run it over a text, and compare its predictions with those of another model, e.g. the
one that it was quantized from: what it lost, and which layers lost it. Exit status 1 if a check fails."""
_EXAMPLE = """\
  fp4-inductor verify qwen3-8b-nvfp4 --against Qwen/Qwen3-8B --device cuda
  fp4-inductor verify qwen3-8b-nvfp4 --text manual.txt --max-perplexity 12"""


def add(subparsers: Any) -> None:
    parser = command(subparsers, "verify", "FOLDER [--against MODEL]", run, "check a quantized model: damage, loading, predictions", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="a quantized model: a folder, a .gguf file or a hub id")
    parser.add_argument("--against", metavar="MODEL", help="a model to compare with, quantized or not")
    parser.add_argument(
        "--layers",
        action=argparse.BooleanOptionalAction,
        help="the share of each layer of the KL, for which both models are in memory together (default: if MODEL is dense and that has room)",
    )
    text = parser.add_argument_group("text")
    text.add_argument("--text", metavar="FILE", help='the text to predict, or "self" for one that the model writes (default: Python\'s language reference)')
    text.add_argument("--windows", type=positive, default=8, metavar="N", help="how many windows of it (default: %(default)s)")
    text.add_argument("--window", type=positive, default=512, metavar="T", help="tokens of a window (default: %(default)s)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-kl", type=float, metavar="X", help="fail if the KL from MODEL is above X nats a token; needs --against")
    limits.add_argument("--max-perplexity", type=float, metavar="X", help="fail if the perplexity is above X")
    add_loading(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    if args.max_kl is not None and args.against is None:
        from ..errors import ConfigError

        raise ConfigError("--max-kl without a model to compare with", value=args.max_kl, limit="--against MODEL", remedy="Add --against MODEL.")
    if args.layers and args.against is None:
        from ..errors import ConfigError

        raise ConfigError("--layers without a model to compare with", value="--layers", limit="--against MODEL", remedy="Add --against MODEL.")
    with screen.working():
        lines, data = _checked(args, screen)
    failed = data["failed"]
    lines.append(f"  FAILED      {'; '.join(failed)}" if failed else "  ok")
    screen.result("\n".join([args.folder, *lines]), data)
    return FAILED if failed else OK


def _checked(args: argparse.Namespace, screen: Screen) -> tuple[list[str], dict[str, Any]]:
    from .. import evaluate, inspect_checkpoint, report
    from ..integrations.pretrained.text import python_reference, windows_of_text
    from ..models.evaluate import predictions
    from ..models.layer_shares import layer_shares
    from ..models.verify import Verification, own_windows

    own = args.text == "self"
    text = "" if own else python_reference() if args.text is None else read_text(args.text)
    what = models.identify(args.folder, args)
    models.refuse_dense(args.folder, what)
    lines, data = [f"  format      {what.format}"], {"folder": args.folder, "format": what.format, "failed": []}
    if Path(args.folder).exists():
        screen.say(f"reading {args.folder} ...")
        found = inspect_checkpoint(args.folder, progress=not screen.quiet)
        data["damage"] = found.damage
        lines += [f"  damage      {found.damage[0].what}" if found.damage else "  damage      none found: every value was read"]
        if found.damage:
            data["failed"].append(f"{len(found.damage)} problems; fp4-inductor inspect lists them")
            return lines, data

    def windows_for(model: Any) -> Any:
        """Its own text is that of the model to compare with, which is loaded first."""
        if own:
            screen.say("writing a text ...")
            return own_windows(model, args.windows, args.window)
        return windows_of_text(models.tokenizer_of(args.folder, model, args), text, args.windows, args.window)

    reference = expected = windows = other = None
    layers = False
    if args.against is not None:  # first: without shares of layers one model at a time is in memory
        against = models.identify(args.against, args)
        other = models.load(args.against, against, args, screen)
        windows = windows_for(other)
        reference = predictions(other, windows, progress=not screen.quiet)
        expected = evaluate(reference, windows)
        layers = args.layers if args.layers is not None else not against.quantized and models.has_room(args.folder, other)
        if not layers:
            other = None
            models.free_memory()
    try:
        model = models.load(args.folder, what, args, screen)
    except (CheckpointError, CoverageError) as error:
        data |= {"loads": False, "error": error, "failed": [f"it does not load: {error}"]}
        return lines, data
    coverage = report(model).coverage
    lines += [f"  loads       as {type(model).__name__}", f"  coverage    {len(report(model).layers)} layers, {coverage:.2f} % of the linear weights"]
    if windows is None:
        windows = windows_for(model)
    got = evaluate(model, windows, reference=reference, progress=not screen.quiet)
    writer = args.folder if args.against is None else args.against
    name = "Python's language reference" if args.text is None else f"written by {writer}" if own else args.text
    lines += [
        f"  text        {name}: {windows.shape[0]} windows of {windows.shape[1] - 1} tokens",
        f"  finite      {'all logits' if not got.non_finite else f'NOT at {got.non_finite} of {got.positions} positions'}",
        f"  perplexity  {got.perplexity:.4f} ({got.nats:.4f} nats a token)",
    ]
    data |= {"loads": True, "coverage": coverage, "text": name, **vars(got), "perplexity": got.perplexity}
    if expected is not None and got.agreement is not None:
        lines += [
            f"  against     {args.against}: perplexity {expected.perplexity:.4f} ({got.perplexity / expected.perplexity:.4f} times)",
            f"  KL          {got.kl:.5f} nats a token; the likeliest token is the same at {100 * got.agreement:.1f} %",
        ]
        data |= {"against": {"model": args.against, **vars(expected), "perplexity": expected.perplexity}}
    if other is not None and expected is not None:
        shares, notes = layer_shares(model, other, windows, progress=not screen.quiet)
        found_shares = Verification(got, expected, tuple(shares), tuple(notes))
        lines += [f"  {line}" for line in found_shares.shares()]
        data |= {"layers": shares, "notes": notes}
    if got.non_finite:
        data["failed"].append("logits that are not finite")
    if args.max_kl is not None and not (got.kl or 0.0) <= args.max_kl:
        data["failed"].append(f"KL {got.kl:.5f} is above {args.max_kl}")
    if args.max_perplexity is not None and not got.perplexity <= args.max_perplexity:
        data["failed"].append(f"perplexity {got.perplexity:.4f} is above {args.max_perplexity}")
    return lines, data
