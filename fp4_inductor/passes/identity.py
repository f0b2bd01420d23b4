"""The keys of torch's compile caches: every byte of this package, the dispatch config, the compile range in force and groups of ranks are a part of them.

Lowerings and appended patterns are in no cache key of torch: a changed threshold would silently reuse the old artifact
(shown on torch 2.11 to 2.15). ``torch.compiler.config.cache_key_tag`` is in the keys of the FX-graph cache, the
AOTAutograd cache and the autotune cache; our element of it changes whenever one of ours does. What may differ between two compilations
at one time (threads, ranges, whether guards are checked) is asked for whenever a key of the first two is made.
"""

from __future__ import annotations

import torch

from .. import config
from .._salt import PREFIX, cache_salt, salt, sources, sources_digest
from .._torch import cache, guards
from .._torch.fx_tables import before_autograd

__all__ = ["key", "refresh", "register", "salt", "sources", "sources_digest"]


def register() -> None:
    """Salt the cache key now, whenever the dispatch config changes, and in each compilation before a key is computed.

    The last covers a user who assigns ``cache_key_tag`` after this package was loaded. It hangs on two hooks: Dynamo's
    start callback, which ``torch._dynamo.reset()`` forgets, and the passes before AOTAutograd, which a user may move
    behind the cache look-up (``pre_grad_pass_timing = "late"``).
    """
    for op in (torch.ops.fp4.dequantize, torch.ops.fp4.sparse_dequantize, torch.ops.fp4.sparse_decompress):
        cache.keep_dequantized(op.default)
    if refresh not in config.dispatch_observers:
        config.dispatch_observers.append(refresh)
    cache.in_every_key(key)
    cache.on_compile_start(refresh)
    before_autograd(lambda graph: refresh())
    refresh()


def refresh() -> None:
    """Put the present salt into torch's cache key tag, in place of an older one, leaving the user's own elements."""
    others = [part for part in cache.key_tag().split(";") if part and not part.startswith(PREFIX)]
    cache.set_key_tag(";".join([*others, salt()]))


def key() -> str:
    """:func:`cache_salt`; and whether guards are checked in the graph that is being compiled: where they are not, none chooses a kernel."""
    return f"{cache_salt()}{'' if guards.are_checked() else ', guards unchecked'}"
