"""Compile the kernels of fp4.decode_attention and fp4.cached_attention ahead of time with the tiles and constants that the launcher would give them."""

from __future__ import annotations

import torch

from fp4_inductor.kernels.cached_attention import step as one_launch
from fp4_inductor.kernels.cached_attention.triton_step import cached_attention_step
from fp4_inductor.kernels.decode_attention import split as kernel
from fp4_inductor.kernels.decode_attention.triton_split import decode_attention_combine, decode_attention_split
from fp4_inductor.ops.cached_call import CachedCall, Prologue
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


def step(
    cc: int, d: int = 128, batch: int = 1, kv_heads: int = 8, group: int = 4, queries: int = 1, length: int = 520, window: int | None = None,
    prologue: str = "", early: bool = False, masked: bool = False, others: bool = False, dtype: str = "bf16", tile: one_launch.StepConfig | None = None,
) -> tuple[aot.Compiled, one_launch.StepConfig]:  # fmt: skip
    """The kernel of one launch. ``prologue``: "norm" and "rope" in it; ``others``: a soft-cap and sinks."""
    t = tile or one_launch.config(batch, kv_heads, window or length, d, SMS, cc)
    meta = dict(dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], device="meta")
    new, cache = torch.empty(batch, kv_heads, queries, d, **meta), torch.empty(batch, kv_heads, length, d, **meta)
    norm, turns = (torch.empty(d, **meta) if "norm" in prologue else None), (torch.empty(1, queries, d, **meta) if "rope" in prologue else None)
    c = CachedCall(
        torch.empty(batch, kv_heads * group, queries, d, **meta), new, new, cache, cache, torch.empty((), dtype=torch.int64, device="meta"),
        mask=torch.empty(batch, 1, 1, length, dtype=torch.bool, device="meta") if masked else None, window=window, softcap=2.0 if others else None,
        sinks=torch.empty(kv_heads * group, **meta) if others else None, early=early,
        prologue=Prologue(norm, norm, 1e-6, 0.0, turns, turns) if prologue else None,
    )  # fmt: skip
    constants = one_launch.constants(t, c, cc)
    given = dict(MASK=masked, SINKS=others, Q_NORM="norm" in prologue, K_NORM="norm" in prologue, COS="rope" in prologue, SIN="rope" in prologue)
    given |= dict.fromkeys(("PEAK", "SUM", "PARTIAL", "ARRIVALS"), t.splits > 1)
    constants |= {name: None for name, there in given.items() if not there} | {"stride_mp": 1}
    types = dict.fromkeys(("Q", "KEY", "VALUE", "K", "V", "SINKS", "Q_NORM", "K_NORM", "COS", "SIN", "OUT"), f"*{dtype}")
    types |= dict.fromkeys(("PEAK", "SUM", "PARTIAL"), "*fp32") | dict(POSITION="*i64", MASK="*u8", ARRIVALS="*i32")
    types |= dict.fromkeys(("scale", "softcap", "eps", "offset"), "fp32")
    signature = {name: types.get(name, "i32") for name in cached_attention_step.arg_names if name not in constants}
    plain = ("SLOTS", "LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb", "scale", "softcap", "eps", "offset")
    aligned = tuple(name for name in signature if name not in plain)
    return aot.compile_kernel(cached_attention_step, signature, constants, cc, t.num_warps, t.num_stages, aligned), t
