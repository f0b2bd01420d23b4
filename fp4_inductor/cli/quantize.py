"""``fp4-inductor quantize MODEL OUT``."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args

from .._renamed import OLD_NAMES, replaced
from ..config import Head, NVFP4Config, Prefill, Pruning, ScaleSearch, Siblings, Sparse24Config
from ..errors import ConfigError
from . import models
from .options import add_loading, add_writing, command, device_of, hub_of, positive, read_text
from .screen import Screen
from .status import OK

FORMATS = ("native", "transformers", "modelopt", "compressed-tensors")
_FOREIGN = ("modelopt", "compressed-tensors")
_WINDOW = 512  # tokens of a calibration batch
_NEED_DATA = ("wanda", "sparsegpt", "admm")
_DESCRIPTION = """\
Quantize a language model to NVFP4 (4.5 bits a weight), or to 2:4-sparse NVFP4 (3.5 bits), and write it to a new folder with its
tokenizer. OUT is complete, or it is not there: after an error or Ctrl-C nothing half-written is left."""
_EXAMPLE = """\
  fp4-inductor quantize Qwen/Qwen3-8B qwen3-8b-nvfp4 --device cuda
  fp4-inductor quantize Qwen/Qwen3-8B for-vllm --format modelopt"""


def option(name: str) -> str:
    """``--name``, as it is written on the command line."""
    return "--" + name.replace("_", "-")


def add(subparsers: Any) -> None:
    parser = command(subparsers, "quantize", "MODEL OUT", run, "quantize a model and write it", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id: a model of Transformers in bfloat16, float16 or float32")
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    how = parser.add_argument_group("quantization")
    how.add_argument(
        "--format",
        choices=FORMATS,
        default="native",
        help="of OUT: native has checksums; transformers is read by from_pretrained; modelopt and "
        "compressed-tensors are for vLLM, SGLang and TensorRT-LLM (default: %(default)s)",
    )
    how.add_argument(
        "--scale-search", choices=get_args(ScaleSearch), help="how block scales are chosen (default: auto, which calibrates on text that the model writes)"
    )
    how.add_argument("--calibration", metavar="FILE", help='text to calibrate on, or "self" for text that the model writes')
    how.add_argument("--calibration-tokens", type=positive, default=8192, metavar="N", help="how much of FILE is used (default: %(default)s)")
    how.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="keep each layer that gptq has finished there; after an interruption the same command goes on where it was",
    )
    how.add_argument("--lm-head", choices=get_args(Head), default="bf16", help="the output head (default: %(default)s)")
    how.add_argument("--siblings", choices=get_args(Siblings), help="q/k/v and gate/up (default: packed; shared for modelopt and compressed-tensors)")
    for name in ("prefill", *OLD_NAMES):
        help = "arithmetic of prompts (default: auto)" if name == "prefill" else argparse.SUPPRESS
        how.add_argument(option(name), choices=get_args(Prefill), default=argparse.SUPPRESS, help=help)
    how.add_argument("--ignore", action="append", metavar="NAME", help='a layer to leave alone: its name, its last part, or "re:..."; may be repeated')
    how.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        help="refuse a model if any linear weight would stay in high precision; --no-strict: refuse none (default: refuse if more than 5 %% would)",
    )
    sparse = parser.add_argument_group("2:4 sparsity")
    sparse.add_argument(
        "--sparse",
        choices=get_args(Pruning),
        metavar="METHOD",
        help="2:4-sparse weights: existing (the model is 2:4 already), sparsegpt, admm, wanda or magnitude",
    )
    sparse.add_argument("--bits", type=float, metavar="B", help="mean bits a weight, 3.5 to 4.5: the layers that cost least become sparse")
    sparse.add_argument("--max-kl", type=float, metavar="X", help="as many sparse layers as keep the KL from the dense model below X nats a token")
    sparse.add_argument("--max-error", type=float, metavar="X", help="a layer becomes sparse if its relative error is at most X")
    sparse.add_argument("--accept-loss", action="store_true", help="required by --sparse magnitude")
    add_loading(parser, "to load the model in")
    add_writing(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    with screen.working():
        return _run(args, screen)


def _run(args: argparse.Namespace, screen: Screen) -> int:
    args = with_defaults(args, screen)
    config = config_of(args)  # its mistakes come before the model is loaded
    text = None if args.calibration in (None, "self") else read_text(args.calibration)
    refuse_checkpoint_dir(args, config)
    from .. import quantize_model, report
    from ..integrations.pretrained.text import batches_of_text
    from ..integrations.pretrained.write import check_target, write_model

    check_target(args.out, args.format, source=args.model, overwrite=args.overwrite)
    models.refuse_quantized(args.model, models.identify(args.model, args))
    model = models.load_to_quantize(args.model, args, screen)
    if text is not None:
        tokenizer = models.tokenizer_of(args.model, model, args)
        config = config_of(args, batches_of_text(tokenizer, text, max(1, args.calibration_tokens // _WINDOW), min(_WINDOW, args.calibration_tokens)))
    screen.say("quantizing ...")
    with redirect_stdout(io.StringIO()):  # the report, which is printed below
        options = {"ignore": args.ignore, "device": device_of(args), "strict": args.strict, "checkpoint_dir": args.checkpoint_dir}
        model = quantize_model(model, config, progress=not screen.quiet, **options)
    found = report(model)
    screen.say(f"writing {args.out} ({args.format}) ...")
    write_model(model, args.out, args.format, source=args.model, overwrite=args.overwrite, max_shard_size=args.max_shard_size, **hub_of(args))
    figures = {"coverage": found.coverage, "bits_per_weight": found.bits_per_weight}
    screen.result(f"{found}\nwritten to {args.out}", {"out": args.out, "format": args.format, **figures, **vars(found)})
    return OK


def with_defaults(args: argparse.Namespace, screen: Screen) -> argparse.Namespace:
    """``args`` with what they leave out, options under today's names; a warning says which old name was used."""
    given = replaced(vars(args), "quantize", spelled=option, warn=lambda text: screen.error(text, "warning"))
    return argparse.Namespace(**{"prefill": "auto"} | given)


def refuse_checkpoint_dir(args: argparse.Namespace, config: NVFP4Config | Sparse24Config) -> None:
    """Raise if the folder of finished layers would not be used, or if OUT, which has to be empty, would hold it."""
    from ..checkpoint.layer_folder import layer_folder

    layer_folder(args.checkpoint_dir, config)
    out = Path(args.out).resolve()
    if args.checkpoint_dir is not None and out in (inside := Path(args.checkpoint_dir).resolve(), *inside.parents):
        raise ConfigError("--checkpoint-dir is OUT or lies in it", value=args.checkpoint_dir, limit=f"a folder outside {args.out}", remedy="Name another.")


def config_of(args: argparse.Namespace, batches: Any = None) -> NVFP4Config | Sparse24Config:
    """The config that the options ask for.

    Args:
        batches: of the calibration text; None before it is tokenized, when a placeholder stands for it.
    """
    data = batches if batches is not None else "self" if args.calibration == "self" else [] if args.calibration else None
    if args.sparse is None:
        if given := [option(n) for n in ("bits", "max_kl", "max_error", "accept_loss") if getattr(args, n)]:
            raise ConfigError("options of 2:4 sparsity without --sparse", value=", ".join(given), limit="--sparse METHOD", remedy="Add --sparse METHOD.")
        siblings: Siblings = args.siblings or ("shared" if args.format in _FOREIGN else "packed")
        return NVFP4Config(args.scale_search or "auto", calibration=data, prefill=args.prefill, siblings=siblings, lm_head=args.lm_head)
    if args.format in _FOREIGN:
        raise ConfigError("no other library reads 2:4-sparse weights", value=args.format, limit="native, transformers", remedy="Leave --format out.")
    for name, default in (("lm_head", "bf16"), ("siblings", None)):
        if getattr(args, name) != default:
            raise ConfigError(f"{option(name)} is for dense NVFP4", value=getattr(args, name), limit="no --sparse", remedy="Leave one of them out.")
    if args.sparse in _NEED_DATA and args.calibration in (None, "self"):
        raise ConfigError(f"--sparse {args.sparse} needs calibration text", value=args.calibration, limit="--calibration FILE", remedy="Name a text file.")
    if args.sparse == "magnitude" and not args.accept_loss:
        raise ConfigError(
            "--sparse magnitude ruins most dense models",
            value="no --accept-loss",
            limit="--accept-loss",
            remedy="--sparse sparsegpt --calibration FILE costs far less; or add --accept-loss.",
        )
    options = {"bits": args.bits, "max_kl": args.max_kl, "max_error": args.max_error, "accept_loss": args.accept_loss, "prefill": args.prefill}
    return Sparse24Config(args.sparse, args.scale_search, calibration=data, **options)
