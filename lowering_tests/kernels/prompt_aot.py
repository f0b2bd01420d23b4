"""Compile the kernels of a prompt over a cache in 8 or 4 bits ahead of time, with the tiles and constants that their launchers would give them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp4_inductor.formats import kv
from fp4_inductor.kernels.cached_attention import append as rows_launch
from fp4_inductor.kernels.cached_attention import prefill as prefill_launch
from fp4_inductor.kernels.cached_attention.quantized import KINDS
from fp4_inductor.kernels.cached_attention.triton_append import append_rows, dequantize_rows
from fp4_inductor.kernels.cached_attention.triton_prefill import prefill_attention
from fp4_inductor.kernels.decode_attention.split import power
from fp4_inductor.ops.cached_call import CachedCall
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


def attention(
    cc: int, name: str, d: int = 128, group: int = 4, queries: int = 2048, window: int | None = None, others: bool = False, dtype: str = "bf16",
    parts: int = 1, tile: prefill_launch.PrefillConfig | None = None,
) -> tuple[aot.Compiled, prefill_launch.PrefillConfig]:  # fmt: skip
    """``others``: a mask of padding, a soft-cap and sinks. A chunk behind old tokens. ``parts``: of the keys, in the place of those for an H100."""
    exact = name != kv.DENSE and kv.FORMATS[name].exact
    meta = dict(dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], device="meta")
    new, query = torch.empty(1, 8, queries, d, **meta), torch.empty(1, 8 * group, queries, d, **meta)
    mask = torch.empty(1, 1, 1, 4096, dtype=torch.bool, device="meta") if others else None
    c = CachedCall(query, new, new, new, new, torch.empty((), dtype=torch.int64, device="meta"), mask, window=window, softcap=2.0 if others else None)
    c = c._replace(sinks=torch.empty(8 * group, **meta) if others else None)
    t = tile or replace(prefill_launch.config_of(c, 4096, exact, cc, 132), parts=parts)
    constants = prefill_launch.constants(t, c, window is None, exact) | dict(stride_mp=1)
    absent = [*([] if exact else ["NEAR_K", "NEAR_V"]), *([] if others else ["MASK", "SINKS"]), *(["PEAK", "SUM", "PARTIAL"] if parts == 1 else [])]
    constants |= dict.fromkeys(absent)
    types = dict.fromkeys(("Q", "K", "V", "NEAR_K", "NEAR_V", "SINKS", "OUT"), f"*{dtype}") | dict.fromkeys(("PEAK", "SUM", "PARTIAL"), "*fp32")
    types |= dict(POSITION="*i64", MASK="*u8", scale="fp32", softcap="fp32")
    signature = {n: types.get(n, "i32") for n in prefill_attention.arg_names if n not in constants}
    plain = ("SLOTS", "LENGTH", "HEADS", "QUERIES", "BACK", "NEAR_BACK", "SPLITS", "stride_mb", "scale", "softcap")
    aligned = tuple(n for n in signature if n not in plain)
    return aot.compile_kernel(prefill_attention, signature, constants, cc, t.num_warps, t.num_stages, aligned), t
