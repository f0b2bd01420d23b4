"""Host side of ``fp4.decode_attention`` on CUDA: one or two launches, nothing copied, no host read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops import decode_attention as contract
from .. import host, select
from . import configs
from .configs import AttentionConfig
from .triton_split import decode_attention_combine, decode_attention_split


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """``[B, Q, H, D]`` by the row that ``select.plan`` gives for this number of queries of one KV head."""
    contract.check(query, key, value, mask, scale)
    batch, heads, queries, d = query.shape
    if not (query.numel() and key.numel()):
        return query.new_zeros((batch, queries, heads, d))
    rows = queries * (heads // key.shape[1])
    if host.row_for("decode_attention", query, rows, heads, d, form=select.attention_form(d)).kernel == "sdpa":
        return contract.by_library(query, key, value, mask, scale)
    with torch.cuda.device(query.device):
        return split(query, key, value, mask, contract.scale_of(query, scale))


def split(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, tile: AttentionConfig | None = None) -> Tensor:
    """At most 16 queries of one KV head; see :mod:`.triton_split`."""
    (batch, heads, queries, d), (_, kv_heads, length, _) = query.shape, key.shape
    group, device = heads // kv_heads, query.device
    arch = host.arch(device)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    kind = 0
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, length)
        kind, strides = (1 if mask.dtype == torch.bool else 2), mask.stride()
        mask = mask.view(torch.uint8) if kind == 1 else mask
    per_row = kind != 0 and bool((queries > 1 and strides[2]) or (group > 1 and strides[1]))
    c = tile or configs.attention(batch, kv_heads, length, d, host.processors(device), arch, per_row)
    constants = configs.constants(c, group, queries, length, d, kind, per_row, arch)
    out = torch.empty(batch, queries, heads, d, dtype=query.dtype, device=device)
    peak = total = partial = None
    if c.splits > 1:
        scratch = torch.empty(out.numel() // d * c.splits * (d + 2), dtype=torch.float32, device=device)
        partial, peak, total = scratch.split([out.numel() * c.splits, *[out.numel() // d * c.splits] * 2])
    pdl = host.launched_early(bool(constants["PDL"]))
    decode_attention_split[(batch * kv_heads * c.splits,)](
        query, key, value, mask, out, peak, total, partial, length, heads, queries, c.splits, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *strides, scale * math.log2(math.e), **constants, num_warps=c.num_warps, num_stages=c.num_stages, **pdl,
    )  # fmt: skip
    if c.splits > 1:
        decode_attention_combine[(batch * queries * heads,)](out, peak, total, partial, c.splits, **configs.combine_constants(c, d, arch), num_warps=4, **pdl)
    return out
