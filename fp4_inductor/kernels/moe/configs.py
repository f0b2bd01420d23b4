"""Tile shapes of the MoE kernels: pure functions of the shape. First choices: none has run on a GPU yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COMBINE_BLOCK = 512
# Dense weights that exist at once on the many-tokens path: all of a projection in E4M3 for every layer that is benchmarked (the largest has
# 2**30 weights, half of what the layer is in bfloat16); a larger one is multiplied in parts, which reads the rows of tokens once a part.
TRANSIENT_BYTES = 1 << 30


@dataclass(frozen=True)
class DecodeConfig:
    """``block_n`` outputs a program, K in steps of ``block_w`` words of 8 codes: 8 k of a dense row, 16 of a 2:4-sparse one."""

    block_n: int
    block_w: int
    num_warps: int


@dataclass(frozen=True)
class GroupedConfig:
    """``block_n`` outputs by ``block_m`` pairs of one expert."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ManyConfig:
    """``block_m`` pairs of one expert by ``block_n`` outputs; ``group`` such rows of tiles take turns at the same outputs.

    ``exact``: E4M3 products whose float32 sums lose bits in the tensor cores' accumulators, at most; None: all of K.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    exact: int | None = None


def many(pairs: int, experts: int) -> ManyConfig:
    """For ``pairs`` spread over ``experts``: the fastest of 15 tiles at 32 to 1024 tokens an expert (``benchmarks/many_products.py``)."""
    if pairs <= 48 * experts:
        return ManyConfig(64, 128, 128, 4, 4)
    return ManyConfig(128, 256, 128, 8, 4)


def words_of(k: int, sparse: bool) -> int:
    """Words of 8 codes in a row of ``k`` weights."""
    return k // (16 if sparse else 8)


def decode(k: int, sparse: bool = False) -> DecodeConfig:
    """For a product over ``k``: one step over all of it where that fits, else the widest step that wastes at most an eighth of its lanes.

    At least 512 words a program, so that every thread of four warps loads 16 bytes. A step is at most 2048 activations.
    """
    words, most = max(words_of(k, sparse), 2), words_of(2048, sparse)
    whole = 1 << (words - 1).bit_length()
    if whole <= most and whole <= 1.4 * words:
        width = max(whole, 16)
    else:
        waste = {w: -(-words // w) * w / words for w in (most, most // 2, most // 4)}
        width = next((w for w in waste if waste[w] <= 1.125), min(waste, key=waste.__getitem__))
    return DecodeConfig(max(4, 512 // width), width, 4)


def grouped(pairs: int, experts: int, gated: bool) -> GroupedConfig:
    """For ``pairs`` spread over ``experts``; with a gate a program holds two weights and two sums."""
    mean = pairs / max(experts, 1)
    if mean <= 12:
        return GroupedConfig(16, 32 if gated else 64, 128, 4, 3)
    if mean <= 24:
        return GroupedConfig(32, 32 if gated else 64, 128, 4, 3)
    return GroupedConfig(64, 64, 64, 4, 3)


def route(pairs: int) -> dict[str, int]:
    """Ids at a time of the routing kernel, which takes as many steps one after the other as they need."""
    return dict(BLOCK=1024, num_warps=4) if pairs <= 8192 else dict(BLOCK=4096, num_warps=16)


def slots(pairs: int, experts: int, block_m: int) -> int:
    """Slots for tiles: see :mod:`.triton_route`."""
    return pairs // block_m + experts


def decode_units(k: int, sparse: bool = False) -> tuple[int, int]:
    """``(units, words a unit)`` of a row of ``k`` weights: the unit is the largest power of two up to 16 that divides its words."""
    words = words_of(k, sparse)
    unit = next(u for u in (16, 8, 4, 2, 1) if words % u == 0)
    return words // unit, unit


def decode_constants(c: DecodeConfig, k: int, arch: int, sparse: bool = False) -> dict[str, object]:
    """Constexpr arguments of both decode kernels."""
    one_step = words_of(k, sparse) <= c.block_w
    return dict(SPARSE=sparse, BLOCK_N=c.block_n, BLOCK_W=c.block_w, UNIT=decode_units(k, sparse)[1], ONE_STEP=one_step, CVT=arch >= 89, ASM=True)


def grouped_constants(c: GroupedConfig, dtype: torch.dtype, sparse: bool = False) -> dict[str, object]:
    return dict(SPARSE=sparse, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, BF16=dtype == torch.bfloat16, ASM=True)


def whole_row(columns: int) -> tuple[int, bool, int]:
    """``(block, one step, warps)`` of the kernels before and between the products: a row of up to 16384 is held in registers."""
    if columns > 16384:
        return 2048, False, 8
    block = max(128, 1 << (columns - 1).bit_length())
    return block, True, max(1, min(16, block // (256 if block <= 2048 else 512)))


def part_of_rows(rows: int, bytes_a_row: int) -> int:
    """How many of ``rows`` outputs of every expert are dense at once: a multiple of 16 within :data:`TRANSIENT_BYTES`, at least 16."""
    fit = TRANSIENT_BYTES // max(bytes_a_row, 1) // 16 * 16
    return min(rows, max(16, fit))
