"""Read the quantized weights of a checkpoint into a model whose layers are there and empty, file by file, a few ahead."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.ahead import ahead
from ...checkpoint.readers import StoredWeight
from ...checkpoint.safetensors_file import Reader
from ...errors import CoverageError
from ...models.convert import carry_over, replace_module
from ...models.progress import bar
from ...modules import FP4Linear
from ...tensors import NVFP4Tensor
from .names import Assembly, Source
from .plan import LoadPlan, unhide


def fill(model: PreTrainedModel, plan: LoadPlan, dtype: torch.dtype, *, strict: bool, progress: bool) -> list[str]:
    """Read every quantized weight to the device its layer was given.

    Host memory holds the weights being placed: at most one assembly (a linear layer, the experts of a layer) and 1 GB ahead of it.

    Returns:
        Notes for the report: weights that NVFP4 cannot hold without loss and that stay dense (``strict=False``).

    Raises:
        CheckpointError: damaged values. CoverageError: a weight that cannot be held, with ``strict``.
    """
    notes: list[str] = []
    with Reader() as reader:

        def read(item: Assembly) -> tuple[dict[str, Tensor], Tensor | None]:
            def get(source: Source) -> Tensor:
                return source.read(reader, dtype) if isinstance(source, StoredWeight) else reader.read(source)

            scales = [s for w in item.weights if (s := w.read_input_scale(reader)) is not None]
            return item.make(model, get), scales[0] if len(scales) == 1 else None

        found = ahead(plan.assemblies, read, lambda item: sum(w.bytes for w in item.weights))
        for _, (made, input_scale) in bar(found, "load", "weight", progress, total=len(plan.assemblies)):
            for name in list(made):
                notes += _place(model, name, made.pop(name), input_scale, dtype, strict)
    return notes


def _place(model: PreTrainedModel, name: str, t: Tensor, input_scale: Tensor | None, dtype: torch.dtype, strict: bool) -> list[str]:
    owner = name.rpartition(".")[0]
    layer = cast(FP4Linear, model.get_submodule(owner))
    where = layer.qdata.device
    if isinstance(t, NVFP4Tensor):
        for part in NVFP4Tensor.PARTS:
            setattr(layer, part, getattr(t, part).to(where))
        layer.input_scale = None if input_scale is None else input_scale.to(where)
        unhide(layer)
        return []
    why = "its scales span more than one NVFP4 global scale can hold without loss"
    if strict:
        raise CoverageError(
            f"{name} cannot be NVFP4: {why}",
            value=f"{t.numel()} weights",
            limit="MXFP4 exponents within 17 octaves in each matrix; gate and up of an expert under one global scale",
            remedy="Pass strict=False to keep this weight in high precision.",
        )
    _place_dense(model, owner, layer, t.to(device=where, dtype=dtype))
    return [f"{name} stays in high precision: {why}"]


def _place_dense(model: PreTrainedModel, owner: str, layer: FP4Linear, weight: Tensor) -> None:
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    dense.weight = nn.Parameter(weight[:, : layer.in_features], requires_grad=False)
    dense.register_parameter("bias", None if layer.bias is None else nn.Parameter(layer.bias, requires_grad=False))
    carry_over(layer, dense)
    replace_module(model, (owner,), dense)
