"""cuda_paged_attention, and cuda_paged_attention_fp8: one launch for one new token of each sequence over a paged cache. Source: ``csrc/attention/pages.cuh``.

The first takes caches in the dtype of the query, the second those in E4M3, by libraries of their own.

M of its problem is the heads that share a KV head, N heads, K the width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops import paged_attention as contract
from ...ops.decode_attention import scale_of
from ...ops.paged_attention import CODES, PagedCall
from .. import host, params
from ..asked import cache_in
from ..forms import Launches, Library
from ..kernel import COMPILED, MEASURED, Kernel, On

LIBRARY = Library("attention/paged_attention.cu", finish=None)
LIBRARY_OF_FP8 = Library("attention/paged_attention_fp8.cu", finish=None)
NAME, NAME_OF_FP8 = "cuda_paged_attention", "cuda_paged_attention_fp8"
WIDTHS = (64, 128)  # that the source compiles
NOT_ROUNDED = -1  # as PagedParams has it
TOKENS = 16  # of a tile, which lies in one page
_ALIGNED = 16
MOST_ROWS = 16  # heads that share a KV head
_LOG2_E = math.log2(math.e)
Tile = tuple[int, int]  # blocks of a KV head of a sequence, up to 16; warps that attend, 3 or the kernel's other number
OWN: Tile = (0, 0)  # the kernel's choice


def is_in_codes(c: PagedCall) -> bool:
    return c.keys.dtype == CODES


def paged_form(c: PagedCall) -> tuple[str, ...]:
    """What a call asks for besides a cache in the dtype of the query that the CUDA kernel serves. Reads shapes, dtypes, strides and addresses only."""
    group = c.query.shape[1] // max(c.key.shape[1], 1)
    asked = {
        cache_in("fp8"): is_in_codes(c),
        f"{group} heads that share a KV head, more than {MOST_ROWS}": group > MOST_ROWS,
        f"pages of {c.keys.shape[1]} tokens, no multiple of {TOKENS}": c.keys.shape[1] % TOKENS != 0,
        "rows whose channels are apart, or that begin at no multiple of 16 bytes": not all(map(is_readable, (c.query, c.key, c.value, c.keys, c.values))),
        "pages of a sequence that are apart": c.table.stride(1) != 1,
    }
    return tuple(what for what, is_asked in asked.items() if is_asked)


def paged_attention(c: PagedCall) -> None:
    """``fp4.paged_attention`` on CUDA. A cache whose channels are apart, or whose rows are not aligned, is copied there and back."""
    contract.check(c)
    if not c.out.numel():
        return
    query, key, value, keys, values = map(readable, (c.query, c.key, c.value, c.keys, c.values))
    table = c.table if c.table.stride(1) == 1 else c.table.contiguous()
    out = c.out if c.out.is_contiguous() else torch.empty(c.out.shape, dtype=c.out.dtype, device=c.out.device)
    laid = c._replace(query=query, key=key, value=value, keys=keys, values=values, table=table, out=out)
    (_, heads, d), kv_heads = c.query.shape, c.key.shape[1]
    kernel = host.row_for("paged_attention", c.query, heads // kv_heads, heads, d, form=paged_form(laid)).implementation
    with torch.cuda.device(c.query.device):
        kernel.source()(laid)
        for given, used in ((c.keys, laid.keys), (c.values, laid.values), (c.out, laid.out)):
            if used is not given:
                given.copy_(used)


def is_readable(t: Tensor) -> bool:
    """Has it rows of neighbouring numbers that begin at multiples of 16 bytes?"""
    return t.stride(-1) == 1 and t.data_ptr() % _ALIGNED == 0 and all(s * t.itemsize % _ALIGNED == 0 for s in t.stride()[:-1])


def readable(t: Tensor) -> Tensor:
    return t if is_readable(t) else t.clone(memory_format=torch.contiguous_format)


def fields(c: PagedCall, tile: Tile = OWN) -> dict[str, Any]:
    """Of :class:`params.PagedParams`, but for y and stream. A 0 of ``tile`` leaves it to the kernel."""
    query, key, value = c.query, c.key, c.value
    (batch, heads, d), (cache_pages, page, kv_heads, _) = query.shape, c.keys.shape
    tensors: dict[str, Tensor | None] = dict(
        query=query, key=key, value=value, keys=c.keys, values=c.values, table=c.table, lengths=c.lengths.contiguous(), slots=c.slots.contiguous(),
        **{name: None if t is None else t.contiguous() for name, t in (("sinks", c.sinks), ("key_scale", c.key_scale), ("value_scale", c.value_scale))},
    )  # fmt: skip
    strides = dict(query_strides=query.stride()[:2], key_strides=key.stride()[:2], value_strides=value.stride()[:2], table_stride=c.table.stride(0))
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, D=d, page_size=page, pages=c.table.shape[1], window=c.window or 0, cache_pages=cache_pages)
    format = dict(format=0 if is_in_codes(c) else NOT_ROUNDED, scale_stride=0 if c.key_scale is None else int(c.key_scale.numel() > 1))
    types = dict(dtype=params.FLOATS[query.dtype], sinks_type=params.FLOATS[torch.float32 if c.sinks is None else c.sinks.dtype], early=int(c.early))
    numbers = dict(scale=scale_of(query, c.scale) * _LOG2_E, softcap=(c.softcap or 0.0) * _LOG2_E, tile=tile)
    return dict(keys_strides=c.keys.stride()[:3], values_strides=c.values.stride()[:3], **tensors, **strides, **sizes, **format, **types, **numbers)


def launch(c: PagedCall, tile: Tile = OWN) -> None:
    """:func:`paged_form` of ``c`` is empty, or says that the cache is in fp8, and nothing of ``c`` is empty.

    Raises:
        KernelError: the launch was refused.
    """
    from .. import csrc  # which reads the list of kernels

    of = f"query {tuple(c.query.shape)} over {tuple(c.keys.shape)}"
    csrc.launch(LIBRARY_OF_FP8 if is_in_codes(c) else LIBRARY, params.PagedParams, fields(c, tile), c.out, host.arch(c.query.device), of)


_WHY = "one launch: new tokens are appended, and the parts of a sequence meet in a cluster's shared memory"
_WHY_90 = "one launch, copies by a producer warp: 8 sequences of 8,192 tokens (8 KV heads of 128) take 71 us on an H200, their bytes 59; 520 of one 4.6"
_WHY_FP8_90 = "as cuda_paged_attention: 8 sequences of 8,000 tokens 39.5 us on an H200, their bytes 28.6 (vLLM's FlashAttention 3 68)"
_BATCH = (1, "the number of blocks follows the numbers of sequences and KV heads, not M")
KERNELS = (
    Kernel(
        "paged_attention", NAME, "paged_attention", (On(90, 90, MEASURED, _WHY_90), On(100, 129, COMPILED, _WHY)), only_k=WIDTHS, plain=True, batch=_BATCH,
        form=Launches("paged_attention.cuda:launch", LIBRARY),
    ),
    Kernel(
        "paged_attention", NAME_OF_FP8, "paged_attention", (On(90, 90, MEASURED, _WHY_FP8_90), On(100, 129, COMPILED, _WHY)), only_k=WIDTHS,
        forms=(cache_in("fp8"),), batch=_BATCH, form=Launches("paged_attention.cuda:launch", LIBRARY_OF_FP8),
    ),
)  # fmt: skip
