"""The 2:4-sparse half of csrc/cpu/nvfp4.c: every implementation that test_cpu_native.py tests, on fp4.sparse_linear."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.errors import SparsityError
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels.linear import cpu, cpu_native
from fp4_inductor.ops import sparse_linear as contract
from lowering_tests.kernels.test_cpu_native import error, path  # noqa: F401  (path is a fixture)

fp4 = torch.ops.fp4


def weight(n, k) -> sparse24.Sparse24Parts:
    """Every code, pattern and scale occurs."""
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)[torch.randint(0, 6, (n, k // 4))]
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return sparse24.Sparse24Parts(torch.randint(0, 256, (n, k // 4), dtype=torch.uint8), sparse24.pack_meta(nibble), scale, torch.tensor(0.37))


@pytest.mark.parametrize("dtype", list(contract.CONTRACT.tolerance), ids=str)
def test_few_and_many_rows(path, dtype, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cpu, "_BLOCK_WEIGHTS", 16 * 288)  # several blocks, the last one short
    for n, k in ((33, 96), (1, 32), (7, 1056), (130, 288)):  # K / 32 odd and even: the last step of the GEMV
        w = weight(n, k)
        for m in (1, 2, 5, 8, 9, 33):
            x = torch.randn(m, k).to(dtype)
            exact = x.double() @ sparse24.dequantize_sparse24(*w, torch.float32).double().T
            bound = max(contract.CONTRACT.tolerance[dtype] * (1 if m * n >= 32 else 2), 5e-6)
            assert error(fp4.sparse_linear(x, *w), exact) <= bound, (m, n, k)


def test_every_byte_pattern_and_scale(path):  # noqa: F811
    values = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)[(torch.arange(256) + torch.arange(127)[:, None]) % 6]
    scale = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 64).contiguous().view(nvfp4.SCALE_DTYPE)
    for g in (1.0, 1.7, 3.1e-39, 1e30):
        parts = (values, sparse24.pack_meta(nibble), scale, torch.tensor(g))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got, want = fp4.sparse_dequantize(*parts, dtype), sparse24.dequantize_sparse24(*parts, dtype)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (g, dtype)


def test_all_illegal_bytes_are_refused_wherever_they_are(path):  # noqa: F811
    x = torch.randn(1, 96)
    legal = {low | high << 4 for low in sparse24.NIBBLES for high in sparse24.NIBBLES}
    for byte in range(256):
        w = weight(3, 96)
        w.meta[byte % 3, byte % 12] = byte
        if byte in legal:
            fp4.sparse_linear(x, *w)
            continue
        for call in (
            lambda w=w: fp4.sparse_linear(x, *w),
            lambda w=w: fp4.sparse_linear(x.expand(9, 96), *w),
            lambda w=w: fp4.sparse_dequantize(*w, torch.float32),
        ):
            with pytest.raises(SparsityError, match=f"1 of 36 bytes, the first 0x{byte:02X}"):
                call()


def test_thread_count_changes_no_bit():
    x, w = torch.randn(5, 288), weight(131, 288)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu_native.gemv(x, w.values, w.scale, 0.37, w.meta))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_experts_and_strided_parts(path):  # noqa: F811
    w = torch.randn(3, 5, 64)
    parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    assert torch.equal(fp4.sparse_dequantize(*parts, torch.float32), sparse24.dequantize_sparse24(*parts, torch.float32))
    one = sparse24.Sparse24Parts(*(t[1] for t in parts))
    x = torch.randn(4, 64)
    y = fp4.sparse_linear(x, *one)
    wide = torch.zeros(10, 8, dtype=torch.uint8)
    wide[::2] = one.meta
    assert torch.equal(fp4.sparse_linear(x, one.values, wide[::2], *one[2:]), y)
    assert torch.equal(fp4.sparse_linear(x.t().contiguous().t(), *one), y)
