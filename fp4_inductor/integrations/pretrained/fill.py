"""Read the quantized weights of a checkpoint into a model whose layers are there and empty, file by file, a few ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.ahead import ahead
from ...checkpoint.readers import StoredWeight
from ...checkpoint.readers.weight import FP8Weight, multiplying
from ...checkpoint.safetensors_file import Reader
from ...decoding.ranks import Ranks, ranks_of
from ...errors import CoverageError
from ...models.convert import carry_over, replace_module
from ...models.progress import bar
from ...modules import FP4Experts, FP4Linear
from ...modules.packed import PackedWeight
from ...tensors import NVFP4Tensor
from ...tensors.base import FP4Tensor
from .names import Assembly, Source
from .parallel import finish_experts, finish_layer, finish_model, part_of
from .plan import LoadPlan, parts_of, unhide

_WHY = "its scales span more than one NVFP4 global scale can hold without loss"


def fill(model: PreTrainedModel, plan: LoadPlan, dtype: torch.dtype, *, strict: bool, progress: bool) -> list[str]:
    """Read every quantized weight to the device its layer was given.

    Weights that are stored as they are held go straight to a CUDA device. Host memory holds the others being placed: at most one assembly (a linear
    layer, the experts of a layer) and 1 GB ahead of it.

    Returns:
        Notes for the report: weights that NVFP4 cannot hold without loss and that stay dense (``strict=False``).

    Raises:
        CheckpointError: damaged values. CoverageError: a weight that cannot be held, with ``strict``.
    """
    kept_dense: dict[str, Tensor] = {}
    ranks = ranks_of(model)
    with Reader() as reader:

        def read(item: Assembly) -> tuple[dict[str, Tensor], Tensor | None]:
            there = _device(model, item.target) if item.converter is None and item.packed and ranks is None else None

            def get(source: Source, as_stored: bool = False) -> Tensor:
                return source.read(reader, dtype, there, as_stored=as_stored) if isinstance(source, StoredWeight) else reader.read(source)

            return _made(model, item, get), _input_scale(item, reader)

        found = ahead(plan.assemblies, read, lambda item: sum(p.end - p.start for _, _, s in item.sources for p in parts_of(s)))
        for _, (made, input_scale) in bar(found, "load", "weight", progress, total=len(plan.assemblies)):
            for name in list(made):
                t = made.pop(name)
                if isinstance(t, NVFP4Tensor) and ranks is not None:
                    t = part_of(t, ranks.style(name.removesuffix(".weight")), ranks, name, _is_interleaved(model, name))
                if not _place(model, name, t, input_scale, dtype):
                    kept_dense[name] = _refuse(name, t) if strict else t.to(device=_device(model, name), dtype=dtype)
    for name, others in plan.followers.items():
        for other in others:
            if name in kept_dense:
                kept_dense[other] = kept_dense[name]
            else:
                _follow(_packed_module(model, name), _packed_module(model, other))
    if ranks is not None:
        _finish_parts(model, plan, ranks)
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in kept_dense):
        _back_to_dense(model, owner, plan.replaced.get(owner), {n: t for n, t in kept_dense.items() if n.rpartition(".")[0] == owner}, dtype)
    return [f"{name} stays in high precision: {_WHY}" for name in kept_dense]


def _made(model: PreTrainedModel, item: Assembly, get: Callable[..., Tensor]) -> dict[str, Tensor]:
    """What ``item`` makes, its global scales multiplying: of stacked experts they are inverted all at once."""
    if item.weights and all(weight.divides for weight in item.weights):
        made = item.make(model, functools.partial(get, as_stored=True))
        if all(isinstance(t, NVFP4Tensor) for t in made.values()):  # else something was computed with them
            return {name: multiplying(cast(NVFP4Tensor, t), name) for name, t in made.items()}
    return item.make(model, get)


def _is_interleaved(model: PreTrainedModel, name: str) -> bool:
    module = model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, FP4Experts) and module.activation.interleaved


def _finish_parts(model: PreTrainedModel, plan: LoadPlan, ranks: Ranks) -> None:
    owners = dict.fromkeys(item.target.rpartition(".")[0] for item in plan.assemblies if item.packed)
    for name, module in [(name, model.get_submodule(name)) for name in owners]:
        if isinstance(module, FP4Linear):
            finish_layer(name, module, ranks)
        elif isinstance(module, FP4Experts):
            finish_experts(name, module, ranks)
    finish_model(model, ranks)


def _input_scale(item: Assembly, reader: Reader) -> Tensor | None:
    """float32 ``[]`` of a linear layer, ``[E]`` of experts; the larger one of a gate and its up, whose input is the same."""
    by_pattern: dict[str, list[Tensor]] = {}
    for _, pattern, source in item.sources:
        if isinstance(source, StoredWeight) and (scale := source.read_input_scale(reader)) is not None:
            by_pattern.setdefault(pattern, []).append(scale)
    if not by_pattern or len({len(scales) for scales in by_pattern.values()}) > 1:
        return None
    return torch.stack([torch.stack(scales).squeeze(0) for scales in by_pattern.values()]).amax(0)


def _packed_module(model: PreTrainedModel, name: str) -> PackedWeight:
    """The module with the packed buffers of the weight, or the bias, ``name``."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    return cast(PackedWeight, getattr(module, attribute.removesuffix("_bias")) if isinstance(module, FP4Experts) else module)


def _device(model: PreTrainedModel, name: str) -> torch.device:
    return _packed_module(model, name).scale.device


def _place(model: PreTrainedModel, name: str, t: Tensor | FP8Weight, input_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Give ``t`` to its module; False if it is a weight that NVFP4 cannot hold."""
    module = _packed_module(model, name)
    where = module.scale.device
    if isinstance(t, FP8Weight):
        module.take(tuple(part.to(where) for part in t))
        module.input_scale = None if input_scale is None else input_scale.to(where).reshape(())
        unhide(module)
        return True
    if name.endswith("_bias"):
        padding = module.bias.shape[-1] - t.shape[-1] if module.bias is not None else 0
        module.bias = _pad_rows(t.to(device=where, dtype=dtype), padding)
        return True
    if not isinstance(t, FP4Tensor):
        return False
    module.take(tuple(part.to(where) for part in t.parts()))
    if input_scale is not None:
        module.input_scale = input_scale.to(where).expand(module.global_scale.shape).contiguous()
    unhide(module)
    return True


def _follow(source: PackedWeight, follower: PackedWeight) -> None:
    """Give ``follower`` the tensors of ``source``: the same ones on the same device."""
    where = follower.scale.device
    follower.take(tuple(part.to(where) for part in source.parts()))
    follower.bias = None if source.bias is None else source.bias.to(where)
    follower.input_scale = None if source.input_scale is None else source.input_scale.to(where)
    unhide(follower)


def _refuse(name: str, t: Tensor) -> Tensor:
    raise CoverageError(
        f"{name} cannot be NVFP4: {_WHY}",
        value=f"{t.numel()} weights",
        limit="MXFP4 exponents within 17 octaves in each matrix; gate and up of an expert under one global scale",
        remedy="Pass strict=False to keep this weight in high precision.",
    )


def _pad_rows(bias: Tensor, rows: int) -> Tensor:
    return nn.functional.pad(bias, (0, rows)) if rows else bias


def _back_to_dense(model: PreTrainedModel, owner: str, experts: nn.Module | None, dense: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Put a dense module back where a packed one could not be filled."""
    packed = model.get_submodule(owner)
    if isinstance(packed, FP4Linear):
        new: nn.Module = nn.Linear(packed.in_features, packed.out_features, bias=False, device="meta")
        new.register_parameter("weight", nn.Parameter(dense[f"{owner}.weight"], requires_grad=False))
        new.register_parameter("bias", None if packed.bias is None else nn.Parameter(packed.bias, requires_grad=False))
    else:
        new = cast(nn.Module, experts)
        for name in list(new._parameters):
            part = cast(PackedWeight, getattr(packed, name.removesuffix("_bias")))
            if name.endswith("_bias"):
                t = cast(Tensor, part.bias)
            else:
                t = dense[f"{owner}.{name}"] if f"{owner}.{name}" in dense else _as_stored(part, new.get_parameter(name).shape, dtype)
            new._parameters[name] = nn.Parameter(t, requires_grad=False)
    carry_over(packed, new)
    replace_module(model, (owner,), new)


def _as_stored(part: PackedWeight, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    w = torch.ops.fp4.dequantize(part.qdata, part.scale, part.global_scale, dtype)
    return w if w.shape == shape else w.mT.contiguous()
