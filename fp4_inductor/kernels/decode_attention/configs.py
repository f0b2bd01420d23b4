"""Tiles and parts of ``fp4.decode_attention``: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

_PARTS = 64  # one program combines them
_SCANNED = 16384  # positions of a mask that every program reads whole


@dataclass(frozen=True)
class AttentionConfig:
    """``block_s`` positions a step, ``splits`` parts of the cache's length."""

    block_s: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


def attention(batch: int, kv_heads: int, length: int, d: int, processors: int, arch: int, per_row: bool = False) -> AttentionConfig:
    """For a cache ``[batch, kv_heads, length, d]``: two programs for each multiprocessor, if that leaves each a tile of positions."""
    # 64 positions of K and V are 32 KiB at D = 128; sm_86, 89 and 120 have 99 KiB a block. A third stage of 16 masks does not fit in registers.
    large = (arch in (80, 90) or 100 <= arch < 120 or d <= 64) and not per_row
    block_s = 32 if d > 128 else 64
    return AttentionConfig(block_s, parts(batch * kv_heads, length, block_s, processors), 4, 3 if large else 2)


def parts(heads: int, length: int, block_s: int, processors: int) -> int:
    """How many programs share the positions of one KV head; ``heads``: of all sequences."""
    wanted = max(1, round(2 * processors / max(heads, 1)))
    return max(1, min(wanted, -(-length // block_s), _PARTS))


def constants(c: AttentionConfig, group: int, queries: int, length: int, d: int, mask_kind: int, per_row: bool, arch: int) -> dict[str, object]:
    """Constexprs of ``decode_attention_split``. ``mask_kind``: 0 none, 1 bool, 2 floating; ``per_row``: the rows of a KV head have masks of their own."""
    # At once as much of the mask as fits in registers: 16 rows of 128 positions, or one of up to 4096.
    scan = 128 if per_row else max(128, min(4096, _power(length)))
    tile = dict(BLOCK_R=max(16, _power(group * queries)), BLOCK_S=c.block_s, BLOCK_D=max(16, _power(d)), SCAN=scan if mask_kind else 128)
    balanced = not mask_kind or length <= _SCANNED or c.splits == 1
    return dict(**tile, GROUP=group, D=d, MASK_KIND=mask_kind, PER_ROW=per_row, BALANCED=balanced, WHOLE=c.splits == 1, PDL=arch >= 90)


def combine_constants(c: AttentionConfig, d: int, arch: int) -> dict[str, object]:
    """Constexprs of ``decode_attention_combine``."""
    return dict(D=d, BLOCK_P=max(2, _power(c.splits)), BLOCK_D=max(16, _power(d)), PDL=arch >= 90)


def _power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (max(n, 1) - 1).bit_length()
