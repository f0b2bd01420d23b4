"""F1: the contract of each op in ``torch.ops.fp4``. Importing this package registers schemas, fakes and gradients."""

from . import (
    bmm,
    dequantize,
    dequantize_fp8,
    linear,
    linear_fp8,
    linear_glu,
    linear_siblings,
    moe,
    moe_backward,
    quantize,
    quantize_rows_fp8,
    sparse_decompress,
    sparse_dequantize,
    sparse_dequantize_fp8,
    sparse_linear,
    sparse_quantize,
)
from .contract import CONTRACTS, OpContract, cast_for_autocast

__all__ = [
    "CONTRACTS",
    "OpContract",
    "bmm",
    "cast_for_autocast",
    "dequantize",
    "dequantize_fp8",
    "linear",
    "linear_fp8",
    "linear_glu",
    "linear_siblings",
    "moe",
    "moe_backward",
    "quantize",
    "quantize_rows_fp8",
    "sparse_decompress",
    "sparse_dequantize",
    "sparse_dequantize_fp8",
    "sparse_linear",
    "sparse_quantize",
]
