"""Replace linear layers by FP4Linear, one weight at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import NVFP4Config
from ..modules import FP4Linear
from .coverage import LayerReport
from .plan import Target, existing_layer

_ERROR_CHUNK = 1 << 21  # weights compared at once
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def convert_group(
    model: nn.Module,
    group: list[Target],
    config: NVFP4Config,
    device: torch.device | None,
    channel_weight: Tensor | None,
    global_scale: Tensor | None = None,
):
    """Quantize the one weight of ``group`` and put an FP4Linear in place of each of its layers.

    The dense weight is released before this returns, unless someone outside the model holds it.

    Returns:
        ``(the model, one LayerReport per layer)``. The model is the one given, or the FP4Linear if the model itself
        is the layer.
    """
    dense = _dense_weight(group[0])
    if device is not None:
        dense = dense.to(device)
    if global_scale is not None:
        global_scale = global_scale.to(dense.device)
    layer = FP4Linear.from_weight(
        dense, scale_search=config.scale_search, channel_weight=channel_weight, global_scale=global_scale, large_m=config.large_m
    )
    error = relative_error(dense, layer)
    del dense
    rows = []
    for i, target in enumerate(group):
        new = layer if i == 0 else share(layer)
        bias = target.module._parameters.get("bias")
        if bias is not None:
            # Not cloned: a bias that other modules share stays shared.
            new.bias = bias.detach().to(device=new.qdata.device, dtype=new.dtype)
        carry_over(target.module, new)
        model = replace_module(model, target.names, new)
        rows.append(_row(group, i, new, error))
        target.module = new  # the last reference this package holds to the dense layer
    return model, rows


def share(layer: FP4Linear) -> FP4Linear:
    """Another FP4Linear over the same weight buffers, without bias."""
    new = FP4Linear(layer.in_features, layer.out_features, dtype=layer.dtype, device="meta", large_m=layer.large_m)
    new.qdata, new.scale, new.global_scale = layer.qdata, layer.scale, layer.global_scale
    return new


def replace_module(model: nn.Module, names: tuple[str, ...], new: nn.Module) -> nn.Module:
    """Put ``new`` at every path of ``names``; returns the model (``new`` itself for the empty path)."""
    for name in names:
        if not name:
            return new
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return model


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Keep the mode and the hooks. The hook dictionaries themselves move, so that handles still remove them."""
    new.training = old.training
    for name in _HOOKS:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def relative_error(dense: Tensor, layer: FP4Linear) -> float:
    """``|W - dequantized| / |W|``, Frobenius norms accumulated in float64; 0 for an all-zero weight."""
    k = dense.shape[1]
    error = norm = torch.zeros((), dtype=torch.float32 if dense.device.type == "mps" else torch.float64, device=layer.qdata.device)
    step = max(1, _ERROR_CHUNK // max(k, 1))
    for start in range(0, dense.shape[0], step):
        rows = slice(start, start + step)
        w = dense[rows].float()
        d = torch.ops.fp4.dequantize(layer.qdata[rows], layer.scale[rows], layer.global_scale, torch.float32)[:, :k]
        norm = norm + torch.linalg.vector_norm(w).to(norm.dtype).square()
        error = error + torch.linalg.vector_norm(d.sub_(w)).to(norm.dtype).square()
    return float((error / norm.clamp_min(torch.finfo(norm.dtype).tiny)).sqrt())


def _dense_weight(target: Target) -> Tensor:
    weight = target.module.get_parameter("weight").detach()
    return weight.t() if target.transposed else weight


def _row(group: list[Target], i: int, layer: FP4Linear, error: float) -> LayerReport:
    row = existing_layer(group[i].names, layer)
    notes = row.notes
    if i:
        notes = (*notes, f"shares its weight with {group[0].name}")
    # A shared weight counts once.
    counted = {"params": 0 if i else row.params, "bytes_before": 0 if i else row.bytes_before, "bytes_after": 0 if i else row.bytes_after}
    return LayerReport(**{**vars(row), **counted, "relative_error": error, "notes": notes})
