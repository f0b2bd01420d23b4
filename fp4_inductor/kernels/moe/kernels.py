"""The kernels of fp4.moe; "sparse_moe": with 2:4-sparse experts."""

from __future__ import annotations

from typing import Any

from ..kernel import ANY, BF16, COMPILED, IN_CI, MEASURED, RIGHT, Kernel, On
from ..linear.kernels import FP8

_EXPERTS = (1, "the tiles follow the number of tokens, and experts are summed in the order in which the tokens of a call name them")
_PIECES = (1, "one token, two, and more are summed in other pieces")
_UNKNOWN = (1, "not examined")
_DECODE = "two launches, nothing sorted: 11 us for one token of Qwen3-30B; sorting pays from about 4 pairs an expert on (Mixtral: 396 us at 2, sorted 732; at 4 both 790)"
_DECODE_90 = (
    "two launches, nothing sorted: 11 us for one token of Qwen3-30B; ahead of sorting up to 0.6 pairs an expert: 46 us for 8 tokens of it, cuda_moe_wide 53"
)
_TABLE = "reads and decodes an expert once for eight tokens, by cuda_table's steps; pays from 8 million weights, H * N, on: Mixtral, 4 tokens, 139 us, Triton 195; Qwen3-30B, 4 tokens, 32 for 27"
_WIDE = "pairs sorted by expert, each weight decoded in registers once for up to 128 of them: Qwen3-30B, 32 and 1024 tokens, 94 and 223 us, 161 and 481 without; FP8 products serve more pairs an expert"
_WIDE_FP8 = "weights rounded to E4M3 in registers, never written: Qwen3-30B, 1024 and 4096 tokens, 191 and 520 us, bfloat16 products 266 and 817; 20 times the error, as of dense FP8 products"
_GROUPED = "pairs sorted by expert, weights decoded in registers: each is read once however many tokens share it"
_GROUPED_FP8 = "above 32 tokens an expert a pass that writes temporary FP8 weights (at most 1 GiB at once) pays: 2.6 million of them a microsecond, FP8 products at 0.6 to 1.1 PFLOPS"
_GROUPED_DENSE = "as the FP8 path, in bfloat16: at most 1 GiB of temporary weights at once"
_BY_EXPERT = "no tensor cores serve this dtype or shape; reads the ids back, so there is no CUDA graph"
_SPARSE_TABLE = "reads and decodes an expert once for eight tokens, by cuda_sparse_table's steps: Mixtral, both products 2:4, 1 and 4 tokens, 52 and 124 us, 0.92 and 0.90 of the dense layer's"
_SPARSE_DECODE = "the dense layer's two launches on kept codes and gathered activations: 22% fewer bytes, as many instructions"
_SPARSE_DECODE_90 = "the dense layer's two launches on kept codes: 22% fewer bytes, as many instructions; Qwen3-30B, 1 and 4 tokens, 11.5 and 29.8 us, dense experts 10.8 and 27"
_SPARSE_GROUPED = "the dense kernel on codes decompressed in registers: nothing dense in memory"
_TABLE_SHAPE: dict[str, Any] = dict(n_multiple=8, least_n=32, csrc="moe_decode_table", plain=True, batch=_EXPERTS)
_WIDE_SHAPE: dict[str, Any] = dict(k_multiple=64, n_multiple=8, plain=True)


def _cpu(op: str, linear: str) -> Kernel:
    return Kernel(op, "cpu", "cpu", (On(0, 0, IN_CI, f"expert by expert, only those with tokens, through the C kernels of {linear}"),), ANY, batch=_UNKNOWN)


KERNELS = (
    _cpu("moe", "fp4.linear"),
    Kernel("moe", "triton_moe_decode", "decode", (On(90, 90, MEASURED, _DECODE_90), On(80, 89, COMPILED, _DECODE), On(100, 129, COMPILED, _DECODE)), batch=_PIECES),
    Kernel("moe", "cuda_moe_table", "table", (On(90, 90, MEASURED, _TABLE),), BF16, k_multiple=64, **_TABLE_SHAPE),
    Kernel(
        "moe", "cuda_moe_wide", "wide", (On(90, 90, MEASURED, _WIDE),), BF16,
        csrc="moe_grouped_wide", batch=(1, "the tile follows the number of pairs an expert"), **_WIDE_SHAPE,
    ),
    Kernel(
        "moe", "cuda_moe_wide_fp8", "wide_fp8", (On(90, 90, MEASURED, _WIDE_FP8),), BF16, FP8, csrc="moe_grouped_wide_fp8", batch=_UNKNOWN, **_WIDE_SHAPE
    ),
    Kernel("moe", "triton_moe_grouped", "grouped", (On(90, 90, MEASURED, _GROUPED), On(80, 89, COMPILED, _GROUPED), On(100, 129, COMPILED, _GROUPED)), batch=_UNKNOWN),
    Kernel("moe", "dequantize_fp8 + triton_grouped_fp8", "large_fp8", (On(90, 90, MEASURED, _GROUPED_FP8),), BF16, FP8, batch=_UNKNOWN),
    Kernel("moe", "dequantize + grouped_mm", "large_dense", (On(80, 129, RIGHT, _GROUPED_DENSE),), BF16, n_multiple=16, batch=_UNKNOWN),
    Kernel("moe", "by expert", "by_expert", (On(80, 129, RIGHT, _BY_EXPERT),), ANY, batch=_UNKNOWN),
    _cpu("sparse_moe", "fp4.sparse_linear"),
    Kernel("sparse_moe", "cuda_sparse_moe_table", "table", (On(90, 90, MEASURED, _SPARSE_TABLE),), BF16, k_multiple=256, **_TABLE_SHAPE),
    Kernel(
        "sparse_moe", "triton_sparse_moe_decode", "decode",
        (On(90, 90, MEASURED, _SPARSE_DECODE_90), On(80, 89, COMPILED, _SPARSE_DECODE), On(100, 129, COMPILED, _SPARSE_DECODE)), batch=_PIECES,
    ),
    Kernel("sparse_moe", "triton_sparse_moe_grouped", "grouped", (On(80, 129, RIGHT, _SPARSE_GROUPED),), batch=_UNKNOWN),
    Kernel("sparse_moe", "sparse_dequantize_fp8 + triton_grouped_fp8", "large_fp8", (On(90, 90, MEASURED, _GROUPED_FP8),), BF16, FP8, batch=_UNKNOWN),
    Kernel("sparse_moe", "sparse_dequantize + grouped_mm", "large_dense", (On(80, 129, RIGHT, _GROUPED_DENSE),), BF16, n_multiple=16, batch=_UNKNOWN),
    Kernel("sparse_moe", "by expert", "by_expert", (On(80, 129, RIGHT, _BY_EXPERT),), ANY, batch=_UNKNOWN),
)  # fmt: skip
