"""Run by test_w4a4_kernels.py in a process of its own: the W4A4 kernels in Triton's interpreter, on CPU tensors.

The interpreter takes E4M3 block scales of ``tl.dot_scaled`` for exponents, so the product runs with ``NATIVE=False``: loads,
tails, scales and stores are those of the real kernel, the one instruction between them is decoded by hand. Prints as ``interpreted.py``.
"""

from __future__ import annotations

from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.formats import e2m1, nvfp4
from fp4_inductor.kernels import host, run
from fp4_inductor.kernels.forms import Problem
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.linear_w4a4 import block_scaled
from fp4_inductor.kernels.quantize_rows_nvfp4 import launch as launch_rows
from fp4_inductor.kernels.quantize_rows_nvfp4.triton_blocks import quantize_blocks
from fp4_inductor.ops import linear_siblings, linear_w4a4, quantize_rows_nvfp4

TILE = MidConfig(32, 32, 64, 4, 2)


def quantize(x, rows):
    """As the launcher does it, for a CPU."""
    m, k = x.shape
    q = torch.full((m, k // 2), 255, dtype=torch.uint8)
    s = torch.full((m, k // 16), 255, dtype=torch.uint8)
    size = launch_rows.block(k // 16)
    quantize_blocks[(m, -(-(k // 16) // size))](x, rows, q, s, k // 16, BLOCK=size, CVT=False)
    return q, s


def check_quantize(case, x):
    rows = quantize_rows_nvfp4.row_scales(x)
    q, s = quantize(x, rows)
    want_q, want_s = quantize_rows_nvfp4.reference(x, rows)
    interpreted.report(f"quantize_nvfp4 {case}", float((q != want_q).sum() + (s != want_s.view(torch.uint8)).sum()), 0.0)


def quantize_cases():
    for m, k in ((1, 16), (3, 48), (5, 272), (2, 608), (1, 4112)):
        for dtype in (torch.float32, torch.float16):
            check_quantize(f"{(m, k)} {dtype}", torch.randn(m, k).to(dtype))
    for size in (1e34, 1e-30, 1e-38):
        check_quantize(f"float32 of {size}", torch.randn(3, 48) * size)
    check_quantize("blocks over fifty decades", torch.randn(4, 64, 16).mul_(torch.logspace(-25, 25, 64)[:, None]).view(4, 1024))
    x = torch.randn(5, 48)
    x[1], x[2, 16:32] = 0, 0
    x[3, 5], x[4, 40] = float("nan"), float("-inf")
    check_quantize("zero rows and blocks, NaN, Inf", x)
    grid = torch.tensor(e2m1.MAGNITUDES)
    ties = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([5.0])])
    exact = torch.stack([ties * 2.0**i for i in range(-8, 8)] + [-ties * 2.0**i for i in range(-8, 8)])
    exact[:, 7] = 6.0 * 2.0 ** torch.arange(-8, 8).repeat(2)  # every block keeps its power of two as scale
    rows = torch.ones(32, 1)
    q, s = quantize(exact, rows)
    want = quantize_rows_nvfp4.reference(exact, rows)
    interpreted.report("quantize_nvfp4 every tie", float((q != want[0]).sum() + (s != want[1].view(torch.uint8)).sum()), 0.0)
    # every E4M3 code, its neighbours in float32, and the ties between codes: as the scale of a block
    codes = torch.arange(1, 0x7F, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE).float()
    scales = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    scales = torch.cat([scales, torch.nextafter(scales, torch.tensor(0.0)), torch.nextafter(scales, torch.tensor(1e9))])
    x = torch.zeros(len(scales), 16)
    x[:, 3] = scales
    rows = torch.full((len(scales), 1), 1 / 6)
    q, s = quantize(x, rows)
    want = quantize_rows_nvfp4.reference(x, rows)
    interpreted.report("quantize_nvfp4 every scale", float((q != want[0]).sum() + (s != want[1].view(torch.uint8)).sum()), 0.0)


def product(x, w, bias, dtype, tile=TILE, bounds=()):
    form = block_scaled.FORM
    real = form.constants
    with (
        mock.patch.object(host, "arch", return_value=120),
        mock.patch.object(form, "constants", lambda c, p: {**real(c, p), "NATIVE": False}),
        mock.patch.object(torch, "empty", interpreted._float32_out),
    ):
        problem = Problem(len(x[0]), len(w[0]), w[0].shape[1] * 2, 120, dtype, bounds)
        return host.plus(run.by_triton(form, (*x, *w), problem, tile), bias)


def codes(m, k):
    q, s, _ = interpreted.weight(m, k)
    return q, s, torch.rand(m, 1) * 1e-3


def product_cases():
    tiles = (TILE, MidConfig(16, 64, 128, 4, 2, group_n=2))
    for m, n, k in ((32, 64, 128), (5, 64, 128), (17, 50, 80), (1, 16, 16), (70, 33, 176)):
        for tile in tiles:
            x, w = codes(m, k), interpreted.weight(n, k)
            bias = torch.randn(n).half() if n % 2 else None
            y = product(x, w, bias, torch.float16 if bias is not None else torch.bfloat16, tile)
            want = linear_w4a4.reference(*x, *w, None if bias is None else bias.float(), torch.float32)
            interpreted.report(f"w4a4 {(m, n, k)} {tile}", interpreted.distance(y, want), 1e-3 if bias is not None else 2e-6)
    rows = [0, 16, 16, 40, 48, 61]
    q, s, _ = interpreted.weight(61, 80)
    g = torch.tensor([0.37, 0.011, 0.002])
    x = codes(19, 80)
    y = product(x, (q, s, g), None, torch.bfloat16, bounds=(16, 48))
    dense = quantize_rows_nvfp4.dequantize(*x)
    want = linear_siblings.reference(dense, q, s, g, None, rows)
    worst = max(interpreted.distance(y[:, a:b], part) for (a, b), part in zip(linear_siblings.spans(rows), want, strict=True))
    interpreted.report("w4a4 siblings", worst, 2e-6)
    w = interpreted.weight(13, 80)
    x = codes(5, 80)
    clean = product(x, w, None, torch.bfloat16)
    x[2][2] = float("nan")
    y = product(x, w, None, torch.bfloat16)
    apart = torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]]) and bool(y[2].isnan().all())
    interpreted.report("w4a4 NaN stays in its row", float(not apart), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    quantize_cases()
    product_cases()
