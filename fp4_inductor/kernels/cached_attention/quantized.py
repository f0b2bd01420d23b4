"""triton_quantized_attention: one launch for up to 16 queries of one KV head over a cache in 8 or 4 bits. Source: :mod:`.triton_quantized`.

M of its problem is queries times the heads that share a KV head, N heads, K the width of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...formats import kv
from ...ops.cached_call import CachedCall
from .. import host
from ..asked import NOT_BY_CLUSTERS, cache_in
from ..decode_attention.split import power
from ..forms import Launches
from ..kernel import COMPILED, MEASURED_H100, Kernel, On
from .step import StepConfig, arguments, config
from .step import constants as shared_constants

KINDS = {kv.FP8: 0, kv.INT8: 1, kv.NVFP4: 2}  # as the constants of triton_quantized.py


def tile_of(c: CachedCall, processors: int, arch: int) -> StepConfig:
    """As of a cache in the dtype of the query; heads wider than 128 need the registers of eight warps, and two stages, on every Triton."""
    batch, kv_heads, _, d = c.key.shape
    t = config(batch, kv_heads, c.window or c.slots, d, processors, arch)
    return replace(t, block_s=64, num_warps=8, num_stages=2) if d > 128 else t


def constants(t: StepConfig, c: CachedCall, arch: int) -> dict[str, object]:
    """Constexprs of ``cached_attention_quantized``."""
    f: Any = c.format
    shared = shared_constants(t, c, arch)
    # A product with half of a head's numbers has at least 16 of them.
    shared["BLOCK_D"] = max(32, power(c.query.shape[3]))
    kinds = dict(K_KIND=KINDS[f.key], V_KIND=KINDS[f.value], K_TOP=f.key.top, V_TOP=f.value.top)
    return dict(**kinds, EXACT=f.exact, FIRST=kv.FIRST, LAST=kv.LAST, BLOCK_E=32, BLOCK_N=power(c.query.shape[2]), **shared)


def quantized(c: CachedCall, tile: StepConfig | None = None) -> Tensor:
    """``[B, Q, H, D]``; see :mod:`.triton_quantized`. ``select.cached_form(c)`` names the format and nothing else, and nothing of ``c`` is empty."""
    from .triton_quantized import cached_attention_quantized

    s: Any = c.stored
    (batch, heads, queries, _), kv_heads = c.query.shape, c.key.shape[1]
    arch = host.arch(c.query.device)
    t = tile or tile_of(c, host.processors(c.query.device), arch)
    constexprs = constants(t, c, arch)
    a = arguments(t, c)
    cache = [None if x is None else x.view(torch.uint8) for x in (c.keys, c.values)]
    blocks = [None if x is None else x.view(torch.uint8) for x in (s.key_blocks, s.value_blocks)]
    exact_slots = 0 if s.exact_keys is None else s.exact_keys.shape[2]
    cached_attention_quantized[(batch * kv_heads * t.splits,)](
        a.query, a.key, a.value, *cache, s.key_scale, s.value_scale, *blocks, s.key_mean, s.exact_keys, s.exact_values, c.position, a.mask, c.sinks,
        *a.norms, *a.angles, a.out, *a.parts, c.slots, exact_slots, a.mask_length, heads, queries, t.splits, *a.new_strides, *a.mask_strides,
        *a.angle_strides, *a.numbers, **constexprs, num_warps=t.num_warps, num_stages=t.num_stages, **host.launched_early(bool(constexprs["PDL"])),
    )  # fmt: skip
    return a.out


_WHY = "one launch that reads codes and scales as they are, for heads of any width; without it all slots are dequantized into memory at each step"
KERNELS = (
    Kernel(
        "cached_attention", "triton_quantized_attention", "attention",
        (On(90, 90, MEASURED_H100, _WHY), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        forms=tuple(map(cache_in, kv.FORMATS)), serves=NOT_BY_CLUSTERS,
        batch=(1, "the number of parts follows the numbers of sequences and KV heads, not M"), form=Launches("cached_attention.quantized:quantized"),
    ),
)  # fmt: skip
