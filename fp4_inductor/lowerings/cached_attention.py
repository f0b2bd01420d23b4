"""fp4.cached_attention: one call of the op in the graph, which writes the cache where it lies: no copy of it is made, and one graph serves every length."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import lowering as inductor
from .._torch.order import why_not_early
from ..config import dispatch_config
from ..kernels import select
from ..ops.cached_call import CachedCall
from .decode_attention import RUNTIME
from .journal import record
from .regime import known

fp4 = torch.ops.fp4
# Old tokens are requested while the kernel before runs, where that is proven to be safe, in steps of so many sequences over a cache in the model's dtype.
# A step of 12 layers of an 8B model takes 1.132 ms on an H100 with it, 1.170 without (batch 1, 512 tokens), 1.361 and 1.373 (8192). Of 8 sequences 4 layers
# take 0.547 ms on an H200 with it, 0.557 without (30B-A3B: 0.492, 0.492), of 32 sequences 0.730 and 0.737 (8 layers of 30B-A3B: 1.178, 1.186). Caches in 8
# and 4 bits, and more sequences: nobody has timed it.
EARLY = 32


def register() -> None:
    inductor.register(fp4.cached_attention.default, lower)


def lower(*args, **kwargs):
    """Lowering of ``fp4.cached_attention``. The journal gets the regime that the number of queries lies in."""
    c: Any = CachedCall.of(*args, **kwargs)  # of IR values
    tell(c)
    new, cache = (c.query, c.key, c.value), (c.keys, c.values, c.position)
    for shared in (c.mask, *new, *((c.prologue.cos, c.prologue.sin) if c.prologue else ())):
        if shared is not None:
            inductor.realized(shared)  # all layers share mask and angles; each would make them again
    sequences = c.query.get_size()[0]
    if c.mask is None and c.stored is None and c.query.get_device().type == "cuda" and inductor.is_constant(sequences) and sequences <= EARLY:
        for t in cache:
            inductor.realized(t)
        c = c._replace(early=not why_not_early(new, cache))
    return inductor.call_op(fp4.cached_attention.default, *c.flat())


def tell(c: Any) -> None:
    """Tell the journal which kernel serves the call, and why not the one launch, if that does not."""
    symbols = inductor.Symbols()
    _, heads, queries, d = c.query.get_size()
    heads, kv_heads, d = (symbols.static_int(size) for size in (heads, c.key.get_size()[1], d))
    if heads is None or not kv_heads or d is None:
        return
    m = queries * (heads // kv_heads)
    form = select.cached_form(inductor.on_meta(c))
    call = select.describe("cached_attention", c.query.get_device(), c.query.get_dtype(), heads, d, form=form)
    options = select.plan(call, dispatch_config())
    record(options, known(options, m, symbols, RUNTIME), m, note=select.ATTENTION_NOTE)
