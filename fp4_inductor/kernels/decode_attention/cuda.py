"""fp4.decode_attention on CUDA: by the kernel that ``select.plan`` gives. Nothing is copied, no host read."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import decode_attention as contract
from .. import host, select


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``[B, Q, H, D]``; M is the number of queries of one KV head."""
    contract.check(query, key, value, mask, scale, key_scale, value_scale)
    batch, heads, queries, d = query.shape
    if not (query.numel() and key.numel()):
        return query.new_zeros((batch, queries, heads, d))
    rows = queries * (heads // key.shape[1])
    form = select.attention_form(d, key_scale is not None, select.is_shared(mask))
    kernel = host.row_for("decode_attention", query, rows, heads, d, form=form).implementation
    with torch.cuda.device(query.device):
        return kernel.source()(query, key, value, mask, contract.scale_of(query, scale), key_scale=key_scale, value_scale=value_scale)
