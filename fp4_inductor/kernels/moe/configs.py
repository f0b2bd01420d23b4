"""Tile shapes of the MoE kernels: pure functions of the shape.

Decode: measured on an H200 (benchmarks/NOTES.md). Grouped: first choices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

COMBINE_BLOCK = 512
# Dense weights that exist at once on the many-tokens path: all of a projection in E4M3 for every layer that is benchmarked (the largest has
# 2**30 weights, half of what the layer is in bfloat16); a larger one is multiplied in parts, which reads the rows of tokens once a part.
TRANSIENT_BYTES = 1 << 30


@dataclass(frozen=True)
class DecodeConfig:
    """``block_n`` outputs a program, K in steps of ``block_k``.

    ``groups`` lie side by side, in other warps once a group fills one: of the rows in the first kernel, of one expert each in the second.
    """

    block_n: int
    block_k: int
    groups: int = 1

    @property
    def num_warps(self) -> int:
        """A thread holds 32 k of a step. On a GPU ``groups * block_k`` is at least 1024: a lane for each thread of a warp."""
        return max(1, self.groups * self.block_k // 1024)


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


def _power(k: int, most: int) -> int:
    """The smallest power of two from ``k`` on, between 128 and ``most``."""
    return min(max(128, 1 << (k - 1).bit_length()), most)


def decode_up(k: int, tokens: int) -> DecodeConfig:
    """Of the first kernel, for a product over ``k``. ``block_n``: whole scale blocks of its result.

    More rows a warp share its conversion of activations, fewer keep more warps busy: one token takes the fewest.
    """
    if k % 2048 == 0 and k >= 4096:
        return DecodeConfig(16, 2048, 2)
    if tokens == 1:
        block_n, width, groups = (16, 1024, 8) if k % 1024 == 0 else (16, 512, 4)
    else:
        block_n, width, groups = 32 if k <= 2048 else 16, 1024, 4
    return DecodeConfig(block_n, max(_power(k, width), 1024 // groups), groups)


def decode_down(k: int, top_k: int, tokens: int) -> DecodeConfig:
    """Of the second kernel, for ``top_k`` products over ``k``.

    One or two tokens: all experts at once, in as many warps as that takes, up to 8. More tokens: no more than an eighth of the lanes idle.
    """
    width = 2048 if k % 2048 == 0 else _power(k, 1024)
    if tokens <= 2:
        groups = min(1 << (top_k - 1).bit_length(), 8 * 1024 // width, 16)
    else:
        while width > 128 and -(-k // width) * width > 1.125 * k:
            width //= 2
        groups = min(1 << (top_k.bit_length() - 1), 8 * 1024 // width, 16)
        while -(-top_k // groups) * groups > 1.125 * top_k:
            groups //= 2
    return DecodeConfig(4, max(width, 1024 // groups), groups)


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


@functools.cache
def lanes_first() -> bool:
    """Whether Triton deals the first of several equal dimensions of a load out to threads first: seen with 3.6; 3.9 begins with the last."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def decode_constants(c: DecodeConfig, n: int, k: int, arch: int, sparse: bool = False) -> dict[str, object]:
    """Constexpr arguments of both decode kernels for ``n`` outputs over ``k``."""
    return dict(
        SPARSE=sparse, GROUPS=c.groups, K=k, BLOCK_N=c.block_n, BLOCK_K=c.block_k, UNROLL=-(-k // c.block_k) <= 8, FIRST=lanes_first(), EVEN=n % c.block_n == 0,
        CVT=arch >= 89, ASM=True, PDL=arch >= 90,
    )  # fmt: skip


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
