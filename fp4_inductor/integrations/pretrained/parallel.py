"""Tensor parallelism: each rank keeps its rows (N) or its whole blocks of columns (K, a multiple of 16) of every packed weight.

Transformers' plan (``tp_plan="auto"``) says which. Codes and scales are sliced, never touched. With gradients its wrappers around ``forward`` move the
activations and sum what is partial. Without gradients this module does: wrappers that make DTensors, change parameters during a call, or call a
collective in place cannot be compiled in one graph (:func:`finish_model`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..._torch.collectives import all_gather, all_reduce
from ...decoding.ranks import LOCAL_ROWS, Ranks
from ...errors import ShapeError
from ...formats import nvfp4
from ...modules import FP4Experts, FP4Linear
from ...modules.packed import PackedWeight
from ...tensors import NVFP4Tensor
from ..rank_memory import join

_ROWS = ("colwise", "colwise_rep", "colwise_gather_output")
_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input")
_PACKED_ROWS = "packed_colwise"  # gate and up one after the other: a part of each
_SPLIT = ("rowwise_split_input", "rowwise_rep")  # of _COLUMNS those that are given a whole input
_GRADIENTS = "replicated_with_grad_allreduce"  # a weight that every rank holds, whose gradient is summed


def is_parallel(model: PreTrainedModel) -> bool:
    """Will transformers distribute this model? Known before it does."""
    wanted = getattr(model.config, "distributed_config", None)
    return wanted is not None and (getattr(wanted, "tp_size", None) or 1) > 1


def part_of(t: NVFP4Tensor, style: str | None, ranks: Ranks, name: str, interleaved: bool = False) -> NVFP4Tensor:
    """This rank's part of a weight ``[..., N, K]``, in memory of its own."""
    if style in _ROWS or (style == _PACKED_ROWS and interleaved):
        start, end = _span(t.qdata.shape[-2], 2 if interleaved else 1, ranks, name)
        return _own(t, [t.qdata[..., start:end, :], t.scale.view(torch.uint8)[..., start:end, :]])
    if style == _PACKED_ROWS:
        half = t.qdata.shape[-2] // 2
        start, end = _span(half, 1, ranks, name)
        rows = torch.cat([torch.arange(start, end), torch.arange(half + start, half + end)]).to(t.qdata.device)
        return _own(t, [t.qdata.index_select(-2, rows), t.scale.view(torch.uint8).index_select(-2, rows)])
    if style in _COLUMNS:
        start, end = _span(t.qdata.shape[-1] * 2, nvfp4.GROUP, ranks, name)
        blocks = slice(start // nvfp4.GROUP, end // nvfp4.GROUP)
        return _own(t, [t.qdata[..., start // 2 : end // 2], t.scale.view(torch.uint8)[..., blocks]])
    return t


def _own(t: NVFP4Tensor, parts: list[Tensor]) -> NVFP4Tensor:
    qdata, scale = (p.contiguous() if p.data_ptr() != t.qdata.data_ptr() else p.clone() for p in parts)
    return NVFP4Tensor(qdata, scale.contiguous().view(nvfp4.SCALE_DTYPE), t.global_scale, t.logical_dtype)


def _span(n: int, unit: int, ranks: Ranks, name: str) -> tuple[int, int]:
    if n % (unit * ranks.size):
        raise ShapeError(
            f"{name} cannot be divided among {ranks.size} ranks",
            value=n,
            limit=f"a multiple of {unit * ranks.size}" + (f" (blocks of {unit})" if unit > 1 else ""),
            remedy="Use fewer ranks, or a tp_plan that leaves this layer out.",
        )
    each = n // ranks.size
    return ranks.rank * each, (ranks.rank + 1) * each


def finish_layer(name: str, layer: FP4Linear, ranks: Ranks) -> None:
    """Make a layer whose weight was placed agree with it: sizes and bias."""
    style = ranks.style(name)
    if style in (*_ROWS, _PACKED_ROWS):
        if layer.bias is not None:
            layer.bias = _bias_part(layer.bias, style, ranks, name, False)
        layer.out_features = layer.qdata.shape[0]
    elif style in _COLUMNS:
        if layer.padding:
            raise ShapeError(f"{name}: a padded K cannot be divided", value=layer.in_features, limit="a multiple of 16", remedy="Leave it out of the tp_plan.")
        layer.in_features = layer.qdata.shape[1] * 2
        if layer.bias is not None and ranks.rank:
            layer.bias = torch.zeros_like(layer.bias)  # the products are summed over the ranks; the bias belongs to one of them


def finish_experts(name: str, experts: FP4Experts, ranks: Ranks) -> None:
    """As :func:`finish_layer`; and sum the outputs of the ranks."""
    first, down = experts.first, experts.down_proj
    styles = ranks.style(f"{name}.{experts.first_name}"), ranks.style(f"{name}.down_proj")
    if styles == (None, None):
        return
    if styles[0] not in (*_ROWS, _PACKED_ROWS) or styles[1] not in _COLUMNS:
        raise ShapeError(
            f"{name}: this plan does not divide the experts' inner dimension",
            value=styles,
            limit="packed_colwise or colwise, then rowwise",
            remedy='Use the model\'s own plan (tp_plan="auto").',
        )
    first.rows = first.qdata.shape[1]
    down.columns = experts.intermediate_dim = down.qdata.shape[2] * 2
    if first.bias is not None:
        first.bias = _bias_part(first.bias, styles[0], ranks, name, experts.activation.interleaved)
    if down.bias is not None and ranks.rank:
        down.bias = torch.zeros_like(down.bias)
    # What transformers wrapped around it sums in 5.23 and not in 5.17, where it looks for sharded Parameters: sum here, once.
    vars(experts).pop("forward", None)
    experts.register_forward_hook(_Sum(ranks.group))


def _bias_part(bias: Tensor, style: str | None, ranks: Ranks, name: str, interleaved: bool) -> Tensor:
    halves = bias.chunk(2, -1) if style == _PACKED_ROWS and not interleaved else (bias,)
    return torch.cat([h[..., _slice(h.shape[-1], ranks, name)] for h in halves], -1)


def _slice(n: int, ranks: Ranks, name: str) -> slice:
    return slice(*_span(n, 1, ranks, name))


def finish_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Without gradients, let the linear layers of the plan compute on plain tensors and sum or gather by collectives that torch.compile traces.

    A call with gradients runs transformers' wrappers as before. A plan with sequence parallelism keeps them: its activations are DTensors.
    """
    if "sequence_parallel" in ranks.plan.values():
        return
    join(ranks.group, model.device)
    for name, module in model.named_modules():
        style = ranks.style(name)
        if style == _GRADIENTS:
            _sum_gradients(module, ranks.group)
        elif style in (*_ROWS, *_COLUMNS) and isinstance(module, (FP4Linear, nn.Linear)) and "forward" in vars(module):
            module.forward = _forward_of(module, style, ranks)  # type: ignore[method-assign]


def _forward_of(module: Any, style: str, ranks: Ranks) -> Any:
    with_gradients = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled():
            return with_gradients(x, *args, **kwargs)
        if style in _SPLIT:
            x = x.chunk(ranks.size, -1)[ranks.rank]
        if isinstance(module, FP4Linear):
            y = type(module).forward(module, x, *args, **kwargs)  # its class changes where siblings are packed
            return all_reduce(y, ranks.group) if style in _COLUMNS else y if style == LOCAL_ROWS else all_gather(y, ranks.group)
        weight, bias = (t.to_local() if isinstance(t, DTensor) else t for t in (module.weight, module.bias))
        if style in _COLUMNS:  # its bias is whole on every rank
            y = all_reduce(nn.functional.linear(x, weight), ranks.group)
            return y if bias is None else y + bias
        y = nn.functional.linear(x, weight, bias)
        return y if style == LOCAL_ROWS else all_gather(y, ranks.group)

    return forward


def _sum_gradients(module: nn.Module, group: Any) -> None:
    """Sum the gradient of each parameter by a hook of its own instead of the module's: a module with a backward hook cannot be compiled in one graph."""
    module._backward_hooks.clear()
    for p in module.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: torch.distributed.all_reduce(p.grad, group=group))


class _Sum:
    """Forward hook: the sum over the ranks, as a traceable collective."""

    def __init__(self, group: Any):
        self.group = group

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return all_reduce(output, self.group)


def shrink(module: PackedWeight) -> None:
    """Drop the full-size buffers of a layer to be filled with a part: transformers would allocate them on every rank."""
    for part in module.storage().names:
        setattr(module, part, getattr(module, part).new_empty(0))
