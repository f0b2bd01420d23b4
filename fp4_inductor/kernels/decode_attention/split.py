"""triton_decode_attention: up to 16 queries of one KV head. Source: :mod:`.triton_split`.

M of its problem is queries times the heads that share a KV head, N heads, K the width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import host
from ..asked import CODES, OTHER_MASK
from ..forms import Launches
from ..kernel import COMPILED, MEASURED, MEASURED_H100, Kernel, On

_PARTS = 64  # one program combines them
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as the constants of triton_split.py
_SCANNED = 16384  # positions of a mask that every program reads whole


@dataclass(frozen=True)
class AttentionConfig:
    """``block_s`` positions a step, ``splits`` parts of the cache's length."""

    block_s: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


def attention(
    batch: int, kv_heads: int, length: int, d: int, processors: int, arch: int, per_row: bool = False, codes: bool = False
) -> AttentionConfig:  # fmt: skip
    """For a cache ``[batch, kv_heads, length, d]``: two programs for each multiprocessor, if that leaves each a tile of positions."""
    # 64 positions of K and V are 32 KiB at D = 128; sm_86, 89 and 120 have 99 KiB a block. A third stage of 16 masks does not fit in registers.
    large = (arch in (80, 90) or 100 <= arch < 120 or d <= 64) and not per_row
    block_s = 32 if d > 128 else 64
    warps = 8 if per_row and codes else 4  # masks and numbers made of codes do not fit in the registers of four
    return AttentionConfig(block_s, parts(batch * kv_heads, length, block_s, processors), warps, 3 if large else 2)


def parts(heads: int, length: int, block_s: int, processors: int) -> int:
    """How many programs share the positions of one KV head; ``heads``: of all sequences."""
    wanted = max(1, round(2 * processors / max(heads, 1)))
    return max(1, min(wanted, -(-length // block_s), _PARTS))


def constants(
    c: AttentionConfig, group: int, queries: int, length: int, d: int, mask_kind: int, per_row: bool, arch: int, kinds: tuple[int, int] = (0, 0)
) -> dict[str, object]:  # fmt: skip
    """Constexprs of ``decode_attention_split``. ``mask_kind``: 0 none, 1 bool, 2 floating, 3 a position; ``per_row``: each row has its own mask.

    ``kinds``: of keys and of values, :data:`KINDS`, or 0 of what are no codes.
    """
    # At once as much of the mask as fits in registers: 16 rows of 128 positions, or one of up to 4096.
    scan = 128 if per_row else max(128, min(4096, power(length)))
    tile = dict(BLOCK_R=max(16, power(group * queries)), BLOCK_S=c.block_s, BLOCK_D=max(16, power(d)), SCAN=scan if mask_kind in (1, 2) else 128)
    balanced = mask_kind not in (1, 2) or length <= _SCANNED or c.splits == 1
    of_codes = dict(K_KIND=kinds[0], V_KIND=kinds[1])
    return dict(**tile, GROUP=group, D=d, MASK_KIND=mask_kind, PER_ROW=per_row, **of_codes, BALANCED=balanced, WHOLE=c.splits == 1, PDL=arch >= 90)


def combine_constants(c: AttentionConfig, d: int, arch: int) -> dict[str, object]:
    """Constexprs of ``decode_attention_combine``."""
    return dict(D=d, BLOCK_P=max(2, power(c.splits)), BLOCK_D=max(16, power(d)), PDL=arch >= 90)


def power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (max(n, 1) - 1).bit_length()


def split(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, tile: AttentionConfig | None = None, position: Tensor | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """At most 16 queries of one KV head; see :mod:`.triton_split`. ``position``: in the place of a mask, the first query's, int64: causal attention."""
    from .triton_split import decode_attention_combine, decode_attention_split

    (batch, heads, queries, d), (_, kv_heads, length, _) = query.shape, key.shape
    group, device = heads // kv_heads, query.device
    arch = host.arch(device)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    kind = 0
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, length)
        kind, strides = (1 if mask.dtype == torch.bool else 2), mask.stride()
        mask = mask.view(torch.uint8) if kind == 1 else mask
    if position is not None:
        kind, mask = 3, position
    per_row = kind in (1, 2) and bool((queries > 1 and strides[2]) or (group > 1 and strides[1]))
    c = tile or attention(batch, kv_heads, length, d, host.processors(device), arch, per_row, key_scale is not None)
    kinds, scales, scale_strides = (0, 0), [key_scale, value_scale], [0] * 6
    if key_scale is not None and value_scale is not None:
        kinds = KINDS[key.dtype], KINDS[value.dtype]
        key, value = (t.view(torch.uint8) for t in (key, value))
        scales = [t.expand(batch, kv_heads, length, 1) for t in (key_scale, value_scale)]
        scale_strides = [stride for t in scales if t is not None for stride in t.stride()[:3]]
    constexprs = constants(c, group, queries, length, d, kind, per_row, arch, kinds)
    out = torch.empty(batch, queries, heads, d, dtype=query.dtype, device=device)
    peak = total = partial = None
    if c.splits > 1:
        scratch = torch.empty(out.numel() // d * c.splits * (d + 2), dtype=torch.float32, device=device)
        partial, peak, total = scratch.split([out.numel() * c.splits, *[out.numel() // d * c.splits] * 2])
    pdl = host.launched_early(bool(constexprs["PDL"]))
    decode_attention_split[(batch * kv_heads * c.splits,)](
        query, key, value, *scales, mask, out, peak, total, partial, length, heads, queries, c.splits, *query.stride()[:3], *key.stride()[:3],
        *value.stride()[:3], *scale_strides, *strides, scale * math.log2(math.e), **constexprs, num_warps=c.num_warps, num_stages=c.num_stages, **pdl,
    )  # fmt: skip
    if c.splits > 1:
        decode_attention_combine[(batch * queries * heads,)](out, peak, total, partial, c.splits, **combine_constants(c, d, arch), num_warps=4, **pdl)
    return out


_WHY = "reads the cache once, by KV head, where it lies and only what the mask leaves in; repeat_kv would copy it once for each query head"
_WHY_90 = (
    "reads the cache once, by KV head, where it lies and only what the mask leaves in: 5.9 us for one sequence of 520 positions (32 "
    "query heads, 8 KV heads of 128), sdpa 27"
)
_WHY_CODES = "reads codes of 8 bits and their scales where they lie; dequantized first, a cache takes two to four times its bytes at each step"
_WHY_CODES_90 = "reads codes of 8 bits where they lie: 4104 positions of INT8 (32 query heads, 8 KV heads of 128) 14.5 us on an H100, dequantized first 61.7"
KERNELS = (
    Kernel(
        "decode_attention", "triton_decode_attention", "attention",
        (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        k_multiple=8, serves=(OTHER_MASK,), batch=(1, "the number of parts follows the numbers of sequences and KV heads, not M"),
        form=Launches("decode_attention.split:split"),
    ),
    Kernel(
        "decode_attention", "triton_codes_attention", "attention",
        (On(90, 90, MEASURED_H100, _WHY_CODES_90), On(80, 89, COMPILED, _WHY_CODES), On(100, 129, COMPILED, _WHY_CODES)), k_multiple=16, forms=(CODES,),
        serves=(OTHER_MASK,), batch=(1, "the number of parts follows the numbers of sequences and KV heads, not M"),
        form=Launches("decode_attention.split:split"),
    ),
)  # fmt: skip
