"""What the emulated kernels of multiply_fp8.cuh have in common: their products of E4M3 activations, over tiles, tails and orders of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fp4_inductor.ops import quantize_rows_fp8
from fp4_inductor.ops.dequantize_fp8 import WEIGHT_FACTOR

NINE = ("-DFP4_EMULATED_SMS=9",)  # four clusters
TOLERANCE = 2.5e-3  # of products of the same codes: rounding to bfloat16


def some(tiles: Sequence[tuple[int, int]]) -> list[Any]:
    """Of the fewest and of the most tokens in every way to share K, of the others in one; all of them with --slow."""
    ends = min(tiles)[0], max(tiles)[0]
    return [tile if tile[0] in ends or tile in ((128, 2), (192, 0)) else pytest.param(tile, marks=pytest.mark.slow) for tile in tiles]


def tokens(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 ``[M, K]`` and a scale for each."""
    return quantize_rows_fp8.reference(torch.randn(m, k))


def one_hot(m: int, k: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token i picks k = first + i: a column of the result is one of the E4M3 weight."""
    x = torch.zeros(m, k)
    x[torch.arange(m), first + torch.arange(m)] = 1
    return x.to(torch.float8_e4m3fn), torch.ones(m, 1)


@dataclass(frozen=True)
class Products:
    """A kernel.

    Args:
        run: ``(x, w, bias, tile, seed=0)`` to ``[M, N]``; x of :func:`tokens`, the last part of w its global scale.
        weight: ``(n, k)`` to a random w.
        e4m3: ``[N, K]`` of w without its global scale, as the transient weight has it.
        zeros: weights of zero are multiplied, too.
    """

    run: Callable[..., torch.Tensor]
    weight: Callable[[int, int], tuple[torch.Tensor, ...]]
    e4m3: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
    zeros: bool = True

    def error(self, y, x, w, bias=None) -> float:
        """Relative, infinite for a NaN."""
        r = (x[0].double() * x[1].double()) @ (self.e4m3(w).double() * (w[-1].double() / WEIGHT_FACTOR)).T
        r = r if bias is None else r + bias.double()
        distance = ((y.double() - r).norm() / r.norm()).item()
        return distance if distance == distance else float("inf")

    def check(self, m: int, n: int, k: int, tile: tuple[int, int], biased: bool = False) -> None:
        x, w, bias = tokens(m, k), self.weight(n, k), torch.randn(n).bfloat16() if biased else None
        assert self.error(self.run(x, w, bias, tile), x, w, bias) <= TOLERANCE, (m, n, k)

    def check_tails(self, tile: tuple[int, int]) -> None:
        """Whole tiles, shares of them, fewer tiles than clusters; N that no run of columns divides. Where K is split all clusters run at once."""
        most = ((tile[0] + 6, 520), (tile[0], 260), (tile[0] - 3, 250))[tile[1] // 2]
        for i, (m, n, k) in enumerate(((5, 33, 1024), (*most, 1280), (tile[0] if tile[1] > 1 else 2 * tile[0] + 1, 255, 1280))):
            self.check(m, n, k, tile, biased=i > 0)

    def check_own_choice(self) -> None:
        for m, n, k in ((1, 17, 256), (130, 40, 1024), (200, 300, 512), (257, 100, 256), (300, 700, 4352), (700, 130, 768)):
            self.check(m, n, k, (0, 0))

    def check_order_of_threads_and_neighbours(self, tile: tuple[int, int]) -> None:
        """No order of threads changes a bit, and a token that holds a NaN spoils its own row only, where a weight meets it."""
        x, w = tokens(24, 1280), self.weight(200, 1280)
        y = self.run(x, w, None, tile)
        assert torch.equal(self.run(x, w, None, tile, seed=7), y)
        spoiled = x[0].clone()
        spoiled[3, -1] = float("nan")
        z = self.run((spoiled, x[1]), w, None, tile)
        keep = [i for i in range(24) if i != 3]
        assert torch.equal(z[keep], y[keep])
        assert z[3][(self.e4m3(w)[:, -1] != 0) | self.zeros].isnan().all()
