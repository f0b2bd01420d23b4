"""triton_masked_attention: many queries over a bool mask that all heads share, without what the mask leaves out. Source: :mod:`.triton_masked`.

Two launches: one reads the mask and writes its bits, and which blocks of keys each tile of queries needs; the other attends.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import host
from ..cached_attention.prefill import PrefillConfig, config, is_large, positive
from ..cached_attention.step import along
from ..forms import Launches
from ..kernel import COMPILED, MEASURED, Kernel, On
from .split import power


@functools.lru_cache(maxsize=4096)
def tile_of(queries: int, d: int, arch: int) -> PrefillConfig:
    """None of them spills but that for wide heads: a few registers, and it takes half of the time of the widest that does not (H200, heads of 256)."""
    if not is_large(arch):
        return config(queries, d, arch, crowded=True)
    if d > 128:
        return PrefillConfig(128, 32, num_stages=3)
    if queries <= 32 or d <= 64:
        return PrefillConfig(32 if queries <= 32 else 64, 64, 4, 3)
    return PrefillConfig(128, 64, num_stages=3)


def constants(t: PrefillConfig, group: int, blocks: int, d: int) -> dict[str, object]:
    """Constexprs of ``masked_attention``."""
    scan = max(16, power(blocks))
    return dict(GROUP=group, D=d, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_D=max(16, power(d)), SCAN=scan, STAGES=t.num_stages)


def masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, tile: PrefillConfig | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``[B, Q, H, D]``. mask: bool ``[B or 1, 1, Q or 1, S or 1]``. There are no scales: the kernel takes no codes."""
    from .triton_masked import WORD, masked_attention, pack_mask

    (batch, heads, queries, d), (_, kv_heads, length, _) = query.shape, key.shape
    device = query.device
    t = tile or tile_of(queries, d, host.arch(device))
    key, value = along(key), along(value)
    query, scale = positive(along(query), scale)
    seen = mask.expand(mask.shape[0], 1, queries, length).view(torch.uint8)
    sequences, tiles, blocks = seen.shape[0], -(-queries // t.block_m), -(-length // WORD)
    found, of_keys = (torch.empty(sequences, tiles, n, dtype=torch.uint8, device=device) for n in (blocks, blocks * WORD))
    bits = torch.empty(sequences, queries, blocks, dtype=torch.int64, device=device)
    stride_b, _, stride_q, stride_s = seen.stride()
    pack_mask[(blocks, tiles, sequences)](seen, found, of_keys, bits, queries, length, stride_b, stride_q, stride_s, BLOCK_M=t.block_m, num_warps=4)
    out = torch.empty(batch, queries, heads, d, dtype=query.dtype, device=device)
    masked_attention[(batch * heads * tiles,)](
        query, key, value, found, of_keys, bits.view(torch.int32), out, queries, length, blocks, heads, sequences, *query.stride()[:3], *key.stride()[:3],
        *value.stride()[:3], scale, **constants(t, heads // kv_heads, blocks, d), num_warps=t.num_warps,
        num_stages=t.num_stages,
    )  # fmt: skip
    return out


_WHY = "reads keys and values where they lie and only the blocks that the mask leaves in; sdpa copies them for each query head and computes the masked half"
_WHY_90 = "reads only what the mask leaves in: a prompt of 2048 tokens 0.15 ms (32 query heads, 8 KV heads of 128), sdpa 0.29; 8192 tokens 1.6 for 3.7"
KERNELS = (
    Kernel(
        "decode_attention", "triton_masked_attention", "masked_attention",
        (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)), k_multiple=8, plain=True,
        batch=(1, "the tile follows the number of queries"), form=Launches("decode_attention.masked:masked"),
    ),
)  # fmt: skip
