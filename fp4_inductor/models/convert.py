"""Replace linear layers by FP4Linear, one weight at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import NVFP4Config, weight_only
from ..formats import nvfp4
from ..modules import FP4Experts, FP4ExpertWeight, FP4Linear, FP8Linear
from ..modules.experts import quantize_stack
from .calibrate_experts import Statistics
from .coverage import LayerReport
from .plan import ExpertsTarget, Target, existing_experts, existing_layer
from .rounding_error import RoundingError, may_have_lost, relative_error
from .training import trainable_bias

_MODULE_STATE = frozenset(vars(nn.Module()))
_SAME = {"in_features", "out_features"}  # both kinds of layer have them
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
    ready: tuple[FP4Linear, float] | None = None,
):
    """Quantize the one weight of ``group`` and put an FP4Linear in place of each of its layers.

    The dense weight is released before this returns, unless someone outside the model holds it.

    Args:
        ready: the layer to put there, and its relative error, where the weight is quantized already.

    Returns:
        ``(the model, one LayerReport per layer)``. The model is the one given, or the FP4Linear if the model itself
        is the layer.
    """
    dense = dense_weight(group[0])
    if device is not None:
        dense = dense.to(device)
    if group[0].head:
        config = replace(config, prefill=weight_only(config.prefill))
    if ready is not None:
        layer, error = ready
        move(layer, dense.device)
    elif group[0].head and config.lm_head == "fp8":
        layer = FP8Linear.from_weight(dense, prefill=config.prefill)
        error = relative_error(dense, layer)
    else:
        layer, error = quantize_dense(dense, config, channel_weight, global_scale)
    kl = None if head_inputs is None else divergence(head_inputs.to(dense.device), dense, layer, group[0].module._parameters.get("bias"))
    del dense
    model, rows = install_group(model, group, layer, error)
    if group[0].tied:
        untie(model, group[0].name)
    return model, [replace(row, kl=kl) for row in rows]


def quantize_dense(dense: Tensor, config: NVFP4Config, channel_weight: Tensor | None = None, global_scale: Tensor | None = None) -> tuple[FP4Linear, float]:
    """A layer over ``dense`` ``[N, K]``, without bias, and its relative error."""
    if global_scale is not None:
        global_scale = global_scale.to(dense.device)
    layer = FP4Linear.from_weight(dense, scale_search=config.scale_search, channel_weight=channel_weight, global_scale=global_scale, prefill=config.prefill)
    return layer, relative_error(dense, layer)


def divergence(x: Tensor, dense: Tensor, layer: FP4Linear, bias: Tensor | None) -> float:
    """KL(head || quantized head) in nats per row of the head's inputs ``x [rows, K]``; 0 rows: 0."""
    total = 0.0
    w = layer.dequantize(torch.float32)
    for rows in x.float().split(_KL_ROWS):
        b = None if bias is None else bias.detach().to(rows)
        p, q = (F.linear(rows, weight, b).log_softmax(-1) for weight in (dense.float(), w))
        total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
    return total / max(len(x), 1)


def untie(model: nn.Module, name: str) -> None:
    """Tell transformers that the weight of ``name`` is no longer the embedding's, so that nothing ties them again."""
    for config in (getattr(model, "config", None), getattr(getattr(model, "config", None), "text_config", None)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # type: ignore[union-attr]
    keys = getattr(model, "all_tied_weights_keys", None)
    if isinstance(keys, dict):
        keys.pop(f"{name}.weight", None)


def install_group(model: nn.Module, group: list[Target], layer: FP4Linear, error: float) -> tuple[nn.Module, list[LayerReport]]:
    """Put ``layer`` in place of the layers of ``group``, which keep their biases; returns as :func:`convert_group`."""
    rows = []
    for i, target in enumerate(group):
        new = layer if i == 0 else share(layer)
        bias = target.module._parameters.get("bias")
        if bias is not None:
            trained = trainable_bias(target.module)
            # Not cloned: a bias that other modules share stays shared, and an optimizer that has it keeps it.
            moved = bias.detach().to(device=new.scale.device, dtype=new.dtype)
            moved = moved.clone() if moved.is_inference() else moved
            new.bias = moved if trained is None else trained if moved.data_ptr() == trained.data_ptr() else nn.Parameter(moved)
        lost = carry_over(target.module, new)
        model = replace_module(model, target.names, new)
        row = _row(group, i, new, error)
        rows.append(replace(row, notes=(*row.notes, f"attributes not kept: {', '.join(lost)}")) if lost else row)
        target.module = new  # the last reference this package holds to the dense layer
    return model, rows


def convert_experts(model: nn.Module, target: ExpertsTarget, config: NVFP4Config, device: torch.device | None, statistics: Statistics | None):
    """Quantize the weights of one module of experts, a few experts at a time, and put FP4Experts in its place.

    Each dense weight is released as soon as it is packed, unless someone outside the model holds it.

    Args:
        statistics: E[x^2] of each expert's inputs, for ``scale_search="activation"``.

    Returns:
        ``(the model, one LayerReport per weight)``.
    """
    module, spec = target.module, target.spec
    pads = rows_to_pad(target)
    weights, rows = {}, []
    for name in spec.parameters[:2]:
        channel_weight = None if statistics is None else statistics.first if name == spec.first else statistics.down
        weights[name], error = quantize_expert_weight(target, target.stack(name).detach(), config, pads[name], channel_weight, device)
        rows.append(experts_row(target, name, weights[name], error, statistics.notes if statistics else ()))
        del module._parameters[name]
    return install_experts(model, target, weights, pads, weight_only(config.prefill)), rows


def quantize_expert_weight(
    target: ExpertsTarget,
    dense: Tensor,
    config: NVFP4Config,
    pad: tuple[int, int],
    channel_weight: Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[FP4ExpertWeight, float]:
    """One weight of a module of experts, without bias, from its values as the module stores them; and its relative error."""
    transposed = target.spec.transposed
    packed = quantize_stack(dense, None, transposed=transposed, scale_search=config.scale_search, channel_weight=channel_weight, pad_rows=pad, device=device)
    return packed, _experts_error(dense.mT if transposed else dense, packed, pad)


def rows_to_pad(target: ExpertsTarget, k_multiple: int = nvfp4.GROUP) -> dict[str, tuple[int, int]]:
    """``(parts, zero rows after each part)`` of both weights. ``k_multiple``: of the format of the second.

    What I is padded with, the gates and the ups get as zero rows: one block at the end of each, or of both where they alternate.
    """
    module, spec = target.module, target.spec
    inner = module.get_parameter("down_proj").shape[1 if spec.transposed else 2]
    extra = -inner % k_multiple
    halves = module.get_parameter(spec.first).shape[2 if spec.transposed else 1] // inner
    return {spec.first: (1, halves * extra) if spec.activation.interleaved or halves == 1 else (halves, extra), "down_proj": (1, 0)}


def install_experts(model: nn.Module, target: ExpertsTarget, weights: dict[str, FP4ExpertWeight], pads: dict[str, tuple[int, int]], prefill: str) -> nn.Module:
    """Put FP4Experts over ``weights`` in place of the module, whose biases they keep; returns the model."""
    new = experts_module(target, weights, pads, prefill)
    carry_over(target.module, new)
    target.module = new  # the last reference this package holds to the dense experts
    return replace_module(model, target.names, new)


def experts_module(target: ExpertsTarget, weights: dict[str, FP4ExpertWeight], pads: dict[str, tuple[int, int]], prefill: str) -> FP4Experts:
    """FP4Experts over ``weights``, which get the biases of the module of ``target``."""
    module, spec = target.module, target.spec
    for name, packed in weights.items():
        if spec.bias:
            parts, extra = pads[name]
            bias = module.get_parameter(f"{name}_bias").detach().to(packed.scale.device, packed.dtype)
            packed.bias = torch.cat([nn.functional.pad(p, (0, extra)) for p in bias.chunk(parts, -1)], -1)
    return FP4Experts(
        weights[spec.first], weights["down_proj"], spec.activation, first_name=spec.first, dense=spec.dense, identity=spec.identity, prefill=prefill
    )


def experts_row(target: ExpertsTarget, name: str, packed: FP4ExpertWeight, error: float, notes: tuple[str, ...] = ()) -> LayerReport:
    """The report row of one weight of a module of experts."""
    row = existing_experts(tuple(f"{n}.{name}" if n else name for n in target.names), packed)
    return LayerReport(**{**vars(row), "relative_error": error, "notes": (*row.notes, *notes)})


def _experts_error(dense: Tensor, packed: FP4ExpertWeight, pad: tuple[int, int]) -> float:
    """As :func:`relative_error`, over all experts."""
    sums, suspect = RoundingError(), may_have_lost(packed.scale)
    for e in range(packed.num_experts):
        if not suspect and type(packed) is FP4ExpertWeight and sums.add_packed(dense[e], packed.qdata[e], packed.scale[e], packed.global_scale[e]):
            continue
        d = unpadded(packed[e].dequantize(torch.float32), packed.columns, pad)
        sums.add(dense[e].to(d.device).float(), d, suspect)
    return sums.relative()


def unpadded(w: Tensor, columns: int, pad: tuple[int, int]) -> Tensor:
    """``[..., N, K]`` without the zero columns behind ``columns`` and the zero rows of ``pad`` (see :func:`rows_to_pad`)."""
    parts, extra = pad
    w = w[..., :columns]
    return torch.cat([p[..., : p.shape[-2] - extra, :] for p in w.chunk(parts, -2)], -2) if extra else w


def move(weight: FP4Linear | FP4ExpertWeight, device: torch.device) -> None:
    """The parts of ``weight`` to ``device``; a bias stays where it is."""
    weight.take(tuple(p.to(device) for p in weight.parts()))


@contextmanager
def moved(weight: FP4Linear | FP4ExpertWeight, device: torch.device) -> Iterator[None]:
    """While active, the parts of a ``weight`` that waits on the CPU are on ``device`` too."""
    parts = weight.parts()
    try:
        if weight.scale.device.type == "cpu":
            move(weight, device)
        yield
    finally:
        weight.take(parts)


def share(layer: FP4Linear) -> FP4Linear:
    """Another FP4Linear over the same weight buffers, without bias."""
    new = type(layer)(layer.in_features, layer.out_features, dtype=layer.dtype, device="meta", prefill=layer.prefill)
    new.take(layer.parts())
    return new


def replace_module(model: nn.Module, names: tuple[str, ...], new: nn.Module) -> nn.Module:
    """Put ``new`` at every path of ``names``; returns the model (``new`` itself for the empty path)."""
    for name in names:
        if not name:
            return new
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return model


def carry_over(old: nn.Module, new: nn.Module) -> list[str]:
    """Keep the mode, the hooks, and the attributes that somebody set on ``old``; returns the names of attributes that cannot be kept.

    The hook dictionaries themselves move, so that handles still remove them.
    """
    new.training = old.training
    lost = []
    for name, value in vars(old).items():
        if name in _MODULE_STATE or name in _SAME:
            continue
        # The new module's own attribute of that name means something else; a method bound to the old module would compute with its weight.
        if hasattr(new, name) or getattr(value, "__self__", None) is old:
            lost.append(name)
        else:
            object.__setattr__(new, name, value)
    for name in _HOOKS:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    return lost


def dense_weight(target: Target) -> Tensor:
    """``[N, K]``, a view of the layer's Parameter."""
    weight = target.module.get_parameter("weight").detach()
    return weight.t() if target.transposed else weight


def _row(group: list[Target], i: int, layer: FP4Linear, error: float) -> LayerReport:
    row = existing_layer(group[i].names, layer)
    notes = row.notes
    if i:
        notes = (*notes, f"shares its weight with {group[0].name}")
    if group[i].tied:
        # The other owner keeps the weight: nothing was freed.
        notes = (*notes, f"untied from {group[i].tied}, which stays: {row.bytes_after / 1e6:.1f} MB more than before")
        row = replace(row, bytes_before=0)
    # A shared weight counts once.
    counted = {"params": 0 if i else row.params, "bytes_before": 0 if i else row.bytes_before, "bytes_after": 0 if i else row.bytes_after}
    return LayerReport(**{**vars(row), **counted, "relative_error": error, "notes": notes})
