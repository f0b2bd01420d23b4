"""Tensor maps, copies to a cluster, mbarriers of other blocks and flags (csrc/sm90/ptx.cuh) on a CPU: tile_maps.cu through emulator.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor._sources import csrc_dir
from fp4_inductor.kernels import build
from lowering_tests.kernels import aot, emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = Path(__file__).parent / "tile_maps.cu"
INCLUDE = (f"-I{csrc_dir()}",)


def kernels() -> Emulated:
    return emulated(SOURCE, 90, INCLUDE)


# rows, bytes of a row, rows and bytes of a tile: cuTensorMapEncodeTiled takes none of them
REFUSED = ((8, 24, 8, 16), (8, 32, 257, 16), (8, 32, 0, 16), (8, 32, 8, 48), (8, 32, 8, 256), (0, 32, 8, 16))


def places(rows: int, row_bytes: int, tile_bytes: int) -> tuple[tuple[int, int], ...]:
    """(byte, row) at which a tile begins: inside, over every edge, and outside."""
    return (0, 0), (tile_bytes, 8), (row_bytes - 16, rows - 3), (48, 3), (-16, -2), (row_bytes, 0), (0, rows), (-208, -300)


def matrix(rows: int, row_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8)


def tile_of(m: torch.Tensor, tile_rows: int, tile_bytes: int, byte: int, row: int) -> torch.Tensor:
    """What the documentation of the swizzles says lies in shared memory; zeros beyond the matrix."""
    margin = 512
    t = F.pad(m, (margin,) * 4)[row + margin :, byte + margin :][:tile_rows, :tile_bytes]
    chunks, out = t.reshape(tile_rows, tile_bytes // 16, 16), torch.empty(tile_rows, tile_bytes // 16, 16, dtype=torch.uint8)
    for r in range(tile_rows):
        for c in range(tile_bytes // 16):
            out[r, c ^ {128: r % 8, 64: r // 2 % 4, 32: r // 4 % 2, 16: 0}[tile_bytes]] = chunks[r, c]
    return out.reshape(tile_rows, tile_bytes)


@pytest.mark.parametrize("tile_bytes", [16, 32, 64, 128])
def test_a_tile(tile_bytes):
    for rows, row_bytes, tile_rows in ((40, 336, 24), (5, 16, 9), (300, 144, 256)):
        m = matrix(rows, row_bytes)
        for byte, row in places(rows, row_bytes, tile_bytes):
            out = kernels().call("one", (m,), torch.empty(tile_rows, tile_bytes, dtype=torch.uint8), rows, row_bytes, tile_rows, tile_bytes, byte, row, 1024)
            assert torch.equal(out, tile_of(m, tile_rows, tile_bytes, byte, row)), (rows, row_bytes, byte, row)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tiles_for_a_cluster(ranks):
    for rows, row_bytes, seed in ((100, 16, 0), (64, 1040, 3), (130, 656, 0)):
        steps, tiles = -(-row_bytes // 128), -(-rows // 64)
        m, masks = matrix(rows, row_bytes), matrix(steps, 64)
        out = kernels().call("all", (m, masks), torch.zeros(ranks, tiles * 64, steps * 128, dtype=torch.uint8), rows, row_bytes, ranks, seed=seed)
        padded = F.pad(m, (0, steps * 128 - row_bytes, 0, tiles * 64 - rows)) ^ masks.repeat(1, 2).reshape(-1)
        assert torch.equal(out, padded.expand(ranks, -1, -1))


def test_sums_handed_on_by_flags():
    x = torch.randint(0, 1000, (9,), dtype=torch.int32)
    out = kernels().call("sums", (x, torch.zeros(9, dtype=torch.int32)), torch.zeros_like(x), 9)
    assert torch.equal(out, x.cumsum(0, dtype=torch.int32))


def test_maps_that_the_driver_refuses():
    for rows, row_bytes, tile_rows, tile_bytes in REFUSED:
        with pytest.raises(EmulatorError, match="status 1"):
            kernels().call("one", (matrix(8, 32),), torch.empty(8, 32, dtype=torch.uint8), rows, row_bytes, tile_rows, tile_bytes, 0, 0, 0)
    library = kernels().library
    try:
        assert library.one(kernels().put(matrix(8, 32), 8), None, 8, 32, 8, 16, 0, 0, 0, None) == 1
    finally:
        library.emulator_free_all()


def test_tiles_at_places_where_none_can_be():
    m, out = matrix(8, 128), torch.empty(8, 128, dtype=torch.uint8)
    for tile_bytes, at in ((16, 64), (32, 128), (64, 256), (128, 512)):
        with pytest.raises(EmulatorError, match="a tile at shared byte"):
            kernels().call("one", (m,), out, 8, 128, 8, tile_bytes, 0, 0, at)
        kernels().call("one", (m,), out, 8, 128, 8, tile_bytes, 0, 0, 2 * at)


def test_a_map_of_more_rows_than_there_are():
    with pytest.raises(EmulatorError, match="outside every allocation"):
        kernels().call("one", (matrix(8, 128),), torch.empty(16, 128, dtype=torch.uint8), 16, 128, 16, 128, 0, 0, 0)


CAUGHT = [
    ("SKIP_WAIT", "before its asynchronous copy was waited for|nobody wrote"),
    ("WAIT_FOR_LAST_PHASE", "nobody wrote|before its asynchronous copy"),
    ("EXPECT_TOO_FEW_BYTES", "more than were promised|where [0-9]+ are promised"),
    ("EXPECT_TOO_MANY_BYTES", "deadlock.*wait for an mbarrier"),
    ("COPY_TILE_TO_ONE_BLOCK", "deadlock.*wait for an mbarrier"),
    ("COPY_TO_A_BLOCK_TOO_MANY", "of a cluster of 2"),
    ("FREE_FOR_OWN_BLOCK_ONLY", "arrivals|race"),
    ("OTHER_READERS_NOT_COUNTED", "race|more arrivals"),
    ("SKIP_SYNC_BEFORE_FREEING", "race"),
    ("FREE_BEFORE_READING", "race|more arrivals|before its asynchronous copy"),
    ("SKIP_FREE_WAIT", "race|more arrivals|promised"),
    ("BARRIERS_UNKNOWN_TO_CLUSTER", "nobody has set up"),
    ("BLOCK_ENDS_EARLY", "block ended while|which has ended"),
    ("SKIP_SWIZZLE", None),
    ("ONE_WARP_ASKS_FOR_REGISTERS", "deadlock.*setmaxnreg"),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    m, masks, zeros = matrix(64, 640), matrix(5, 64), torch.zeros(2, 64, 640, dtype=torch.uint8)
    want = (m ^ masks.repeat(1, 2).reshape(-1)).expand(2, -1, -1)
    emulator.check_caught(kernels(), fault, words, lambda: (kernels().call("all", (m, masks), zeros, 64, 640, 2) != want).float().mean().item())


def test_a_flag_that_nobody_sets():
    x = torch.zeros(3, dtype=torch.int32)
    emulator.check_caught(kernels(), "FLAG_NOT_SET", "deadlock.*flag", lambda: kernels().call("sums", (x, x), x, 3))


@pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed: the CUDA sources are compiled where it is")
def test_what_nvcc_makes_of_them():
    library = build.cuda_library(str(SOURCE), 90, INCLUDE)
    sass = subprocess.run([aot.tool("cuobjdump"), "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    for instruction in (r"UTMALDG\.2D \[", r"UTMALDG\.2D\.MULTICAST", r"UBLKCP\S*\.MULTICAST", r"UTMACCTL\.PF", "USETMAXREG", r"SYNCS\.ARRIVE\.TRANS64\.RED"):
        assert re.search(instruction, sass), instruction
    assert not re.search(r"\b(STL|LDL)\b", sass), "a map copied to the stack is none"
