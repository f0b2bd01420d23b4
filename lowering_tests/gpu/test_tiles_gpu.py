"""What the emulator says of tile maps, clusters and flags, said of the GPU: tile_maps.cu against the expectations of test_emulated_tiles.py."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor.kernels import build
from lowering_tests.gpu.helpers import DEVICE
from lowering_tests.kernels.test_emulated_tiles import INCLUDE, REFUSED, SOURCE, matrix, places, tile_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed")]


@pytest.fixture(scope="module")
def call():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    library = ctypes.CDLL(str(build.cuda_library(str(SOURCE), 90, INCLUDE)))

    def run(name, *arguments) -> int:
        pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        status = getattr(library, name)(*pointers, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        return status

    return run


@pytest.mark.parametrize("tile_bytes", [16, 32, 64, 128])
def test_a_tile(call, tile_bytes):
    for rows, row_bytes, tile_rows in ((40, 336, 24), (5, 16, 9), (300, 144, 256)):
        m, out = matrix(rows, row_bytes), torch.empty(tile_rows, tile_bytes, dtype=torch.uint8, device=DEVICE)
        on_device = m.to(DEVICE)
        for byte, row in places(rows, row_bytes, tile_bytes):
            assert call("one", on_device, out, rows, row_bytes, tile_rows, tile_bytes, byte, row, 1024) == 0
            assert torch.equal(out.cpu(), tile_of(m, tile_rows, tile_bytes, byte, row)), (rows, row_bytes, byte, row)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tiles_for_a_cluster(call, ranks):
    for rows, row_bytes in ((100, 16), (64, 1040), (5000, 4096)):
        steps, tiles = -(-row_bytes // 128), -(-rows // 64)
        m, masks = matrix(rows, row_bytes).to(DEVICE), matrix(steps, 64).to(DEVICE)
        padded = F.pad(m, (0, steps * 128 - row_bytes, 0, tiles * 64 - rows)) ^ masks.repeat(1, 2).reshape(-1)
        for _ in range(20):
            out = torch.zeros(ranks, tiles * 64, steps * 128, dtype=torch.uint8, device=DEVICE)
            assert call("all", m, masks, out, rows, row_bytes, ranks) == 0
            assert torch.equal(out, padded.expand(ranks, -1, -1))


def test_sums_handed_on_by_flags(call):
    x = torch.randint(0, 1000, (100,), dtype=torch.int32, device=DEVICE)
    out = torch.zeros_like(x)
    assert call("sums", x, torch.zeros_like(x), out, 100) == 0
    assert torch.equal(out, x.cumsum(0, dtype=torch.int32))


def test_maps_that_the_driver_refuses(call):
    m, out = torch.zeros(64, 128, dtype=torch.uint8, device=DEVICE), torch.zeros(64, 128, dtype=torch.uint8, device=DEVICE)
    for rows, row_bytes, tile_rows, tile_bytes in REFUSED:
        assert call("one", m, out, rows, row_bytes, tile_rows, tile_bytes, 0, 0, 0) == 1
    assert call("one", m.view(-1)[8:], out, 8, 32, 8, 16, 0, 0, 0) == 1
