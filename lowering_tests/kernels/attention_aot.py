"""Compile the kernels of fp4.decode_attention ahead of time with the tiles and constants that the launcher would give them."""

from __future__ import annotations

from fp4_inductor.kernels.decode_attention import split as kernel
from fp4_inductor.kernels.decode_attention.triton_split import decode_attention_combine, decode_attention_split
from lowering_tests.kernels import aot

SMS = 132


def split(
    cc: int, d: int = 128, batch: int = 1, kv_heads: int = 8, group: int = 4, queries: int = 1, length: int = 520, mask_kind: int = 1,
    per_row: bool = False, dtype: str = "bf16", tile: kernel.AttentionConfig | None = None,
) -> tuple[aot.Compiled, kernel.AttentionConfig]:  # fmt: skip
    c = tile or kernel.attention(batch, kv_heads, length, d, SMS, cc, per_row)
    constants = kernel.constants(c, group, queries, length, d, mask_kind, per_row, cc)
    types = dict(Q=f"*{dtype}", K=f"*{dtype}", V=f"*{dtype}", MASK={1: "*u8", 3: "*i64"}.get(mask_kind, "*bf16"), OUT=f"*{dtype}", scale="fp32")
    types |= dict.fromkeys(("PEAK", "SUM", "PARTIAL"), "*fp32")
    absent = {"MASK": None} if mask_kind == 0 else {}
    absent |= dict.fromkeys(("PEAK", "SUM", "PARTIAL")) if c.splits == 1 else {}
    constants = {**constants, **absent, **({"stride_ms": 1} if mask_kind in (1, 2) else {})}  # Triton makes a constant of an argument that is 1
    signature = {name: types.get(name, "i32") for name in decode_attention_split.arg_names if name not in constants}
    aligned = tuple(name for name in signature if name not in ("scale", "LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb", "stride_mh", "stride_mq"))
    return aot.compile_kernel(decode_attention_split, signature, constants, cc, c.num_warps, c.num_stages, aligned), c


def combine(cc: int, d: int = 128, splits: int = 9, dtype: str = "bf16") -> aot.Compiled:
    constants = kernel.combine_constants(kernel.AttentionConfig(64, splits), d, cc)
    signature = dict(OUT=f"*{dtype}", PEAK="*fp32", SUM="*fp32", PARTIAL="*fp32", SPLITS="i32")
    return aot.compile_kernel(decode_attention_combine, signature, constants, cc, 4, 2, ("OUT", "PEAK", "SUM", "PARTIAL"))
