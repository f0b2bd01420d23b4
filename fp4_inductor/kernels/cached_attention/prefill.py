"""triton_prefill_attention: many queries of a KV head, over a cache in any format. Source: :mod:`.triton_prefill`.

M of its problem is queries times the heads that share a KV head, N heads, K the width of a head.

Old tokens of a cache in 8 or 4 bits are read as numbers once (:mod:`.triton_append`), not by each tile of queries. New tokens are rounded and appended
by a launch that writes them behind those. How many tokens there are is read from the counter by all of these kernels, and by no host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...formats import kv
from ...ops.cached_call import CachedCall, check_room
from ...ops.decode_attention import scale_of
from .. import host
from ..asked import EMPTY, NO_COUNTERS, NOT_PLAIN, OVERWRITTEN, TURNS, cache_in
from ..decode_attention.split import power
from ..forms import Launches
from ..kernel import COMPILED, MEASURED_H100, Kernel, On
from . import append
from .append import Numbers
from .composed import known
from .step import along, mask_of

_LEAST_SCALE = 1e-30  # zero times a score of -inf is NaN


@dataclass(frozen=True)
class PrefillConfig:
    """``block_m`` queries a program, ``block_n`` keys a step."""

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 2


def config(queries: int, d: int, arch: int, crowded: bool = False) -> PrefillConfig:
    """For heads of width ``d``; sm_86, 89 and 120 have 99 KiB of shared memory a block, sm_80 163, sm_90 227. None of them spills.

    ``crowded``: a window, a mask or a soft-cap takes registers in every step.
    """
    large = arch == 90 or 100 <= arch < 120
    if queries <= 32:
        return PrefillConfig(32, 64 if d <= 128 else 32, 4)
    if d > 128:
        return PrefillConfig(64, 64 if large and not crowded else 32)
    if queries <= 64:
        return PrefillConfig(64, 64)
    return PrefillConfig(128, 64 if large or not crowded else 32, num_stages=3 if large else 2)


def is_crowded(c: CachedCall) -> bool:
    return c.window is not None or c.mask is not None or c.softcap is not None


def constants(t: PrefillConfig, c: CachedCall, absolute: bool, exact: bool) -> dict[str, object]:
    """Constexprs of ``prefill_attention``."""
    d = c.query.shape[3]
    return dict(
        GROUP=c.query.shape[1] // c.key.shape[1], D=d, WINDOW=c.window or 0, LAST=kv.LAST if exact else 0, ABSOLUTE=absolute, MASKED=c.mask is not None,
        SOFTCAP=c.softcap is not None, SINK=c.sinks is not None, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_D=max(16, power(d)),
        STAGES=t.num_stages,
    )  # fmt: skip


def prefill(c: CachedCall, tile: PrefillConfig | None = None) -> Tensor:
    """Append, and ``[B, Q, H, D]``. The form of ``c`` has nothing but :data:`SERVES`, and nothing of ``c`` is empty."""
    if c.window is None and c.query.shape[2] > c.slots:
        check_room(c, 0)  # raises
    empty = known(c) == 0
    c = c.prepared()
    return attend(c, numbers(c, empty), tile)


def numbers(c: CachedCall, empty: bool) -> Numbers:
    """Append, and what is attended to: the tokens that came before and the new ones."""
    if c.stored is None:
        return _dense(c, empty)
    to = append.memory(c, empty, c.format is not None and c.format.exact)
    if not empty:
        append.dequantize(c, to)
    append.append(c, to)
    return to


def _dense(c: CachedCall, empty: bool) -> Numbers:
    """Of a cache in the dtype of query, by torch's copies."""
    key, value = along(c.key), along(c.value)
    queries, at = c.key.shape[2], c.position.reshape(())
    new = torch.arange(queries, device=key.device) + at
    if empty:
        found = Numbers(key, value, 0)
    elif c.window is None:
        found = Numbers(c.keys, c.values)
    else:
        old = (torch.arange(1 - c.window, 0, device=key.device) + at) % c.slots  # below position 0 they are not attended to
        keys, values = (torch.cat([held.index_select(2, old), token], 2) for held, token in ((c.keys, key), (c.values, value)))
        found = Numbers(keys, values, c.window - 1)
    kept = min(queries, c.slots)
    slots = new[-kept:] if c.window is None else new[-kept:] % c.slots
    for held, token in ((c.keys, key), (c.values, value)):
        held.index_copy_(2, slots, token[:, :, -kept:])
    return found


def attend(c: CachedCall, to: Numbers, tile: PrefillConfig | None = None) -> Tensor:
    """Of the queries of ``c`` to the keys and values of ``to``."""
    from .triton_prefill import prefill_attention

    batch, heads, queries, d = c.query.shape
    t = tile or config(queries, d, host.arch(c.query.device), is_crowded(c))
    query, scale = along(c.query), scale_of(c.query, c.scale)
    if scale < 0:
        query, scale = -query, -scale
    out = torch.empty(batch, queries, heads, d, dtype=query.dtype, device=query.device)
    mask, length, mask_strides = mask_of(c)
    exact = to.near_keys is not None
    near: Any = (to.near_keys, to.near_values) if exact else (to.keys, to.values)
    prefill_attention[(batch * heads * -(-queries // t.block_m),)](
        query, to.keys, to.values, *(near if exact else (None, None)), c.position, mask, c.sinks, out, c.slots, length, heads, queries, to.back or 0,
        to.near_back, *query.stride()[:3], *to.keys.stride()[:3], *to.values.stride()[:3], *near[0].stride()[:3], *near[1].stride()[:3], *mask_strides,
        max(scale, _LEAST_SCALE) * math.log2(math.e), (c.softcap or 0.0) * math.log2(math.e), **constants(t, c, to.back is None, exact),
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return out


# What a call may ask for besides a decode step.
SERVES = (*map(cache_in, kv.FORMATS), OVERWRITTEN, NO_COUNTERS, EMPTY, NOT_PLAIN, TURNS)
_WHY = "many queries over a cache: causality and windows from the counter, and of nvfp4 the exact and the rounded copies, without a mask in memory"
_WHY_90 = "no mask in memory: 2048 tokens behind 8192 take 0.67 ms on an H100, 7.0 by torch's operators over a mask; 8192 of nvfp4 1.5 for 45"
KERNELS = (
    Kernel(
        "cached_attention", "triton_prefill_attention", "prefill_attention",
        (On(90, 90, MEASURED_H100, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)), k_multiple=8, serves=SERVES,
        batch=(1, "the tile follows the number of queries"), form=Launches("cached_attention.prefill:prefill"),
    ),
)  # fmt: skip
