"""cuda_quantized_attention: one launch for up to 16 rows of one KV head over a cache in 8 or 4 bits. Source: ``csrc/attention``.

M of its problem is queries times the heads that share a KV head, N heads, K the width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats import kv
from ...ops.cached_call import CachedCall
from .. import host, params
from ..asked import NOT_BY_CLUSTERS, cache_in
from ..forms import Launches, Library
from ..kernel import COMPILED, MEASURED_H100, Kernel, On
from .step import Arguments, StepConfig, arguments

LIBRARY = Library("attention/cached_attention.cu", finish=None)
NAME = "cuda_quantized_attention"
WIDTHS = (64, 128, 256)  # that csrc/attention/cached_attention.cu compiles
_FORMATS = {name: number for number, name in enumerate(kv.FORMATS)}  # as AttentionParams has them
_ALIGNED = 16


def fields(c: CachedCall, a: Arguments, tile: int = 0) -> dict[str, Any]:
    """Of :class:`params.AttentionParams`, but for y, stream and scratch memory. ``tile``: the most parts of a sequence; 0: the kernel's choice."""
    return dict(call_fields(c, a), **cache_fields(c), arrivals=c.arrivals, tile=(tile, 0))


def cache_fields(c: CachedCall) -> dict[str, Any]:
    """A cache in 8 or 4 bits."""
    s: Any = c.stored
    f: Any = c.format
    keys = dict(codes=c.keys, scale=s.key_scale, blocks=s.key_blocks, exact=s.exact_keys)
    values = dict(codes=c.values, scale=s.value_scale, blocks=s.value_blocks, exact=s.exact_values)
    of_exact = 0 if s.exact_keys is None else s.exact_keys.shape[2]
    return dict(keys=keys, values=values, key_mean=s.key_mean, exact_slots=of_exact, format=_FORMATS[f.name])


def call_fields(c: CachedCall, a: Arguments) -> dict[str, Any]:
    """What is not of the format of the cache."""
    (batch, heads, queries, d), kv_heads = c.query.shape, c.key.shape[1]
    p = c.prologue
    # Weights and angles are of the dtype of the query or in float32, both of a kind alike.
    cos, sin = _alike(a.angles, c.query.dtype)
    q_norm, k_norm = _alike(a.norms, c.query.dtype)
    strides = dict(query_strides=a.query.stride()[:3], key_strides=a.key.stride()[:3], value_strides=a.value.stride()[:3])
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, D=d, slots=c.slots, window=c.window or 0, mask_length=a.mask_length)
    wide = [int(any(t is not None and t.dtype != c.query.dtype for t in pair)) for pair in ((q_norm, k_norm), (cos, sin))]
    types = dict(
        dtype=params.FLOATS[c.query.dtype],
        wide_norms=wide[0],
        wide_angles=wide[1],
        sinks_type=params.FLOATS[torch.float32 if c.sinks is None else c.sinks.dtype],
    )
    scale, softcap, eps, norm_offset = a.numbers
    return dict(
        query=a.query, key=a.key, value=a.value, position=c.position, mask=a.mask, sinks=c.sinks, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin,
        mask_strides=a.mask_strides, angle_strides=a.angle_strides, rotary=p.turning if p else 0, angles=1 if cos is None else cos.shape[2],
        early=int(c.early and c.mask is None), scale=scale, softcap=softcap, eps=eps, norm_offset=norm_offset, **strides, **sizes, **types,
    )  # fmt: skip


def _alike(pair: tuple[Tensor | None, Tensor | None], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    if all(t is None or t.dtype == dtype for t in pair):
        return pair
    first, second = (None if t is None else t.float() for t in pair)
    return first, second


def quantized(c: CachedCall, tile: int = 0) -> Tensor:
    """``[B, Q, H, D]``. ``select.cached_form(c)`` names the format and nothing else, and nothing of ``c`` is empty.

    Raises:
        KernelError: the launch was refused.
    """
    from .. import csrc  # which reads the list of kernels

    a = arguments(ALONE, c)  # scratch memory is the library's own
    of = f"query {tuple(c.query.shape)} over {tuple(c.keys.shape)} in {c.format.name if c.format else ''}"
    csrc.launch(LIBRARY, params.AttentionParams, fields(c, a, tile), a.out, host.arch(c.query.device), of)
    return a.out


ALONE = StepConfig(0, 1)
_WHY = "one launch from q/k/v to attention; codes go from memory to registers, and from there to tensor cores"
_WHY_90 = "codes go from memory to registers and to tensor cores; k8v4 on an H100, 0.9 (520 positions) to 2.5 times as fast as bfloat16 (32768, batch 32)"
KERNELS = (
    Kernel(
        "cached_attention", NAME, "cuda_attention",
        (On(90, 90, MEASURED_H100, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        only_k=WIDTHS, forms=tuple(map(cache_in, kv.FORMATS)), serves=NOT_BY_CLUSTERS,
        batch=(1, "the number of parts follows the numbers of sequences and KV heads, not M"), form=Launches("cached_attention.cuda:quantized", LIBRARY),
    ),
)  # fmt: skip
