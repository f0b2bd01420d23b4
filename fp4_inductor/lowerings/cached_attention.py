"""fp4.cached_attention: one call of the op in the graph, which writes the cache where it lies: no copy of it is made, and one graph serves every length."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from .decode_attention import tell

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.cached_attention.default, lower)


def lower(
    query, key, value, keys, values, position, mask=None, scale=None, window=None, causal=True, softcap=None, sinks=None, empty=False
):  # fmt: skip
    """Lowering of ``fp4.cached_attention``. The journal gets the kernel of ``fp4.decode_attention`` that it attends with, if it does."""
    if softcap is None and sinks is None:
        tell(query, key, "cached_attention")
    mask = None if mask is None else inductor.realized(mask)  # all layers share it
    rest = (mask, scale, window, causal, softcap, sinks, empty)
    return inductor.call_op(fp4.cached_attention.default, query, key, value, keys, values, position, *rest)
