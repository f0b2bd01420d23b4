"""What the internal operators ``torch.ops.fp4_csrc.moe_*`` share, by which :mod:`.grouped_wide` and :mod:`.decode_table` call the CUDA kernels of ``csrc/moe``.

They are defined, and reached, as the operators of :mod:`fp4_inductor.kernels.csrc` are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError, KernelError
from ...ops.moe_call import MoeCall
from .. import csrc, params
from ..build import aligned

_TYPES = {torch.int32: 0, torch.int64: 1, torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_DENSE = (
    "Tensor hidden, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_qdata, Tensor gate_up_scale, Tensor gate_up_global_scale, "
    "Tensor down_qdata, Tensor down_scale, Tensor down_global_scale, Tensor? gate_up_bias, Tensor? down_bias, Tensor? expert_map"
)
_METAS = "Tensor? gate_up_meta, Tensor? down_meta"
# name -> tensors before the activation
_OPERATORS: dict[str, int] = {}


def define(name: str, sparse: bool = False, tile: bool = True) -> None:
    """Define ``torch.ops.fp4_csrc.<name>``. ``sparse``: it takes metadata, too. ``tile``: the caller chooses the tile, not the kernel."""
    tensors = f"{_DENSE}, {_METAS}" if sparse else _DENSE
    _OPERATORS[name] = tensors.count("Tensor")
    chosen = "int tokens, int gathers, " if tile else ""
    csrc.DEFINITIONS.define(f"{name}({tensors}, float alpha, float limit, int more, int interleaved, {chosen}int arch) -> Tensor")
    csrc.DEFINITIONS.impl(name, functools.partial(_until_bound, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4_csrc::{name}", _fake, lib=csrc.DEFINITIONS)


def launch(name: str, call: MoeCall, *rest: Any) -> Tensor:
    """``[T, N]`` by the operator ``name``, or by its sibling for two global scales an expert; ``rest``: its arguments behind the activation.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    a, b, act = call.gate_up, call.down, call.activation
    tensors = (
        call.hidden, call.expert_ids, call.expert_weights, a.qdata, a.scale, a.global_scale, b.qdata, b.scale, b.global_scale, a.bias, b.bias,
        call.expert_map,
    )  # fmt: skip
    metas = (a.meta, b.meta) if _OPERATORS[name] > len(tensors) else ()
    form = act.alpha, act.limit or 0.0, int(act.name == "swiglu_oai"), int(act.interleaved)
    name = csrc.for_scales(name, a.global_scale.numel() // max(call.experts, 1))
    try:
        return getattr(torch.ops.fp4_csrc, name)(*tensors, *metas, *form, *rest)
    except RuntimeError as error:
        if "fp4_csrc::" not in str(error):
            raise
        raise KernelError(f"fp4_{name} was not launched", value=str(error), limit="cudaSuccess", remedy=csrc.switch_off(name)) from error


def _until_bound(name: str, *args) -> Tensor:
    device = args[0].device
    if device.type != "cuda":
        raise DeviceError(f"fp4_csrc.{name} got tensors elsewhere", value=str(device), limit="cuda", remedy="Call torch.ops.fp4.*, which runs anywhere.")
    return getattr(torch.ops.fp4_csrc, name).default(*args) if not csrc.binding() else through_ctypes(name, *args)


def through_ctypes(name: str, *args) -> Tensor:
    """The operator ``name`` where there is no binding."""
    count = _OPERATORS[name]
    tensors: list[Any] = [None if t is None else aligned(t) for t in args[:count]]
    alpha, limit, more, interleaved, *tile, arch = args[count:]
    hidden, ids, weights, *parts, gate_up_bias, down_bias, expert_map = tensors[:12]
    gate_up_meta, down_meta = tensors[12:] or (None, None)
    gate_up, down = (dict(zip(("codes", "scale", "global_scale"), three, strict=True)) for three in (parts[:3], parts[3:]))
    width, inner = parts[3].shape[1], parts[3].shape[2] * (2 if down_meta is None else 4)
    (t, k), top_k, experts = hidden.shape, ids.shape[1], parts[0].shape[0]
    sizes = dict(tokens=t, top_k=top_k, E=experts, K=k, I=inner, N=width)
    with torch.cuda.device(hidden.device):
        y = hidden.new_empty(t, width)
        filled = params.MoeParams.of(
            x=hidden, ids=ids, weights=weights, map=expert_map, y=y, **sizes,
            gate_up=dict(gate_up, meta=gate_up_meta, bias=gate_up_bias), down=dict(down, meta=down_meta, bias=down_bias),
            ids_type=_TYPES[ids.dtype], weights_type=_TYPES[weights.dtype], map_type=0 if expert_map is None else _TYPES[expert_map.dtype],
            map_size=0 if expert_map is None else expert_map.numel(), alpha=alpha, limit=limit, more=more, interleaved=interleaved, tile=tile,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        status = params.call(csrc.library(name, arch), csrc.LIBRARIES[name].function, filled, hidden.device)
    if status:
        raise KernelError(
            f"fp4_{name} was not launched", value=f"cudaError {status} for {sizes}, tile {tuple(tile)}", limit="cudaSuccess", remedy=csrc.switch_off(name)
        )
    return y


def _fake(*args) -> Tensor:
    return args[0].new_empty(args[0].shape[0], args[6].shape[1])


for _name, _library in csrc.LIBRARIES.items():
    if _library.source.startswith("moe/"):
        define(_name, sparse=_library.metas, tile=not _library.metas)
