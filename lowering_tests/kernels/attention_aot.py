"""Compile the kernels of fp4.decode_attention and fp4.cached_attention ahead of time with the tiles and constants that the launcher would give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp4_inductor.formats import kv
from fp4_inductor.kernels.cached_attention import quantized as quantized_launch
from fp4_inductor.kernels.cached_attention import step as one_launch
from fp4_inductor.kernels.cached_attention.triton_quantized import cached_attention_quantized
from fp4_inductor.kernels.cached_attention.triton_step import cached_attention_step
from fp4_inductor.kernels.decode_attention import masked as masked_launch
from fp4_inductor.kernels.decode_attention import split as kernel
from fp4_inductor.kernels.decode_attention.triton_masked import masked_attention
from fp4_inductor.kernels.decode_attention.triton_split import decode_attention_combine, decode_attention_split
from fp4_inductor.ops.cached_call import CachedCall, Prologue
from lowering_tests.kernels import aot

SMS = 132


def split(
    cc: int, d: int = 128, batch: int = 1, kv_heads: int = 8, group: int = 4, queries: int = 1, length: int = 520, mask_kind: int = 1,
    per_row: bool = False, dtype: str = "bf16", kinds: tuple[int, int] = (0, 0), tile: kernel.AttentionConfig | None = None,
) -> tuple[aot.Compiled, kernel.AttentionConfig]:  # fmt: skip
    c = tile or kernel.attention(batch, kv_heads, length, d, SMS, cc, per_row, kinds[0] > 0)
    constants = kernel.constants(c, group, queries, length, d, mask_kind, per_row, cc, kinds)
    types = dict(Q=f"*{dtype}", K=f"*{dtype}", V=f"*{dtype}", MASK={1: "*u8", 3: "*i64"}.get(mask_kind, "*bf16"), OUT=f"*{dtype}", scale="fp32")
    types |= dict.fromkeys(("PEAK", "SUM", "PARTIAL"), "*fp32") | dict.fromkeys(("K_SCALE", "V_SCALE"), f"*{dtype}")
    types |= dict(K="*u8", V="*u8") if kinds[0] else {}
    absent = {"MASK": None} if mask_kind == 0 else {}
    absent |= {} if kinds[0] else {"K_SCALE": None, "V_SCALE": None}
    absent |= dict.fromkeys(("PEAK", "SUM", "PARTIAL")) if c.splits == 1 else {}
    constants = {**constants, **absent, **({"stride_ms": 1} if mask_kind in (1, 2) else {})}  # Triton makes a constant of an argument that is 1
    signature = {name: types.get(name, "i32") for name in decode_attention_split.arg_names if name not in constants}
    scales = [f"stride_{side}{dim}" for side in "xy" for dim in "bhs"]
    aligned = tuple(name for name in signature if name not in ("scale", "LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb", "stride_mh", "stride_mq", *scales))
    return aot.compile_kernel(decode_attention_split, signature, constants, cc, c.num_warps, c.num_stages, aligned), c


def masked(cc: int, d: int = 128, queries: int = 2048, dtype: str = "bf16") -> tuple[aot.Compiled, masked_launch.PrefillConfig]:
    t = masked_launch.tile_of(queries, d, cc)
    constants = masked_launch.constants(t, 4, 33, d)
    types = dict.fromkeys(("Q", "K", "V", "OUT"), f"*{dtype}") | dict(FOUND="*u8", SEEN="*u8", BITS="*i32", scale="fp32")
    signature = {name: types.get(name, "i32") for name in masked_attention.arg_names if name not in constants}
    aligned = tuple(name for name in signature if name not in ("QUERIES", "LENGTH", "BLOCKS", "HEADS", "SEQUENCES", "scale"))
    return aot.compile_kernel(masked_attention, signature, constants, cc, t.num_warps, t.num_stages, aligned), t


def combine(cc: int, d: int = 128, splits: int = 9, dtype: str = "bf16") -> aot.Compiled:
    constants = kernel.combine_constants(kernel.AttentionConfig(64, splits), d, cc)
    signature = dict(OUT=f"*{dtype}", PEAK="*fp32", SUM="*fp32", PARTIAL="*fp32", SPLITS="i32")
    return aot.compile_kernel(decode_attention_combine, signature, constants, cc, 4, 2, ("OUT", "PEAK", "SUM", "PARTIAL"))


def _call(
    d: int, batch: int, kv_heads: int, group: int, queries: int, length: int, window: int | None, prologue: str, early: bool, masked: bool, others: bool,
    dtype: str
) -> CachedCall:  # fmt: skip
    """On no device. ``prologue``: "norm" and "rope" in it; ``others``: a soft-cap and sinks."""
    meta = dict(dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], device="meta")
    new, cache = torch.empty(batch, kv_heads, queries, d, **meta), torch.empty(batch, kv_heads, length, d, **meta)
    norm, turns = (torch.empty(d, **meta) if "norm" in prologue else None), (torch.empty(1, queries, d, **meta) if "rope" in prologue else None)
    return CachedCall(
        torch.empty(batch, kv_heads * group, queries, d, **meta), new, new, cache, cache, torch.empty((), dtype=torch.int64, device="meta"),
        mask=torch.empty(batch, 1, 1, length, dtype=torch.bool, device="meta") if masked else None, window=window, softcap=2.0 if others else None,
        sinks=torch.empty(kv_heads * group, **meta) if others else None, early=early,
        prologue=Prologue(norm, norm, 1e-6, 0.0, turns, turns) if prologue else None,
    )  # fmt: skip


def _compiled(
    kernel: Any, c: CachedCall, t: one_launch.StepConfig, constants: dict[str, object], absent: Iterable[str], types: dict[str, str], cc: int, dtype: str
) -> aot.Compiled:  # fmt: skip
    """``absent``: arguments of ``kernel`` besides those that a call of one launch lacks."""
    p = c.prologue or Prologue()
    given = dict(MASK=c.mask, SINKS=c.sinks, Q_NORM=p.q_norm, K_NORM=p.k_norm, COS=p.cos, SIN=p.sin)
    none = [name for name, x in given.items() if x is None] + [*absent, *(("PEAK", "SUM", "PARTIAL", "ARRIVALS") if t.splits == 1 else ())]
    constants = {**constants, **dict.fromkeys(none), "stride_mp": 1}
    types = {**types, **dict.fromkeys(("Q", "KEY", "VALUE", "SINKS", "Q_NORM", "K_NORM", "COS", "SIN", "OUT"), f"*{dtype}")}
    types |= dict.fromkeys(("PEAK", "SUM", "PARTIAL"), "*fp32") | dict(POSITION="*i64", MASK="*u8", ARRIVALS="*i32")
    types |= dict.fromkeys(("scale", "softcap", "eps", "offset"), "fp32")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    plain = ("SLOTS", "EXACT_SLOTS", "LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb", "scale", "softcap", "eps", "offset")
    return aot.compile_kernel(kernel, signature, constants, cc, t.num_warps, t.num_stages, tuple(name for name in signature if name not in plain))


def step(
    cc: int, d: int = 128, batch: int = 1, kv_heads: int = 8, group: int = 4, queries: int = 1, length: int = 520, window: int | None = None,
    prologue: str = "", early: bool = False, masked: bool = False, others: bool = False, dtype: str = "bf16", tile: one_launch.StepConfig | None = None,
) -> tuple[aot.Compiled, one_launch.StepConfig]:  # fmt: skip
    """The kernel of one launch."""
    t = tile or one_launch.config(batch, kv_heads, window or length, d, SMS, cc)
    c = _call(d, batch, kv_heads, group, queries, length, window, prologue, early, masked, others, dtype)
    cache = dict.fromkeys(("K", "V"), f"*{dtype}")
    return _compiled(cached_attention_step, c, t, one_launch.constants(t, c, cc), (), cache, cc, dtype), t


def quantized(
    cc: int, name: str, d: int = 128, batch: int = 1, kv_heads: int = 8, group: int = 4, queries: int = 1, length: int = 520, window: int | None = None,
    prologue: str = "", early: bool = False, masked: bool = False, others: bool = False, dtype: str = "bf16", tile: one_launch.StepConfig | None = None,
) -> tuple[aot.Compiled, one_launch.StepConfig]:  # fmt: skip
    """The kernel of one launch over a cache in the format ``name``."""
    f = kv.FORMATS[name]
    c = _call(d, batch, kv_heads, group, queries, length, window, prologue, early, masked, others, dtype)
    rows = [kv.empty(kind, (batch, kv_heads, length), d, torch.device("meta")) for kind in (f.key, f.value)]
    c = c._replace(keys=rows[0].codes, values=rows[1].codes)
    t = tile or quantized_launch.tile_of(c, SMS, cc)
    types = dict.fromkeys(("K", "V", "K_BLOCKS", "V_BLOCKS"), "*u8") | dict.fromkeys(("K_SCALE", "V_SCALE"), "*fp16") | dict(MEAN="*fp32")
    types |= dict.fromkeys(("EXACT_K", "EXACT_V"), f"*{dtype}")
    absent = [f"{side}_BLOCKS" for side, row in zip("KV", rows, strict=True) if row.blocks is None] + ([] if f.exact else ["EXACT_K", "EXACT_V"])
    return _compiled(cached_attention_quantized, c, t, quantized_launch.constants(t, c, cc), absent, types, cc, dtype), t
