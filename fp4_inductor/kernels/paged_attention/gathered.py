"""gather + attention: ``fp4.paged_attention`` by torch's operators, for every call and device. No host read, but a copy of all pages of the table."""

from __future__ import annotations

import torch

from ...ops.decode_attention import scale_of
from ...ops.paged_attention import PagedCall, appended, numbers
from ..forms import Launches
from ..kernel import ANY, BY_LIBRARY, IN_CI, Kernel, On


def gathered(c: PagedCall) -> None:
    page, group = c.keys.shape[1], c.query.shape[1] // c.key.shape[1]
    row = torch.arange(len(c.slots), device=c.slots.device)
    new = appended(c)
    # [B, tokens, Hkv, D], before the append
    k, v = (numbers(cache[c.table.long()].flatten(1, 2), scale, torch.float32) for cache, _, scale in new)
    for cache, token, scale in new:
        if scale is not None:  # codes are written as bytes, which every device can choose among
            cache, token = cache.view(torch.uint8), token.view(torch.uint8)
        old = cache[c.slots.clamp(min=0) // page, c.slots.clamp(min=0) % page]
        kept = (c.slots >= 0)[:, None, None]
        # Rows without a slot write what is there already; the slot 0 of a row that has one comes last.
        order = torch.argsort(kept[:, 0, 0].to(torch.int8), stable=True)
        at = c.slots.clamp(min=0)[order]
        cache[at // page, at % page] = torch.where(kept, token, old)[order]
    last = (c.lengths.long() - 1).clamp(min=0)
    k[row, last], v[row, last] = (numbers(token, scale, torch.float32) for _, token, scale in new)
    at, lengths = torch.arange(k.shape[1], device=k.device)[None], c.lengths[:, None]
    used = (at < lengths) & (at >= lengths - (c.window or k.shape[1]))
    k, v = (t.masked_fill(~used[..., None, None], 0.0).repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bhd,bnhd->bhn", c.query.float(), k) * scale_of(c.query, c.scale)
    if c.softcap is not None:
        scores = c.softcap * (scores / c.softcap).tanh()
    scores = scores.masked_fill(~used[:, None], float("-inf"))
    if c.sinks is not None:
        scores = torch.cat([scores, c.sinks.float()[None, :, None].expand(len(row), -1, 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(~used[:, None], 0.0)
    c.out.copy_(torch.einsum("bhn,bnhd->bhd", weights, v))


_WHY = "by torch's operators: every page of the table is copied"
KERNELS = (
    Kernel(
        "paged_attention", "gather + attention", "library", (On(0, 129, IN_CI, _WHY),), ANY, k_multiple=1, batch=BY_LIBRARY,
        form=Launches("paged_attention.gathered:gathered"),
    ),
)  # fmt: skip
