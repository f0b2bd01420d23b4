"""What the internal operators ``torch.ops.fp4_csrc.moe_*`` share, by which :mod:`.grouped_wide` and :mod:`.decode_table` call the CUDA kernels of ``csrc/moe``.

They are defined, and reached, as the operators of :mod:`fp4_inductor.kernels.csrc` are.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError, KernelError
from ...ops.moe_call import MoeCall
from .. import csrc
from ..build import aligned, pointer
from ..kernel import for_scales

_TYPES = {torch.int32: 0, torch.int64: 1, torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_DENSE = (
    "Tensor hidden, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_qdata, Tensor gate_up_scale, Tensor gate_up_global_scale, "
    "Tensor down_qdata, Tensor down_scale, Tensor down_global_scale, Tensor? gate_up_bias, Tensor? down_bias, Tensor? expert_map"
)
_METAS = "Tensor? gate_up_meta, Tensor? down_meta"
# name -> tensors before the activation, and the tile that its C function is given where the operator has no argument for one
_OPERATORS: dict[str, tuple[int, tuple[int, ...]]] = {}


def define(name: str, sparse: bool = False, own_tile: tuple[int, ...] = ()) -> None:
    """Define ``torch.ops.fp4_csrc.<name>``. ``sparse``: it takes metadata, too. ``own_tile``: as in ``_OPERATORS``."""
    tensors = f"{_DENSE}, {_METAS}" if sparse else _DENSE
    _OPERATORS[name] = tensors.count("Tensor"), own_tile
    tile = "" if own_tile else "int tile, "
    csrc.DEFINITIONS.define(f"{name}({tensors}, float alpha, float limit, int more, int interleaved, {tile}Tensor workspace, int arch) -> Tensor")
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
    metas = (a.meta, b.meta) if _OPERATORS[name][0] > len(tensors) else ()
    form = act.alpha, act.limit or 0.0, int(act.name == "swiglu_oai"), int(act.interleaved)
    name = for_scales(name, a.global_scale.numel() // max(call.experts, 1))
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
    count, own_tile = _OPERATORS[name]
    tensors, (alpha, limit, more, interleaved, *given_tile), (workspace, arch) = args[:count], args[count:-2], args[-2:]
    hidden, ids, weights, gate_up, down, expert_map = (tensors[i] for i in (0, 1, 2, 3, 6, 11))
    down_meta = tensors[13] if count > 12 else None
    tile = own_tile or tuple(given_tile)
    library = csrc.library(name, arch)
    given = [None if t is None else aligned(t) for t in tensors]
    with torch.cuda.device(hidden.device):
        y = hidden.new_empty(hidden.shape[0], down.shape[1])
        sizes = (*ids.shape, gate_up.shape[0], hidden.shape[1], down.shape[2] * (2 if down_meta is None else 4), down.shape[1])
        types = _TYPES[ids.dtype], _TYPES[weights.dtype], *((0, 0) if expert_map is None else (_TYPES[expert_map.dtype], expert_map.numel()))
        rest = ctypes.c_float(alpha), ctypes.c_float(limit), more, interleaved, *tile, ctypes.c_int64(workspace.numel()), pointer(workspace)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = getattr(library, csrc.KERNELS[name].function)(*map(pointer, (*given, y)), *sizes, *types, *rest, stream)
    if status:
        raise KernelError(
            f"fp4_{name} was not launched", value=f"cudaError {status} for {sizes}, tile {tile}", limit="cudaSuccess", remedy=csrc.switch_off(name)
        )
    return y


def _fake(*args) -> Tensor:
    return args[0].new_empty(args[0].shape[0], args[6].shape[1])
