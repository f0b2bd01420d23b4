"""The largest scores of a row, one after the other. A score and its index are one integer: its bits in the order of integers, then the index, lower first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(bits):
    """Bits of a float32 <-> an int32 that compares as the number does. Its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def best_of(x, at, E, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The K largest of ``x[at < E]`` and their indices, each of WIDTH; x float32, ``at`` 0 .. BLOCK - 1."""
    key = tl.where(x == x, ordered(x.to(tl.int32, bitcast=True)), 0x7FFFFFFF)  # NaN is the largest
    key = tl.where(x == 0.0, 0, key)  # -0 as 0
    scores = tl.where(at < E, (key.to(tl.int64) << 32) + (BLOCK - 1 - at), -(1 << 63))
    chosen = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH,), tl.int64)
    for i in tl.static_range(K):
        best = tl.max(scores, 0)
        found = tl.where(chosen == i, best, found)
        scores = tl.where(scores == best, -(1 << 63), scores)
    return ordered((found >> 32).to(tl.int32)).to(tl.float32, bitcast=True), BLOCK - 1 - (found & 0xFFFFFFFF)


@triton.jit
def topk_rows(X, VALUES, INDICES, E, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """BLOCK >= E, WIDTH >= K, powers of two."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * E + at, mask=at < E, other=0.0).to(tl.float32)
    value, index = best_of(x, at, E, K, BLOCK, WIDTH)
    chosen = tl.arange(0, WIDTH)
    to = row * K + chosen
    tl.store(VALUES + to, value.to(VALUES.dtype.element_ty), mask=chosen < K)
    tl.store(INDICES + to, index, mask=chosen < K)
