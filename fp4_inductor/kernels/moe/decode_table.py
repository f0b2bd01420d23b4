"""fp4.moe for a few tokens by ``csrc/moe/decode_table.cu``: ``torch.ops.fp4_csrc.moe_decode_table``, an internal operator that :mod:`.launch` calls.

It is defined, and reached, as those of :mod:`.grouped_wide` are.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...errors import KernelError
from ...ops.activation import Activation
from .. import csrc
from ..build import aligned, pointer
from .grouped_wide import TYPES, on_device

NAME = "moe_decode_table"
TOKENS = 8  # multiplied at a time
OWN_TILES = (0,) * 7


def workspace_bytes(tokens: int, top_k: int, inner: int) -> int:
    """What lies between the two products, for the most tokens at a time and as many distinct experts as they can have."""
    most = min(tokens, TOKENS)
    return most * most * top_k * 512 * -(-inner // 256)


def call(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: tuple[Tensor, Tensor, Tensor], down: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None], expert_map: Tensor | None, metas: tuple[Tensor | None, Tensor | None], act: Activation, arch: int,
) -> Tensor:  # fmt: skip
    """``[T, N]``; two launches for every :data:`TOKENS` tokens.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    inner = down[0].shape[2] * (2 if metas[1] is None else 4)
    workspace = hidden.new_empty(workspace_bytes(expert_ids.shape[0], expert_ids.shape[1], inner), dtype=torch.uint8)
    form = act.alpha, act.limit or 0.0, int(act.name == "swiglu_oai"), int(act.interleaved)
    try:
        return torch.ops.fp4_csrc.moe_decode_table(hidden, expert_ids, expert_weights, *gate_up, *down, *biases, expert_map, *metas, *form, workspace, arch)
    except RuntimeError as error:
        if "fp4_csrc::" not in str(error):
            raise
        raise KernelError(f"fp4_{NAME} was not launched", value=str(error), limit="cudaSuccess", remedy=csrc.switch_off(NAME)) from error


def _until_bound(*args) -> Tensor:
    on_device(NAME, args[0])
    return torch.ops.fp4_csrc.moe_decode_table.default(*args) if not csrc.binding() else _through_ctypes(*args)


def _through_ctypes(*args) -> Tensor:
    *tensors, alpha, limit, more, interleaved, workspace, arch = args
    hidden, ids, weights, gate_up, down, expert_map, meta = (tensors[i] for i in (0, 1, 2, 3, 6, 11, 13))
    library = csrc.library(NAME, arch)
    given = [None if t is None else aligned(t) for t in tensors]
    with torch.cuda.device(hidden.device):
        y = hidden.new_empty(hidden.shape[0], down.shape[1])
        sizes = (*ids.shape, gate_up.shape[0], hidden.shape[1], down.shape[2] * (2 if meta is None else 4), down.shape[1])
        types = TYPES[ids.dtype], TYPES[weights.dtype], *((0, 0) if expert_map is None else (TYPES[expert_map.dtype], expert_map.numel()))
        rest = ctypes.c_float(alpha), ctypes.c_float(limit), more, interleaved, *OWN_TILES, ctypes.c_int64(workspace.numel()), pointer(workspace)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = getattr(library, csrc.KERNELS[NAME].function)(*map(pointer, (*given, y)), *sizes, *types, *rest, stream)
    if status:
        raise KernelError(f"fp4_{NAME} was not launched", value=f"cudaError {status} for {sizes}", limit="cudaSuccess", remedy=csrc.switch_off(NAME))
    return y


def _fake(*args) -> Tensor:
    return args[0].new_empty(args[0].shape[0], args[6].shape[1])


csrc.DEFINITIONS.define(
    f"{NAME}(Tensor hidden, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_qdata, Tensor gate_up_scale, Tensor gate_up_global_scale, "
    "Tensor down_qdata, Tensor down_scale, Tensor down_global_scale, Tensor? gate_up_bias, Tensor? down_bias, Tensor? expert_map, "
    "Tensor? gate_up_meta, Tensor? down_meta, float alpha, float limit, int more, int interleaved, Tensor workspace, int arch) -> Tensor"
)
csrc.DEFINITIONS.impl(NAME, _until_bound, "CompositeExplicitAutograd")
torch.library.register_fake(f"fp4_csrc::{NAME}", _fake, lib=csrc.DEFINITIONS)
