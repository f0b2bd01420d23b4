"""fp4.decode_attention: one call of the op in the graph, which launches its one or two kernels itself: one graph serves every length of the cache."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..kernels import select
from ..kernels.select import plan
from .journal import record
from .regime import known

fp4 = torch.ops.fp4
RUNTIME = "the operator picks its kernel at each call: no guard"


def register() -> None:
    inductor.register(fp4.decode_attention.default, lower)


def lower(query, key, value, mask=None, scale=None, key_scale=None, value_scale=None):
    """Lowering of ``fp4.decode_attention``. The journal gets the regime that the number of queries lies in."""
    symbols = inductor.Symbols()
    _, heads, queries, d = query.get_size()
    heads, kv_heads, d = (symbols.static_int(size) for size in (heads, key.get_size()[1], d))
    if heads is not None and kv_heads and d is not None:
        m = queries * (heads // kv_heads)
        shared = mask is not None and mask.get_dtype() == torch.bool and symbols.static_int(mask.get_size()[1]) == 1
        form = select.attention_form(d, key_scale is not None, shared)
        call = select.describe("decode_attention", query.get_device(), query.get_dtype(), heads, d, form=form)
        options = plan(call, dispatch_config())
        record(options, known(options, m, symbols, RUNTIME), m, note=select.ATTENTION_NOTE)
    # The layers of a model share one mask, and each would make it again.
    mask = None if mask is None else inductor.realized(mask)
    return inductor.call_op(fp4.decode_attention.default, query, key, value, mask, scale, key_scale, value_scale)
