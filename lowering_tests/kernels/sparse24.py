"""Random 2:4-sparse NVFP4 weights in the canonical layout, what they mean, by the definition, and emulated kernels that multiply by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fp4_inductor.formats import e2m1, nvfp4
from fp4_inductor.kernels.params import LinearParams
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, linear_fields

LEGAL = torch.tensor([4, 8, 12, 9, 13, 14], dtype=torch.uint8)  # pos0 | pos1 << 2 with pos0 < pos1
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
WEIGHT = ("codes", "meta", "scale")


def weight(n: int, k: int, nibbles: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Every code, every scale, and every pattern unless ``nibbles [N, K/4]`` are given."""
    values = torch.randint(0, 256, (n, k // 4), dtype=torch.uint8)
    nibbles = LEGAL[torch.randint(0, 6, (n, k // 4))] if nibbles is None else nibbles
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return values, nibbles[:, ::2] | nibbles[:, 1::2] << 4, scale, torch.tensor(0.37)


def dense(values, meta, scale, g) -> torch.Tensor:
    """float64 ``[N, K]``, by the definition of the canonical layout."""
    n, groups = values.shape
    nibbles = torch.stack((meta & 15, meta >> 4), -1).reshape(n, groups).long()
    w = torch.zeros(n, groups, 4, dtype=torch.float64)
    table = e2m1.decode(torch.arange(16, dtype=torch.uint8)).double()
    for place, code in ((nibbles & 3, values & 15), (nibbles >> 2, values >> 4)):
        w.scatter_(2, place[..., None], table[code.long()][..., None])
    return w.reshape(n, -1) * scale.double().repeat_interleave(16, 1) * g.double()


SEVERAL = ("-DFP4_SEVERAL_SCALES=1",)


def run(
    kernel: Emulated, x, w, bias, tile, seed: int = 0, early: bool = False, constants: Sequence[str] = WEIGHT, starts: tuple[int, ...] = ()
) -> torch.Tensor:
    """``x [M, K] @ w.T + bias``; ``constants``: what the kernel may read while the one before it runs, if it begins ``early``.

    ``starts``: the rows at which the second and the third global scale of ``w`` begin.
    """
    out = torch.full((x.shape[0], w[0].shape[0]), float("nan"), dtype=x.dtype)
    given = dict(linear_fields(x, w, bias, tile, starts), early=int(early))
    return kernel.run(LinearParams, given, out, seed=seed, constants=constants if early else ())


def error(y, x, w, bias=None) -> float:
    """Relative, infinite for a NaN."""
    r = x.double() @ dense(*w).T + (bias.double() if bias is not None else 0)
    distance = ((y.double() - r).norm() / r.norm()).item()
    return distance if distance == distance else float("inf")


def check(source: str, m: int, n: int, k: int, tile, dtype: torch.dtype, w=None) -> None:
    """The kernel of ``source`` against float64, with a bias where N is odd."""
    x, w = torch.randn(m, k).to(dtype), w or weight(n, k)
    bias = torch.randn(n).to(dtype) if n % 2 else None
    assert error(run(emulated(source), x, w, bias, tile), x, w, bias) <= BOUND[dtype], (m, n, k, tile, dtype)


def check_caught(source: str, fault: str, words: str | None, tile, size: tuple[int, int, int], early: bool = False) -> None:
    """:func:`emulator.check_caught` of the kernel of ``source`` for ``(m, n, k)``."""
    m, n, k = size
    x, w, kernel = torch.randn(m, k).to(torch.bfloat16), weight(n, k), emulated(source)
    emulator.check_caught(kernel, fault, words, lambda: error(run(kernel, x, w, None, tile, early=early), x, w))


def check_several_scales(source: str, tile, sizes: tuple[tuple[int, int, int], ...]) -> None:
    """``(m, n, k)`` each with two and with three scales that differ by decades, against float64; and what the library for one scale says of them."""
    kernel = emulated(source, 90, SEVERAL)
    for i, (m, n, k) in enumerate(sizes):
        starts = ((n // 3 + 1,), (n // 4, n - 1))[i % 2]
        (*packed, _), dtype = weight(n, k), (torch.bfloat16, torch.float16)[i % 2]
        x, bias, g = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype), torch.tensor([0.37, 2.9, 0.011])
        of_row = g[sum((torch.arange(n) >= s).long() for s in starts)]
        y = run(kernel, x, (*packed, g), bias, tile, starts=starts)
        for scale in g[: len(starts) + 1]:  # each layer by itself: the largest does not hide the others
            own = of_row == scale
            r = (x.double() @ dense(*packed, torch.ones(())).T * of_row.double() + bias.double())[:, own]
            assert ((y[:, own].double() - r).norm() / r.norm()).item() <= BOUND[dtype], (m, n, k, starts, scale)
        assert torch.equal(run(kernel, x, (*packed, g), bias, tile), run(emulated(source), x, (*packed, g[0]), bias, tile))  # one scale: the same bits
    for bad in ((5, 5), (6, 5), (0, 5), (-1, 0)):
        with pytest.raises(EmulatorError, match="status"):
            run(kernel, x, (*packed, g), bias, tile, starts=bad)
    with pytest.raises(EmulatorError, match="status"):
        run(emulated(source), x, (*packed, g), bias, tile, starts=(5,))


def picks(k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row i of ``[k, k]`` keeps one value, 1.0 at k = i: a product with it is x, exactly."""
    row = torch.arange(k)
    nibbles = torch.full((k, k // 4), 14, dtype=torch.uint8)
    values = torch.zeros(k, k // 4, dtype=torch.uint8)
    for first in range(4):
        chosen = row % 4 == first
        nibbles[row[chosen], row[chosen] // 4] = 4 if first == 0 else first << 2  # kept: (0, 1), or (0, first)
        values[row[chosen], row[chosen] // 4] = 2 if first == 0 else 2 << 4  # 1.0
    scale = torch.full((k, k // 16), 0x38, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return values, nibbles[:, ::2] | nibbles[:, 1::2] << 4, scale, torch.tensor(1.0)


def check_every_code_with_every_scale(product: Callable[..., torch.Tensor]) -> None:
    """``product(x, w)`` of each byte of two codes with each scale, in any pattern."""
    values = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 64).contiguous().view(nvfp4.SCALE_DTYPE)
    meta = LEGAL[torch.randint(0, 6, (127, 128))] | LEGAL[torch.randint(0, 6, (127, 128))] << 4
    w = (values, meta, scale, torch.tensor(2.0**-9))
    reference = dense(*w)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(8, 1024).to(dtype)
        y = product(x, w)
        assert not y[:, 0].any(), "scale byte 0"
        magnitude = x.double().abs() @ reference.abs().T
        assert ((y.double() - x.double() @ reference.T).abs() / magnitude.clamp_min(1e-30)).max() <= 2**-8


def check_order_of_threads_and_neighbours(product: Callable[..., torch.Tensor], x: torch.Tensor, w: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``product(x, w, seed=...)`` has the same bits in another order of threads, and where another row of x holds a NaN; returns it."""
    y = product(x, w)
    assert torch.equal(product(x, w, seed=5), y)
    bad = x.clone()
    bad[3, -1] = float("nan")
    z = product(bad, w)
    keep = [i for i in range(len(x)) if i != 3]
    assert torch.equal(z[keep], y[keep])
    assert z[3][dense(*w)[:, -1] != 0].isnan().all()
    return y
