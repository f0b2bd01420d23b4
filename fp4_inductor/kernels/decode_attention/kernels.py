"""The kernels of fp4.decode_attention. M: queries times the heads that share a KV head; N: heads; K: width of a head."""

from __future__ import annotations

from ..kernel import ANY, COMPILED, IN_CI, MEASURED, Kernel, On

_SPLIT = "reads the cache once, by KV head, where it lies and only what the mask leaves in; repeat_kv would copy it once for each query head"
_SPLIT_90 = "reads the cache once, by KV head, where it lies and only what the mask leaves in: 5.9 us for one sequence of 520 positions (32 query heads, 8 KV heads of 128), sdpa 27"
_LIBRARY = "many queries are limited by products, not by reading the cache: F.scaled_dot_product_attention"
KERNELS = (
    Kernel(
        "decode_attention", "triton_decode_attention", "attention",
        (On(90, 90, MEASURED, _SPLIT_90), On(80, 89, COMPILED, _SPLIT), On(100, 129, COMPILED, _SPLIT)),
        k_multiple=8, plain=True, batch=(1, "the number of parts follows the numbers of sequences and KV heads, not M"),
    ),
    Kernel(
        "decode_attention", "sdpa", "library", (On(0, 129, IN_CI, _LIBRARY),), ANY, k_multiple=1, batch=(1, "the library chooses its algorithm by M")
    ),
)  # fmt: skip
