"""triton_cached_attention: one launch for up to 16 queries of one KV head. Source: :mod:`.triton_step`.

M of its problem is queries times the heads that share a KV head, N heads, K the width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.cached_call import CachedCall, Prologue
from ...ops.decode_attention import scale_of
from .. import host
from ..asked import NOT_BY_CLUSTERS
from ..decode_attention.split import attention, power
from ..forms import Launches
from ..kernel import COMPILED, MEASURED_H100, Kernel, On

_MOST_PARTS = 16  # the last program reads all parts: at 8,000 positions of one sequence 19.8 us on an H100, with 33 parts 22.9
_COMBINED = 8192  # float32 numbers of partial results that the last program has in registers at once


@dataclass(frozen=True)
class StepConfig:
    """``block_s`` positions a tile, at most ``splits`` parts of the cache, each of a multiple of ``least`` positions."""

    block_s: int
    splits: int
    least: int = 32
    num_warps: int = 4
    num_stages: int = 3


def config(batch: int, kv_heads: int, length: int, d: int, processors: int, arch: int) -> StepConfig:
    """For caches ``[batch, kv_heads, ..., d]`` of which ``length`` positions or less are attended to: two programs a multiprocessor, in few parts."""
    c = attention(batch, kv_heads, length, d, processors, arch)
    return StepConfig(c.block_s, min(c.splits, _MOST_PARTS), num_warps=c.num_warps, num_stages=c.num_stages)


def constants(t: StepConfig, c: CachedCall, arch: int) -> dict[str, object]:
    """Constexprs of ``cached_attention_step``."""
    p, (_, heads, queries, d) = c.prologue, c.query.shape
    rows = queries * (heads // c.key.shape[1])
    block_d, block_g = max(16, power(d)), max(2, power(rows))
    turning = p.turning if p else 0
    return dict(
        GROUP=heads // c.key.shape[1], D=d, WINDOW=c.window or 0, MASKED=c.mask is not None, SOFTCAP=c.softcap is not None, SINK=c.sinks is not None,
        NORM_Q=p is not None and p.q_norm is not None, NORM_K=p is not None and p.k_norm is not None, ROTARY=turning,
        ANGLES=p.cos.shape[2] if p and p.cos is not None else 1, LEAST=t.least, BLOCK_R=max(16, power(rows)), BLOCK_S=t.block_s, BLOCK_D=block_d,
        BLOCK_G=block_g, BLOCK_P=max(2, min(power(t.splits), _COMBINED // (block_g * block_d))), WHOLE=t.splits == 1,
        EARLY=c.early and c.mask is None, PDL=arch >= 90,
    )  # fmt: skip


class Arguments(NamedTuple):
    """What both kernels of one launch take: the new tokens with a stride of 1 along a head, memory for the parts, masks and angles."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    parts: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    mask: Tensor | None
    mask_length: int
    mask_strides: tuple[int, int]
    norms: tuple[Tensor | None, Tensor | None]
    angles: tuple[Tensor | None, Tensor | None]
    angle_strides: tuple[int, int]
    numbers: tuple[float, float, float, float]

    @property
    def new_strides(self) -> tuple[int, ...]:
        """Of query, key and value, without the last."""
        return (*self.query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3])


def along(t: Tensor) -> Tensor:
    """With neighbouring channels beside each other."""
    return t if t.stride(-1) == 1 else t.contiguous()


def mask_of(c: CachedCall) -> tuple[Tensor | None, int, tuple[int, int]]:
    """Bytes, how many positions it has, and its strides from one sequence and one position to the next."""
    if c.mask is None:
        return None, 0, (0, 1)
    mask = c.mask.view(torch.uint8)
    return mask, mask.shape[3], (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(3))


def arguments(t: StepConfig, c: CachedCall) -> Arguments:
    """Of a call with the tile ``t``. Makes the result; ``parts``: maximum, sum and output of each part, and the counters; of one part None."""
    batch, heads, queries, d = c.query.shape
    query, key, value = map(along, (c.query, c.key, c.value))
    out = torch.empty(batch, queries, heads, d, dtype=query.dtype, device=query.device)
    parts: tuple[Tensor | None, ...] = (None,) * 4
    if t.splits > 1:
        rows = out.numel() // d * t.splits
        partial, peak, total = torch.empty(rows * (d + 2), dtype=torch.float32, device=query.device).split([rows * d, rows, rows])
        parts = peak, total, partial, c.arrivals
    mask, length, mask_strides = mask_of(c)
    p = c.prologue or Prologue()
    cos, sin, turns = None, None, (0, 0)
    if p.cos is not None and p.sin is not None:
        cos, sin = p.cos.contiguous(), p.sin.contiguous()  # as models make them
        turns = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    numbers = (scale_of(query, c.scale) * math.log2(math.e), (c.softcap or 0.0) * math.log2(math.e), p.eps, p.norm_offset)
    return Arguments(query, key, value, out, parts, mask, length, mask_strides, (p.q_norm, p.k_norm), (cos, sin), turns, numbers)  # type: ignore[arg-type]


def step(c: CachedCall, tile: StepConfig | None = None) -> Tensor:
    """``[B, Q, H, D]``; see :mod:`.triton_step`. ``select.cached_form(c)`` has nothing but NOT_BY_CLUSTERS, and nothing of ``c`` is empty."""
    from .triton_step import cached_attention_step

    (batch, heads, queries, d), kv_heads = c.query.shape, c.key.shape[1]
    arch = host.arch(c.query.device)
    t = tile or config(batch, kv_heads, c.window or c.slots, d, host.processors(c.query.device), arch)
    constexprs = constants(t, c, arch)
    a = arguments(t, c)
    cached_attention_step[(batch * kv_heads * t.splits,)](
        a.query, a.key, a.value, c.keys, c.values, c.position, a.mask, c.sinks, *a.norms, *a.angles, a.out, *a.parts, c.slots, a.mask_length, heads, queries,
        t.splits, *a.new_strides, *c.keys.stride()[:3], *c.values.stride()[:3], *a.mask_strides, *a.angle_strides, *a.numbers, **constexprs,
        num_warps=t.num_warps, num_stages=t.num_stages, **host.launched_early(bool(constexprs["PDL"])),
    )  # fmt: skip
    return a.out


_WHY = "one launch: norm and rotation of query and key, append, attention by KV head over what the counter says, combination by the last program"
_WHY_90 = "one launch from q/k/v to attention, 8.8 us a layer in an 8B model's decode step on an H100 (520 positions), where launches of their own took 17.6"
KERNELS = (
    Kernel(
        "cached_attention", "triton_cached_attention", "attention",
        (On(90, 90, MEASURED_H100, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)), k_multiple=8, serves=NOT_BY_CLUSTERS,
        batch=(1, "the number of parts follows the numbers of sequences and KV heads, not M"), form=Launches("cached_attention.step:step"),
    ),
)  # fmt: skip
