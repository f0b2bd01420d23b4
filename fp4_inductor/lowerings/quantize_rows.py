"""fp4.quantize_rows_fp8 inside a compiled graph: plain operations that Inductor fuses with whatever produced the activations."""

from __future__ import annotations

from .._torch import lowering as inductor
from ..ops.quantize_rows_fp8 import E4M3_MAX, TINY


def quantized_rows(x):
    """``(E4M3 [M, K], float32 [M, 1])``, once for all calls that read ``x``; bit for bit the op's result."""
    return inductor.once_per_graph("quantize_rows_fp8", x, lambda x: inductor.quantize_rows_e4m3(x, E4M3_MAX, TINY))
