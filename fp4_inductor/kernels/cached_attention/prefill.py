"""triton_prefill_attention: many queries of a KV head, over a cache in any format. Source: :mod:`.triton_prefill`.

M of its problem is queries times the heads that share a KV head, N heads, K the width of a head.

Old tokens of a cache in 8 or 4 bits are read as numbers once (:mod:`.triton_append`), not by each tile of queries. New tokens are rounded and appended
by a launch that writes them behind those. How many tokens there are is read from the counter by all of these kernels, and by no host.

Few queries: the heads that share a KV head are rows of one tile, and if there are fewer tiles than run on the GPU at once, several programs share the keys of
a tile, and a second launch adds up what they found (``decode_attention_combine``). Into how many parts the keys are divided follows from sizes that the host
knows; which keys are in which part, from the counter. Only then memory for partial results is taken: for each tile and part BLOCK_M x (D + 2) x 4 bytes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...formats import kv
from ...ops.cached_call import CachedCall, check_room
from ...ops.decode_attention import scale_of
from .. import host
from ..asked import EMPTY, NO_COUNTERS, NOT_BY_CLUSTERS, NOT_PLAIN, OVERWRITTEN, TURNS, cache_in
from ..decode_attention.split import AttentionConfig, combine_constants, power
from ..forms import Launches
from ..kernel import COMPILED, MEASURED_H100, Kernel, On
from . import append
from .append import Numbers
from .composed import known
from .step import along, mask_of

_PACKED = 256  # queries: more are whole tiles of one head
_MOST_PARTS = 64  # one program combines those of a row
_LEAST = 4  # steps of a part
_OF_A_PROGRAM, _OF_COMBINING = 4, 4  # what a program takes besides its steps, and what the second launch takes, in steps
_LEAST_SCALE = 1e-30  # zero times a score of -inf is NaN


@dataclass(frozen=True)
class PrefillConfig:
    """``block_m`` rows a program, ``block_n`` keys a step.

    ``packed``: the rows are those of all heads that share a KV head. ``parts``: into how many the keys of a tile are divided, at most.
    """

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 2
    packed: bool = False
    parts: int = 1


def is_large(arch: int) -> bool:
    """Has the architecture shared memory for deep pipelines? sm_86, 89 and 120 have 99 KiB a block, sm_80 163, sm_90 227."""
    return arch == 90 or 100 <= arch < 120


def config(rows: int, d: int, arch: int, crowded: bool = False) -> PrefillConfig:
    """For heads of width ``d``. None of them spills. ``crowded``: a window, a mask, a soft-cap and the like take registers in every step."""
    large = is_large(arch)
    if rows <= 32:
        return PrefillConfig(32, 64 if d <= 128 else 32, 4)
    if d > 128:
        return PrefillConfig(64, 64 if large and not crowded else 32)
    if rows <= 64:
        return PrefillConfig(64, 64, 4 if large and not crowded else 8)
    return PrefillConfig(128, 64 if large or not crowded else 32, num_stages=3 if large else 2)


def config_of(c: CachedCall, keys: int, exact: bool, arch: int, processors: int) -> PrefillConfig:
    """For the queries of ``c`` and up to ``keys`` keys, ``exact``: some of them twice, on a GPU of ``processors`` multiprocessors."""
    batch, heads, queries, d = c.query.shape
    kv_heads = c.key.shape[1]
    packed = queries <= _PACKED and heads > kv_heads
    sets, rows = (batch * kv_heads, queries * (heads // kv_heads)) if packed else (batch * heads, queries)
    large = is_large(arch)
    t = config(rows, d, arch, is_crowded(c) or (packed and exact and (d > 128 or not large)))
    two = t.num_warps == 4 and d <= 128 and (arch == 80 or large)  # programs of a multiprocessor: registers and shared memory allow it
    return replace(t, packed=packed, parts=parts_of(sets * -(-rows // t.block_m), keys, processors * (1 + two), t.block_n))


@functools.lru_cache(maxsize=4096)
def parts_of(tiles: int, keys: int, at_once: int, block_n: int) -> int:
    """Into how many parts the keys of each tile are divided if ``at_once`` programs run at a time: 1 if the tiles alone fill the GPU, else what ends first."""
    if tiles >= at_once:
        return 1

    def steps(parts: int) -> int:
        waves = -(-tiles * parts // at_once)
        return waves * (-(-keys // (parts * block_n)) + _OF_A_PROGRAM) + (_OF_COMBINING if parts > 1 else 0)

    # Three waves at most: more of them take hardly less time, and more memory.
    return min(range(1, max(1, min(_MOST_PARTS, keys // (_LEAST * block_n), 3 * at_once // tiles)) + 1), key=steps)


def is_crowded(c: CachedCall) -> bool:
    return c.window is not None or c.mask is not None or c.softcap is not None


def constants(t: PrefillConfig, c: CachedCall, absolute: bool, exact: bool) -> dict[str, object]:
    """Constexprs of ``prefill_attention``."""
    d, group = c.query.shape[3], c.query.shape[1] // c.key.shape[1]
    return dict(
        GROUP=group, PER=group if t.packed else 1, D=d, WINDOW=c.window or 0, LAST=kv.LAST if exact else 0, ABSOLUTE=absolute, MASKED=c.mask is not None,
        SOFTCAP=c.softcap is not None, SINK=c.sinks is not None, WHOLE=t.parts == 1, LEAST=_LEAST * t.block_n, BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        BLOCK_D=max(16, power(d)), STAGES=t.num_stages,
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


def positive(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a query and a scale above 0, times log2(e), as the kernels of many queries take it."""
    if scale < 0:
        query, scale = -query, -scale
    return query, max(scale, _LEAST_SCALE) * math.log2(math.e)


def attend(c: CachedCall, to: Numbers, tile: PrefillConfig | None = None) -> Tensor:
    """Of the queries of ``c`` to the keys and values of ``to``."""
    from ..decode_attention.triton_split import decode_attention_combine
    from .triton_prefill import prefill_attention

    (batch, heads, queries, d), kv_heads = c.query.shape, c.key.shape[1]
    arch = host.arch(c.query.device)
    exact = to.near_keys is not None
    t = tile or config_of(c, to.keys.shape[2], exact, arch, host.processors(c.query.device))
    query, scale = positive(along(c.query), scale_of(c.query, c.scale))
    out = torch.empty(batch, queries, heads, d, dtype=query.dtype, device=query.device)
    found: list[Any] = [None, None, None]  # maximum, sum and output of each row and part
    rows = batch * queries * heads
    if t.parts > 1:
        partial = torch.empty(rows * t.parts * (d + 2), dtype=torch.float32, device=query.device)
        found = list(reversed(partial.split([rows * t.parts * d, rows * t.parts, rows * t.parts])))
    mask, length, mask_strides = mask_of(c)
    near: Any = (to.near_keys, to.near_values) if exact else (to.keys, to.values)
    tiles = batch * kv_heads * -(-queries * (heads // kv_heads) // t.block_m) if t.packed else batch * heads * -(-queries // t.block_m)
    prefill_attention[(tiles * t.parts,)](
        query, to.keys, to.values, *(near if exact else (None, None)), c.position, mask, c.sinks, out, *found, c.slots, length, heads, queries, to.back or 0,
        to.near_back, t.parts, *query.stride()[:3], *to.keys.stride()[:3], *to.values.stride()[:3], *near[0].stride()[:3], *near[1].stride()[:3],
        *mask_strides, scale, (c.softcap or 0.0) * math.log2(math.e),
        **constants(t, c, to.back is None, exact), num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    if t.parts > 1:
        combined = combine_constants(AttentionConfig(t.block_n, t.parts), d, arch)
        decode_attention_combine[(rows,)](out, *found, t.parts, **combined, num_warps=4, **host.launched_early(bool(combined["PDL"])))
    return out


# What a call may ask for besides a decode step.
SERVES = (*map(cache_in, kv.FORMATS), OVERWRITTEN, NO_COUNTERS, EMPTY, NOT_PLAIN, TURNS, *NOT_BY_CLUSTERS)
_WHY = "many queries over a cache: causality and windows from the counter, and of nvfp4 the exact and the rounded copies, without a mask in memory"
_WHY_90 = "no mask in memory: 2048 tokens behind 8192 take 0.67 ms on an H100, 7.0 by torch's operators over a mask; 8192 of nvfp4 1.5 for 45"
KERNELS = (
    Kernel(
        "cached_attention", "triton_prefill_attention", "prefill_attention",
        (On(90, 90, MEASURED_H100, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)), k_multiple=8, serves=SERVES,
        batch=(1, "the tile follows the number of queries"), form=Launches("cached_attention.prefill:prefill"),
    ),
)  # fmt: skip
