"""Routing metadata in one launch: pairs sorted by expert, where each expert begins, and which expert each tile of rows belongs to.

One program an expert; it reads all ids (from L2, P * 4 bytes) and compacts its own pairs behind those of the experts before it: stable,
no atomics, no synchronisation, nothing read back by the host. Pairs whose id is no expert are in no group and are computed by no one.

Tiles without padding: the i-th tile of expert e takes slot ``start[e] // BLOCK_M + e + i``. Two experts never share a slot, because
floor((s + c) / B) + 1 >= floor(s / B) + ceil(c / B); slots between two experts' tiles stay empty.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mapped_ids(IDS, MAP, at, P, MAP_SIZE, HAS_MAP: tl.constexpr):
    """The local ids (int64) of pairs ``at``; -1 past the last pair and where the map has none."""
    ids = tl.load(IDS + at, mask=at < P, other=-1).to(tl.int64)
    if HAS_MAP:
        known = (ids >= 0) & (ids < MAP_SIZE)
        ids = tl.load(MAP + ids, mask=known, other=-1).to(tl.int64)
    return ids


@triton.jit
def moe_route(IDS, MAP, ORDER, PLACE, ENDS, TILE_EXPERT, TILE_START, P, E, MAP_SIZE, SLOTS, BLOCK_M: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    """ORDER[P] pairs by expert, PLACE[P] its inverse; ENDS[E] past each expert's last; TILE_EXPERT[SLOTS] (-1: empty) and TILE_START[SLOTS]."""
    e = tl.program_id(0)
    # A thread (or a few of one warp) owns a stretch of consecutive pairs: it counts them, and after one sum over the program places them.
    stretch = tl.cdiv(P, BLOCK) * 8
    pairs = (tl.arange(0, BLOCK // 8) * stretch)[:, None] + tl.arange(0, 8)[None, :]
    smaller = tl.zeros((BLOCK // 8, 8), tl.int32)
    equal = tl.zeros((BLOCK // 8, 8), tl.int32)
    for p in range(0, stretch, 8):
        ids = mapped_ids(IDS, MAP, pairs + p, P, MAP_SIZE, HAS_MAP)
        smaller += ((ids >= 0) & (ids < e)).to(tl.int32)
        equal += (ids == e).to(tl.int32)
    counts = tl.sum(equal, 1)
    before = tl.sum(tl.sum(smaller, 1), 0)
    mine = tl.sum(counts, 0)
    tl.store(ENDS + e, before + mine)
    place = before + tl.cumsum(counts, 0) - counts
    for p in range(0, stretch, 8):
        at = pairs + p
        ids = mapped_ids(IDS, MAP, at, P, MAP_SIZE, HAS_MAP)
        own = (ids == e).to(tl.int32)
        to = place[:, None] + tl.cumsum(own, 1) - 1
        tl.store(ORDER + to, at, mask=own > 0)
        tl.store(PLACE + at, to, mask=own > 0)
        place += tl.sum(own, 1)
    first = before // BLOCK_M + e
    following = tl.where(e == E - 1, SLOTS, (before + mine) // BLOCK_M + e + 1)
    tiles = tl.cdiv(mine, BLOCK_M)
    for i in range(0, following - first, BLOCK):
        at = i + tl.arange(0, BLOCK)
        inside = at < following - first
        tl.store(TILE_EXPERT + first + at, tl.where(at < tiles, e, -1), mask=inside)
        tl.store(TILE_START + first + at, before + at * BLOCK_M, mask=inside)
