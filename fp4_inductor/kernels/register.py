"""Attach implementations to ops by dispatch key. CUDA launchers are imported at their first call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from ..ops import (
    append_kv,
    cached_attention,
    decode_attention,
    dequantize,
    dequantize_fp8,
    dequantize_kv,
    linear,
    linear_epilogue,
    linear_fp8,
    linear_glu,
    linear_w4a4,
    moe,
    norm_router,
    paged_attention,
    quantize,
    quantize_glu_rows_fp8,
    quantize_rows_fp8,
    quantize_rows_nvfp4,
    rms_linear,
    router,
    sparse_decompress,
    sparse_dequantize,
    sparse_dequantize_fp8,
    sparse_linear,
    topk,
)
from .cached_attention import composed
from .linear import cpu as linear_cpu
from .moe import by_expert
from .quantize import cpu as quantize_cpu


def _at_first_call(module: str, name: str) -> Callable:
    @functools.cache
    def found() -> Callable:
        return getattr(importlib.import_module(module, __package__), name)

    def call(*args):
        return found()(*args)

    call.__name__ = name
    return call


cached_attention.CONTRACT.implement("CPU", composed.cached_attention)
cached_attention.CONTRACT.implement("CUDA", composed.cached_attention)
append_kv.CONTRACT.implement("CPU", append_kv.reference)
append_kv.CONTRACT.implement("CUDA", composed.append_kv)
dequantize_kv.CONTRACT.implement("CUDA", _at_first_call(".cached_attention.append", "dequantize_kv"))
linear.CONTRACT.implement("CPU", linear_cpu.linear)
dequantize.CONTRACT.implement("CPU", linear_cpu.dequantize)
sparse_linear.CONTRACT.implement("CPU", linear_cpu.sparse_linear)
sparse_dequantize.CONTRACT.implement("CPU", linear_cpu.sparse_dequantize)
linear.CONTRACT.implement("CUDA", _at_first_call(".linear.cuda", "linear"))
linear_epilogue.CONTRACT.implement("CUDA", _at_first_call(".linear.cuda", "linear_epilogue"))
linear_fp8.CONTRACT.implement("CUDA", _at_first_call(".linear_fp8.cuda", "linear_fp8"))
linear_glu.CONTRACT.implement("CUDA", _at_first_call(".linear_glu.cuda", "linear_glu"))
linear_w4a4.CONTRACT.implement("CPU", linear_cpu.linear_w4a4)
linear_w4a4.CONTRACT.implement("CUDA", _at_first_call(".linear_w4a4.cuda", "linear_w4a4"))
decode_attention.CONTRACT.implement("CUDA", _at_first_call(".decode_attention.cuda", "decode_attention"))
quantize.CONTRACT.implement("CPU", quantize_cpu.quantize)
moe.CONTRACT.implement("CPU", by_expert.moe)
moe.CONTRACT.implement("CUDA", _at_first_call(".moe.cuda", "moe"))
paged_attention.CONTRACT.implement("CUDA", _at_first_call(".paged_attention.cuda", "paged_attention"))
dequantize.CONTRACT.implement("CUDA", _at_first_call(".dequantize.launch", "dequantize"))
dequantize_fp8.CONTRACT.implement("CUDA", _at_first_call(".dequantize.launch", "dequantize_fp8"))
quantize_glu_rows_fp8.CONTRACT.implement("CUDA", _at_first_call(".quantize_rows_fp8.launch", "quantize_glu_rows_fp8"))
quantize_rows_fp8.CONTRACT.implement("CUDA", _at_first_call(".quantize_rows_fp8.launch", "quantize_rows_fp8"))
quantize_rows_nvfp4.CONTRACT.implement("CUDA", _at_first_call(".quantize_rows_nvfp4.launch", "quantize_rows_nvfp4"))
for _half in (rms_linear.SQUARES, rms_linear.LINEAR, rms_linear.LINEAR_SIBLINGS, rms_linear.LINEAR_GLU):
    _half.implement("CUDA", _at_first_call(".linear.rms", _half.name))
router.CONTRACT.implement("CUDA", _at_first_call(".router.launch", "router"))
norm_router.CONTRACT.implement("CUDA", _at_first_call(".router.launch", "norm_router"))
sparse_linear.CONTRACT.implement("CUDA", _at_first_call(".sparse_linear.cuda", "sparse_linear"))
sparse_dequantize.CONTRACT.implement("CUDA", _at_first_call(".dequantize.launch", "sparse_dequantize"))
sparse_dequantize_fp8.CONTRACT.implement("CUDA", _at_first_call(".dequantize.launch", "sparse_dequantize_fp8"))
sparse_decompress.CONTRACT.implement("CUDA", _at_first_call(".dequantize.launch", "sparse_decompress"))
topk.CONTRACT.implement("CUDA", _at_first_call(".topk.launch", "topk"))
