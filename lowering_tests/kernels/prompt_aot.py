"""Compile the kernels of a prompt over a cache in 8 or 4 bits ahead of time, with the tiles and constants that their launchers would give them."""

from __future__ import annotations

from fp4_inductor.formats import kv
from fp4_inductor.kernels.cached_attention import append as rows_launch
from fp4_inductor.kernels.cached_attention.quantized import KINDS
from fp4_inductor.kernels.cached_attention.triton_append import append_rows, dequantize_rows
from fp4_inductor.kernels.decode_attention.split import power
from lowering_tests.kernels import aot

_POINTERS = {"POSITION": "*i64", "MEAN": "*fp32", "K_SCALE": "*fp16", "V_SCALE": "*fp16", **dict.fromkeys(("K", "V", "K_BLOCKS", "V_BLOCKS"), "*u8")}
_NOT_ALIGNED = ("SLOTS", "EXACT_SLOTS", "HEADS", "TILES", "QUERIES", "ROWS", "BACK", "NEAR_BACK")


def rows(cc: int, name: str, new: bool, d: int = 128, ring: bool = False, dtype: str = "bf16") -> aot.Compiled:
    """``new``: the kernel that appends; else the one that reads old tokens."""
    f, t, kernel = kv.FORMATS[name], rows_launch.rows_config(d), append_rows if new else dequantize_rows
    constants = dict(
        K_KIND=KINDS[f.key], V_KIND=KINDS[f.value], FIRST=kv.FIRST, FIRST_EXACT=f.exact, NEAR=f.exact, RING=ring, ABSOLUTE=not ring, D=d, BLOCK_N=t.block_n,
        BLOCK_D=max(32, power(d)),
    )  # fmt: skip
    if new:
        constants |= dict(K_TOP=f.key.top, V_TOP=f.value.top, MEAN_TOKENS=kv.MEAN_TOKENS, EXACT=f.exact, BLOCK_M=t.block_n)
    else:
        constants |= dict(COUNTED=True)
    absent = [f"{side}_BLOCKS" for side, kind in zip("KV", (f.key, f.value), strict=True) if not kind.blocks]
    absent += [] if f.exact else ["EXACT_K", "EXACT_V", "NEAR_K", "NEAR_V"]
    constants |= dict.fromkeys(absent)
    types = _POINTERS | dict.fromkeys(("KEY", "VALUE", "EXACT_K", "EXACT_V", "OUT_K", "OUT_V", "NEAR_K", "NEAR_V"), f"*{dtype}")
    signature = {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}
    return aot.compile_kernel(kernel, signature, constants, cc, t.num_warps, 3, tuple(n for n in signature if n not in _NOT_ALIGNED))
