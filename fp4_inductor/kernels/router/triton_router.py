"""A router's scores of a few tokens, and the choice of experts by them. PDL (programmatic dependent launch, sm_90 on): as in :mod:`..moe.triton_decode`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..topk.triton_rows import best_of


@triton.jit
def router_scores(X, WEIGHT, BIAS, SCORES, T, H, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """SCORES [T, E] of one expert: its row of WEIGHT is read once for all ROWS >= T tokens."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < T)[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, H, BLOCK):
        h = start + at
        w = tl.load(WEIGHT + expert.to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
        x = tl.load(X + row.to(tl.int64)[:, None] * H + h[None, :], mask=inside & (h < H)[None, :], other=0.0).to(tl.float32)
        total += x * w[None, :]
    score = tl.sum(total, 1)
    if HAS_BIAS:
        score += tl.load(BIAS + expert).to(tl.float32)
    tl.store(SCORES + row * tl.num_programs(0) + expert, score.to(SCORES.dtype.element_ty), mask=row < T)


@triton.jit
def router_choice(SCORES, WEIGHTS, IDS, E, K: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """The K experts of one token, BLOCK >= E, WIDTH >= K, powers of two. FORM: 0 softmax, 1 normalized, 2 chosen."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(SCORES + row * E + at, mask=at < E, other=float("-inf")).to(tl.float32)
    if FORM != 2:
        x = softmax(x)
    weight, index = best_of(x, at, E, K, BLOCK, WIDTH)
    chosen = tl.arange(0, WIDTH)
    if FORM == 1:
        weight = weight / tl.sum(tl.where(chosen < K, weight, 0.0), 0)
    elif FORM == 2:
        weight = softmax(tl.where(chosen < K, weight, float("-inf")))
    to = row * K + chosen
    tl.store(WEIGHTS + to, weight.to(WEIGHTS.dtype.element_ty), mask=chosen < K)
    tl.store(IDS + to, index, mask=chosen < K)


@triton.jit
def softmax(x):
    """Of a vector; NaN if one of its numbers is, or if the largest is infinite. ``tl.max`` passes NaN by, the sum does not."""
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)
