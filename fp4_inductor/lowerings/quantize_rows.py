"""Activations rounded per row inside a compiled graph: plain operations that Inductor fuses with whatever produced them."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..ops.quantize_rows_fp8 import E4M3_MAX, LANE_ORDER, TINY
from ..ops.quantize_rows_nvfp4 import PER_UNIT, SMALLEST


def quantized_rows(x, lane_order: bool = False):
    """``(E4M3 [M, K], float32 [M, 1])``, once for all calls that read ``x``; ``lane_order``: as of fp4.quantize_rows_fp8.

    Bit for bit the result of fp4.quantize_rows_fp8, except of an ``act(gate) * up`` in front of it: that is a kernel with it, fp4.quantize_glu_rows_fp8.
    """

    def make(x):
        product = inductor.made_from(x)
        if product is None:
            return inductor.quantize_rows_e4m3(x, E4M3_MAX, TINY, LANE_ORDER if lane_order else None)
        gate_up, act = product
        rows = inductor.view(gate_up, [x.get_size()[0], gate_up.get_size()[-1]])
        return inductor.call_op(torch.ops.fp4.quantize_glu_rows_fp8.default, inductor.contiguous(rows), act, lane_order)

    return inductor.once_per_graph(f"quantize_rows_fp8 {lane_order}", x, make)


def nvfp4_rows(x):
    """``(codes [M, K/2], E4M3 [M, K/16], float32 [M, 1])``, once for all calls that read ``x``.

    The rows' scales are plain operations, fused with a norm in front of them; the codes are a kernel that reads ``x`` once.
    """

    def make(x):
        scales = inductor.row_scales(x, PER_UNIT, SMALLEST)
        return (*inductor.call_op(torch.ops.fp4.quantize_rows_nvfp4.default, inductor.contiguous(x), scales), scales)

    return inductor.once_per_graph("quantize_rows_nvfp4", x, make)
