"""The choice on sm_100 to sm_129: Blackwell. As on sm_80 to sm_89, but for the Triton GEMV, which serves up to four rows there."""

from __future__ import annotations

from .common import cached_attention, decode_attention, linear_chain, linear_fp8, linear_w4a4, many_rows
from .sm80 import few_rows, linear_epilogue, linear_glu, moe, sparse_linear, sparse_moe

__all__ = [
    "cached_attention",
    "decode_attention",
    "linear",
    "linear_chain",
    "linear_epilogue",
    "linear_fp8",
    "linear_glu",
    "linear_w4a4",
    "moe",
    "sparse_linear",
    "sparse_moe",
]


def linear(call, can):
    yield from few_rows(call, can, gemv=4, mid=64)
    yield from many_rows(call, can)
