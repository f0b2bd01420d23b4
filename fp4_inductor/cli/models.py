"""Loading whatever a command is given: quantized or not, folder, .gguf file or hub id."""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any, cast

import torch

from ..checkpoint.identify import GGUF, Identity
from ..errors import ConfigError
from ..models.plan import model_bytes
from ..models.preflight import check_device
from .options import device_of, hub_of
from .screen import Screen

_BACKWARD = 4  # activations and gradients of one window of text: at most this part of a model's bytes
_ROOM = 0.8  # of a GPU's free memory that a dense model may take


def identify(name: str, args: argparse.Namespace) -> Identity:
    """The format of a model."""
    from ..integrations.pretrained.dense import identify_pretrained

    return identify_pretrained(name, **hub_of(args))


def load(name: str, what: Identity, args: argparse.Namespace, screen: Screen) -> Any:
    """The model in eval mode, on the device of ``--device``."""
    from ..integrations.pretrained import load_pretrained
    from ..integrations.pretrained.dense import class_of, load_dense

    device = device_of(args)
    screen.say(f"loading {name} ({what.format}) to {device} ...")
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    if not what.quantized:
        return load_dense(name, device=device, dtype=dtype or "auto", **hub_of(args))
    options = hub_of(args) if what.format == GGUF else {**hub_of(args), "model_class": class_of(what.architecture)}
    return load_pretrained(name, device=device, dtype=dtype, **options)


def load_to_quantize(name: str, args: argparse.Namespace, screen: Screen) -> Any:
    """A dense model: on the device of ``--device`` if that has room for it, else on the CPU, from where each layer moves by itself."""
    from ..integrations.pretrained.dense import load_dense

    device = cast(torch.device, check_device(device_of(args)))
    files = list(Path(name).glob("*.safetensors"))
    straight = device.type != "cuda" or (bool(files) and _fits(sum(p.stat().st_size for p in files), device))
    where = device if straight else torch.device("cpu")
    screen.say(f"loading {name} to {where} ...")
    model = load_dense(name, device=where, dtype="auto" if args.dtype == "auto" else getattr(torch, args.dtype), **hub_of(args))
    if straight:
        return model
    if _fits(model_bytes(model), device):
        return cast(Any, model).to(device)
    screen.say(f"{device} has no room for the dense model: its layers move there one by one, quantized")
    return model


def _fits(size: int, device: torch.device) -> bool:
    return size < _ROOM * torch.cuda.mem_get_info(device)[0]


def has_room(folder: str, loaded: torch.nn.Module) -> bool:
    """Whether a quantized model in a local folder or file fits beside a model that is loaded, with what a backward pass takes; False where nobody knows."""
    path = Path(folder)
    files = list(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    size = sum(p.stat().st_size for p in files)
    device = next((p.device for p in loaded.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return bool(size) and _fits(size + model_bytes(loaded) // _BACKWARD, device)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return False
    return bool(size) and size + model_bytes(loaded) // _BACKWARD < _ROOM * free


def free_memory() -> None:
    """Give back what a model took that nothing refers to."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def tokenizer_of(name: str, model: Any, args: argparse.Namespace) -> Any:
    """The tokenizer of a model."""
    from ..integrations.pretrained.text import load_tokenizer

    return load_tokenizer(name, getattr(model.config.get_text_config(), "vocab_size", None), **hub_of(args))


def refuse_quantized(name: str, what: Identity) -> None:
    """Raise ConfigError if the model is quantized already."""
    if what.quantized:
        raise ConfigError(
            f"{name} is quantized already",
            value=what.format,
            limit="a model in bfloat16, float16 or float32",
            remedy="fp4-inductor export writes it in another format, and fp4-inductor run runs it.",
        )


def refuse_dense(name: str, what: Identity) -> None:
    """Raise ConfigError if the model is not quantized."""
    if not what.quantized:
        raise ConfigError(f"{name} is not quantized", value=what.format, limit="a quantized model", remedy="Run fp4-inductor quantize first.")
