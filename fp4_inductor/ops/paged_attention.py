"""``fp4.paged_attention``: a decode step over a paged cache: one new token of each sequence is appended, and attends to the cache and to itself.

    query         [B, H, D]                    bfloat16, float16 or float32; any strides
    key, value    [B, Hkv, D]                  the new tokens; any strides
    keys, values  [pages, page, Hkv, D]        the cache, any strides; written in place. In the dtype of query, or float8_e4m3fn: codes
    table         [B, P]           int32       the pages of each sequence: token t lies in row t % page of page table[b, t // page]
    lengths       [B]              int32       tokens of each sequence, with the new one; 0: there is no sequence, its rows of out are zeros
    slots         [B]              int64       the row of the cache, counted over all pages, that the new token is written to; below 0: none
    scale                                      None: D ** -0.5
    window                                     a token attends to the last ``window`` ones, with itself; None: to all
    softcap                                    scores become softcap * tanh(scores / softcap)
    sinks         [H]              floating    a score of each head that has no value (gpt-oss)
    early                                      the kernel before on the stream writes none of keys, values, table, lengths, slots: they may be read early
    key_scale, value_scale  [] or [1] or [Hkv]  float32     what codes are multiplied by; None: the cache is not in codes
    out           [B, H, D]                    written; any strides

The new token is attended to whether it is written or not, as the cache would hold it: of codes the nearest to x / scale, at most 448. Nothing else is read at
its slot, and tokens that are not attended to change nothing, NaN included.
Layout and names are those of vLLM's FlashAttention backend. Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, DTypeError, ShapeError
from ..formats import nvfp4
from .contract import OpContract
from .decode_attention import scale_of
from .quantize_rows_fp8 import E4M3_MAX

CODES = torch.float8_e4m3fn


class PagedCall(NamedTuple):
    """The op's arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    slots: Tensor
    out: Tensor
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    early: bool = False
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @staticmethod
    def of(*args, **kwargs) -> PagedCall:
        return PagedCall(*args, **kwargs)


def stored(token: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    """``token [..., Hkv, D]`` as ``cache`` holds it."""
    return token if scale is None else (token.float() / scale.reshape(-1, 1)).clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)


def numbers(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What ``rows [..., Hkv, D]`` of a cache stand for."""
    return rows.to(dtype) if scale is None else rows.to(dtype) * scale.reshape(-1, 1).to(dtype)


def appended(c: PagedCall) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Of keys and of values: the cache, the new tokens as it holds them, and its scale."""
    return [(cache, stored(token, cache, scale), scale) for cache, token, scale in ((c.keys, c.key, c.key_scale), (c.values, c.value, c.value_scale))]


def reference(c: PagedCall) -> None:
    """float64 arithmetic, rounded once to ``query.dtype``, one sequence after the other."""
    check(c)
    group = c.query.shape[1] // max(c.key.shape[1], 1)
    c.out.zero_()
    new = appended(c)
    for b, (length, slot) in enumerate(zip(c.lengths.tolist(), c.slots.tolist(), strict=True)):
        if slot >= 0:
            for cache, token, _ in new:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = token[b]
        if length > 0 and c.out.numel():
            at = torch.arange(max(0, length - (c.window or length)), length, device=c.query.device)
            row = c.table[b, at // c.keys.shape[1]].long(), at % c.keys.shape[1]
            k, v = (torch.cat([numbers(cache[row][:-1], s, torch.float64), numbers(token[b : b + 1], s, torch.float64)]) for cache, token, s in new)
            k, v = (t.transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))  # [H, tokens, D]
            scores = (k @ c.query[b].double()[..., None])[..., 0] * scale_of(c.query, c.scale)
            if c.softcap is not None:
                scores = c.softcap * (scores / c.softcap).tanh()
            if c.sinks is not None:
                scores = torch.cat([scores, c.sinks.double()[:, None]], 1)
            c.out[b] = (scores.softmax(-1)[:, None, : len(at)] @ v)[:, 0].to(c.out.dtype)


def check(c: PagedCall) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    tokens, cache = [c.query, c.key, c.value, c.out], [c.keys, c.values]
    in_codes = c.keys.dtype == c.values.dtype == CODES
    alike = {t.dtype for t in (tokens if in_codes else tokens + cache)}
    if c.query.dtype not in nvfp4.HIGH_PRECISION or alike != {c.query.dtype}:
        raise DTypeError(
            "fp4.paged_attention: dtypes of query, key, value, out, keys and values",
            value=[t.dtype for t in tokens + cache],
            limit=f"one of {list(nvfp4.HIGH_PRECISION)}; keys and values may be {CODES}",
            remedy="Cast them with .to(dtype).",
        )
    scales = {name: s for name, s in (("key_scale", c.key_scale), ("value_scale", c.value_scale)) if s is not None}
    if len(scales) != 2 * in_codes or any(s.dtype != torch.float32 for s in scales.values()):
        raise DTypeError(
            "fp4.paged_attention: scales of the cache",
            value={name: s.dtype for name, s in scales.items()},
            limit=f"key_scale and value_scale in {torch.float32} for a cache in {CODES}, none for any other; this one is in {c.keys.dtype}",
            remedy="Give ones for codes without scales.",
        )
    for name, given, kind in (("table", c.table, torch.int32), ("lengths", c.lengths, torch.int32), ("slots", c.slots, torch.int64)):
        if given.dtype != kind:
            raise DTypeError(f"fp4.paged_attention: dtype of {name}", value=given.dtype, limit=kind, remedy="Cast it with .to(dtype).")
    b, h, d = c.query.shape if c.query.dim() == 3 else (-1, -1, -1)
    heads = c.key.shape[1] if c.key.dim() == 3 else -1
    fits = c.key.shape == c.value.shape == (b, heads, d) and c.keys.dim() == 4 and c.keys.shape == c.values.shape and tuple(c.keys.shape[2:]) == (heads, d)
    fits = fits and (h % heads == 0 if heads else not h) and c.keys.shape[1] > 0
    if not fits:
        raise ShapeError(
            "fp4.paged_attention: query, key, value and the cache do not belong together",
            value=[tuple(t.shape) for t in (c.query, c.key, c.value, c.keys, c.values)],
            limit="[B, H, D], twice [B, Hkv, D], twice [pages, page, Hkv, D], H a multiple of Hkv",
            remedy="Give the new tokens and the cache of one layer.",
        )
    if scales and ({s.numel() for s in scales.values()} not in ({1}, {heads}) or any(s.dim() > 1 for s in scales.values())):
        raise ShapeError(
            "fp4.paged_attention: scales of the cache",
            value={name: tuple(s.shape) for name, s in scales.items()},
            limit=f"both [], [1] or [{heads}]",
            remedy="Give one scale of all tokens, or one of each KV head.",
        )
    shapes = (c.table.shape[:1], c.lengths.shape, c.slots.shape, c.out.shape, (h,) if c.sinks is None else c.sinks.shape)
    if c.table.dim() != 2 or tuple(map(tuple, shapes)) != ((b,), (b,), (b,), (b, h, d), (h,)):
        raise ShapeError(
            "fp4.paged_attention: table, lengths, slots, out and sinks",
            value=[tuple(c.table.shape), *map(tuple, shapes[1:])],
            limit=f"[{b}, P], [{b}], [{b}], [{b}, {h}, {d}], [{h}]",
            remedy="Give one row of the table for each row of query.",
        )
    for name, number in (("window", c.window), ("softcap", c.softcap)):
        if number is not None and not number > 0:
            raise ConfigError(f"fp4.paged_attention: {name}", value=number, limit="> 0", remedy="Pass None for none.")


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (lengths, page, H, Hkv, D): one token, none, edges of pages and of tiles, no sequence
    cases: tuple[tuple[tuple[int, ...], int, int, int, int], ...] = (
        ((1, 40, 17), 16, 8, 2, 64),
        ((16, 0, 33, 15), 16, 4, 4, 32),
        ((70,), 48, 16, 1, 128),
        ((5, 130), 32, 6, 3, 80),
        ((), 16, 4, 2, 64),
        ((3, 30), 16, 1, 1, 96),
        ((3, 30), 16, 0, 0, 64),
    )
    for lengths, page, h, heads, d in cases:
        for dtype, options in (
            (torch.float32, {}), (torch.bfloat16, dict(window=9)), (torch.bfloat16, dict(softcap=2.0, sinks=True, scale=0.3)), (torch.float32, dict(codes=1)),
            (torch.bfloat16, dict(codes=heads, window=30)),
        ):  # fmt: skip
            yield f"{lengths} page {page} H{h} Hkv{heads} D{d} {dtype} {options}", tuple(call(device, lengths, page, h, heads, d, dtype, **options))


def call(
    device: torch.device,
    lengths: tuple[int, ...],
    page: int,
    h: int,
    heads: int,
    d: int,
    dtype: torch.dtype,
    sinks: bool = False,
    codes: int = 0,
    **options: Any,
) -> PagedCall:
    """Random tokens in pages in a random order; what lies behind the tokens of a sequence is NaN. ``codes``: the cache is in E4M3, with so many scales."""
    b, columns = len(lengths), max((-(-n // page) for n in lengths), default=0) + 1
    order = torch.randperm(b * columns + 2, device=device)[: b * columns].view(b, columns).to(torch.int32)
    query, key, value = (torch.randn(b, n, d, device=device).to(dtype) for n in (h, heads, heads))
    scales = [torch.rand(codes, device=device) / 64 + 1 / 256 for _ in range(2)] if codes else [None, None]
    caches = []
    for scale in scales:
        cache = torch.full((b * columns + 2, page, heads, d), float("nan"), dtype=dtype, device=device)
        for i, n in enumerate(lengths):
            at = torch.arange(max(n - 1, 0), device=device)
            cache[order[i, at // page].long(), at % page] = torch.randn(len(at), heads, d, device=device).to(dtype)
        caches.append(cache if scale is None else stored(cache, torch.empty(0, dtype=CODES, device=device), scale))
    slots = [int(order[i, (n - 1) // page]) * page + (n - 1) % page if n else -1 for i, n in enumerate(lengths)]
    sizes, rows = torch.tensor(lengths, dtype=torch.int32, device=device), torch.tensor(slots, dtype=torch.int64, device=device)
    sink = torch.randn(h, device=device).to(dtype) if sinks else None
    made = PagedCall(query, key, value, caches[0], caches[1], order, sizes, rows, torch.empty_like(query), sinks=sink, **options)
    return made._replace(key_scale=scales[0], value_scale=scales[1])


CONTRACT = OpContract(
    name="paged_attention",
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor table, Tensor lengths, Tensor slots, Tensor(c!) out, "
    "float? scale=None, int? window=None, float? softcap=None, Tensor? sinks=None, bool early=False, "
    "Tensor? key_scale=None, Tensor? value_scale=None) -> ()",
    reference=reference,
    fake=check,
    inputs=inputs,
    tolerance={torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3},
    any_strides=True,
    struct=PagedCall,
)
CONTRACT.implement("CPU", reference)
CONTRACT.refuse_gradients()
