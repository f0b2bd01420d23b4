"""Replace linear layers by FP4Linear, one weight at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import NVFP4Config
from ..modules import FP4Linear, FP8Linear
from .coverage import LayerReport
from .plan import Target, existing_layer

_ERROR_CHUNK = 1 << 21  # weights compared at once
_KL_ROWS = 64  # rows of logits compared at once
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
    head_inputs: Tensor | None = None,
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
    layer = quantized(dense, group[0], config, channel_weight, global_scale)
    error = relative_error(dense, layer)
    dense_device = dense.device
    kl = None if head_inputs is None else divergence(head_inputs.to(dense.device), dense, layer, group[0].module._parameters.get("bias"))
    del dense
    rows = []
    for i, target in enumerate(group):
        new = layer if i == 0 else share(layer)
        bias = target.module._parameters.get("bias")
        if bias is not None:
            # Not cloned: a bias that other modules share stays shared.
            new.bias = bias.detach().to(device=dense_device, dtype=new.dtype)
        carry_over(target.module, new)
        model = replace_module(model, target.names, new)
        rows.append(replace(_row(group, i, new, error), kl=kl))
        if target.tied:
            untie(model, target.name)
        target.module = new  # the last reference this package holds to the dense layer
    return model, rows


def quantized(
    dense: Tensor, target: Target, config: NVFP4Config, channel_weight: Tensor | None = None, global_scale: Tensor | None = None
) -> FP4Linear | FP8Linear:
    """The layer, without bias, that stands for ``dense``."""
    if target.head and config.lm_head == "fp8":
        return FP8Linear.from_weight(dense, large_m=config.large_m)
    if global_scale is not None:
        global_scale = global_scale.to(dense.device)
    return FP4Linear.from_weight(dense, scale_search=config.scale_search, channel_weight=channel_weight, global_scale=global_scale, large_m=config.large_m)


def untie(model: nn.Module, name: str) -> None:
    """Tell transformers that the weight of ``name`` is no longer the embedding's, so that nothing ties them again."""
    for config in (getattr(model, "config", None), getattr(getattr(model, "config", None), "text_config", None)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # type: ignore[union-attr]
    keys = getattr(model, "all_tied_weights_keys", None)
    if isinstance(keys, dict):
        keys.pop(f"{name}.weight", None)


def share(layer: FP4Linear | FP8Linear) -> FP4Linear | FP8Linear:
    """Another layer over the same weight buffers, without bias."""
    new = type(layer)(layer.in_features, layer.out_features, dtype=layer.dtype, device="meta", large_m=layer.large_m)
    for name in layer.parts:
        setattr(new, name, getattr(layer, name))
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


def relative_error(dense: Tensor, layer: FP4Linear | FP8Linear) -> float:
    """``|W - dequantized| / |W|``, Frobenius norms accumulated in float64; 0 for an all-zero weight."""
    k = dense.shape[1]
    error = norm = torch.zeros((), dtype=torch.float32 if dense.device.type == "mps" else torch.float64, device=dense.device)
    step = max(1, _ERROR_CHUNK // max(k, 1))
    for start in range(0, dense.shape[0], step):
        rows = slice(start, start + step)
        w = dense[rows].float()
        if isinstance(layer, FP8Linear):
            d = layer.weight[rows].float() * layer.weight_scale[rows, None]
        else:
            d = torch.ops.fp4.dequantize(layer.qdata[rows], layer.scale[rows], layer.global_scale, torch.float32)[:, :k]
        norm = norm + torch.linalg.vector_norm(w).to(norm.dtype).square()
        error = error + torch.linalg.vector_norm(d.sub_(w)).to(norm.dtype).square()
    return float((error / norm.clamp_min(torch.finfo(norm.dtype).tiny)).sqrt())


def divergence(x: Tensor, dense: Tensor, layer: FP4Linear | FP8Linear, bias: Tensor | None) -> float:
    """KL(head || quantized head) in nats per row of the head's inputs ``x [rows, K]``; 0 rows: 0."""
    total = 0.0
    w = layer.dequantize(torch.float32)
    for rows in x.float().split(_KL_ROWS):
        b = None if bias is None else bias.detach().to(rows)
        p, q = (F.linear(rows, weight, b).log_softmax(-1) for weight in (dense.float(), w))
        total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
    return total / max(len(x), 1)


def _dense_weight(target: Target) -> Tensor:
    weight = target.module.get_parameter("weight").detach()
    return weight.t() if target.transposed else weight


def _row(group: list[Target], i: int, layer: FP4Linear | FP8Linear, error: float) -> LayerReport:
    row = existing_layer(group[i].names, layer)
    notes = row.notes
    if group[i].tied:
        # The other owner keeps the weight: nothing was freed.
        notes = (*notes, f"untied from {group[i].tied}, which stays: {row.bytes_after / 1e6:.1f} MB more than before")
        row = replace(row, bytes_before=0)
    if i:
        notes = (*notes, f"shares its weight with {group[0].name}")
    # A shared weight counts once.
    counted = {"params": 0 if i else row.params, "bytes_before": 0 if i else row.bytes_before, "bytes_after": 0 if i else row.bytes_after}
    return LayerReport(**{**vars(row), **counted, "relative_error": error, "notes": notes})
