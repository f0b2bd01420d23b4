"""``save_pretrained`` of a diffusers model that holds packed layers: complete, described, proved to be readable, or not at all."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from ...checkpoint.aside import as_path
from ...errors import CheckpointError, bullet_names
from ...models.plan import linear_kind
from ...modules import FP4Experts, FP4Linear
from ...tensors.base import FP4Tensor
from ..whole import is_packed, prefill_of, write_whole
from .quantizer import METHOD, FP4DiffusersConfig, FP4DiffusersQuantizer

_FIELD = "quantization_config"


def extend_save_pretrained() -> None:
    """Extend ``ModelMixin.save_pretrained``. May be called again."""
    original = ModelMixin.save_pretrained
    if hasattr(original, "_fp4_inductor"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if not is_packed(self):
            return original(self, save_directory, *args, **kwargs)
        options = dict(signature.bind(self, save_directory, *args, **kwargs).arguments)
        options |= options.pop("kwargs", {})
        del options["self"], options["save_directory"]
        check_saveable(self, options)
        with _described(self):
            write = functools.partial(original, self)
            if options.get("push_to_hub"):
                return write(save_directory, **options)
            is_stale = _is_weights_of(options.get("variant"))
            write_whole(self, as_path(save_directory, "save_directory"), functools.partial(write, **options), lambda aside: None, "config.json", is_stale)
            return None

    save_pretrained._fp4_inductor = True  # type: ignore[attr-defined]
    ModelMixin.save_pretrained = save_pretrained


def describe(model: Any) -> None:
    """Tell a diffusers model that it is quantized, by the quantizer and the config that ``from_pretrained`` would give it."""
    layers = {name: m.storage().name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, FP4Linear)}
    config = FP4DiffusersConfig(layers, prefill_of(model))
    model.hf_quantizer = FP4DiffusersQuantizer(config, pre_quantized=True)
    model.quantization_method = METHOD
    model.register_to_config(**{_FIELD: config})


@contextmanager
def _described(model: Any) -> Iterator[None]:
    """Inside, the model says that it is quantized, as it is now: more layers may have been packed since it last said so."""
    before = {name: vars(model)[name] for name in ("hf_quantizer", "quantization_method", "_internal_dict") if name in vars(model)}
    describe(model)
    try:
        yield
    finally:
        for name in ("hf_quantizer", "quantization_method", "_internal_dict"):
            vars(model).pop(name, None)
        vars(model).update(before)


def check_saveable(model: Any, options: dict[str, Any]) -> None:
    """Raise CheckpointError for a model, or options, of which ``from_pretrained`` could read nothing back."""
    other = getattr(model, "hf_quantizer", None)
    wrong = [f"a quantizer of another library: {type(other).__name__}"] if other is not None and not isinstance(other, FP4DiffusersQuantizer) else []
    wrong += [f"{name}: experts in one tensor" for name, m in model.named_modules() if isinstance(m, FP4Experts)]
    wrong += [f"{name}: a {type(p).__name__} in a module of the model's own" for name, p in model.named_parameters() if isinstance(p, FP4Tensor)]
    wrong += [f"{name}={options[name]!r}" for name, usual in (("safe_serialization", True), ("use_flashpack", False)) if options.get(name, usual) != usual]
    wrong += _misfits(model)
    if wrong:
        raise CheckpointError(
            f"from_pretrained could not read back what save_pretrained would write; nothing was written:\n{bullet_names(wrong)}\n",
            value=f"{len(wrong)} problems",
            limit="FP4Linear, Sparse24Linear and FP8Linear in place of the model's linear layers, safetensors",
            remedy="Write the model with fp4_inductor.save(model, folder), and read it with fp4_inductor.load(function_that_builds_it, folder).",
        )


def _misfits(model: Any) -> list[str]:
    """The packed layers that a model built from the config has no linear layer for."""
    try:
        with torch.device("meta"):
            dense = type(model).from_config({k: v for k, v in model.config.items() if k != _FIELD})
    except Exception:  # a constructor of somebody's own: nothing can be proved then
        return []
    theirs: dict[str, nn.Module] = dict(dense.named_modules())
    wrong = []
    for name, m in model.named_modules(remove_duplicate=False):
        if isinstance(m, FP4Linear):
            there = theirs.get(name)
            shape = tuple(there.weight.shape) if there is not None and linear_kind(there) == "linear" else None  # type: ignore[arg-type]
            if shape != (m.out_features, m.in_features):
                wrong.append(f"{name}: {m.out_features} x {m.in_features}, in the architecture {shape or type(there).__name__}")
    return wrong


def _is_weights_of(variant: str | None) -> Any:
    stem = f"diffusion_pytorch_model.{variant}" if variant else "diffusion_pytorch_model"
    index = f"diffusion_pytorch_model.safetensors.index.{variant}.json" if variant else "diffusion_pytorch_model.safetensors.index.json"
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(index)}")
    return lambda name: ours.fullmatch(name) is not None
