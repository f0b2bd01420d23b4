"""The sparse form of wgmma (csrc/sm90/wgmma.cuh) on a CPU, against mma.sp, which was checked on hardware: sparse_products.cu through emulator.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, emulated
from lowering_tests.kernels.sparse24 import LEGAL

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = Path(__file__).parent / "sparse_products.cu"


def product(name: str, a, meta, b, half: int, selector: int) -> torch.Tensor:
    kernel = emulated(SOURCE, 90, (f"-I{csrc_dir()}",))
    return kernel.call(name, (a, meta, b), torch.full((64, 16), float("nan")), half, selector, int(b.dtype == torch.float16))


def words(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight nibbles an int32."""
    return (nibbles.long() << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selector", [0, 1])
def test_as_mma_sp_of_four_warps(dtype, selector):
    for half in (0, 1):
        a, b = torch.randn(4, 128, 2).to(dtype), torch.randn(16, 64).to(dtype)
        meta = words(LEGAL[torch.randint(0, 6, (128, 8))])
        y = product("product_wide", a, meta, b, half, selector)
        assert torch.equal(y, product("product_of_warps", a, meta, b, half, selector))
        others = torch.arange(128) % 4 // 2 != selector  # nobody looks at what these lanes hold
        assert torch.equal(y, product("product_wide", a, torch.where(others, 0, meta).to(torch.int32), b, half, selector))


def test_by_the_definition():
    """Of lane 4g + t of warp w: groups t and t + 4 of rows 16 w + g and 16 w + g + 8; the metadata of k 0..15 and of k 16..31 in two lanes."""
    a, b = torch.randn(4, 128, 2).bfloat16(), torch.randn(16, 64).bfloat16()
    nibbles = LEGAL[torch.randint(0, 6, (128, 8))]
    w = torch.zeros(64, 32)
    for thread in range(128):
        for r in range(4):
            row, group = thread // 32 * 16 + thread % 32 // 4 + r % 2 * 8, thread % 4 + r // 2 * 4
            nibble = int(nibbles[thread // 4 * 4 + group // 4, r % 2 * 4 + group % 4])
            for place, kept in zip((nibble & 3, nibble >> 2), a[r, thread], strict=True):
                w[row, 4 * group + place] = kept
    y = product("product_wide", a, words(nibbles), b, 1, 0)
    torch.testing.assert_close(y, w @ b[:, 32:].float().T, rtol=1e-5, atol=1e-5)


def test_metadata_out_of_order_is_refused():
    a, b = torch.randn(4, 128, 2).bfloat16(), torch.randn(16, 64).bfloat16()
    with pytest.raises(EmulatorError, match="not ordered"):
        product("product_wide", a, torch.full((128,), 0x44444441, dtype=torch.int32), b, 0, 0)
